"""The online softmax over chunks of keys (Milakov and Gimelshein 2018), on values: shared by the Pallas kernel and the XLA loop.

Everything is float32 but the stored keys and values. A *row* is a query of a block and a query head of a KV head; all KV heads go
through one batched product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

from .pages import PageFormat

EXACT: Final = lax.Precision.HIGHEST
_BY_HEAD_KEYS: Final = (((2,), (2,)), ((0,), (0,)))
_BY_HEAD_VALUES: Final = (((2,), (1,)), ((0,), (0,)))


@dataclass(frozen=True)
class Softmax:
    """What a pass over keys knows at compile time.

    Attributes:
        page: where K and V lie.
        group: G, query heads a KV head.
        queries: queries of a block; a row is ``query * group + head``.
        capped: whether there is a soft-cap.
    """

    page: PageFormat
    group: int
    queries: int
    capped: bool

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.queries * self.group


Numbers = tuple[jax.Array, jax.Array]
"""Scale and soft-cap, float32 scalars: of the call, so that calls that differ by them are one program."""


def ranges(
    visible: jax.Array, first_query: jax.Array | int, *, softmax: Softmax, query_len: int, window: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """First key and end of the keys of each row, int32 ``[rows, 1]`` each; a row of no query has none.

    Args:
        visible: scalar int32, keys that the last query sees; not negative.
        first_query: of the block.
        softmax: sizes.
        query_len: T.
        window: W, scalar int32; its largest where there is none.
    """
    row = lax.broadcasted_iota(jnp.int32, (softmax.rows, 1), 0)
    query = first_query + lax.div(row, jnp.int32(softmax.group))
    end = jnp.where(query < query_len, jnp.maximum(visible - (query_len - 1 - query), 0), 0)
    return jnp.maximum(end - window, 0), end


def begin(
    start: jax.Array, end: jax.Array, most: int, sinks: jax.Array | None, heads: int
) -> tuple[jax.Array, jax.Array]:
    """Maximum and sum before the first chunk, float32 ``[Hkv, rows, 1]`` each.

    A sink is a first logit. Keys from ``most`` on have no column in the table: zeros that take part in the softmax, so they count with
    a logit of 0 and add nothing to the values.
    """
    missing = jnp.maximum(end - jnp.maximum(start, most), 0).astype(jnp.float32)
    missing = jnp.broadcast_to(missing[None], (heads, *missing.shape))
    zero = jnp.where(missing > 0.0, 0.0, -jnp.inf)
    if sinks is None:
        return zero, missing
    peak = jnp.maximum(sinks, zero)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    return peak, jnp.exp(sinks - base) + missing * jnp.exp(zero - base)


def scores(q: jax.Array, page: jax.Array, numbers: Numbers, softmax: Softmax) -> jax.Array:
    """Logits float32 ``[Hkv, rows, C]`` of ``q [Hkv, rows, key_lanes]`` and the keys of a chunk ``[Hkv, C, lanes]``."""
    scale, cap = numbers
    form = softmax.page
    keys = page[..., : form.key_lanes]
    if form.key_lanes > form.key_dim:
        # Beside K lies V, and what belongs to nobody: neither may reach a score, not even times zero.
        lane = lax.broadcasted_iota(jnp.int32, keys.shape, 2)
        keys = jnp.where(lane < form.key_dim, keys, jnp.zeros_like(keys))
    if q.dtype == keys.dtype and q.dtype != jnp.float32:
        found = lax.dot_general(q, keys, _BY_HEAD_KEYS, preferred_element_type=jnp.float32)
    else:
        found = lax.dot_general(
            q.astype(jnp.float32),
            keys.astype(jnp.float32),
            _BY_HEAD_KEYS,
            precision=EXACT,
            preferred_element_type=jnp.float32,
        )
    found = found * scale
    return cap * jnp.tanh(found / cap) if softmax.capped else found


def weighted(weights: jax.Array, values: jax.Array) -> jax.Array:
    """``weights [Hkv, rows, C] @ values [Hkv, C, Dv]`` in float32.

    Weights keep their precision beside values of two bytes: they are the sum of two numbers of that type.
    """
    if values.dtype == jnp.float32:
        return lax.dot_general(weights, values, _BY_HEAD_VALUES, precision=EXACT, preferred_element_type=jnp.float32)
    high = weights.astype(values.dtype)
    low = (weights - high.astype(jnp.float32)).astype(values.dtype)
    return lax.dot_general(high, values, _BY_HEAD_VALUES, preferred_element_type=jnp.float32) + lax.dot_general(
        low, values, _BY_HEAD_VALUES, preferred_element_type=jnp.float32
    )


State = tuple[jax.Array, jax.Array, jax.Array]
"""Maximum and sum ``[Hkv, rows, 1]``, and weighted values ``[Hkv, rows, Dv]``; float32."""


def absorb(
    state: State,
    q: jax.Array,
    page: jax.Array,
    first: jax.Array,
    start: jax.Array,
    end: jax.Array,
    numbers: Numbers,
    softmax: Softmax,
) -> State:
    """The state behind a chunk ``page [Hkv, C, lanes]`` of the tokens from ``first`` on; rows see ``start <= key < end``."""
    peak, total, summed = state
    tokens = page.shape[1]
    position = first + lax.broadcasted_iota(jnp.int32, (softmax.rows, tokens), 1)
    seen = ((position >= start) & (position < end))[None]
    logits = jnp.where(seen, scores(q, page, numbers, softmax), -jnp.inf)
    new_peak = jnp.maximum(peak, jnp.max(logits, axis=2, keepdims=True))
    base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
    shrink, weights = jnp.exp(peak - base), jnp.exp(logits - base)
    total = shrink * total + jnp.sum(weights, axis=2, keepdims=True)
    low, width = softmax.page.value_slice
    values = page[..., low : low + width]
    at = first + lax.broadcasted_iota(jnp.int32, values.shape, 1)

    def visible_values(lowest: jax.Array, highest: jax.Array) -> jax.Array:
        # What no row sees may be NaN, and NaN times a weight of zero is NaN.
        return jnp.where((at >= lowest) & (at < highest), values, jnp.zeros_like(values))

    shown = visible_values(jnp.min(jnp.where(end > start, start, 2**31 - 1)), jnp.max(end))
    if softmax.queries == 1:
        return new_peak, total, shrink * summed + weighted(weights, shown)

    def one_by_one() -> jax.Array:
        # A key that one query sees and another does not is not finite: each query gets values of its own.
        row = lax.broadcasted_iota(jnp.int32, (1, softmax.rows, 1), 1)

        def of_query(t: jax.Array, found: jax.Array) -> jax.Array:
            mine = lax.div(row, jnp.int32(softmax.group)) == t
            of_mine = mine[0]
            highest = jnp.max(jnp.where(of_mine, end, 0))
            lowest = jnp.max(jnp.where(of_mine, start, 0))
            return jnp.where(mine, weighted(weights, visible_values(lowest, highest)), found)

        found: jax.Array = lax.fori_loop(0, softmax.queries, of_query, jnp.zeros(summed.shape, jnp.float32))
        return found

    strange = jnp.max(jnp.where(jnp.abs(shown.astype(jnp.float32)) < jnp.inf, 0, 1)) > 0
    added = lax.cond(strange, one_by_one, lambda: weighted(weights, shown))
    return new_peak, total, shrink * summed + added


def finish(state: State, start: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output ``[Hkv, rows, Dv]`` and natural-log LSE ``[Hkv, rows, 1]``; a row without keys is 0 and -inf, beside a sink as well."""
    peak, total, summed = state
    any_key = (end > start)[None]
    out = jnp.where(any_key, summed / jnp.where(any_key, total, 1.0), 0.0)
    lse = jnp.where(any_key, peak + jnp.log(jnp.where(any_key, total, 1.0)), -jnp.inf)
    return out, lse
