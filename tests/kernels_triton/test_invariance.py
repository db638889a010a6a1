"""A row's bits are its own, direct and gathered rows give the same (clauses D4, D5, D11); what is loaded is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels_triton.cases import LAYOUTS, Case, assert_same_bits, make
from tests.kernels_triton.loads import counted

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SMALL = {"block_n": 16, "min_split": 32, "max_splits": 4}
LENGTHS = (300, 33, 0, 1, 129, 64, 128, 65)
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 45},
    {"softcap": 3.0, "scale": 1.0},
    {"sinks": torch.linspace(-2, 2, 6)},
)


@pytest.mark.clause("D5", "D3")
@pytest.mark.parametrize(("group", "dtype"), [(1, F32), (3, F32), (3, BF16), (4, F16)])
def test_neighbours_programs_and_table_width_change_nothing(group: int, dtype: torch.dtype) -> None:
    case = make(LENGTHS, group=group, dim=32, q_dtype=dtype, dtype=dtype, extra=30, tiles=SMALL)
    whole = case.run()
    for programs in (3, 7):
        assert_same_bits(case.with_tiles(programs=programs).run(), whole)
    assert_same_bits(case.with_tiles(reduce_rows=4, count_rows=1, counters=3, count_columns=2).run(), whole)
    wide = replace(case, table_len=case.table.shape[1])
    assert_same_bits(wide.run(), whole)
    assert_same_bits(replace(case, table=case.table[:, : case.table_len].contiguous()).run(), whole)
    for b in range(len(LENGTHS)):
        out, lse, _ = wide.row(b).run()
        np.testing.assert_array_equal(out[0].view(np.uint32), whole[0][b].view(np.uint32))
        np.testing.assert_array_equal(lse[0].view(np.uint32), whole[1][b].view(np.uint32))


@pytest.mark.clause("D5", "D11")
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("block_m", [16, 32])
def test_a_query_among_several_equals_the_query_alone(block_m: int, params: dict[str, Any]) -> None:
    """Lengths of splits change at 128 and 256 keys here, between two queries of one block."""
    case = make((130, 258, 4, 17), group=3, dim=32, query_len=5, tiles=SMALL | {"block_m": block_m}, **params)
    out, lse, _ = case.run()
    for t in range(5):
        visible = (case.visible - (4 - t)).clamp(min=0)
        alone = replace(case, q=case.q[:, t : t + 1], visible=visible).with_tiles(block_m=16).run()
        np.testing.assert_array_equal(alone[0].view(np.uint32), out[:, t : t + 1].view(np.uint32))
        np.testing.assert_array_equal(alone[1].view(np.uint32), lse[:, t : t + 1].view(np.uint32))


@pytest.mark.clause("D4", "L2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("query_len", [1, 3])
def test_direct_equals_gather(query_len: int, layout: str) -> None:
    for params in PARAMS[:3]:
        for dtype in (F32, BF16):
            case = make(
                (150, 70, 0, 5), group=3, dim=24, layout=layout, query_len=query_len, dtype=dtype, q_dtype=dtype,
                bad=[(1, 2), (0, 1)], tiles=SMALL, **params,
            )  # fmt: skip
            assert_same_bits(case.check("gather"), case.run())
    case = make((160, 70, 0, 160), group=3, dim=24, layout=layout, query_len=query_len, tiles=SMALL)
    behind = replace(case, visible=torch.tensor([170, 70, 0, 400], dtype=torch.int32))
    behind.check()
    assert_same_bits(behind.run("gather"), behind.run())


def loaded(case: Case, path: str) -> dict[str, int]:
    tensors = {"k": case.k, "table": case.table, "q": case.q, "visible": case.visible}
    if case.layout in ("NHD", "HND"):
        tensors["v"] = case.v
    with counted(**tensors) as loads:
        case.run(path)
    return loads.bytes


@pytest.mark.clause("D12", "D6")
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize(("layout", "dim"), [("NHD", 80), ("HND", 64), ("PACKED", 192), ("KV2", 128)])
def test_keys_and_values_are_loaded_once(layout: str, dim: int, query_len: int, group: int) -> None:
    """No byte of KV but those that are visible, and each but once; beside them one table entry a token."""
    visible = 1100
    for window in (None, 1030):
        case = make((visible,), group=group, kv_heads=2, dim=dim, layout=layout, query_len=query_len, window=window)
        seen = visible if window is None else min(visible, window + query_len - 1)
        got = loaded(case.with_tiles(block_n=64, min_split=256), "direct")
        assert got["k"] + got.get("v", 0) == 2 * seen * 2 * dim * 4
        assert got["elsewhere"] <= 2 * 33 * query_len * group * 2 * (dim + 1) * 4, "more than partial results"


@pytest.mark.clause("D12")
def test_latent_rows_are_loaded_once_for_keys_and_values() -> None:
    case = make((1100,), group=4, dim=96, value_dim=64, layout="LATENT")
    got = loaded(case.with_tiles(head_pieces=(64, 32), value_pieces=(64, 0)), "direct")
    assert got["k"] == 1100 * 96 * 4


def test_nothing_is_read_elsewhere() -> None:
    """All that rows of one split load lies in the operands."""
    case = make((40, 0, 300), group=3, query_len=2, bad=[(0, 1)], window=37)
    assert loaded(case, "direct")["elsewhere"] == 0
