"""The bits of an attention row depend on its query, keys and values alone (clauses D4, D5, D11)."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from forebay.kernels.numba.paged_decode import prepare
from tests.kernels.cases import LAYOUTS, Case, Dtype, make, relocate

GEOMETRIES: tuple[tuple[int, int, int, Dtype], ...] = (
    (8, 2, 128, "float32"),
    (8, 2, 128, "bfloat16"),
    (9, 3, 64, "float32"),
    (9, 3, 64, "bfloat16"),
    (5, 1, 80, "float32"),
    (20, 1, 96, "bfloat16"),
)
every_geometry = pytest.mark.parametrize(("heads", "kv_heads", "dim", "dtype"), GEOMETRIES)


def assert_same(case: Case, other: Case, **more: object) -> None:
    """Both give the same bits of out and lse."""
    (out, lse, _), (again, again_lse, _) = case.run(), other.run(**more)
    np.testing.assert_array_equal(out.view(np.uint32), again.view(np.uint32))
    np.testing.assert_array_equal(lse.view(np.uint32), again_lse.view(np.uint32))


@pytest.mark.clause("D5")
@every_geometry
def test_alone_and_in_batches_of_3_8_and_32(heads: int, kv_heads: int, dim: int, dtype: Dtype) -> None:
    lengths = [700, 33, 512, 0, 1, 513, 64, 31, *range(100, 124)]
    case = make(lengths, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    out, lse, _ = case.run()
    for size in (3, 8):
        part = replace(case, q=case.q[:size].copy(), table=case.table[:size], visible=case.visible[:size])
        np.testing.assert_array_equal(part.run()[0].view(np.uint32), out[:size].view(np.uint32))
    for b in range(len(lengths)):
        alone, alone_lse, _ = case.row(b).run()
        np.testing.assert_array_equal(alone.view(np.uint32), out[b : b + 1].view(np.uint32))
        np.testing.assert_array_equal(alone_lse.view(np.uint32), lse[b : b + 1].view(np.uint32))


@pytest.mark.clause("D5", "L1")
@every_geometry
def test_block_size_layout_and_table_width(heads: int, kv_heads: int, dim: int, dtype: Dtype) -> None:
    """SPARSE has no contiguous rows, so it takes the build for any geometry: that one and the specialised ones
    agree."""
    case = make([600, 70, 1], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    for layout in LAYOUTS:
        assert_same(case, relocate(case, layout))
    for block_size in (1, 3, 64):
        assert_same(case, relocate(case, "NHD", block_size=block_size, width=1300))


@pytest.mark.clause("D4")
@every_geometry
def test_direct_equals_gather(heads: int, kv_heads: int, dim: int, dtype: Dtype) -> None:
    for options in ({}, {"window": 45}, {"softcap": 20.0}, {"query_len": 3, "window": 70}):
        case = make([1030, 70, 0, 5], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, **options)
        case.table[1, 1] = -1
        assert_same(case, case, path="gather")


@pytest.mark.clause("D11", "D5")
@every_geometry
def test_a_query_among_several_equals_the_query_alone(heads: int, kv_heads: int, dim: int, dtype: Dtype) -> None:
    for window in (None, 37):
        case = make([530, 4], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, query_len=5, window=window)
        out, lse, _ = case.run()
        for t in range(5):
            one = replace(case, q=case.q[:, t : t + 1].copy(), visible=case.visible - (4 - t))
            alone, alone_lse, _ = one.run()
            np.testing.assert_array_equal(alone.view(np.uint32), out[:, t : t + 1].view(np.uint32))
            np.testing.assert_array_equal(alone_lse.view(np.uint32), lse[:, t : t + 1].view(np.uint32))


@pytest.mark.clause("D5")
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads(dtype: Dtype, path: Literal["direct", "gather"]) -> None:
    """Many calls in a row on more threads than cores: who computes what changes, the bits do not."""
    case = make([2048, 700, 0, 1500], heads=8, kv_heads=8, dim=64, dtype=dtype)
    want, want_lse, _ = case.run(threads=1)
    out, lse, invalid = case.outputs()
    call = prepare(
        case.q, case.k, case.v, case.table, case.visible, out, lse, invalid, path=path, threads=4, **case.options
    )
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(60):
            out[:], lse[:] = np.nan, np.nan
            call()
            np.testing.assert_array_equal(out.view(np.uint32), want.view(np.uint32))
            np.testing.assert_array_equal(lse.view(np.uint32), want_lse.view(np.uint32))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.clause("D5")
def test_helpers_that_come_after_the_call_is_gone() -> None:
    """A helper may reach its job when the caller has long dropped the arrays: it must find them, and nothing to do."""
    cases = [make([1500, 900, 40], heads=8, kv_heads=8, dim=64, seed=seed) for seed in range(3)]
    wants = [case.run(threads=1)[0] for case in cases]
    for _ in range(40):
        for case, want in zip(cases, wants, strict=True):
            np.testing.assert_array_equal(case.run(threads=6, path="gather")[0].view(np.uint32), want.view(np.uint32))


@pytest.mark.clause("D5", "D11")
def test_a_call_too_large_for_one_pass() -> None:
    """Chunked prefill with many partial results goes over its rows in passes; the first and last rows are those of T
    = 1."""
    case = make([1400], heads=32, kv_heads=1, dim=128, query_len=1300)
    case.options["table_len"] = case.table.shape[1]
    case.table = np.pad(case.table, ((0, 0), (0, 4000)), constant_values=-1)
    out, lse, _ = case.run(table_len=4000)
    for t in (0, 1, 500, 1299):
        one = replace(case, q=case.q[:, t : t + 1].copy(), visible=case.visible - (1299 - t))
        alone, alone_lse, _ = one.run()
        np.testing.assert_array_equal(alone.view(np.uint32), out[:, t : t + 1].view(np.uint32))
        np.testing.assert_array_equal(alone_lse.view(np.uint32), lse[:, t : t + 1].view(np.uint32))
