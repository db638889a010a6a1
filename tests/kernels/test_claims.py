"""Work that threads claim: every item is done once, whenever helpers come (clause D5)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from forebay.kernels.numba import linear, paged_decode
from forebay.kernels.numba.workers import Job
from tests.kernels.cases import make


class LateHelper:
    """A helper that begins each job only when the next one is given to it."""

    def __init__(self) -> None:
        self.waiting: list[Job] = []
        self.begun = 0

    def start(self, job: Job) -> None:
        for late in self.waiting:
            late()
            self.begun += 1
        self.waiting = [job]


def late_helpers(monkeypatch: pytest.MonkeyPatch, module: object) -> LateHelper:
    """Make the calls of ``module`` use one late helper for everything, however small."""
    late = LateHelper()

    def helper(index: int) -> LateHelper:
        return late

    monkeypatch.setattr(module, "helper", helper)
    monkeypatch.setattr(module, "_BYTES_PER_THREAD", 1)
    return late


@pytest.mark.clause("D5")
def test_attention_in_several_passes_with_a_helper_that_is_a_pass_late(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make([700, 33, 1200, 5, 64], heads=8, kv_heads=2, dim=64)
    want = case.run(threads=1)
    late = late_helpers(monkeypatch, paged_decode)
    monkeypatch.setattr(paged_decode, "_PARTIALS_BUDGET", 1)  # one row a pass
    for _ in range(2):
        got = case.run(threads=2)
        for mine, other in zip(got[:2], want[:2], strict=True):
            np.testing.assert_array_equal(mine.view(np.uint32), other.view(np.uint32))
    assert late.begun == 9


@pytest.mark.clause("D5")
def test_products_with_a_helper_that_is_a_call_late(monkeypatch: pytest.MonkeyPatch) -> None:
    late = late_helpers(monkeypatch, linear)
    monkeypatch.setattr(linear, "_ITEM_BYTES", 4096)
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((200, 64)).astype(np.float32), np.zeros((2, 64), np.float32)
    out, want = np.full((2, 200), np.nan, np.float32), np.zeros((2, 200), np.float32)
    product: Callable[[], None] = linear.prepare_linear(x, weight, out, threads=2)
    for _ in range(5):
        x[:] = rng.standard_normal(x.shape)
        out[:] = np.nan
        product()
        linear.linear(x, weight, want, threads=1)
        np.testing.assert_array_equal(out.view(np.uint32), want.view(np.uint32))
    assert late.begun == 4
