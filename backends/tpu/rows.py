"""Programs over JAX's own arrays that take a row together: sums, thresholds, norms, products, draws; one dispatch each.

A row's bits depend on that row alone, by construction: XLA is free to choose the order of a reduction by the shape, so sums of floats
are written out as a tree of additions. Elements are compared by integers that stand in their order, for XLA takes subnormal floats
for zeros.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from forebay.specs import draws

from .elementwise import clipped, converted, divisor, program, rounded, settled, widened

_FOLD: Final = 8
_MAGNITUDE: Final = 2**31 - 1
_INFINITY: Final = 0x7F800000
"""The bits of +inf: of the magnitudes only those of NaN are larger."""


# -- sums ------------------------------------------------------------------------------------------------------------------
def _tree_sum(x: jax.Array) -> jax.Array:
    """float32 ``[..., N]`` to ``[..., 1]``: eighths of a row are added to each other until one element is left."""
    n = x.shape[-1]
    if n == 0:
        return jnp.zeros((*x.shape[:-1], 1), x.dtype)
    x = settled(x)
    while n > 1:
        part = -(-n // _FOLD)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, part * _FOLD - n)])
        parts = [lax.slice_in_dim(x, i * part, (i + 1) * part, axis=x.ndim - 1) for i in range(_FOLD)]
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        x, n = parts[0], part
    return x


def _mean(x: jax.Array) -> jax.Array:
    total = _tree_sum(x)
    return jnp.divide(total, divisor(total, np.float32(x.shape[-1])))


@program
def row_sum(x: jax.Array) -> jax.Array:
    """Sum of the last axis, kept; of ints it wraps."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return rounded(_tree_sum(widened(x)), x.dtype.name)
    return jnp.sum(x, -1, keepdims=True, dtype=x.dtype)


@program
def row_mean(x: jax.Array) -> jax.Array:
    """Mean of the last axis, kept."""
    return rounded(_mean(widened(x)), x.dtype.name)


@program
def row_max(x: jax.Array) -> jax.Array:
    """Maximum of the last axis, kept; NaN if there is one."""
    return jnp.max(x, -1, keepdims=True)


# -- thresholds ------------------------------------------------------------------------------------------------------------
def _places(x: jax.Array) -> jax.Array:
    """int32 that are ordered as ``x`` is: both zeros alike, NaN behind all numbers."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.int32)
    bits = lax.bitcast_convert_type(widened(x), jnp.int32)
    magnitude = bits & _MAGNITUDE
    return jnp.where(magnitude > _INFINITY, _MAGNITUDE, jnp.where(bits < 0, -magnitude, magnitude))


def _at_places(places: jax.Array) -> jax.Array:
    """The float32 of :func:`_places`."""
    bits = jnp.where(places < 0, -places | ~_MAGNITUDE, places)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _largest_place(low: jax.Array, high: jax.Array, holds: Any) -> jax.Array:
    """The largest int32 from ``low`` to ``high`` at which ``holds``, which holds at ``low`` and, once it does not, nowhere above."""

    def halved(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        below, above = bounds
        middle = (below | above) - ((below ^ above) >> 1)  # rounded up; the sum of the two would not fit
        there = holds(middle)
        return jnp.where(there, middle, below), jnp.where(there, above, middle - 1)

    found: jax.Array = lax.fori_loop(0, 32, halved, (low, high))[0]
    return found


@program
def argmax(x: jax.Array) -> jax.Array:
    """int32 index of the first maximum of the last axis; NaN is one."""
    places = _places(x)
    columns = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    largest = jnp.max(places, -1, keepdims=True)
    return jnp.min(jnp.where(places == largest, columns, x.shape[-1]), -1)


@program
def kth_largest(x: jax.Array, k: jax.Array) -> jax.Array:
    """By counting the elements from a place on: ranks need no sort."""
    n, places = x.shape[1], _places(x)
    low, high = jnp.full(k.shape, -_INFINITY, jnp.int32), jnp.full(k.shape, _MAGNITUDE, jnp.int32)
    found = _largest_place(low, high, lambda at: jnp.sum(places >= at, -1, keepdims=True, dtype=jnp.int32) >= k)
    return jnp.where((k >= 1) & (k <= n), _at_places(found), -jnp.inf)


@partial(program, static_argnames="k")
def top_k(x: jax.Array, *, k: int) -> tuple[jax.Array, jax.Array]:
    """Elements and columns; of equals the first comes first, which JAX promises of ints as well."""
    columns = lax.top_k(_places(x), k)[1]
    return jnp.take_along_axis(x, columns, 1, mode="promise_in_bounds"), columns


@program
def mass_cutoff(p: jax.Array, mass: jax.Array) -> jax.Array:
    """By the sum of the elements from a place on, which falls from place to place: each addition of the tree does."""
    places = _places(p)
    low, high = jnp.min(places, -1, keepdims=True), jnp.max(places, -1, keepdims=True)

    def reached(at: jax.Array) -> jax.Array:
        return _tree_sum(jnp.where(places >= at, p, 0.0)) >= mass

    found = _largest_place(low, high, reached)
    return jnp.where((high < _MAGNITUDE) & reached(low), _at_places(found), -jnp.inf)


@program
def add_along(x: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    """Each row its own columns. JAX counts negative indices from the end, so those outside go behind it, where they are dropped."""
    n = x.shape[1]
    columns = jnp.where((indices >= 0) & (indices < n), indices, n)
    made: jax.Array = jax.vmap(lambda row, at, added: row.at[at].add(added, mode="drop"))(x, columns, values)
    return made


# -- products and what lies between them -------------------------------------------------------------------------------------
def _exactness(x: jax.Array) -> dict[str, Any]:
    """A TPU multiplies float32 in bfloat16 unless it is told not to; narrower floats add up in float32."""
    if x.dtype == jnp.float32:
        return {"precision": lax.Precision.HIGHEST}
    return {"preferred_element_type": jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype}


@program
def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Product over the last two axes."""
    return rounded(jnp.matmul(a, b, **_exactness(a)), a.dtype.name)


@program
def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """``x @ weight.T + bias``."""
    made = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), **_exactness(x))
    if bias is not None:
        made = made + bias.astype(made.dtype)
    return rounded(made, x.dtype.name)


@program
def rms_norm(x: jax.Array, weight: jax.Array, eps: Any) -> jax.Array:
    """Root-mean-square norm, in x's dtype before the weight."""
    wide, kind = widened(x), x.dtype.name
    scaled = wide * lax.rsqrt(_mean(wide * wide) + eps)
    return rounded(widened(rounded(scaled, kind)) * widened(weight), kind)


@program
def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Pairs ``(d, d + D/2)`` turned by their angles."""
    low, high = jnp.split(widened(x), 2, -1)
    c, s = widened(cos)[:, None], widened(sin)[:, None]
    return rounded(jnp.concatenate((low * c - high * s, high * c + low * s), -1), x.dtype.name)


# -- sampling ----------------------------------------------------------------------------------------------------------------
class _Chain:
    """The operations of :mod:`forebay.specs.draws` on JAX's own arrays."""

    shape = staticmethod(jnp.shape)
    reshape = staticmethod(jnp.reshape)
    where = staticmethod(jnp.where)
    log = staticmethod(jnp.log)
    clip = staticmethod(clipped)

    @staticmethod
    def astype(x: jax.Array, dtype: str) -> jax.Array:
        made: jax.Array = converted(x, dtype=dtype)
        return made


_CHAIN: Final[Any] = _Chain()


@program
def gumbel(keys: jax.Array, blocks: jax.Array) -> jax.Array:
    """Standard Gumbel variates."""
    made: jax.Array = draws.gumbel(_CHAIN, keys, blocks)
    return made


@program
def penalise(x: jax.Array, seen: jax.Array, bits: jax.Array, penalty: jax.Array) -> jax.Array:
    """Repetition penalty."""
    made: jax.Array = draws.penalise(_CHAIN, x, seen, bits, divisor(x, penalty))
    return made
