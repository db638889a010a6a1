"""Programs over JAX's own arrays: operators, slices and elementwise functions, one dispatch each, part of a trace inside one.

They compute in float32 where the dtype is bfloat16 or float16, and round once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Program = Callable[..., jax.Array]

JAX_DTYPE: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "float32": jnp.float32,
        "bfloat16": jnp.bfloat16,
        "float16": jnp.float16,
        "int32": jnp.int32,
        "bool": jnp.bool_,
    }
)
_BINARY: Final[Mapping[str, Program]] = MappingProxyType(
    {
        "add": jnp.add,
        "sub": jnp.subtract,
        "mul": jnp.multiply,
        "truediv": lambda a, b: a / divisor(a, b),
        "floordiv": jnp.floor_divide,
        "mod": jnp.remainder,
        "lshift": jnp.left_shift,
        "rshift": jnp.right_shift,
        "and": jnp.bitwise_and,
        "or": jnp.bitwise_or,
        "xor": jnp.bitwise_xor,
        "lt": jnp.less,
        "le": jnp.less_equal,
        "gt": jnp.greater,
        "ge": jnp.greater_equal,
        "eq": jnp.equal,
        "ne": jnp.not_equal,
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
    }
)
_NARROW: Final = ("bfloat16", "float16")
program: Final = partial(jax.jit, inline=True)
"""Compiled once a shape; in a trace its operations stand for themselves."""


def widened(x: jax.Array) -> jax.Array:
    """float32 of a narrower float; anything else as it is."""
    return x.astype(jnp.float32) if x.dtype.name in _NARROW else x


def rounded(x: jax.Array, dtype: str) -> jax.Array:
    """Converted to nearest even, also where the compiler would rather keep the excess precision of a bfloat16.

    Without the explicit reduction XLA takes a pair of conversions out of a larger program, whose bits then differ from those of
    the same operations one by one.
    """
    if dtype == "bfloat16" and x.dtype == jnp.float32:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(JAX_DTYPE[dtype])


def settled(x: jax.Array) -> jax.Array:
    """``x``, by a choice that changes nothing: what made it and what is done with it are not rounded as one.

    XLA for CPUs puts a product and an addition of one program into a multiply-add, in some shapes only, so that a row's bits would
    depend on its batch.
    """
    return jnp.where(x == x, x, jnp.nan)


def divisor(a: jax.Array, b: Any) -> jax.Array:
    """``b`` as what ``a`` is divided by, in their common shape and bound to ``a`` by a choice that changes no result.

    XLA turns a division by a number or a broadcast array into a product with its reciprocal, which rounds twice.
    """
    return jnp.where(a == a, b, a)


# -- operators -------------------------------------------------------------------------------------------------------------
@partial(program, static_argnames=("name", "kind"))
def binary(a: Any, b: Any, *, name: str, kind: str) -> jax.Array:
    """An operator of two arrays or numbers, computed in ``kind`` or in float32 for a narrower one; comparisons give bool."""
    carrier = jnp.float32 if kind in _NARROW else JAX_DTYPE[kind]
    made = _BINARY[name](*(jnp.asarray(x).astype(carrier) for x in (a, b)))
    return made if made.dtype == jnp.bool_ else rounded(made, kind)


@program
def inverted(x: jax.Array) -> jax.Array:
    """Every bit, or the truth, the other way."""
    return jnp.invert(x)


@partial(program, static_argnames="dtype")
def converted(x: jax.Array, *, dtype: str) -> jax.Array:
    """Another dtype; a float becomes the int towards zero, and what is not 0 is true."""
    if dtype == "bool":
        return x != 0
    return rounded(widened(x), dtype)


@program
def clipped(x: jax.Array, low: Any, high: Any) -> jax.Array:
    """Bounds; NaN stays."""
    return rounded(jnp.minimum(jnp.maximum(widened(x), low), high), x.dtype.name)


@partial(program, static_argnames="dtype")
def chosen(condition: jax.Array, a: Any, b: Any, *, dtype: str) -> jax.Array:
    """A choice; what is not chosen does not matter."""
    left, right = (jnp.asarray(x).astype(JAX_DTYPE[dtype]) for x in (a, b))
    return jnp.where(condition, left, right)


# -- slices ----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cut:
    """A basic slice of a known shape: each axis from ``starts`` to ``limits`` by ``strides``, some ``flipped``, then in ``shape``."""

    starts: tuple[int, ...]
    limits: tuple[int, ...]
    strides: tuple[int, ...]
    flipped: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, index: tuple[Any, ...], shape: tuple[int, ...]) -> Cut:
        """Ints, slices, None and one Ellipsis.

        Raises:
            IndexError: an int out of range, too many of them, or another kind of index.
        """
        given = sum(part is not None and part is not Ellipsis for part in index)
        dots = [n for n, part in enumerate(index) if part is Ellipsis]
        if given > len(shape) or len(dots) > 1:
            raise IndexError(f"index {index} for shape {shape}")
        at = dots[0] if dots else len(index)
        missing = (slice(None),) * (len(shape) - given)
        bounds: list[tuple[int, int, int]] = []
        flipped: list[int] = []
        sizes: list[int] = []
        for part in (*index[:at], *missing, *index[at + 1 :]):
            if part is None:
                sizes.append(1)
                continue
            n = shape[len(bounds)]
            if isinstance(part, slice):
                taken = range(*part.indices(n))
                if taken.step < 0:
                    flipped.append(len(bounds))
                sizes.append(len(taken))
                low, high = sorted((taken[0], taken[-1])) if taken else (0, -1)
                bounds.append((low, high + 1, abs(taken.step)))
                continue
            if isinstance(part, bool | np.bool_) or not isinstance(part, int | np.integer) or not -n <= part < n:
                raise IndexError(f"index {part!r} for an axis of {n}")
            bounds.append((int(part) % n, int(part) % n + 1, 1))
        starts, limits, strides = zip(*bounds, strict=True) if bounds else ((), (), ())
        return cls(starts, limits, strides, tuple(flipped), tuple(sizes))


@partial(program, static_argnames="cut")
def sliced(x: jax.Array, *, cut: Cut) -> jax.Array:
    """The elements of a :class:`Cut`."""
    made = lax.slice(x, cut.starts, cut.limits, cut.strides)
    turned = lax.rev(made, cut.flipped) if cut.flipped else made
    return turned.reshape(cut.shape)


# -- functions -------------------------------------------------------------------------------------------------------------
def _silu(x: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.exp(-x))


_UNARY: Final[Mapping[str, Program]] = MappingProxyType(
    {"exp": jnp.exp, "log": jnp.log, "tanh": jnp.tanh, "rsqrt": lax.rsqrt, "silu": _silu}
)


@partial(program, static_argnames="name")
def unary(x: jax.Array, *, name: str) -> jax.Array:
    """A function of each element."""
    return rounded(_UNARY[name](settled(widened(x))), x.dtype.name)


@program
def silu_mul(gate: jax.Array, up: jax.Array) -> jax.Array:
    """``silu(gate) * up``."""
    return rounded(_silu(widened(gate)) * widened(up), gate.dtype.name)
