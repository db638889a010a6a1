"""``backend.xp`` over JAX: the operations of :class:`forebay.specs.ArrayNamespace`, result types fixed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from forebay.specs.dtypes import FLOAT_DTYPES, check_dtype
from forebay.specs.errors import InvalidInput

from . import elementwise, rows
from .arrays import DeviceArray, TraceScope, fits, number, sizes
from .elementwise import program


class TpuNamespace:
    """Array operations, each one program; nothing here can read a value.

    Args:
        scope: the one of the backend's arrays.
    """

    def __init__(self, scope: TraceScope) -> None:
        self._scope = scope

    def is_array(self, x: object) -> bool:
        """True for arrays of this very backend."""
        return isinstance(x, DeviceArray) and x.scope is self._scope

    def shape(self, x: DeviceArray) -> tuple[int, ...]:
        """The static shape."""
        return x.shape

    def dtype(self, x: DeviceArray) -> str:
        """The dtype's name."""
        return x.dtype

    # -- shape ---------------------------------------------------------------------------------------------------------
    def reshape(self, x: DeviceArray, shape: Sequence[int]) -> DeviceArray:
        """Row-major."""
        value = self._scope.unwrap("xp.reshape", x)
        whole, known = prod(value.shape), prod(n for n in shape if n != -1)
        wanted = tuple(int(n) if n != -1 else whole // max(known, 1) for n in shape)
        if prod(wanted) != whole or sum(n == -1 for n in shape) > 1:
            raise InvalidInput(f"xp.reshape: got {list(value.shape)} to {list(shape)}; the numbers of elements differ")
        return self._scope.wrap(_reshaped(value, shape=wanted))

    def permute(self, x: DeviceArray, axes: Sequence[int]) -> DeviceArray:
        """Transpose."""
        value = self._scope.unwrap("xp.permute", x)
        if sorted(axes) != list(range(value.ndim)):
            raise InvalidInput(f"xp.permute: got axes {list(axes)} of an array of {value.ndim}")
        return self._scope.wrap(_permuted(value, axes=tuple(axes)))

    def head(self, x: DeviceArray, n: int) -> DeviceArray:
        """First rows."""
        if not x.shape or not 0 <= n <= x.shape[0]:
            raise InvalidInput(f"xp.head: got n={n} of {list(x.shape)}")
        return x[:n]

    def concat(self, xs: Sequence[DeviceArray]) -> DeviceArray:
        """Along the last axis."""
        values = self._alike("concat", *xs)
        if len({(*x.shape[:-1], x.ndim) for x in values}) != 1 or not values[0].ndim:
            raise InvalidInput(f"xp.concat: got {sizes(*values)}, expected arrays that differ in their last axis alone")
        return self._scope.wrap(_concatenated(values))

    def stack(self, xs: Sequence[DeviceArray]) -> DeviceArray:
        """Along a new last axis."""
        values = self._alike("stack", *xs)
        if len({x.shape for x in values}) != 1:
            raise InvalidInput(f"xp.stack: got {sizes(*values)}, expected one shape")
        return self._scope.wrap(_stacked(values))

    def repeat(self, x: DeviceArray, n: int) -> DeviceArray:
        """A last axis of length 1, n times."""
        value = self._scope.unwrap("xp.repeat", x)
        if not value.ndim or value.shape[-1] != 1:
            raise InvalidInput(f"xp.repeat: got {list(value.shape)}, expected a last axis of length 1")
        return self._scope.wrap(_repeated(value, n=n))

    # -- indexing ------------------------------------------------------------------------------------------------------
    def take(self, x: DeviceArray, indices: DeviceArray) -> DeviceArray:
        """Rows of axis 0; an index outside takes the nearest."""
        value, at = self._scope.unwrap("xp.take", x), self._int32("take", indices)
        return self._scope.wrap(_taken(value, at))

    def take_along(self, x: DeviceArray, indices: DeviceArray) -> DeviceArray:
        """Each row its own columns; an index outside takes the nearest."""
        value, at = self._scope.unwrap("xp.take_along", x), self._int32("take_along", indices)
        if value.ndim != 2 or at.ndim != 2 or value.shape[0] != at.shape[0]:
            raise InvalidInput(f"xp.take_along: got {sizes(value, at)}, expected [B, N] and [B, M]")
        return self._scope.wrap(_taken_along(value, at))

    def add_along(self, x: DeviceArray, indices: DeviceArray, values: DeviceArray) -> DeviceArray:
        """Each row its own columns; an index outside them adds nothing."""
        at = self._int32("add_along", indices)
        value, added = self._alike("add_along", x, values)
        if value.ndim != 2 or at.ndim != 2 or at.shape != added.shape or value.shape[0] != at.shape[0]:
            raise InvalidInput(f"xp.add_along: got {sizes(value, at, added)}, expected [B, N], [B, M] and [B, M]")
        return self._scope.wrap(rows.add_along(value, at, added))

    def where(self, condition: DeviceArray, a: Any, b: Any) -> DeviceArray:
        """Two numbers give int32, or float32 where one is a float."""
        chosen_by = self._scope.unwrap("xp.where", condition)
        if chosen_by.dtype != jnp.bool_:
            raise InvalidInput(f"xp.where: got a condition of {chosen_by.dtype.name}, expected bool")
        (left, right), kind = self._scope.operands("xp.where", a, b)
        fits("xp.where", chosen_by, left, right)
        return self._scope.wrap(elementwise.chosen(chosen_by, left, right, dtype=kind))

    # -- elementwise ---------------------------------------------------------------------------------------------------
    def astype(self, x: DeviceArray, dtype: str) -> DeviceArray:
        """Convert; the same dtype is the same array."""
        check_dtype(dtype, what="xp.astype dtype")
        value = self._scope.unwrap("xp.astype", x)
        return x if dtype == x.dtype else self._scope.wrap(elementwise.converted(value, dtype=dtype))

    def bitcast(self, x: DeviceArray, dtype: str) -> DeviceArray:
        """The same bits under another dtype of their size."""
        value = self._scope.unwrap("xp.bitcast", x)
        if {x.dtype, dtype} - {"float32", "int32"}:
            raise InvalidInput(f"xp.bitcast: got {x.dtype} to {dtype}, expected float32 and int32")
        return self._scope.wrap(_bits_as(value, dtype=dtype))

    def exp(self, x: DeviceArray) -> DeviceArray:
        """e^x."""
        return self._unary("exp", x)

    def log(self, x: DeviceArray) -> DeviceArray:
        """ln x."""
        return self._unary("log", x)

    def tanh(self, x: DeviceArray) -> DeviceArray:
        """Hyperbolic tangent."""
        return self._unary("tanh", x)

    def rsqrt(self, x: DeviceArray) -> DeviceArray:
        """1/sqrt(x)."""
        return self._unary("rsqrt", x)

    def silu(self, x: DeviceArray) -> DeviceArray:
        """x * sigmoid(x)."""
        return self._unary("silu", x)

    def maximum(self, a: DeviceArray, b: DeviceArray) -> DeviceArray:
        """The larger of each pair; NaN where one is."""
        return self._scope.binary("maximum", a, b)

    def minimum(self, a: DeviceArray, b: DeviceArray) -> DeviceArray:
        """The smaller of each pair; NaN where one is."""
        return self._scope.binary("minimum", a, b)

    def clip(self, x: DeviceArray, low: int, high: int) -> DeviceArray:
        """Bounds."""
        value = self._scope.unwrap("xp.clip", x)
        bounds = (number("xp.clip", n, x.dtype) for n in (low, high))
        return self._scope.wrap(elementwise.clipped(value, *bounds))

    # -- reductions ----------------------------------------------------------------------------------------------------
    def max(self, x: DeviceArray) -> DeviceArray:
        """Maximum of the last axis, kept."""
        return self._scope.wrap(rows.row_max(self._last_axis("max", x)))

    def sum(self, x: DeviceArray) -> DeviceArray:
        """Sum of the last axis, kept, in x's dtype."""
        return self._scope.wrap(rows.row_sum(self._last_axis("sum", x, least=0)))

    def mean(self, x: DeviceArray) -> DeviceArray:
        """Mean of the last axis, kept."""
        value = self._last_axis("mean", x)
        if x.dtype not in FLOAT_DTYPES:
            raise InvalidInput(f"xp.mean: got {x.dtype}, expected a float array")
        return self._scope.wrap(rows.row_mean(value))

    def argmax(self, x: DeviceArray) -> DeviceArray:
        """int32 index of the first maximum."""
        return self._scope.wrap(rows.argmax(self._last_axis("argmax", x)))

    # -- thresholds ----------------------------------------------------------------------------------------------------
    def kth_largest(self, x: DeviceArray, k: DeviceArray) -> DeviceArray:
        """The element of a rank in each row."""
        value, rank = self._floats("kth_largest", x), self._int32("kth_largest", k)
        return self._scope.wrap(rows.kth_largest(value, self._column("kth_largest", value, rank)))

    def top_k(self, x: DeviceArray, k: int) -> tuple[DeviceArray, DeviceArray]:
        """The largest of each row; of equals the first one first."""
        value = self._floats("top_k", x)
        if not 1 <= k <= value.shape[1]:
            raise InvalidInput(f"xp.top_k: got k={k} of {list(value.shape)}, expected 1 to {value.shape[1]}")
        values, places = rows.top_k(value, k=k)
        return self._scope.wrap(values), self._scope.wrap(places)

    def mass_cutoff(self, p: DeviceArray, mass: DeviceArray) -> DeviceArray:
        """Where the sum of the largest of a row reaches its mass."""
        value, wanted = self._alike("mass_cutoff", p, mass)
        self._floats("mass_cutoff", p)
        return self._scope.wrap(rows.mass_cutoff(value, self._column("mass_cutoff", value, wanted)))

    # -- heavy operations ------------------------------------------------------------------------------------------------
    def matmul(self, a: DeviceArray, b: DeviceArray) -> DeviceArray:
        """Matrix product over the last two axes."""
        left, right = self._alike("matmul", a, b)
        if min(left.ndim, right.ndim) < 2 or left.shape[-1] != right.shape[-2]:
            raise InvalidInput(f"xp.matmul: got {sizes(left, right)}, expected [..., M, K] and [..., K, N]")
        return self._scope.wrap(rows.matmul(left, right))

    def linear(self, x: DeviceArray, weight: DeviceArray, bias: DeviceArray | None = None) -> DeviceArray:
        """x @ weight.T + bias."""
        given = self._alike("linear", x, weight, *(() if bias is None else (bias,)))
        value, w, *added = given
        if w.ndim != 2 or not value.ndim or value.shape[-1] != w.shape[1] or any(b.shape != w.shape[:1] for b in added):
            raise InvalidInput(f"xp.linear: got {sizes(*given)}, expected [..., K], [N, K] and a bias [N]")
        return self._scope.wrap(rows.linear(value, w, added[0] if added else None))

    def rms_norm(self, x: DeviceArray, weight: DeviceArray, eps: float) -> DeviceArray:
        """Root-mean-square norm, accumulated in float32."""
        value, w = self._alike("rms_norm", x, weight)
        if not value.ndim or w.shape != value.shape[-1:]:
            raise InvalidInput(f"xp.rms_norm: got {sizes(value, w)}, expected [..., K] and [K]")
        return self._scope.wrap(rows.rms_norm(value, w, number("xp.rms_norm", eps, "float32")))

    def rope(self, x: DeviceArray, cos: DeviceArray, sin: DeviceArray) -> DeviceArray:
        """Rotary embedding of [N, H, D] by [N, D/2] in NeoX order."""
        value, c, s = self._alike("rope", x, cos, sin)
        if value.ndim != 3 or {c.shape, s.shape} != {(value.shape[0], value.shape[2] // 2)} or value.shape[2] % 2:
            raise InvalidInput(f"xp.rope: got {sizes(value, c, s)}, expected [N, H, D], [N, D/2] and [N, D/2]")
        return self._scope.wrap(rows.rope(value, c, s))

    def silu_mul(self, gate: DeviceArray, up: DeviceArray) -> DeviceArray:
        """silu(gate) * up."""
        left, right = self._alike("silu_mul", gate, up)
        fits("xp.silu_mul", left, right)
        return self._scope.wrap(elementwise.silu_mul(left, right))

    def gumbel(self, keys: DeviceArray, blocks: DeviceArray) -> DeviceArray:
        """Standard Gumbel variates."""
        key, block = self._int32("gumbel", keys), self._int32("gumbel", blocks)
        fits("xp.gumbel", key, block)
        return self._scope.wrap(rows.gumbel(key, block))

    def penalise(self, x: DeviceArray, seen: DeviceArray, bits: DeviceArray, penalty: DeviceArray) -> DeviceArray:
        """Repetition penalty."""
        value, factor = self._alike("penalise", x, penalty)
        words, masks = self._int32("penalise", seen), self._int32("penalise", bits)
        batch, vocab = self._floats("penalise", x).shape
        if words.shape != (batch, -(-vocab // 32)) or masks.shape != (32,) or factor.shape != (batch, 1):
            raise InvalidInput(
                f"xp.penalise: got {sizes(value, words, masks, factor)}, expected [B, V], [B, ceil(V / 32)], [32] and [B, 1]"
            )
        return self._scope.wrap(rows.penalise(value, words, masks, factor))

    # -- checks ----------------------------------------------------------------------------------------------------------
    def _alike(self, act: str, *arrays: DeviceArray) -> list[jax.Array]:
        values = [self._scope.unwrap(f"xp.{act}", x) for x in arrays]
        if len({x.dtype for x in values}) != 1:
            raise InvalidInput(f"xp.{act}: got {sizes(*values)}, expected one dtype; convert with xp.astype")
        return values

    def _int32(self, act: str, x: DeviceArray) -> jax.Array:
        value = self._scope.unwrap(f"xp.{act}", x)
        if value.dtype != jnp.int32:
            raise InvalidInput(f"xp.{act}: got {sizes(value)} where int32 is expected; convert with xp.astype")
        return value

    def _floats(self, act: str, x: DeviceArray) -> jax.Array:
        value = self._scope.unwrap(f"xp.{act}", x)
        if value.dtype != jnp.float32 or value.ndim != 2 or not value.shape[1]:
            raise InvalidInput(f"xp.{act}: got {sizes(value)}, expected float32 [B, N] of at least one column")
        return value

    def _column(self, act: str, x: jax.Array, column: jax.Array) -> jax.Array:
        if column.shape != (x.shape[0], 1):
            raise InvalidInput(f"xp.{act}: got {sizes(x, column)}, expected [B, N] and [B, 1]")
        return column

    def _last_axis(self, act: str, x: DeviceArray, least: int = 1) -> jax.Array:
        value = self._scope.unwrap(f"xp.{act}", x)
        if not value.ndim or value.shape[-1] < least:
            raise InvalidInput(f"xp.{act}: got {sizes(value)}, expected a last axis of at least {least}")
        return value

    def _unary(self, name: str, x: DeviceArray) -> DeviceArray:
        value = self._scope.unwrap(f"xp.{name}", x)
        if x.dtype not in FLOAT_DTYPES:
            raise InvalidInput(f"xp.{name}: got {x.dtype}, expected a float array")
        return self._scope.wrap(elementwise.unary(value, name=name))


# -- programs of shape and place -----------------------------------------------------------------------------------------------
@partial(program, static_argnames="shape")
def _reshaped(x: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    return x.reshape(shape)


@partial(program, static_argnames="axes")
def _permuted(x: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
    return x.transpose(axes)


@program
def _concatenated(xs: list[jax.Array]) -> jax.Array:
    return jnp.concatenate(xs, -1)


@program
def _stacked(xs: list[jax.Array]) -> jax.Array:
    return jnp.stack(xs, -1)


@partial(program, static_argnames="n")
def _repeated(x: jax.Array, *, n: int) -> jax.Array:
    return jnp.broadcast_to(x, (*x.shape[:-1], n))


@program
def _taken(x: jax.Array, indices: jax.Array) -> jax.Array:
    return jnp.take(x, indices, 0, mode="clip")


@program
def _taken_along(x: jax.Array, indices: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, jnp.clip(indices, 0, x.shape[1] - 1), 1, mode="promise_in_bounds")


@partial(program, static_argnames="dtype")
def _bits_as(x: jax.Array, *, dtype: str) -> jax.Array:
    return lax.bitcast_convert_type(x, elementwise.JAX_DTYPE[dtype])
