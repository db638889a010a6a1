"""The inner operations of :mod:`.draws`: one row each, in vectors of 16 lanes."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from numba import types

from .compiled import emitted
from .elementwise_ops import Span, for_spans
from .lanes import I32, LANES, VF32, VI32, Lanes, int64, splat_constant

_LANE_NUMBERS: Final = ir.Constant(VI32, list(range(LANES)))
_BYTES: Final = 8
_LARGEST: Final = 2**31 - 128
_FMIX: Final = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))


def _whole(value: int) -> Any:
    return ir.Constant(VI32, [value] * LANES)


def _hash(builder: Any, keys: Any, blocks: Any) -> Any:
    """The last block of MurmurHash3_x86_32, mixed already, and its finaliser (fmix32)."""
    h = builder.xor(keys, blocks)
    h = builder.or_(builder.shl(h, _whole(13)), builder.lshr(h, _whole(19)))
    h = builder.add(builder.mul(h, _whole(5)), _whole(0xE6546B64))
    h = builder.xor(h, _whole(_BYTES))
    for shift, factor in _FMIX:
        h = builder.mul(builder.xor(h, builder.lshr(h, _whole(shift))), _whole(factor))
    return builder.xor(h, builder.lshr(h, _whole(16)))


@emitted
def gumbel_row(_typing: Any, _key: Any, _blocks: Any, _y: Any, _count: Any) -> Any:
    """Standard Gumbel variates of one key and a row of blocks."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        keys, one = lanes.splat(args[0]), splat_constant(1.0)

        def draw(span: Span) -> None:
            blocks = builder.bitcast(span.load(args[1]), VI32)
            upper = builder.lshr(_hash(builder, keys, blocks), _whole(1))
            too_large = builder.icmp_signed(">", upper, _whole(_LARGEST))
            held = builder.sitofp(builder.select(too_large, _whole(_LARGEST), upper), VF32)
            u = builder.fmul(builder.fadd(held, splat_constant(0.5)), splat_constant(2.0**-31))
            series = lanes.fma(u, splat_constant(1.0 / 3.0), splat_constant(0.5))
            series = builder.fmul(u, lanes.fma(u, series, one))
            negative = lanes.log(builder.fsub(one, u))
            far = builder.fsub(splat_constant(0.0), negative)
            near = builder.fcmp_ordered("<", u, splat_constant(2.0**-8))
            exponential = builder.select(near, series, far)
            span.store(builder.fsub(splat_constant(0.0), lanes.log(exponential)), args[2])

        for_spans(lanes, args[3], draw, bf16=False)
        return context.get_dummy_value()

    return types.void(types.int32, types.int64, types.int64, types.int64), generate


@emitted
def penalise_row(_typing: Any, _x: Any, _seen: Any, _penalty: Any, _y: Any, _count: Any) -> Any:
    """Divide the positive elements of a row whose bits are set in a bitmap, multiply the negative ones."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        x, seen, penalty, y, count = args
        factor = lanes.splat(penalty)

        def penalise(span: Span) -> None:
            values = span.load(x)
            word = lanes.load(lanes.index(seen, builder.lshr(span.chunk, int64(1)), size=4), I32)
            half = builder.trunc(builder.shl(builder.and_(span.chunk, int64(1)), int64(4)), I32)
            bits = builder.lshr(lanes.splat(builder.lshr(word, half)), _LANE_NUMBERS)
            held = builder.trunc(bits, ir.VectorType(ir.IntType(1), LANES))
            below = builder.fcmp_ordered("<", values, splat_constant(0.0))
            changed = builder.select(below, builder.fmul(values, factor), builder.fdiv(values, factor))
            span.store(builder.select(held, changed, values), y)

        for_spans(lanes, count, penalise, bf16=False)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64, types.int64), generate
