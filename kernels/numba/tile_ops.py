"""The inner operations of a tile of tokens: scores, softmax and the weighted sum of values, for one KV head at a time.

A tile is :data:`TILE` tokens at an absolute position that is a multiple of it. Where its rows lie is a *row table*:
``TILE`` addresses (head 0 of each token), then ``TILE`` steps in bytes from head to head. Scores are float32
``[heads, TILE]``.

``dim`` and ``heads`` are literals, which unrolls the loops, or known at run time. bfloat16 rows keep their elements
in the order even, odd within each 32, and so do the query and the sums that meet them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from numba import types
from numba.core import cgutils

from .compiled import emitted
from .lanes import BF16_LANES, F32, I64, LANES, VF32, Lanes, int64, splat_constant

TILE: Final = 32
TABLE_BYTES: Final = 2 * TILE * 8
"""Size of a row table."""

_SCORE_ROW: Final = TILE * 4
_HEADS_AT_ONCE: Final = 4
_VECTORS_AT_ONCE: Final = 4
_Address: Final = types.int64


def tokens_at_once(heads: int) -> int:
    """How many tokens :func:`score_tokens` takes for a literal number of heads: enough sums to keep the multipliers
    busy."""
    return 8 if heads <= 2 else 4


def _is_literal(kind: Any) -> bool:
    return isinstance(kind, types.IntegerLiteral)


def _value(kind: Any, value: Any) -> Any:
    return int64(kind.literal_value) if _is_literal(kind) else value


def _for_heads(builder: Any, kind: Any, value: Any, emit: Callable[[Any, int], None]) -> None:
    """Emit for a few heads at a time: ``emit(first head, how many)``; one by one where the number is known at run
    time."""
    if not _is_literal(kind):
        with cgutils.for_range(builder, value) as loop:
            emit(loop.index, 1)
        return
    for first in range(0, kind.literal_value, _HEADS_AT_ONCE):
        emit(int64(first), min(_HEADS_AT_ONCE, kind.literal_value - first))


def _row(lanes: Lanes, table: Any, token: Any, head: Any) -> Any:
    """Address of the row of ``token`` at ``head``."""
    entry = lanes.index(table, token, size=8)
    step = lanes.load(lanes.offset(entry, TILE, size=8), I64)
    return lanes.builder.add(lanes.load(entry, I64), lanes.builder.mul(head, step))


@emitted
def score_tokens(
    _typing: Any,
    _table: Any,
    _head: Any,
    _query: Any,
    _scores: Any,
    _next_table: Any,
    _next_head: Any,
    dim: Any,
    heads: Any,
    bf16: Any,
) -> Any:
    """``scores[g, p] = query[g] . row[p]`` for the next tokens ``p`` and all query heads ``g`` of KV head ``head``.

    ``table`` and ``scores`` start at the first token, ``query`` is float32 ``[heads, dim]``; builds with literals
    also ask the memory for the rows of the same tokens in the table ``ahead``. Every sum has one order: lane i takes
    elements i, i + 16, ... (of bfloat16 the evens, then the odds of each 32), and the lanes are added by halves.
    """
    is_bf16 = bool(bf16.literal_value)
    tokens = range(tokens_at_once(heads.literal_value if _is_literal(heads) else 0))
    per_load = BF16_LANES if is_bf16 else LANES

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        table, head, query, scores, next_table, next_head = args[:6]
        size = _value(dim, args[6])
        rows = [_row(lanes, table, int64(p), head) for p in tokens]
        asked = [_row(lanes, next_table, int64(p), next_head) for p in tokens] if _is_literal(dim) else []

        def emit(first: Any, count: int) -> None:
            zero = splat_constant(0.0)
            sums = {(g, p): cgutils.alloca_once_value(builder, zero) for g in range(count) for p in tokens}
            queries = [
                lanes.index(query, builder.mul(size, builder.add(first, int64(g))), size=4) for g in range(count)
            ]
            with cgutils.for_range(builder, builder.sdiv(size, int64(per_load))) as loop:
                if asked and first.constant == 0:
                    for row in asked:
                        lanes.prefetch(lanes.index(row, loop.index, size=64), 64)
                keys = [lanes.load_kv(lanes.index(row, loop.index, size=64), bf16=is_bf16) for row in rows]
                for g in range(count):
                    place = lanes.index(queries[g], loop.index, size=per_load * 4)
                    for part in range(per_load // LANES):
                        values = lanes.load(lanes.offset(place, part * LANES))
                        for p in tokens:
                            builder.store(lanes.fma(keys[p][part], values, builder.load(sums[g, p])), sums[g, p])
            totals = [[builder.load(sums[g, p]) for p in tokens] for g in range(count)]
            _store_totals(lanes, totals, lanes.index(scores, first, size=_SCORE_ROW))

        _for_heads(builder, heads, args[7], emit)
        return context.get_dummy_value()

    return types.void(_Address, types.int64, *[_Address] * 3, types.int64, dim, heads, bf16), generate


def _store_totals(lanes: Lanes, sums: list[list[Any]], scores: Any) -> None:
    """Add up the lanes of ``sums[g][p]`` and store the totals of each head as one vector of tokens."""
    width = len(sums[0])
    at_once = LANES // width
    for first in range(0, len(sums), at_once):
        batch = sums[first : first + at_once]
        totals = lanes.totals([vector for head in batch for vector in head])
        for i in range(len(batch)):
            mine = lanes.shuffle(totals, totals, range(i * width, (i + 1) * width))
            lanes.store(mine, lanes.offset(scores, (first + i) * _SCORE_ROW, size=1))


@emitted
def add_values(
    _typing: Any,
    _table: Any,
    _head: Any,
    _low: Any,
    _high: Any,
    _sums: Any,
    _weights: Any,
    _scales: Any,
    _next_table: Any,
    _next_head: Any,
    dim: Any,
    heads: Any,
    bf16: Any,
) -> Any:
    """``sums[g] = sums[g] * scales[g] + sum of weights[g, t] * row[t]`` over tokens ``low <= t < high``, in their
    order.

    ``sums`` is float32 ``[heads, dim]``, ``weights`` float32 ``[heads, TILE]``, ``scales`` float32 ``[heads]``;
    builds with literals also ask the memory for the rows of the same tokens in the table ``ahead``.
    """
    is_bf16 = bool(bf16.literal_value)
    width = _VECTORS_AT_ONCE * LANES if _is_literal(dim) else BF16_LANES
    row_bytes = width * (2 if is_bf16 else 4)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        table, head, low, high, sums, weights, scales, next_table, next_head = args[:9]
        size = _value(dim, args[9])

        def add_token(token: Any, part: Any, entries: list[Any], held: dict[tuple[int, int], Any]) -> None:
            row = lanes.index(_row(lanes, table, token, head), part, size=row_bytes)
            places = [lanes.offset(row, byte, size=1) for byte in range(0, row_bytes, 64)]
            values = [value for place in places for value in lanes.load_kv(place, bf16=is_bf16)]
            for g, entry in enumerate(entries):
                weight = lanes.splat(lanes.load(lanes.index(entry, token, size=4), F32))
                for u, value in enumerate(values):
                    builder.store(lanes.fma(value, weight, builder.load(held[g, u])), held[g, u])

        def emit(first: Any, count: int) -> None:
            ask = _is_literal(dim) and first.constant == 0
            entries = [lanes.index(weights, builder.add(first, int64(g)), size=_SCORE_ROW) for g in range(count)]
            with cgutils.for_range(builder, builder.sdiv(size, int64(width))) as loop:
                places, held = {}, {}
                for g in range(count):
                    head_g = builder.add(first, int64(g))
                    scale = lanes.splat(lanes.load(lanes.index(scales, head_g, size=4), F32))
                    base = lanes.index(lanes.index(sums, builder.mul(size, head_g), size=4), loop.index, size=width * 4)
                    for u in range(width // LANES):
                        places[g, u] = lanes.offset(base, u * LANES)
                        held[g, u] = cgutils.alloca_once_value(builder, builder.fmul(lanes.load(places[g, u]), scale))
                with cgutils.for_range_slice(builder, low, high, int64(1)) as (token, _):
                    if ask:
                        asked = _row(lanes, next_table, builder.sub(token, low), next_head)
                        lanes.prefetch(lanes.index(asked, loop.index, size=row_bytes), row_bytes)
                    add_token(token, loop.index, entries, held)
                for key, place in places.items():
                    lanes.store(builder.load(held[key]), place)

        _for_heads(builder, heads, args[10], emit)
        return context.get_dummy_value()

    return types.void(_Address, *[types.int64] * 3, *[_Address] * 4, types.int64, dim, heads, bf16), generate


@emitted
def widen_pairs(_typing: Any, _source: Any, _target: Any, _count: Any) -> Any:
    """``count`` times 32 bfloat16 in a row become float32 in the order even, odd within each 32."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        source, target, count = args
        with cgutils.for_range(builder, count) as loop:
            even, odd = lanes.load_kv(lanes.index(source, loop.index, size=2 * BF16_LANES), bf16=True)
            place = lanes.index(target, loop.index, size=4 * BF16_LANES)
            lanes.store(even, place)
            lanes.store(odd, lanes.offset(place, LANES))
        return context.get_dummy_value()

    return types.void(_Address, _Address, types.int64), generate


@emitted
def soften(_typing: Any, _scores: Any, _before: Any) -> Any:
    """Turn one row of ``TILE`` base-2 scores into weights ``2**(score - m)``, in place.

    ``m`` is the larger of ``before`` (the row's maximum so far) and the scores; a score of -inf (not visible) gives
    exactly 0, a NaN stays one. Returns ``m``, the sum of the weights, and ``2**(before - m)``, by which earlier sums
    shrink.
    """
    result = types.UniTuple(types.float32, 3)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        hidden_score = splat_constant(float("-inf"))
        before = lanes.splat(args[1])
        places = [lanes.offset(args[0], first) for first in range(0, TILE, LANES)]
        scores = [lanes.load(place) for place in places]
        peak = before
        for vector in scores:
            peak = lanes.call("llvm.maxnum", peak, vector)
        highest = lanes.largest(peak)
        peak = lanes.splat(highest)
        total = splat_constant(0.0)
        for place, vector in zip(places, scores, strict=True):
            weight = lanes.exp2(builder.fsub(vector, peak))
            weight = builder.select(builder.fcmp_ordered("==", vector, hidden_score), splat_constant(0.0), weight)
            lanes.store(weight, place)
            total = builder.fadd(total, weight)
        shrink = lanes.exp2(builder.fsub(before, peak))
        shrink = builder.select(builder.fcmp_ordered("==", before, peak), splat_constant(1.0), shrink)
        scale = builder.extract_element(shrink, ir.IntType(32)(0))
        return context.make_tuple(builder, result, [highest, lanes.total(total), scale])

    return result(_Address, types.float32), generate


@emitted
def cap_scores(_typing: Any, _scores: Any, _cap: Any) -> Any:
    """One row of ``TILE`` scores becomes ``cap * tanh(score)``, in place."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        cap = lanes.splat(args[1])
        for first in range(0, TILE, LANES):
            place = lanes.offset(args[0], first)
            lanes.store(builder.fmul(lanes.tanh(lanes.load(place, VF32)), cap), place)
        return context.get_dummy_value()

    return types.void(_Address, types.float32), generate
