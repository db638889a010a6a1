"""The inner operation of a skinny product: a few rows of weights times a few rows of activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from numba import types
from numba.core import cgutils

from .compiled import emitted
from .lanes import BF16_LANES, I16, LANES, VF32, VI32, Lanes, int64, splat_constant

TILES: Final = (1, 2, 4)
"""How many rows of activations :func:`multiply_rows` can take at once."""
_PAIRS: Final = ir.VectorType(I16, BF16_LANES)


def rows_at_once(tile: int) -> int:
    """Rows of weights taken with ``tile`` rows of activations: enough sums to keep the multipliers busy, few enough for
    the registers, and at most one vector of totals."""
    return 4 if tile == 4 else 8


@emitted
def multiply_rows(
    _typing: Any,
    _w: Any,
    _w_step: Any,
    _w_rows: Any,
    _k: Any,
    _x: Any,
    _x_step: Any,
    _x_rows: Any,
    _y: Any,
    _y_step: Any,
    _ahead: Any,
    tile: Any,
    bf16: Any,
) -> Any:
    """``y[m, n] = x[m] . w[n]`` for the first ``w_rows`` of ``rows_at_once(tile)`` rows of weights and the first
    ``x_rows`` of ``tile`` rows of activations.

    ``w``, ``x``, ``y`` and ``ahead`` are addresses, steps are bytes from row to row. Weights are ``[., k]``, float32 or
    bfloat16. Activations and sums are float32; all ``tile`` rows of activations are there and reach to a whole number
    of vectors, zero beyond ``k``; for bfloat16 weights they come in their order (the evens, then the odds of each 32).
    The memory is asked for the rows of weights at ``ahead``.

    A sum has one order, whatever the tile: lane i takes elements i, i + 16, ... (of bfloat16 the evens, then the odds
    of each 32), and the lanes are added by halves.
    """
    is_bf16, m_count = bool(bf16.literal_value), tile.literal_value
    n_count = rows_at_once(m_count)
    parts = 2 if is_bf16 else 1
    chunk_elements = parts * LANES

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = Lanes(builder)
        w, w_step, w_rows, k, x, x_step, x_rows, y, y_step, ahead = args[:10]
        # In place of rows beyond the last one, the last one is read again; its sum is not stored there.
        last = builder.sub(w_rows, int64(1))
        numbers = [builder.select(builder.icmp_signed("<", int64(n), w_rows), int64(n), last) for n in range(n_count)]
        rows, rows_ahead = ([builder.add(at, builder.mul(n, w_step)) for n in numbers] for at in (w, ahead))
        columns = [builder.add(x, builder.mul(int64(m), x_step)) for m in range(m_count)]
        sums = [
            [cgutils.alloca_once_value(builder, splat_constant(0.0)) for _ in range(n_count)] for _ in range(m_count)
        ]

        def add_chunk(chunk: Any, load: Callable[[Any], list[Any]]) -> None:
            places = [lanes.index(column, chunk, size=chunk_elements * 4) for column in columns]
            values = [[lanes.load(lanes.offset(place, part * LANES)) for part in range(parts)] for place in places]
            for n, row in enumerate(rows):
                weights = load(lanes.index(row, chunk, size=64))
                for m in range(m_count):
                    total = builder.load(sums[m][n])
                    for weight, value in zip(weights, values[m], strict=True):
                        total = lanes.fma(weight, value, total)
                    builder.store(total, sums[m][n])

        whole, rest = builder.sdiv(k, int64(chunk_elements)), builder.srem(k, int64(chunk_elements))
        with cgutils.for_range(builder, whole) as loop:
            for row in rows_ahead:
                lanes.prefetch(lanes.index(row, loop.index, size=64), 64)
            add_chunk(loop.index, lambda address: lanes.load_kv(address, bf16=is_bf16))
        with builder.if_then(builder.icmp_signed(">", rest, int64(0)), likely=False):
            mask = lanes.first(rest, chunk_elements)
            add_chunk(whole, lambda address: _load_rest(lanes, address, mask, is_bf16=is_bf16))

        totals = lanes.totals([builder.load(total) for row in sums for total in row])
        stored = lanes.first(w_rows, n_count)
        for m in range(m_count):
            with builder.if_then(builder.icmp_signed("<", int64(m), x_rows)):
                mine = lanes.shuffle(totals, totals, range(m * n_count, (m + 1) * n_count))
                lanes.store_masked(mine, builder.add(y, builder.mul(int64(m), y_step)), stored)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10, tile, bf16), generate


def _load_rest(lanes: Lanes, address: Any, mask: Any, *, is_bf16: bool) -> list[Any]:
    """The last chunk of a row; memory beyond the row is not touched."""
    if not is_bf16:
        return [lanes.load_masked(address, mask, VF32)]
    return lanes.split_bf16(lanes.builder.bitcast(lanes.load_masked(address, mask, _PAIRS), VI32))
