"""Fused row operations against float64, at tolerances derived from the roundings that each makes; bits row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forebay.kernels.numba.elementwise import prepare_argmax, prepare_rms_norm, prepare_rope, prepare_silu_mul
from forebay.specs.suite import attention
from forebay.specs.suite.attention import Array
from tests.kernels import oracle
from tests.kernels.cases import Dtype, encode, poisoned

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_size = pytest.mark.parametrize("size", [1, 7, 16, 31, 64, 100, 576])
SINGLE = 2.0**-24
"""Relative error of one rounding to float32."""
HALF = {"float32": 0.0, "bfloat16": 2.0**-8}
"""Relative error of one rounding to the storage, beyond that of float32."""
ROWS = 5


def numbers(shape: tuple[int, ...], dtype: Dtype, seed: int = 0, scale: float = 1.0) -> Array:
    return encode(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


def inside(array: Array, dtype: Dtype) -> Array:
    """The array as a part of a larger one that is NaN or infinite everywhere else; rows stay contiguous."""
    whole = poisoned(tuple(n + 3 for n in array.shape), dtype, np.random.default_rng(1))
    part = whole[tuple(slice(2, -1) for _ in array.shape)]
    part[:] = array
    return part


def empty(shape: tuple[int, ...], dtype: Dtype) -> Array:
    return poisoned(shape, dtype, np.random.default_rng(2))


def bits(values: Array) -> Array:
    return values.view(np.uint32 if values.itemsize == 4 else np.uint16)


def rms_norm(x: Array, weight: Array, dtype: Dtype) -> Array:
    out = empty(x.shape, dtype)
    prepare_rms_norm(x, weight, out, 1e-5)()
    return out


def rope(x: Array, cos: Array, sin: Array, dtype: Dtype) -> Array:
    out = empty(x.shape, dtype)
    prepare_rope(x, cos, sin, out)()
    return out


def silu_mul(gate: Array, up: Array, dtype: Dtype) -> Array:
    out = empty(gate.shape, dtype)
    prepare_silu_mul(gate, up, out)()
    return out


@pytest.mark.clause("D1")
@every_dtype
@every_size
def test_rms_norm(dtype: Dtype, size: int) -> None:
    """The mean of squares has a chain of C/16 + 6 roundings, halved by the root; root, quotient, products add four."""
    x, weight = numbers((ROWS, size), dtype, 1, 3.0), numbers((size,), dtype, 2)
    a = oracle.values(x)
    want = a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-5) * oracle.values(weight)
    bound = ((-(-size // 16) + 6) / 2 + 4) * SINGLE * 1.01 + ((1 + HALF[dtype]) ** 2 - 1)
    got = oracle.values(rms_norm(inside(x, dtype), weight, dtype))
    assert (np.abs(got - want) <= bound * np.abs(want)).all()


@pytest.mark.clause("D1")
@every_dtype
@every_size
def test_rope_is_float32_arithmetic_rounded_once(dtype: Dtype, size: int) -> None:
    """Bit for bit: two products and a sum of float32, then the nearest storage, ties to even."""
    x, cos, sin = (
        numbers((ROWS, 3, 2 * size), dtype, 1),
        numbers((ROWS, size), dtype, 2),
        numbers((ROWS, size), dtype, 3),
    )
    low, high = (oracle.values(half).astype(np.float32) for half in (x[..., :size], x[..., size:]))
    c, s = (oracle.values(angle).astype(np.float32)[:, None] for angle in (cos, sin))
    want = np.concatenate([low * c - high * s, high * c + low * s], -1)
    got = rope(inside(x, dtype), inside(cos, dtype), inside(sin, dtype), dtype)
    np.testing.assert_array_equal(bits(got), bits(encode(want, dtype)))


@pytest.mark.clause("D1")
@every_dtype
@every_size
def test_silu_mul(dtype: Dtype, size: int) -> None:
    """The exponential's argument has two roundings, its polynomial 2e-7, the rest five roundings; below -87 the
    sigmoid stays at ``2**-126``."""
    gate, up = numbers((ROWS, size), dtype, 1, 20.0), numbers((ROWS, size), dtype, 2)
    a, b = oracle.values(gate), oracle.values(up)
    want = a / (1 + np.exp(-a)) * b
    relative = np.abs(a) * 2 * SINGLE + 2e-7 + 5 * SINGLE + ((1 + HALF[dtype]) ** 2 - 1)
    smallest = np.abs(a) * 2.0**-125 * np.maximum(np.abs(b), 1)
    got = oracle.values(silu_mul(inside(gate, dtype), inside(up, dtype), dtype))
    assert (np.abs(got - want) <= relative * np.abs(want) + smallest).all()


@pytest.mark.clause("D1")
@every_dtype
def test_silu_mul_at_the_ends(dtype: Dtype) -> None:
    gate = encode(np.array([[0.0, -0.0, 200.0, -200.0, 3e38, np.nan, np.inf, 1.0]]), dtype)
    up = encode(np.array([[1.0, 1.0, 2.0, 2.0, 0.5, 1.0, 1.0, np.nan]]), dtype)
    got = oracle.values(silu_mul(gate, up, dtype))[0]
    np.testing.assert_array_equal(got[[0, 1, 2, 6]], [0.0, 0.0, 400.0, np.inf])
    assert abs(got[3]) < 1e-34
    assert got[4] == oracle.values(gate)[0, 4] / 2
    assert np.isnan(got[[5, 7]]).all()


@pytest.mark.clause("D1")
def test_bfloat16_rounds_to_nearest_even_and_keeps_nan() -> None:
    """``1 * cos - 1 * sin`` is a number of our choice: ties, both sides of them, overflow to infinity, NaN."""
    cos = np.array([[1.0, 1.0078125, 1.0, 3.3895314e38, np.inf, -1.0]], np.float32)
    sin = np.array([[-(2.0**-8), -(2.0**-8), -(2.0**-8) - 2.0**-15, -3.3895314e38, np.inf, 2.0**-8]], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        want = attention.round_to_bfloat16(cos - sin)[0]
    got = rope(encode(np.ones((1, 1, 12)), "bfloat16"), encode(cos, "bfloat16"), encode(sin, "bfloat16"), "bfloat16")
    np.testing.assert_array_equal(got[0, 0, [0, 1, 2, 3, 5]], want[[0, 1, 2, 3, 5]])
    assert np.isnan(oracle.values(got)[0, 0, 4])
    assert want[0] == 0x3F80
    assert want[1] == 0x3F82
    assert want[2] == 0x3F81
    assert want[3] == 0x7F80


@pytest.mark.clause("D1")
@every_dtype
@pytest.mark.parametrize("size", [1, 7, 16, 17, 48, 100])
def test_argmax_is_that_of_numpy(dtype: Dtype, size: int) -> None:
    """First of equals, NaN above all; rows that are all -inf, and peaks in every place."""
    x = np.round(np.random.default_rng(0).standard_normal((size + 40, size)) * 2).astype(np.float32)
    x[np.arange(size), np.arange(size)] = 100.0
    for row in range(size, size + 30):
        x[row, np.random.default_rng(row).random(size) < 0.2] = [np.nan, np.inf, -np.inf][row % 3]
    x[-10] = -np.inf
    x[-9] = np.nan
    x[-8, :-1], x[-8, -1] = -np.inf, -3e38
    stored = inside(encode(np.where(np.isnan(x), 0, x), dtype), dtype)
    stored[np.isnan(x)] = np.float32(np.nan) if dtype == "float32" else 0x7FC0
    out = np.full(len(x), -1, np.int32)
    prepare_argmax(stored, out)()
    np.testing.assert_array_equal(out, np.argmax(oracle.values(stored), -1))


@pytest.mark.clause("D5")
@every_dtype
@pytest.mark.parametrize("size", [31, 64])
def test_a_row_has_the_same_bits_alone_in_any_batch_and_at_any_stride(dtype: Dtype, size: int) -> None:
    x, y = numbers((ROWS, size), dtype, 1), numbers((ROWS, size), dtype, 2)
    heads = numbers((ROWS, 2, 2 * size), dtype, 3)
    operations: list[tuple[Callable[..., Array], tuple[Array, ...], tuple[Array, ...]]] = [
        (rms_norm, (x,), (y[0],)),
        (silu_mul, (x, y), ()),
        (rope, (heads, x, y), ()),
    ]
    for operation, rows, fixed in operations:
        whole = operation(*rows, *fixed, dtype)
        for order in ([0], [3], [4, 1, 2]):
            part = operation(*(inside(array[order], dtype) for array in rows), *fixed, dtype)
            np.testing.assert_array_equal(bits(part), bits(whole[order]))


@pytest.mark.clause("W9")
@every_dtype
def test_a_prepared_operation_follows_its_arrays_and_writes_nothing_else(dtype: Dtype) -> None:
    """Gate and up are halves of one array; the output lies in the middle of another."""
    both, whole = numbers((ROWS, 40), dtype, 1), empty((ROWS + 2, 30), dtype)
    before, out = whole.copy(), whole[1:-1, 5:25]
    call = prepare_silu_mul(both[:, :20], both[:, 20:], out)
    for seed in (2, 3):
        both[:] = numbers(both.shape, dtype, seed)
        call()
        want = silu_mul(both[:, :20].copy(), both[:, 20:].copy(), dtype)
        np.testing.assert_array_equal(bits(out), bits(want))
    before[1:-1, 5:25] = out
    np.testing.assert_array_equal(bits(whole), bits(before))


X, HEADS = np.zeros((2, 8), np.float32), np.zeros((2, 3, 8), np.float32)
ANGLES = np.zeros((2, 4), np.float32)


@pytest.mark.clause("D1")
@pytest.mark.parametrize(
    ("prepare", "arguments", "message"),
    [
        (prepare_rms_norm, (X, np.zeros(7, np.float32), X, 1e-5), r"^weight: got contiguous float32\[7\], .*\[8\]"),
        (
            prepare_rms_norm,
            (X, np.zeros(8, np.uint16), X, 1e-5),
            r"^weight: got uint16, expected the dtype of x, float",
        ),
        (prepare_rms_norm, (X[:, ::2], X[0, :4], X[:, :4], 1e-5), r"^x: got strides \(32, 8\) bytes, expected contig"),
        (prepare_rms_norm, (HEADS, X[0], HEADS, 1e-5), r"^x: got contiguous float32\[2, 3, 8\]"),
        (prepare_rope, (HEADS, ANGLES[:1], ANGLES, HEADS), r"^cos: got contiguous float32\[1, 4\], .*\[2, 4\]"),
        (prepare_rope, (HEADS[..., :7], ANGLES, ANGLES, HEADS), r"^x: got strided float32\[2, 3, 7\], .*\[2, 3, 6\]"),
        (prepare_silu_mul, (X, X[:, :4], X), r"^up: got strided float32\[2, 4\], .*\[2, 8\]"),
        (prepare_silu_mul, (X.astype(np.float64), X, X), r"^gate: got contiguous float64\[2, 8\]"),
        (prepare_argmax, (X, np.zeros(2, np.int64)), r"^out: got contiguous int64\[2\], expected int32\[2\]"),
        (prepare_argmax, (X[:, :0], np.zeros(2, np.int32)), r"^argmax: got rows of 0 elements"),
        (prepare_argmax, (X, np.zeros(4, np.int32)[::2]), r"^argmax: .* out strides \(8,\), .*contiguous out"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(prepare: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(*arguments)
