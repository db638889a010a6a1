"""Triton's paged decode, interpreted, against attention in float64 (clauses D2, D3, D6, D9, D10, D11, L1, L2, L3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from forebay.kernels.triton.decode_config import interpreted_tiles
from forebay.kernels.triton.paged_decode import paged_decode
from tests.kernels_triton.cases import FIRST_BLOCK, LAYOUTS, TOLERANCE, attend, empty, make

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SMALL = {"block_n": 16, "min_split": 32, "max_splits": 4}
"""Tiles that cut short rows into several splits."""
SINKS = torch.linspace(-3, 3, 8)
PARAMS: dict[str, dict[str, Any]] = {
    "scale": {"scale": -0.4},
    "zero scale": {"scale": 0.0},
    "window": {"window": 21},
    "window of one": {"window": 1},
    "window wider than all": {"window": 2**31 - 1},
    "softcap": {"softcap": 1.5, "scale": 2.0},
    "softcap out of reach": {"softcap": 1e6, "scale": 2.0},
    "softcap far exceeded": {"softcap": 0.5, "scale": 500.0},
    "sinks": {"sinks": SINKS},
    "sinks outweigh": {"sinks": SINKS + 30},
    "no sink": {"sinks": torch.where(SINKS > 0, SINKS, float("-inf"))},
    "all": {"scale": 0.7, "window": 53, "softcap": 4.0, "sinks": SINKS},
}


@pytest.mark.clause("D6", "L3")
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("q_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("group", [1, 4])
def test_every_pair_of_dtypes(group: int, q_dtype: torch.dtype, dtype: torch.dtype) -> None:
    make((37, 0, 1, 530), group=group, q_dtype=q_dtype, dtype=dtype).check()


@pytest.mark.clause("D6")
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_weights_keep_their_precision_beside_values_of_two_bytes(dtype: torch.dtype, group: int) -> None:
    """Weights rounded to the values' type would leave ten times the error that is left here beside the rounding of out."""
    case = make((500,), group=group, q_dtype=dtype, dtype=dtype, tiles={"block_n": 64})
    out, _, _ = case.run()
    want, _, _, _ = attend(case)
    nearest = torch.tensor(want).to(dtype).float().numpy()
    step = 2.0 ** np.floor(np.log2(np.abs(want))) * torch.finfo(dtype).eps
    assert (np.abs(out - want) <= 0.5 * step + 4e-6 * np.abs(want).max()).all()
    assert (out == nearest).mean() > 0.97


@pytest.mark.clause("D6", "L3")
@pytest.mark.parametrize("dim", [1, 16, 24, 80, 96, 100, 128, 192, 256])
def test_any_head_size(dim: int) -> None:
    for dtype in (F32, BF16):
        make((70, 5), group=3, kv_heads=2, dim=dim, q_dtype=dtype, dtype=dtype).check()


@pytest.mark.clause("D6")
@pytest.mark.parametrize("dim", [24, 80, 96, 192])
@pytest.mark.parametrize("layout", ["NHD", "LATENT"])
def test_head_sizes_in_two_pieces(layout: str, dim: int) -> None:
    """The pieces a device takes, for one query head and for several; values of another size than keys."""
    from forebay.kernels.triton.decode_config import pieces

    for group, value_dim in ((1, None), (3, dim // 2), (3, None)):
        case = make(
            (70, 5, 0), group=group, dim=dim, value_dim=value_dim, layout=layout, query_len=2 if group == 3 else 1
        )
        case.with_tiles(
            head_pieces=pieces(dim, whole_up_to=16), value_pieces=pieces(case.v.shape[3], whole_up_to=16), **SMALL
        ).check()


@pytest.mark.clause("D6")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_sizes_of_latent_attention(dtype: torch.dtype) -> None:
    make((40, 3), group=16, dim=576, value_dim=512, layout="LATENT", q_dtype=dtype, dtype=dtype).check()


@pytest.mark.clause("D6", "L3")
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 20])
@pytest.mark.parametrize("query_len", [1, 3])
def test_any_group_of_query_heads(query_len: int, group: int) -> None:
    """Also more rows than a query block has."""
    make(
        (37, 1, 0), group=group, dim=32, query_len=query_len, tiles={"block_m": 16} if query_len * group > 1 else {}
    ).check()


@pytest.mark.clause("D6", "L3")
@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_any_block_size(block_size: int) -> None:
    make((37, 0, block_size, block_size + 1), block_size=block_size, dim=32, tiles=SMALL).check()


@pytest.mark.clause("D6", "L1", "L2", "L3")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_any_layout(dtype: torch.dtype, layout: str) -> None:
    case = make((70, 0, 33), group=4, dim=32, layout=layout, dtype=dtype, q_dtype=dtype, query_len=2, extra=2)
    case.check()
    # Operands as views of larger ones, the heads of q side by side with others.
    wide = torch.full((3, 2, 16, 40), float("nan"), dtype=dtype)
    wide[:, :, 1 : 1 + case.q.shape[2], 3:35] = case.q
    tables = torch.full((6, 2 * case.table.shape[1]), -9, dtype=torch.int32)
    tables[::2, ::2] = case.table
    strided = replace(case, q=wide[:, :, 1 : 1 + case.q.shape[2], 3:35], table=tables[::2, ::2])
    np.testing.assert_array_equal(strided.check()[0], case.run()[0])


@pytest.mark.clause("D9", "D6", "D10", "L3")
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter(name: str, query_len: int) -> None:
    """In one split and in several, what lies before a window being poison."""
    for tiles in ({}, SMALL):
        make((70, 0, 1, 150), group=4, dim=32, query_len=query_len, tiles=tiles, **PARAMS[name]).check()


@pytest.mark.clause("D11", "D3", "D6")
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("query_len", [2, 7, 40])
def test_several_queries(query_len: int, window: int | None) -> None:
    """Rows with fewer keys than queries, and queries of one block whose splits differ in length."""
    case = make(
        (0, 1, 6, 32, 64, 129, 145), group=3, kv_heads=1, dim=16, query_len=query_len, window=window, tiles=SMALL
    )
    case.check()
    case.with_tiles(block_m=16).check()


@pytest.mark.clause("D3", "D9")
@pytest.mark.parametrize("params", [{}, {"sinks": SINKS}, {"softcap": 2.0, "window": 3}])
def test_empty_rows_are_zero_beside_a_query_of_nan(params: dict[str, Any]) -> None:
    case = make((0, 0, 5), **params)
    case.q[:2] = float("nan")
    out, lse, invalid = case.run()
    assert not out[:2].view(np.uint32).any()
    assert np.isneginf(lse[:2]).all()
    assert invalid == 0
    replace(case, visible=torch.tensor([-3, -(2**31), 5], dtype=torch.int32)).row(1).run()


@pytest.mark.clause("D2", "D9")
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("params", [{}, {"window": 20}, {"sinks": SINKS, "softcap": 3.0}])
def test_invalid_blocks_are_zero_rows_that_take_part(params: dict[str, Any], query_len: int) -> None:
    bad = [(0, 0), (0, 2), (0, 3), (1, 1), (2, 0), (0, 4)]
    for tiles in ({}, SMALL | {"count_columns": 2, "count_rows": 2}):
        _, _, invalid = make((78, 20, 3, 0), bad=bad, query_len=query_len, tiles=tiles, **params).check()
        assert invalid > 0


@pytest.mark.clause("D2", "D1")
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize(
    "params", [{}, {"window": 20}, {"window": 70, "sinks": SINKS}, {"softcap": 3.0, "sinks": SINKS - 3}]
)
def test_tokens_behind_the_table_are_missing_blocks(params: dict[str, Any], query_len: int) -> None:
    """The device alone knows such lengths; columns behind table_len hold blocks, and are not followed."""
    for tiles in ({}, SMALL):
        case = make((48, 48, 48, 48), query_len=query_len, tiles=tiles, extra=7, **params)
        case.table[:, case.table_len :] = case.table[:, :1]
        replace(case, visible=torch.tensor([49, 48, 60, 170], dtype=torch.int32)).check()


@pytest.mark.clause("D2")
def test_a_million_missing_tokens_cost_no_loop() -> None:
    case = make((48, 48))
    out, lse, invalid = replace(case, visible=torch.tensor([2**31 - 1, 48], dtype=torch.int32)).run()
    assert invalid == -(-(2**31 - 1) // 16) - 3
    assert np.abs(out[0]).max() < 1e-6
    np.testing.assert_allclose(lse[0], np.log(2.0**31), rtol=1e-6)
    np.testing.assert_array_equal(out[1], case.run()[0][1])


@pytest.mark.clause("D11", "L3")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("layout", "dtype", "pieces"), [("NHD", F32, (32, 0)), ("NHD", BF16, (16, 16)), ("LATENT", F16, (16, 16))]
)
def test_what_other_queries_see_changes_no_bit(
    layout: str, dtype: torch.dtype, pieces: tuple[int, int], bad: float
) -> None:
    """A key and a value that are not finite spoil the queries that see them alone; the first three see no token that is so."""
    tiles = SMALL | {"block_m": 16, "head_pieces": pieces, "value_pieces": pieces}
    for window in (None, 40):
        case = make(
            (70, 36, 5, 3), group=3, dim=32, value_dim=32 if layout == "NHD" else 24, layout=layout, query_len=6,
            dtype=dtype, q_dtype=dtype, window=window, tiles=tiles,
        )  # fmt: skip
        want = case.check()
        for b, n in enumerate(case.visible.tolist()):
            last = torch.tensor([n - 3]) if n > 5 else torch.tensor([n - 1])
            place = case.table[b, last // 16].long(), last % 16
            case.v[place] = bad
            case.k[(*place, slice(None), 1)] = bad
        out, lse, _ = case.run()
        for b, n in enumerate(case.visible.tolist()):
            blind = 3 if n > 5 else 5
            np.testing.assert_array_equal(out[b, :blind].view(np.uint32), want[0][b, :blind].view(np.uint32))
            np.testing.assert_array_equal(lse[b, :blind].view(np.uint32), want[1][b, :blind].view(np.uint32))
            assert not np.isfinite(out[b, blind:]).any()


@pytest.mark.clause("D11", "L3")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_lies_before_the_window_of_later_queries_changes_no_bit(bad: float) -> None:
    """The first query of three alone sees the value that is not finite."""
    case = make((70, 130), group=3, dim=32, query_len=3, window=20, tiles=SMALL | {"block_m": 16})
    want = case.check()
    for b, n in enumerate(case.visible.tolist()):
        position = n - 22
        case.v[int(case.table[b, position // 16]), position % 16] = bad
    out, lse, _ = case.run()
    np.testing.assert_array_equal(out[:, 1:].view(np.uint32), want[0][:, 1:].view(np.uint32))
    np.testing.assert_array_equal(lse.view(np.uint32), want[1].view(np.uint32))
    assert not np.isfinite(out[:, 0]).any()


@pytest.mark.clause("D2", "L3")
def test_entries_behind_the_visible_range_are_never_read() -> None:
    """make() fills them with the least int32, and the rows behind the last token with poison."""
    case = make((24, 16, 0, 1), extra=3, block_size=16)
    want = case.check()
    for last in (0, 1, 10**6):
        case.table[0, 2:] = last
        np.testing.assert_array_equal(replace(case, table_len=5).run()[0], want[0])


@pytest.mark.clause("D6")
def test_one_key_that_outweighs_all_others() -> None:
    case = make((150,), group=2, kv_heads=1, dim=32, tiles=SMALL)
    case.k[case.table[0].long()] *= 0
    position = torch.tensor([2, 149])
    case.k[case.table[0, position // 16].long(), position % 16] = torch.tensor([50.0, -50.0])[:, None, None]
    for sign in (1.0, -1.0):
        case.q.fill_(sign * 50)
        case.check()


@pytest.mark.clause("D6")
def test_finite_scores_at_the_edge_of_float32() -> None:
    """Scores of about -3e38 everywhere are as good as any."""
    case = make((40,), group=4, dim=16, scale=-1e37)
    case.k.nan_to_num_(0, 0, 0).clamp_(1.0, 1.0)
    case.q.fill_(2.1)
    out, lse, _ = case.run()
    assert np.isfinite(out).all()
    np.testing.assert_allclose(lse, -3.36e38, rtol=1e-2)
    want = case.v[case.table[0].long()].reshape(-1, 2, 16)[:40].mean(0)
    np.testing.assert_allclose(out[0, 0, ::4], want, atol=1e-6)


@pytest.mark.clause("L1")
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_offsets_beyond_32_bits(layout: str) -> None:
    """A store of more than 2^31 elements of which the system commits the few pages that are touched."""
    bs, heads, dim = 16, 2, 64
    blocks = 2**31 // (bs * heads * dim) + 8
    shape = (blocks, bs, heads, dim) if layout == "NHD" else (blocks, heads, bs, dim)
    k, v = (torch.from_numpy(np.empty(shape, np.float16)) for _ in range(2))
    if layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    table = torch.tensor([[blocks - 1, 5, blocks - 3]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    for x in (k, v):
        x[table[0].long()] = torch.randn(3, bs, heads, dim, generator=generator).half()
    base = make((48,), q_dtype=F16, dtype=F16)
    case = replace(base, k=k, v=v, table=table)
    case.check()
    case.check("gather")


@pytest.mark.clause("D6")
def test_large_offsets_of_query_table_and_result() -> None:
    """Rows of q, out, lse and the table lie 2^31 elements apart."""
    case = make((40, 20), group=4, dim=16, kv_heads=1, q_dtype=F16, dtype=F16)
    step = 2**31 + 64

    def apart(x: torch.Tensor) -> torch.Tensor:
        store = torch.from_numpy(np.empty(step + x[0].numel(), x.numpy().dtype))
        view = store.as_strided(x.shape, (step, *x.stride()[1:]))
        view.copy_(x)
        return view

    want = case.run()
    out, lse = apart(torch.zeros(2, 1, 4, 16, dtype=F16)), apart(torch.zeros(2, 1, 4))
    tiles = interpreted_tiles(F16, F16, 4, 1, 16, 16)
    invalid = torch.zeros(1, dtype=torch.int32)
    paged_decode(
        apart(case.q), case.k, case.v, apart(case.table), case.visible, out, lse, invalid,
        table_len=case.table_len, first_block=FIRST_BLOCK, num_blocks=case.k.shape[0], scale=0.25, tiles=tiles, empty=empty,
    )  # fmt: skip
    np.testing.assert_array_equal(out.float().numpy(), want[0])
    np.testing.assert_array_equal(lse.numpy(), want[1])


def test_what_does_not_belong_together_is_refused() -> None:
    case = make((5,))
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"v": case.v.half()}, r"v: got torch.float16 .* expected torch.float32"),
        ({"visible": case.visible.long()}, "visible: got torch.int64"),
        ({"table": case.table.long()}, "table: got torch.int64"),
        ({"table_len": 9}, "at least table_len = 9"),
        ({"q": case.q[:, :, :3]}, "2 heads of 64, q has 3 of 64"),
        ({"params": {"sinks": torch.zeros(7)}}, r"sinks: got torch.float32 \[7\]"),
    )
    for change, says in changes:
        with pytest.raises(ValueError, match=says):
            replace(case, **change).run()
    assert TOLERANCE[F32] == 5e-6
