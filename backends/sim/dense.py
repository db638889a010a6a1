"""Dense kernels: elementwise operations, reductions, selections, products. A row's bits depend on that row alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from forebay.specs.dtypes import HostArray

from .views import View

Views = list[View]
Ufunc = Callable[..., HostArray]

BINARY: Final[Mapping[str, Ufunc]] = MappingProxyType(
    {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "truediv": np.true_divide,
        "floordiv": np.floor_divide,
        "mod": np.remainder,
        "lshift": np.left_shift,
        "rshift": np.right_shift,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "eq": np.equal,
        "ne": np.not_equal,
        "maximum": np.maximum,
        "minimum": np.minimum,
    }
)


def _silu(x: HostArray) -> HostArray:
    one = np.float32(1)
    made: HostArray = x / (one + np.exp(-x))
    return made


def _rsqrt(x: HostArray) -> HostArray:
    made: HostArray = np.float32(1) / np.sqrt(x)
    return made


UNARY: Final[Mapping[str, Ufunc]] = MappingProxyType(
    {"exp": np.exp, "log": np.log, "tanh": np.tanh, "rsqrt": _rsqrt, "silu": _silu, "invert": np.invert}
)


# -- elementwise -----------------------------------------------------------------------------------------------------------
def binary(outs: Views, ins: list[View | None], name: str, left: Any, right: Any, kind: str) -> None:
    """``BINARY[name]`` of two operands, each a view or a constant, computed in the numpy type ``kind``."""
    a = left if ins[0] is None else ins[0].values().astype(kind, copy=False)
    b = right if ins[1] is None else ins[1].values().astype(kind, copy=False)
    outs[0].put(BINARY[name](a, b))


def unary(outs: Views, ins: Views, name: str) -> None:
    """``UNARY[name]``."""
    outs[0].put(UNARY[name](ins[0].values()))


def clip(outs: Views, ins: Views, low: Any, high: Any) -> None:
    """Bounds."""
    outs[0].put(np.minimum(np.maximum(ins[0].values(), low), high))


def where(outs: Views, ins: list[View | None], a: Any, b: Any) -> None:
    """A choice; what is not chosen does not matter."""
    condition, x, y = ins
    if condition is not None:
        outs[0].put(np.where(condition.bits, a if x is None else x.values(), b if y is None else y.values()))


def convert(outs: Views, ins: Views) -> None:
    """Another dtype; a float becomes the int towards zero."""
    values = ins[0].values()
    outs[0].put(values != 0 if outs[0].dtype == "bool" else values)


def copy(outs: Views, ins: Views) -> None:
    """The same bytes elsewhere."""
    outs[0].bits[...] = ins[0].bits


def zero(outs: Views, _ins: Views) -> None:
    """Zeros."""
    for out in outs:
        out.bits[...] = 0


# -- shape and indexing ------------------------------------------------------------------------------------------------------
def concat(outs: Views, ins: Views) -> None:
    """One behind another along the last axis."""
    np.concatenate([x.bits for x in ins], -1, out=outs[0].bits)


def stack(outs: Views, ins: Views) -> None:
    """Beside each other along a new last axis."""
    np.stack([x.bits for x in ins], -1, out=outs[0].bits)


def _checked(indices: HostArray, n: int) -> HostArray:
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < n:
        raise IndexError(f"indices {int(indices.min())} to {int(indices.max())} of {n}")
    return indices


def take(outs: Views, ins: Views) -> None:
    """Rows of axis 0."""
    x, indices = ins
    outs[0].bits[...] = x.bits[_checked(indices.bits, x.bits.shape[0])]


def take_along(outs: Views, ins: Views) -> None:
    """Each row its own columns."""
    x, indices = ins
    outs[0].bits[...] = np.take_along_axis(x.bits, _checked(indices.bits, x.bits.shape[1]), 1)


def add_along(outs: Views, ins: Views) -> None:
    """Each row its own columns; an index outside them adds nothing."""
    x, indices, values = (view.values() for view in ins)
    made, (rows, columns) = x.copy(), x.shape
    if indices.size and columns:
        flat = np.arange(rows)[:, None] * columns + np.clip(indices, 0, columns - 1)
        held = (indices >= 0) & (indices < columns)
        np.add.at(made.reshape(-1), flat[held], values[held])
    outs[0].put(made)


# -- reductions --------------------------------------------------------------------------------------------------------------
def largest(outs: Views, ins: Views) -> None:
    """Maximum of the last axis."""
    outs[0].put(np.maximum.reduce(ins[0].values(), -1, keepdims=True))


def total(outs: Views, ins: Views, mean: bool) -> None:
    """Sum of the last axis, int32 wrapping; divided by its length for the mean."""
    x = ins[0].values()
    summed = np.add.reduce(x, -1, dtype=x.dtype, keepdims=True)
    outs[0].put(summed / np.float32(x.shape[-1]) if mean else summed)


def argmax(outs: Views, ins: Views) -> None:
    """First maximum of the last axis."""
    outs[0].bits[...] = np.argmax(ins[0].values(), -1)


# -- thresholds --------------------------------------------------------------------------------------------------------------
def _falling(x: HostArray) -> HostArray:
    """Rows from the largest element to the smallest, NaN first."""
    made: HostArray = np.sort(x, -1)[:, ::-1]
    return made


def kth_largest(outs: Views, ins: Views) -> None:
    """One element of each sorted row."""
    x, k = (view.values() for view in ins)
    n = x.shape[1]
    found = np.take_along_axis(_falling(x), np.clip(k - 1, 0, n - 1), 1)
    outs[0].put(np.where((k >= 1) & (k <= n), found, np.float32(-np.inf)))


def top_k(outs: Views, ins: Views) -> None:
    """The first columns of each sorted row; of equals the first one first."""
    x = ins[0].values()
    number = ~np.isnan(x)
    places = np.lexsort((np.where(number, -x, 0), number), axis=-1)[:, : outs[0].bits.shape[1]]
    outs[0].put(np.take_along_axis(x, places, 1))
    outs[1].bits[...] = places


def mass_cutoff(outs: Views, ins: Views) -> None:
    """Where the sum of each sorted row, in float64, first reaches its mass."""
    p, mass = (view.values() for view in ins)
    falling = _falling(p)
    reached: HostArray = np.cumsum(falling, -1, dtype=np.float64) >= mass
    found = np.take_along_axis(falling, np.argmax(reached, -1)[:, None], 1)
    outs[0].put(np.where(np.logical_or.reduce(reached, -1, keepdims=True), found, np.float32(-np.inf)))


# -- heavy operations --------------------------------------------------------------------------------------------------------
def matmul(outs: Views, ins: Views) -> None:
    """One row of ``a`` at a time, so that a row's bits do not depend on how many there are."""
    a, b = (view.values() for view in ins)
    rows = [np.matmul(a[..., i : i + 1, :], b) for i in range(a.shape[-2])]
    outs[0].put(np.concatenate(rows, -2) if rows else np.empty(outs[0].bits.shape, np.float32))


def linear(outs: Views, ins: list[View | None]) -> None:
    """``x @ weight.T + bias``, one row of x at a time."""
    x, weight, bias = (None if view is None else view.values() for view in ins)
    if x is None or weight is None:
        return
    flat = x.reshape(-1, x.shape[-1])
    made = np.empty((len(flat), len(weight)), np.float32)
    for i, row in enumerate(flat):
        np.dot(weight, row.copy(), out=made[i])
    if bias is not None:
        made += bias
    outs[0].put(made.reshape(outs[0].bits.shape))


def rms_norm(outs: Views, ins: Views, eps: float) -> None:
    """``x / sqrt(mean(x^2) + eps) * weight``, with the rounding to x's dtype before the weight."""
    x, weight = (view.values() for view in ins)
    mean = np.add.reduce(x * x, -1, keepdims=True) / np.float32(x.shape[-1])
    outs[0].put(x / np.sqrt(mean + np.float32(eps)))
    outs[0].put(outs[0].values() * weight)


def rope(outs: Views, ins: Views) -> None:
    """Pairs ``(d, d + D/2)`` turned by their angles."""
    x, cos, sin = (view.values() for view in ins)
    half = x.shape[-1] // 2
    low, high, c, s = x[..., :half], x[..., half:], cos[:, None], sin[:, None]
    outs[0].put(np.concatenate([low * c - high * s, high * c + low * s], -1))


def silu_mul(outs: Views, ins: Views) -> None:
    """``silu(gate) * up``."""
    gate, up = (view.values() for view in ins)
    outs[0].put(_silu(gate) * up)
