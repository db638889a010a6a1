"""The inner operations of :mod:`.elementwise`: one row each, float32 or bfloat16, computed in float32.

Addresses and counts of elements come as 64-bit integers; memory outside the rows is not touched. A row's sum has one
order: lane i takes elements i, i + 16, ..., and the lanes are added by halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from numba import types
from numba.core import cgutils

from .compiled import emitted
from .lanes import F32, I32, LANES, VF32, VI16, VI32, Lanes, int64, splat_constant

_LOG2E: Final = 1.4426950408889634
_LANE_NUMBERS: Final = ir.Constant(VI32, list(range(LANES)))


class Span:
    """Up to 16 neighbouring elements at the same place of several rows."""

    def __init__(self, lanes: Lanes, chunk: Any, mask: Any | None, *, bf16: bool) -> None:
        self._lanes, self.chunk, self._mask, self._bf16 = lanes, chunk, mask, bf16
        self._bytes = LANES * (2 if bf16 else 4)

    def load(self, row: Any) -> Any:
        """The elements of a row as float32; lanes beyond its end are zero."""
        lanes, mask, kind = self._lanes, self._mask, VI16 if self._bf16 else VF32
        address = lanes.index(row, self.chunk, size=self._bytes)
        values = lanes.load(address, kind) if mask is None else lanes.load_masked(address, mask, kind)
        return lanes.from_bf16(values) if self._bf16 else values

    def places(self) -> Any:
        """The elements' places in their row, int32."""
        builder = self._lanes.builder
        first = self._lanes.splat(builder.trunc(builder.mul(self.chunk, int64(LANES)), I32))
        return builder.add(first, _LANE_NUMBERS)

    def or_lowest(self, values: Any) -> Any:
        """The values, -inf in lanes beyond the end of the row."""
        lowest = splat_constant(float("-inf"))
        return values if self._mask is None else self._lanes.builder.select(self._mask, values, lowest)

    def store(self, values: Any, row: Any) -> None:
        """Write float32 values as elements of a row."""
        address = self._lanes.index(row, self.chunk, size=self._bytes)
        elements = self._lanes.to_bf16(values) if self._bf16 else values
        mask = self._lanes.first(int64(LANES)) if self._mask is None else self._mask
        self._lanes.store_masked(elements, address, mask)

    def rounded(self, values: Any) -> Any:
        """The values that a row of this storage would hold."""
        return self._lanes.from_bf16(self._lanes.to_bf16(values)) if self._bf16 else values


def for_spans(lanes: Lanes, count: Any, emit: Callable[[Span], None], *, bf16: bool) -> None:
    """Emit for all spans of a row of ``count`` elements, the last one masked."""
    builder = lanes.builder
    whole, rest = builder.sdiv(count, int64(LANES)), builder.srem(count, int64(LANES))
    with cgutils.for_range(builder, whole) as loop:
        emit(Span(lanes, loop.index, None, bf16=bf16))
    with builder.if_then(builder.icmp_signed(">", rest, int64(0)), likely=False):
        emit(Span(lanes, whole, lanes.first(rest), bf16=bf16))


@emitted
def norm_row(_typing: Any, _x: Any, _weight: Any, _y: Any, _count: Any, _eps: Any, bf16: Any) -> Any:
    """``y = x / sqrt(mean(x^2) + eps) * weight``; in bfloat16 the quotient is rounded before the product, as a model
    that was trained so expects."""
    is_bf16 = bool(bf16.literal_value)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        x, weight, y, count, eps = args[:5]
        squares = cgutils.alloca_once_value(builder, splat_constant(0.0))

        def add_squares(span: Span) -> None:
            values = span.load(x)
            builder.store(lanes.fma(values, values, builder.load(squares)), squares)

        for_spans(lanes, count, add_squares, bf16=is_bf16)
        mean = builder.fdiv(lanes.total(builder.load(squares)), builder.sitofp(count, F32))
        root = lanes.call("llvm.sqrt", lanes.splat(builder.fadd(mean, eps)))
        factor = builder.fdiv(splat_constant(1.0), root)

        def scale(span: Span) -> None:
            normed = span.rounded(builder.fmul(span.load(x), factor))
            span.store(builder.fmul(normed, span.load(weight)), y)

        for_spans(lanes, count, scale, bf16=is_bf16)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32, bf16), generate


@emitted
def sum_row(_typing: Any, _x: Any, _count: Any) -> Any:
    """The sum of a row of float32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        sums = cgutils.alloca_once_value(builder, splat_constant(0.0))

        def add(span: Span) -> None:
            builder.store(builder.fadd(builder.load(sums), span.load(args[0])), sums)

        for_spans(lanes, args[1], add, bf16=False)
        return lanes.total(builder.load(sums))

    return types.float32(types.int64, types.int64), generate


@emitted
def rotate_row(_typing: Any, _x: Any, _cos: Any, _sin: Any, _y: Any, _half: Any, bf16: Any) -> Any:
    """Turn the pairs ``(d, d + half)`` of one head by the angles whose cosines and sines are given."""
    is_bf16 = bool(bf16.literal_value)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        x, cos, sin, y, half = args[:5]
        x_high, y_high = (lanes.index(row, half, size=2 if is_bf16 else 4) for row in (x, y))

        def rotate(span: Span) -> None:
            low, high, c, s = span.load(x), span.load(x_high), span.load(cos), span.load(sin)
            span.store(builder.fsub(builder.fmul(low, c), builder.fmul(high, s)), y)
            span.store(builder.fadd(builder.fmul(high, c), builder.fmul(low, s)), y_high)

        for_spans(lanes, half, rotate, bf16=is_bf16)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, bf16), generate


@emitted
def gate_row(_typing: Any, _gate: Any, _up: Any, _y: Any, _count: Any, bf16: Any) -> Any:
    """``y = gate * sigmoid(gate) * up``; sigmoid does not fall below ``2**-126``."""
    is_bf16 = bool(bf16.literal_value)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        gate, up, y, count = args[:4]
        one = splat_constant(1.0)

        def multiply(span: Span) -> None:
            values = span.load(gate)
            size = lanes.call("llvm.fabs", values)
            decay = lanes.exp2(builder.fmul(size, splat_constant(-_LOG2E)))
            over = builder.select(builder.fcmp_ordered(">=", values, splat_constant(0.0)), one, decay)
            activated = builder.fmul(values, builder.fdiv(over, builder.fadd(one, decay)))
            span.store(builder.fmul(span.rounded(activated), span.load(up)), y)

        for_spans(lanes, count, multiply, bf16=is_bf16)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, bf16), generate


@emitted
def largest_place(_typing: Any, _x: Any, _count: Any, bf16: Any) -> Any:
    """Place of the first largest element of a row, int32; a NaN is larger than any number."""
    is_bf16 = bool(bf16.literal_value)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        # A lane starts with its own place and -inf, which is right for an element -inf there and loses to any other.
        peak = cgutils.alloca_once_value(builder, splat_constant(float("-inf")))
        where = cgutils.alloca_once_value(builder, _LANE_NUMBERS)

        def larger(x: Any, y: Any) -> Any:
            return builder.and_(builder.fcmp_unordered(">", x, y), builder.fcmp_ordered("ord", y, y))

        def compare(span: Span) -> None:
            values, before = span.or_lowest(span.load(args[0])), builder.load(peak)
            better = larger(values, before)
            builder.store(builder.select(better, values, before), peak)
            builder.store(builder.select(better, span.places(), builder.load(where)), where)

        for_spans(lanes, args[1], compare, bf16=is_bf16)
        values, places = builder.load(peak), builder.load(where)
        for distance in (8, 4, 2, 1):
            order = [lane ^ distance for lane in range(LANES)]
            others, their_places = lanes.shuffle(values, values, order), lanes.shuffle(places, places, order)
            equal = builder.not_(builder.or_(larger(others, values), larger(values, others)))
            earlier = builder.and_(equal, builder.icmp_signed("<", their_places, places))
            better = builder.or_(larger(others, values), earlier)
            values = builder.select(better, others, values)
            places = builder.select(better, their_places, places)
        return builder.extract_element(places, I32(0))

    return types.int32(types.int64, types.int64, bf16), generate
