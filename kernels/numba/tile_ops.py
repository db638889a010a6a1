"""The inner operations of a tile of tokens: scores, softmax and the weighted sum of values, for one KV head at a time.

A tile is :data:`TILE` tokens at an absolute position that is a multiple of it. Its rows come as two tables of
``TILE`` 64-bit entries: ``rows[t]`` is the address of token t's row at head 0, ``steps[t]`` the bytes from head to
head. Scores are float32 ``[heads, TILE]``. ``dim`` and ``heads`` may be literals (the loops unroll) or, for ``dim``,
a run-time value; bfloat16 rows keep their elements in the order even, odd within each 32, and so do the query and the
accumulator that meet them.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from numba import types
from numba.core import cgutils

from .compiled import emitted
from .lanes import BF16_LANES, F32, I64, LANES, VF32, Lanes, int64, splat_constant

TILE: Final = 32
_SCORES: Final = TILE * 4
_HEADS_AT_ONCE: Final = 4
_VECTORS_AT_ONCE: Final = 4

I = types.int64  # noqa: E741 - reads as the type of an address in the signatures below


def tokens_at_once(heads: int) -> int:
    """How many tokens one call of :func:`score_tokens` takes: enough sums at once to keep the multipliers busy."""
    return 8 if heads <= 2 else 4


def _constant_or(value: Any, literal: Any) -> Any:
    return int64(literal.literal_value) if isinstance(literal, types.IntegerLiteral) else value


def _row(lanes: Lanes, rows: Any, steps: Any, head: Any, token: Any) -> Any:
    """Address of one token's row at ``head``."""
    builder = lanes.builder
    entry = builder.mul(token, int64(8))
    step = lanes.load(builder.add(steps, entry), I64)
    return builder.add(lanes.load(builder.add(rows, entry), I64), builder.mul(head, step))


def _groups(heads: int) -> list[range]:
    return [range(first, min(first + _HEADS_AT_ONCE, heads)) for first in range(0, heads, _HEADS_AT_ONCE)]


@emitted
def score_tokens(
    _typing: Any,
    _rows: Any,
    _steps: Any,
    _head: Any,
    _query: Any,
    _scores: Any,
    _ahead: Any,
    dim: Any,
    heads: Any,
    bf16: Any,
) -> Any:
    """``scores[g, p] = query[g] . rows[p]`` for the next tokens ``p`` (see :func:`tokens_at_once`) and query heads
    ``g``.

    Every sum has the same order: a lane takes each 16th element (of bfloat16 the evens, then the odds of each 32),
    then the lanes are added by halves.
    """
    g_count, is_bf16 = heads.literal_value, bool(bf16.literal_value)
    tokens = range(tokens_at_once(g_count))

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        rows, steps, head, query, scores, ahead = args[:6]
        size = _constant_or(args[6], dim)
        if isinstance(dim, types.IntegerLiteral):
            for p in tokens:
                lanes.prefetch(
                    _row(lanes, ahead, lanes.offset(ahead, TILE, size=8), head, int64(p)),
                    dim.literal_value * (2 if is_bf16 else 4),
                )
        at = [_row(lanes, rows, steps, head, int64(p)) for p in tokens]
        per_load = BF16_LANES if is_bf16 else LANES
        for group in _groups(g_count):
            sums = {(g, p): cgutils.alloca_once_value(builder, splat_constant(0.0)) for g in group for p in tokens}
            with cgutils.for_range(builder, builder.sdiv(size, int64(per_load))) as loop:
                keys = [lanes.load_kv(lanes.index(row, loop.index, size=64), bf16=is_bf16) for row in at]
                for g in group:
                    q_row = lanes.index(query, builder.mul(size, int64(g)), size=4)
                    q_at = lanes.index(q_row, loop.index, size=per_load * 4)
                    for part in range(per_load // LANES):
                        q = lanes.load(lanes.offset(q_at, part * LANES))
                        for p in tokens:
                            builder.store(lanes.fma(keys[p][part], q, builder.load(sums[g, p])), sums[g, p])
            _store_totals(lanes, [[builder.load(sums[g, p]) for p in tokens] for g in group], scores, group)
        return context.get_dummy_value()

    return types.void(I, I, I, I, I, I, dim, heads, bf16), generate


def _store_totals(lanes: Lanes, sums: list[list[Any]], scores: Any, group: range) -> None:
    """Add up each vector and store the totals of one query head as one vector of tokens."""
    width = len(sums[0])
    per_batch = max(1, LANES // width)
    for first in range(0, len(sums), per_batch):
        batch = sums[first : first + per_batch]
        totals = lanes.totals([vector for head in batch for vector in head])
        for i in range(len(batch)):
            mine = lanes.shuffle(totals, totals, range(i * width, (i + 1) * width))
            lanes.store(mine, lanes.offset(scores, (group[first] + i) * _SCORES, size=1))


@emitted
def add_values(
    _typing: Any,
    _rows: Any,
    _steps: Any,
    _head: Any,
    _first: Any,
    _stop: Any,
    _sums: Any,
    _weights: Any,
    _scales: Any,
    _ahead: Any,
    dim: Any,
    heads: Any,
    bf16: Any,
) -> Any:
    """``sums[g] = sums[g] * scales[g] + sum of weights[g, t] * rows[t]`` over tokens ``first <= t < stop``, in their
    order.

    ``sums`` is float32 ``[heads, dim]``, ``weights`` float32 ``[heads, TILE]``, ``scales`` float32 ``[heads]``.
    """
    g_count, is_bf16 = heads.literal_value, bool(bf16.literal_value)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        rows, steps, head, first, stop, sums, weights, scales, ahead = args[:9]
        size = _constant_or(args[9], dim)
        width = _VECTORS_AT_ONCE * LANES if isinstance(dim, types.IntegerLiteral) else BF16_LANES
        row_bytes = width * (2 if is_bf16 else 4)
        for group in _groups(g_count):
            with cgutils.for_range(builder, builder.sdiv(size, int64(width))) as loop:
                held = {}
                for g in group:
                    scale = lanes.splat(lanes.load(lanes.offset(scales, g), F32))
                    sum_row = lanes.index(sums, builder.mul(size, int64(g)), size=4)
                    base = lanes.index(sum_row, loop.index, size=width * 4)
                    for u in range(width // LANES):
                        address = lanes.offset(base, u * LANES)
                        start = builder.fmul(lanes.load(address), scale)
                        held[g, u] = (address, cgutils.alloca_once_value(builder, start))
                with cgutils.for_range_slice(builder, first, stop, int64(1)) as (token, _):
                    row = lanes.index(_row(lanes, rows, steps, head, token), loop.index, size=row_bytes)
                    if isinstance(dim, types.IntegerLiteral) and group.start == 0:
                        nxt = lanes.index(
                            _row(lanes, ahead, lanes.offset(ahead, TILE, size=8), head, token),
                            loop.index,
                            size=row_bytes,
                        )
                        lanes.prefetch(nxt, row_bytes)
                    places = [lanes.offset(row, byte, size=1) for byte in range(0, row_bytes, 64)]
                    values = [value for place in places for value in lanes.load_kv(place, bf16=is_bf16)]
                    for g in group:
                        entry = lanes.index(lanes.offset(weights, g * _SCORES, size=1), token, size=4)
                        weight = lanes.splat(lanes.load(entry, F32))
                        for u, value in enumerate(values):
                            cell = held[g, u][1]
                            builder.store(lanes.fma(value, weight, builder.load(cell)), cell)
                for address, cell in held.values():
                    lanes.store(builder.load(cell), address)
        return context.get_dummy_value()

    return types.void(I, I, I, I, I, I, I, I, I, dim, heads, bf16), generate


@emitted
def soften(_typing: Any, _scores: Any, _highest: Any) -> Any:
    """Turn one row of ``TILE`` base-2 scores into weights ``2**(score - m)``, in place.

    ``m`` is the larger of ``highest`` (the row's maximum so far) and the scores; a score of -inf (not visible) gives
    exactly 0, a NaN stays one. Returns ``m``, the sum of the weights and ``2**(highest - m)``, by which what was
    summed before is scaled.
    """
    result = types.UniTuple(types.float32, 3)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        address, before = args
        minus_infinity = splat_constant(float("-inf"))
        at = [lanes.offset(address, first) for first in range(0, TILE, LANES)]
        scores = [lanes.load(a) for a in at]
        peak = lanes.splat(before)
        for vector in scores:
            peak = lanes.call("llvm.maxnum", peak, vector)
        highest = lanes.largest(peak)
        peak = lanes.splat(highest)
        total = None
        for a, vector in zip(at, scores, strict=True):
            weight = lanes.exp2(builder.fsub(vector, peak))
            hidden = builder.fcmp_ordered("==", vector, minus_infinity)
            weight = builder.select(hidden, splat_constant(0.0), weight)
            lanes.store(weight, a)
            total = weight if total is None else builder.fadd(total, weight)
        shrink = lanes.exp2(builder.fsub(lanes.splat(before), peak))
        shrink = builder.select(builder.fcmp_ordered("==", peak, minus_infinity), splat_constant(1.0), shrink)
        scale = builder.extract_element(shrink, ir.IntType(32)(0))
        return context.make_tuple(builder, result, [highest, lanes.total(total), scale])

    return result(I, types.float32), generate


@emitted
def cap_scores(_typing: Any, _scores: Any, _cap: Any) -> Any:
    """One row of ``TILE`` scores becomes ``cap * tanh(score)``, in place."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        cap = lanes.splat(args[1])
        for first in range(0, TILE, LANES):
            at = lanes.offset(args[0], first)
            lanes.store(builder.fmul(lanes.tanh(lanes.load(at, VF32)), cap), at)
        return context.get_dummy_value()

    return types.void(I, types.float32), generate


@emitted
def prefetch(_typing: Any, _address: Any, count: Any) -> Any:
    """Ask for ``count`` bytes (a literal) from ``address`` on; never faults."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        Lanes(builder).prefetch(args[0], count.literal_value)
        return context.get_dummy_value()

    return types.void(I, count), generate
