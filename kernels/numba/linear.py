"""Skinny products on the CPU: a few rows of activations times all rows of a weight matrix, where it lies.

A decode step reads every weight once, so its products run at the speed of memory. Weights stay in their own row-major
memory (torch uses the same bytes for large products, and an embedding is also a matrix). Rows of weights are cut into
items that threads claim (:mod:`.claims`), so a busy second core slows a product down by its own share at most.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .address import load_f32, load_u16, load_u32, store_f32, store_u32
from .checks import Array, expect_float32, expect_storage
from .claims import Queue, claim_item, finish_item, open_queue, wait_for_items
from .compiled import SOURCES, compiled, inner, uint32
from .decode_loop import bring_row
from .decode_plan import element_place
from .linear_ops import TILES, multiply_rows, rows_at_once
from .workers import helper, usable_cpus

MAX_ROWS: Final = 16
"""Rows of activations up to which a product is bound by memory; beyond, a library that blocks for the caches wins."""
_ITEM_BYTES: Final = 128 << 10
"""Weights an item reads: long enough to amortise its first rows, which nothing asked for ahead of time."""
_BYTES_PER_THREAD: Final = 1 << 20
"""Weights below which another thread does not pay."""

Matrix = tuple[int, int, int, int]
"""Address, bytes from row to row, bytes from element to element, bytes per element."""
Weights = tuple[int, int, int, int]
"""Address, bytes from row to row, N, K."""
Rows = tuple[int, int, int]
"""float32 rows: address, bytes from row to row, how many."""

Float32 = npt.NDArray[np.float32]


@inner
def _place_row(source: int, step: int, size: int, k: int, target: int, weight_size: int) -> None:
    """One row of activations as float32, in the order that the vectors of the weights have."""
    if size == weight_size:
        bring_row(source, step, size, k, target)
    elif size == 2:
        for i in range(k):
            store_u32(target + i * 4, uint32(load_u16(source + i * step)) << uint32(16))
    else:
        for i in range(k):
            store_u32(target + element_place(i) * 4, load_u32(source + i * step))


@compiled
def _begin(queue: int, items: int, x: Matrix, k: int, placed: Rows, weight_size: int, _sources: int = SOURCES) -> None:
    """Bring the activations to where threads read them, then let threads claim items."""
    if placed[0] != x[0]:  # else they are read where they lie
        for m in range(placed[2]):
            _place_row(x[0] + m * x[1], x[2], x[3], k, placed[0] + m * placed[1], weight_size)
    open_queue(queue, items)


@inner
def _add_bias(bias: int, begin: int, end: int, y: Rows) -> None:
    """Add elements ``[begin, end)`` of the bias to the same columns of ``y``."""
    for m in range(y[2]):
        for n in range(begin, end):
            place = y[0] + m * y[1] + n * 4
            store_f32(place, load_f32(place) + load_f32(bias + n * 4))


def _build(tile: int, bf16: int) -> Any:
    """Make the loop for rows of activations taken ``tile`` at a time and one storage of weights.

    It takes items off the queue until none is left; any number of threads may run it at once.
    """
    at_once = rows_at_once(tile)

    @compiled
    def multiply(queue: int, item_rows: int, w: Weights, x: Rows, y: Rows, bias: int, _sources: int = SOURCES) -> None:
        while True:
            item = claim_item(queue)
            if item < 0:
                break
            begin, end = item * item_rows, min(w[2], (item + 1) * item_rows)
            for n in range(begin, end, at_once):
                rows = w[0] + n * w[1]
                # Past the item another thread is likely at work, so nothing is asked for there.
                ahead = rows + at_once * w[1] if n + at_once < end else rows
                for m in range(0, y[2], tile):
                    multiply_rows(
                        rows,
                        w[1],
                        min(at_once, end - n),
                        w[3],
                        x[0] + m * x[1],
                        x[1],
                        y[2] - m,
                        y[0] + m * y[1] + n * 4,
                        y[1],
                        ahead,
                        tile,
                        bf16,
                    )
                    ahead = rows
            if bias != 0:
                _add_bias(bias, begin, end, y)
            finish_item(queue)

    return multiply


@cache
def _loop(tile: int, bf16: int) -> Any:
    return _build(tile, bf16)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _check(x: Array, weight: Array, out: Float32, bias: Float32 | None) -> None:
    """Raise ValueError for arrays that do not fit together."""
    expect_storage("x", x, (None, None))
    expect_storage("weight", weight, (None, x.shape[1]))
    if weight.size and weight.shape[1] > 1 and weight.strides[1] != weight.itemsize:
        raise ValueError(f"weight: got strides {weight.strides} bytes, expected contiguous rows")
    expect_float32("out", out, (x.shape[0], weight.shape[0]))
    if bias is not None:
        expect_float32("bias", bias, (weight.shape[0],))


def prepare_linear(
    x: Array, weight: Array, out: Float32, bias: Float32 | None = None, *, threads: int | None = None
) -> Callable[[], None]:
    """Resolve a :func:`linear` once; the returned callable works on what the arrays hold when it is called."""
    _check(x, weight, out, bias)
    (count, k), n = x.shape, weight.shape[0]
    bf16 = int(weight.itemsize == 2)
    tile = next((tile for tile in TILES if count <= tile), TILES[-1])
    at_once = rows_at_once(tile)

    padded = (-(-count // tile) * tile, -(-k // 32) * 32)
    in_place = x.dtype == np.float32 and not bf16 and x.shape == padded and x.strides[1] == 4
    rows = x if in_place else np.zeros(padded, np.float32)
    placed = (_address(rows), rows.strides[0], count)
    source = (_address(x), x.strides[0], x.strides[1], x.itemsize)
    weights = (_address(weight), weight.strides[0], n, k)
    target, added = (_address(out), out.strides[0], count), 0 if bias is None else _address(bias)
    item_rows = max(1, _ITEM_BYTES // (max(1, k) * weight.itemsize * at_once)) * at_once
    items = -(-n // item_rows)
    memory, multiply = Queue(), _loop(tile, bf16)
    queue = memory.address

    # Compiled code knows these by address only. A helper may come late, after the caller has dropped the call: its job
    # keeps them alive too.
    alive = (x, weight, out, bias, rows, memory)

    def job(_alive: tuple[Any, ...] = alive) -> None:
        multiply(queue, item_rows, weights, placed, target, added)

    helpers = min((threads or usable_cpus()) - 1, items - 1, weight.nbytes // _BYTES_PER_THREAD)
    starts = [helper(i).start for i in range(helpers)]

    def product() -> None:
        _begin(queue, items, source, k, placed, weight.itemsize)
        for start in starts:
            start(job)
        job()
        if starts:
            wait_for_items(queue)

    return product


def linear(x: Array, weight: Array, out: Float32, bias: Float32 | None = None, *, threads: int | None = None) -> None:
    """``out = x @ weight.T + bias`` for few rows of ``x``.

    Sums are float32. An element of ``out`` has one order of operations: its bits depend on its rows of ``x`` and
    ``weight`` and its element of ``bias`` alone, not on the number of rows of either, on strides of ``x`` or on
    threads. Nothing outside the arrays is read.

    Args:
        x: ``[M, K]``, float32 or uint16 (bfloat16 bits), any strides; any M, meant for up to :data:`MAX_ROWS`.
        weight: ``[N, K]``, float32 or uint16 (bfloat16 bits), rows contiguous.
        out: float32 ``[M, N]``, contiguous, written; no part of it may be part of another argument.
        bias: float32 ``[N]``, contiguous.
        threads: at most this many threads (default: the CPUs this process may use); small products use one.

    Raises:
        ValueError: arrays that do not fit together; nothing was written.
    """
    prepare_linear(x, weight, out, bias, threads=threads)()
