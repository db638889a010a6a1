"""What gather writes, reads and leaves alone (clauses D2, D4, L3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay.kernels.triton.gather import gather
from tests.kernels_triton.cases import FIRST_BLOCK, LAYOUTS, make
from tests.kernels_triton.loads import counted


@pytest.mark.clause("D2", "L3")
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_visible_rows_and_no_others_are_copied(layout: str, window: int | None) -> None:
    case = make(
        (40, 0, 17), dim=24, layout=layout, bad=[(0, 1)], extra=2, query_len=3, dtype=torch.bfloat16, window=window
    )
    untouched = torch.tensor(77.0, dtype=torch.bfloat16)
    latent = layout == "LATENT"
    k = untouched.repeat(3 * case.table_len, *case.k.shape[1:])
    v = None if latent else untouched.repeat(3 * case.table_len, *case.v.shape[1:])
    identity = torch.full((3, case.table_len), -5, dtype=torch.int32)
    sources = {"k": case.k, "table": case.table, "visible": case.visible}
    if layout in ("NHD", "HND"):
        sources["v"] = case.v
    with counted(**sources) as loads:
        gather(
            case.k, None if latent else case.v, case.table, case.visible, k, v, identity,
            table_len=case.table_len, first_block=FIRST_BLOCK, num_blocks=case.k.shape[0], query_len=3, window=window,
            elements_a_tile=16, tokens_a_tile=8, programs=2,
        )  # fmt: skip
    assert loads.bytes["elsewhere"] == 0
    for b, n in enumerate(case.visible.tolist()):
        low = 0 if window is None else max(0, n - 2 - window)
        for token in range(case.table_len * 16):
            column, offset = divmod(token, 16)
            copies = [(case.k, k)] if v is None else [(case.k, k), (case.v, v)]
            for source, target in copies:
                got = target[b * case.table_len + column, offset]
                if not low <= token < n:
                    assert (got == untouched).all()
                elif (b, column) == (0, 1):
                    assert not got.any()
                else:
                    assert torch.equal(got, source[case.table[b, column], offset])
        columns = torch.arange(low // 16, -(-n // 16)) if n else torch.arange(0)
        assert torch.equal(identity[b, columns], (b * case.table_len + columns).int())


def test_what_does_not_belong_together_is_refused() -> None:
    case = make((5,))
    k, v = torch.zeros(1, 16, 2, 64), torch.zeros(1, 16, 2, 64)
    identity = torch.zeros(1, 1, dtype=torch.int32)
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"k_out": k[:0]}, r"k_out: got torch.float32 \[0, 16, 2, 64\]"),
        ({"v_out": None}, "v_out: given for no source, or missing"),
        ({"v_out": v.half()}, "v_out: got torch.float16"),
        ({"identity": identity.long()}, "torch.int64, expected int32"),
        ({"identity": torch.zeros(2, 1, dtype=torch.int32)}, r"identity: got \[2, 1\]"),
    )
    for change, says in changes:
        given = {"k_out": k, "v_out": v, "identity": identity} | change
        with pytest.raises(ValueError, match=says):
            gather(
                case.k, case.v, case.table, case.visible, given["k_out"], given["v_out"], given["identity"],
                table_len=1, first_block=FIRST_BLOCK, num_blocks=4,
            )  # fmt: skip
