"""Merging partial results in Triton, interpreted (clause D10)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from forebay.kernels.triton.merge import merge_partials
from tests.kernels_triton.cases import TOLERANCE, empty, make


def merged(outs: list[torch.Tensor], lses: list[torch.Tensor], **more: Any) -> tuple[Any, Any]:
    out, lse = empty(outs[0].shape, outs[0].dtype), empty(lses[0].shape, torch.float32)
    merge_partials(outs, lses, out, lse, empty=empty, **more)
    return out.float().numpy(), lse.numpy()


@pytest.mark.clause("D10")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("count", [1, 2, 8, 9, 17, 40])
def test_parts_weigh_by_their_lse(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    lses = [6 * torch.rand(2, 3, 5, generator=generator) - 3 for _ in range(count)]
    outs = [torch.randn(2, 3, 5, 24, generator=generator).to(dtype) for _ in range(count)]
    out, lse = merged(outs, lses, rows_a_program=8)
    weight = torch.stack(lses).double().softmax(0)
    want = (weight[..., None] * torch.stack(outs).double()).sum(0).numpy()
    assert np.abs(out - want).max() <= TOLERANCE[dtype] * np.abs(want).max()
    np.testing.assert_allclose(lse, torch.stack(lses).double().logsumexp(0).numpy(), rtol=5e-6, atol=5e-6)


@pytest.mark.clause("D10", "D3")
@pytest.mark.parametrize("garbage", [0.0, 123.0, float("nan"), float("inf")])
@pytest.mark.parametrize("count", [2, 12])
def test_empty_parts_weigh_nothing_whatever_they_hold(count: int, garbage: float) -> None:
    none = (torch.full((3, 4, 8), garbage), torch.full((3, 4), float("-inf")))
    some = (torch.full((3, 4, 8), 3.0), torch.zeros(3, 4))
    for place in {0, 7, 8, count - 1} & {*range(count)}:
        parts = [some if i == place else none for i in range(count)]
        out, lse = merged(*([*x] for x in zip(*parts, strict=True)))
        assert (out == 3.0).all()
        assert not lse.any()
    out, lse = merged([none[0]] * count, [none[1]] * count)
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.clause("D10")
def test_an_infinite_lse_outweighs_all_others() -> None:
    outs = [torch.full((1, 2, 4), x) for x in (1.0, 5.0)]
    lses = [torch.zeros(1, 2), torch.full((1, 2), float("inf"))]
    assert (merged(outs, lses)[0] == 5).all()
    assert (merged(outs[::-1], lses[::-1])[0] == 5).all()


@pytest.mark.clause("D10", "D6")
def test_halves_of_a_table_merge_to_the_whole() -> None:
    case = make((64, 64), group=3, dim=32)
    whole = case.check()
    parts = []
    for low, high in ((0, 1), (1, 1), (1, 4)):
        rows = torch.full((2,), 16 * (high - low), dtype=torch.int32)
        part = case.__class__(
            **(case.__dict__ | {"table": case.table[:, low:high], "visible": rows, "table_len": high - low})
        )
        parts.append([torch.from_numpy(x) for x in part.run()[:2]])
    out, lse = merged(*([*x] for x in zip(*parts, strict=True)))
    np.testing.assert_allclose(out, whole[0], atol=2e-6)
    np.testing.assert_allclose(lse, whole[1], rtol=2e-6)


def test_parts_may_be_views_whose_rows_are_evenly_spaced() -> None:
    outs = torch.randn(2, 3, 4, 16).unbind(0)
    wide = [torch.full((3, 4, 40), float("nan")) for _ in outs]
    for target, part in zip(wide, outs, strict=True):
        target[..., 2:34:2] = part
    lses = list(torch.randn(3, 4, 2).unbind(2))
    views = [x[..., 2:34:2] for x in wide]
    np.testing.assert_array_equal(merged(views, lses)[0], merged([*outs], [x.contiguous() for x in lses])[0])
    with pytest.raises(ValueError, match="are not evenly spaced"):
        merged([x.transpose(0, 1) for x in outs], [torch.zeros(4, 3)] * 2)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    out, lse = torch.zeros(3, 2, 4), torch.zeros(3, 2)
    for outs, lses, says in (
        ([out], [lse, lse], "got 1 outputs and 2 LSEs"),
        ([out, out[..., :3]], [lse, lse], r"got a part torch.float32 \[3, 2, 3\]"),
        ([out, out], [lse, lse[:2]], r"got an LSE \[2, 2\]"),
        ([out, out.half()], [lse, lse], r"got a part torch.float16"),
    ):
        with pytest.raises(ValueError, match=says):
            merged(outs, lses)
    with pytest.raises(ValueError, match="got 0 outputs"):
        merge_partials([], [], out, lse, empty=empty)
