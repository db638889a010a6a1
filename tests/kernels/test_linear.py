"""Skinny products: right to a bound that is derived, the same bits whatever else is computed, nothing else touched."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.kernels.numba import linear as module
from forebay.kernels.numba.linear import MAX_ROWS, linear, prepare_linear
from forebay.kernels.numba.workers import Job
from forebay.specs.suite.attention import Array
from tests.kernels import oracle
from tests.kernels.cases import Dtype, encode, poisoned

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
every_dtype = pytest.mark.parametrize(("x_dtype", "dtype"), list(product(DTYPES, DTYPES)))
ROUNDING = 2.0**-24
SIZES = [(1, 1), (3, 2), (8, 15), (9, 16), (4, 17), (7, 31), (16, 32), (5, 33), (37, 63), (33, 576), (10, 1000)]


def numbers(shape: tuple[int, ...], dtype: Dtype, seed: int = 0) -> Array:
    return encode(np.random.default_rng(seed).standard_normal(shape), dtype)


def inside(matrix: Array, dtype: Dtype, *, contiguous: bool) -> Array:
    """The matrix as a part of a larger one that is NaN or infinite everywhere else; its last axis strided or not."""
    rows, columns = matrix.shape
    step = 1 if contiguous else 3
    whole = poisoned((rows + 2, columns * step + 7), dtype, np.random.default_rng(1))
    part = whole[1:-1, 3 : 3 + columns * step : step]
    part[:] = matrix
    return part


def run(x: Array, weight: Array, bias: Array | None = None, **options: Any) -> Array:
    out = np.full((len(x), len(weight)), np.nan, np.float32)
    linear(x, weight, out, bias, **options)
    return out


def assert_right(out: Array, x: Array, weight: Array, bias: Array | None = None) -> None:
    """Within the bound of a sum whose longest chain is n operations: ``n u / (1 - n u)`` times the sum of magnitudes.

    A lane adds at most ``2 ceil(K / 32)`` products, one rounding each; then four additions of lanes, and the bias.
    """
    a, b = oracle.values(x), oracle.values(weight)
    added = 0.0 if bias is None else bias.astype(np.float64)
    n = 2 * -(-x.shape[1] // 32) + 4 + 1
    bound = n * ROUNDING / (1 - n * ROUNDING) * (np.abs(a) @ np.abs(b).T + np.abs(added))
    assert (np.abs(out - (a @ b.T + added)) <= bound).all()


def same(a: Array, b: Array) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.clause("D1", "D5", "L1")
@every_dtype
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("contiguous", [True, False])
def test_products_of_any_size_and_stride(n: int, k: int, contiguous: bool, x_dtype: Dtype, dtype: Dtype) -> None:
    """Rows lie in memory that is NaN or infinite around them; a row alone has the bits it has in any batch."""
    weight = inside(numbers((n, k), dtype, 1), dtype, contiguous=True)
    x = numbers((MAX_ROWS + 1, k), x_dtype, 2)
    alone = np.concatenate([run(row[None], weight) for row in x])
    assert_right(alone, x, weight)
    for m in (1, 2, 3, 4, 5, 8, MAX_ROWS, MAX_ROWS + 1):
        rows = inside(x[:m], x_dtype, contiguous=contiguous)
        whole = np.full((m + 2, n), 7, np.float32)
        linear(rows, weight, whole[1:-1])
        same(whole[1:-1], alone[:m])
        assert (whole[[0, -1]] == 7).all()


@pytest.mark.clause("D5")
@every_dtype
def test_the_bits_depend_on_no_other_row(x_dtype: Dtype, dtype: Dtype) -> None:
    """Of the weights any range of rows, in any order; of the batch any neighbours, NaN included."""
    weight, x = numbers((100, 96), dtype, 1), numbers((6, 96), x_dtype, 2)
    want = run(x, weight)
    for begin, end in ((0, 1), (3, 12), (90, 100), (5, 98)):
        same(run(x, weight[begin:end]), want[:, begin:end])
    same(run(x, weight[::-1]), want[:, ::-1].copy())
    same(run(x[[4, 1, 0]], weight), want[[4, 1, 0]])
    spoiled = x.copy()
    spoiled[[0, 2, 3]] = poisoned((3, 96), x_dtype, np.random.default_rng(0))
    same(run(spoiled, weight)[[1, 4, 5]], want[[1, 4, 5]])


@pytest.mark.clause("D5")
@every_dtype
def test_equal_numbers_in_float32_and_bfloat16_give_equal_bits(x_dtype: Dtype, dtype: Dtype) -> None:
    """The activations' storage decides nothing but the rounding it brings."""
    weight, x = numbers((40, 77), dtype, 1), numbers((5, 77), "bfloat16", 2)
    wide = oracle.values(x).astype(np.float32)
    same(run(wide, weight), run(x, weight))


@pytest.mark.clause("D5")
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, dtype: Dtype) -> None:
    monkeypatch.setattr(module, "_BYTES_PER_THREAD", 1)
    monkeypatch.setattr(module, "_ITEM_BYTES", 2048)
    weight, x = numbers((301, 200), dtype, 1), numbers((5, 200), "float32", 2)
    want = run(x, weight, threads=1)
    assert_right(want, x, weight)
    out = np.empty_like(want)
    call = prepare_linear(x, weight, out, threads=4)
    for _ in range(300):
        out[:] = np.nan
        call()
        same(out, want)


@pytest.mark.clause("D1", "D5")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bias_is_added_last(dtype: Dtype) -> None:
    weight, x, bias = numbers((21, 50), dtype, 1), numbers((3, 50), "float32", 2), numbers((21,), "float32", 3)
    out = run(x, weight, bias)
    assert_right(out, x, weight, bias)
    same(out, run(x, weight) + bias)


@pytest.mark.clause("D1")
def test_a_nan_stays_in_its_row_and_infinities_follow_arithmetic() -> None:
    weight, x = np.ones((9, 20), np.float32), np.ones((3, 20), np.float32)
    x[1, 19], weight[4, 0], weight[5, 3] = np.nan, np.inf, -np.inf
    out = run(x, weight)
    assert np.isnan(out[1]).all()
    for row in (out[0], out[2]):
        np.testing.assert_array_equal(row, [20, 20, 20, 20, np.inf, -np.inf, 20, 20, 20])


@pytest.mark.clause("W9")
def test_a_prepared_product_follows_its_arrays() -> None:
    weight, x, out = numbers((12, 64), "float32", 1), numbers((4, 64), "float32", 2), np.zeros((4, 12), np.float32)
    call = prepare_linear(x, weight, out)
    for seed in range(3):
        x[:], weight[:] = numbers(x.shape, "float32", 10 + seed), numbers(weight.shape, "float32", 20 + seed)
        call()
        same(out, run(x, weight))


@pytest.mark.clause("D5")
@pytest.mark.parametrize("count", [1, 3])
def test_a_helper_that_comes_late_finds_the_arrays_alive(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Compiled code knows arrays by address: whoever may still run it must hold them."""
    jobs: list[Job] = []

    class Never:
        start = staticmethod(jobs.append)

    monkeypatch.setattr(module, "helper", lambda index: Never)
    monkeypatch.setattr(module, "_BYTES_PER_THREAD", 1)
    monkeypatch.setattr(module, "_ITEM_BYTES", 1024)
    arrays = [numbers((count, 64), "float32"), numbers((50, 64), "float32", 1), np.zeros((count, 50), np.float32)]
    prepare_linear(*arrays, threads=2)()
    held = [weakref.ref(array) for array in arrays]
    arrays.clear()
    gc.collect()
    assert len(jobs) == 1
    assert all(ref() is not None for ref in held)
    jobs.pop()()
    gc.collect()
    assert all(ref() is None for ref in held)


@pytest.mark.clause("D1")
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_and_no_weights(dtype: Dtype) -> None:
    assert run(numbers((0, 8), "float32"), numbers((3, 8), dtype)).shape == (0, 3)
    assert run(numbers((2, 8), "float32"), numbers((0, 8), dtype)).shape == (2, 0)


GOOD: dict[str, Any] = {
    "x": np.zeros((2, 8), np.float32),
    "weight": np.zeros((3, 8), np.float32),
    "out": np.zeros((2, 3), np.float32),
    "bias": None,
}


@pytest.mark.clause("D1")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 8))}, r"^x: got contiguous float64\[2, 8\], expected float32 or uint16"),
        ({"x": np.zeros(8, np.float32)}, r"^x: got contiguous float32\[8\]"),
        ({"weight": np.zeros((3, 9), np.float32)}, r"^weight: got contiguous float32\[3, 9\], .*\[any, 8\]"),
        ({"weight": np.zeros((8, 3), np.float32).T}, r"^weight: got strides \(4, 12\) bytes, expected contiguous rows"),
        ({"out": np.zeros((3, 2), np.float32)}, r"^out: got contiguous float32\[3, 2\], .*float32\[2, 3\]"),
        ({"out": np.zeros((2, 6), np.float32)[:, ::2]}, r"^out: got strided float32\[2, 3\]"),
        ({"bias": np.zeros(2, np.float32)}, r"^bias: got contiguous float32\[2\], .*float32\[3\]"),
        ({"bias": np.zeros(3, np.uint16)}, r"^bias: got contiguous uint16\[3\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    call = GOOD | change
    with pytest.raises(ValueError, match=message):
        prepare_linear(call["x"], call["weight"], call["out"], call["bias"])


@pytest.mark.clause("L1", "D1")
@pytest.mark.parametrize("operation", ["linear", "rms_norm", "rope", "silu_mul", "argmax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_beyond_the_arrays_is_read(operation: str, dtype: Dtype) -> None:
    """Every array ends where an unreadable page begins, at sizes that fill no vector."""
    command = [sys.executable, "-m", "tests.kernels.guarded_rows", operation, dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, f"exit {done.returncode} (a negative one is a fault): {done.stderr}"
