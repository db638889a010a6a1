"""Fused row operations of a decode step, on one thread: RMS norm, rotary embedding, the gate of a feed-forward and
the largest element.

Each replaces two to eight calls of an array library, whose overhead is what they cost for a few rows. float32 or
bfloat16 bits (uint16) in and out, float32 inside; the bits of a row depend on that row alone. Each operation has a
``prepare_`` form that resolves addresses once; its callable works on what the arrays hold when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .address import store_i32
from .checks import Array, expect_int32, expect_storage
from .compiled import SOURCES, compiled, float32
from .elementwise_ops import gate_row, largest_place, norm_row, rotate_row

Rows = tuple[int, int]
"""Address, bytes from row to row."""
Heads = tuple[int, int, int]
"""Address, bytes from row to row, bytes from head to head."""


@cache
def _norm_loop(bf16: int) -> Any:
    @compiled
    def norm_rows(x: Rows, weight: int, y: Rows, n: int, count: int, eps: float, _sources: int = SOURCES) -> None:
        for i in range(n):
            norm_row(x[0] + i * x[1], weight, y[0] + i * y[1], count, float32(eps), bf16)

    return norm_rows


@cache
def _rotate_loop(bf16: int) -> Any:
    @compiled
    def rotate_heads(
        x: Heads, cos: Rows, sin: Rows, y: Heads, n: int, heads: int, half: int, _sources: int = SOURCES
    ) -> None:
        for i in range(n):
            c, s = cos[0] + i * cos[1], sin[0] + i * sin[1]
            for h in range(heads):
                rotate_row(x[0] + i * x[1] + h * x[2], c, s, y[0] + i * y[1] + h * y[2], half, bf16)

    return rotate_heads


@cache
def _gate_loop(bf16: int) -> Any:
    @compiled
    def gate_rows(gate: Rows, up: Rows, y: Rows, n: int, count: int, _sources: int = SOURCES) -> None:
        for i in range(n):
            gate_row(gate[0] + i * gate[1], up[0] + i * up[1], y[0] + i * y[1], count, bf16)

    return gate_rows


@cache
def _argmax_loop(bf16: int) -> Any:
    @compiled
    def find_largest(x: Rows, y: int, n: int, count: int, _sources: int = SOURCES) -> None:
        for i in range(n):
            store_i32(y + i * 4, largest_place(x[0] + i * x[1], count, bf16))

    return find_largest


def _check(expected: dict[str, tuple[Array, tuple[int, ...]]]) -> None:
    """Raise ValueError unless all arrays have their shapes, one dtype and contiguous rows."""
    first, (like, _) = next(iter(expected.items()))
    for name, (array, shape) in expected.items():
        expect_storage(name, array, shape)
        if array.dtype != like.dtype:
            raise ValueError(f"{name}: got {array.dtype}, expected the dtype of {first}, {like.dtype}")
        if array.size and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
            raise ValueError(
                f"{name}: got strides {array.strides} bytes, expected contiguous elements in the last axis"
            )


def _where(array: Array) -> tuple[int, ...]:
    """Address and the strides of all axes but the last."""
    return (int(array.__array_interface__["data"][0]), *array.strides[:-1])


def prepare_rms_norm(x: Array, weight: Array, out: Array, eps: float) -> Callable[[], None]:
    """Prepare ``out = x / sqrt(mean(x^2) + eps) * weight`` over the last axis (Zhang & Sennrich 2019).

    In bfloat16 the quotient is rounded before it is multiplied by the weight.

    Args:
        x: ``[N, C]``, rows contiguous, any step from row to row; float32 or uint16 (bfloat16 bits).
        weight: ``[C]``, same dtype.
        out: ``[N, C]``, same dtype, rows contiguous; written.
        eps: added to the mean square.

    Raises:
        ValueError: arrays that do not fit together.
    """
    n, count = x.shape if x.ndim == 2 else (0, 0)
    _check({"x": (x, (n, count)), "weight": (weight, (count,)), "out": (out, (n, count))})
    loop, source, factors, target = _norm_loop(int(x.itemsize == 2)), _where(x), _where(weight)[0], _where(out)

    # The default keeps the arrays alive: compiled code sees only their addresses.
    def norm(_alive: tuple[Array, ...] = (x, weight, out)) -> None:
        loop(source, factors, target, n, count, eps)

    return norm


def prepare_rope(x: Array, cos: Array, sin: Array, out: Array) -> Callable[[], None]:
    """Prepare the rotary embedding of pairs ``(d, d + D/2)`` (Su et al. 2021, NeoX order).

    Args:
        x: ``[N, H, D]``, D even, last axis contiguous, other steps any; float32 or uint16 (bfloat16 bits).
        cos: ``[N, D/2]``, same dtype, rows contiguous.
        sin: like ``cos``.
        out: ``[N, H, D]``, same dtype, last axis contiguous; written.

    Raises:
        ValueError: arrays that do not fit together.
    """
    n, heads, dim = x.shape if x.ndim == 3 else (0, 0, 0)
    half = dim // 2
    angles = (n, half)
    _check({"x": (x, (n, heads, 2 * half)), "cos": (cos, angles), "sin": (sin, angles), "out": (out, x.shape)})
    loop, source, c, s, target = _rotate_loop(int(x.itemsize == 2)), _where(x), _where(cos), _where(sin), _where(out)

    def rope(_alive: tuple[Array, ...] = (x, cos, sin, out)) -> None:
        loop(source, c, s, target, n, heads, half)

    return rope


def prepare_silu_mul(gate: Array, up: Array, out: Array) -> Callable[[], None]:
    """Prepare ``out = gate * sigmoid(gate) * up``; in bfloat16 the first product is rounded before the second.

    Sigmoid does not fall below ``2**-126``, which it reaches near -87.

    Args:
        gate: ``[N, C]``, rows contiguous, any step from row to row; float32 or uint16 (bfloat16 bits).
        up: like ``gate``; both may be halves of one array.
        out: ``[N, C]``, same dtype, rows contiguous; written.

    Raises:
        ValueError: arrays that do not fit together.
    """
    n, count = gate.shape if gate.ndim == 2 else (0, 0)
    _check({"gate": (gate, (n, count)), "up": (up, (n, count)), "out": (out, (n, count))})
    loop, first, second, target = _gate_loop(int(gate.itemsize == 2)), _where(gate), _where(up), _where(out)

    def silu_mul(_alive: tuple[Array, ...] = (gate, up, out)) -> None:
        loop(first, second, target, n, count)

    return silu_mul


def prepare_argmax(x: Array, out: npt.NDArray[np.int32]) -> Callable[[], None]:
    """Prepare ``out[i]``, the place of the first largest element of row ``i``; a NaN is larger than any number.

    Args:
        x: ``[N, C]``, C from 1 to ``2**31 - 1``, rows contiguous; float32 or uint16 (bfloat16 bits).
        out: int32 ``[N]``, contiguous; written.

    Raises:
        ValueError: arrays that do not fit together.
    """
    n, count = x.shape if x.ndim == 2 else (0, 0)
    _check({"x": (x, (n, count))})
    expect_int32("out", out, (n,))
    if not 1 <= count < 2**31 or not out.flags.c_contiguous:
        raise ValueError(
            f"argmax: got rows of {count} elements and out strides {out.strides}, expected 1 to 2**31 - 1 "
            "elements and a contiguous out"
        )
    loop, source, target = _argmax_loop(int(x.itemsize == 2)), _where(x), _where(out)[0]

    def argmax(_alive: tuple[Array, ...] = (x, out)) -> None:
        loop(source, target, n, count)

    return argmax
