"""What a decode call does before and after the tile loop: which keys each query sees, which splits that makes, how
they merge.

A *row* is one query: ``row = b * query_len + t``. Its keys are cut at absolute positions that are multiples of
:data:`SPLIT`, so neither the batch nor the table decides where, and an *item* is one split of one row. All of this
reads ``visible`` and the table in compiled code, at the time of the call.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from .address import atomic_add_i64, clear_bytes, load_f32, load_i32, load_i64, store_f32, store_i64
from .claims import QUEUE_BYTES, open_queue
from .compiled import SOURCES, compiled, float32, inner, int64
from .row_loops import Vector, load_int

SPLIT: Final = 512
"""Tokens a split, a multiple of the tile. Fixed: it decides the bits of a result."""

Table = tuple[int, int, int]
"""Block table: address, bytes per row, bytes per column."""
Limits = tuple[int, int, int, int]
"""``table_len, first_block, num_blocks, block_size``."""
Shape = tuple[int, int, int, int, int, int, int]
"""``query_len, kv_heads, group, k_dim, v_dim, k_padded, v_padded``: padded to whole vectors, in elements."""
Io = tuple[int, int, int, int]
"""Addresses of q, out, lse and sinks (0: none)."""
Partials = tuple[int, int, int]
"""Addresses of the items' sums ``[items, Hq, v_padded]``, maxima and weights ``[items, Hq]``, all float32."""

# The plan: a queue of items, the rows that they are of, then the plan of each row.
FIRST_ROW: Final = QUEUE_BYTES
ROWS: Final = QUEUE_BYTES + 8
HEAD_BYTES: Final = QUEUE_BYTES + 16
BEGIN: Final = 0
END: Final = 8
FIRST_ITEM: Final = 16
ITEM_COUNT: Final = 24
LEFT: Final = 32
ROW_BYTES: Final = 40


@inner
def row_plan(plan: int, row: int) -> int:
    """Address of the plan of ``row``."""
    return plan + HEAD_BYTES + row * ROW_BYTES


@compiled
def plan_rows(
    plan: int,
    first_row: int,
    rows: int,
    visible: Vector,
    query_len: int,
    window: int,
    limits: Limits,
    heads: int,
    v_dim: int,
    io: Io,
    _sources: int = SOURCES,
) -> int:
    """Plan ``rows`` rows from ``first_row`` on; rows that see nothing are written at once (zeros, -inf).

    A split that lies beyond the table has no item: its keys are zero rows, whose partial result is known
    (:func:`merge_row`). Returns the number of tokens that the items read.
    """
    tokens, items = 0, 0
    splits = max(1, (limits[0] * limits[3] + SPLIT - 1) // SPLIT)
    for i in range(rows):
        row = first_row + i
        at = row_plan(plan, i)
        end = max(0, load_int(visible, row // query_len) - (query_len - 1 - row % query_len))
        begin = max(0, end - window) if window > 0 else 0
        count = 0
        if end > 0:
            first = begin // SPLIT
            stop = max(first + 1, min((end + SPLIT - 1) // SPLIT, splits))
            count = stop - first
            tokens += min(end, stop * SPLIT) - begin
        else:
            clear_bytes(io[1] + row * heads * v_dim * 4, heads * v_dim * 4)
            for h in range(heads):
                store_f32(io[2] + (row * heads + h) * 4, float32(-np.inf))
        store_i64(at + BEGIN, begin)
        store_i64(at + END, end)
        store_i64(at + FIRST_ITEM, items)
        store_i64(at + ITEM_COUNT, count)
        store_i64(at + LEFT, count)
        items += count
    store_i64(plan + FIRST_ROW, first_row)
    store_i64(plan + ROWS, rows)
    # A thread that is late for another call may come at any time: it finds nothing to claim until the plan stands.
    open_queue(plan, items)
    return tokens


@inner
def item_keys(plan: int, index: int, item: int) -> tuple[int, int]:
    """Positions ``[begin, end)`` of the keys of ``item``, which belongs to row ``index``."""
    at = row_plan(plan, index)
    split = load_i64(at + BEGIN) // SPLIT + item - load_i64(at + FIRST_ITEM)
    return max(load_i64(at + BEGIN), split * SPLIT), min(load_i64(at + END), (split + 1) * SPLIT)


@inner
def leave_row(plan: int, index: int) -> bool:
    """Note that an item of row ``index`` has its partial result; true for the last one of the row."""
    return bool(atomic_add_i64(row_plan(plan, index) + LEFT, int64(-1)) == 1)


@compiled
def count_invalid(
    visible: Vector, batch: int, query_len: int, window: int, table: Table, limits: Limits, _sources: int = SOURCES
) -> int:
    """Number of table columns, over all sequences, that a query sees and that hold no block of the pool (clause D2)."""
    table_len, first_block, num_blocks, block_size = limits
    invalid = 0
    for b in range(batch):
        end = load_int(visible, b)
        if end <= 0:
            continue
        begin = max(0, end - query_len + 1 - window) if window > 0 else 0
        first, last = begin // block_size, (end - 1) // block_size
        invalid += max(0, last - max(first, table_len) + 1)
        for column in range(first, min(last + 1, table_len)):
            page = int64(load_i32(table[0] + b * table[1] + column * table[2]))
            invalid += page < first_block or page >= num_blocks
    return invalid


@inner
def find_row(plan: int, item: int) -> tuple[int, int]:
    """The row that ``item`` belongs to: its index in the plan, and its number."""
    low, high = 0, load_i64(plan + ROWS) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if load_i64(row_plan(plan, middle) + FIRST_ITEM) <= item:
            low = middle
        else:
            high = middle - 1
    return low, load_i64(plan + FIRST_ROW) + low


@inner
def element_place(d: int) -> int:
    """Where element ``d`` of a bfloat16 row lies in vectors: the evens, then the odds of each 32."""
    return (d & -32) + ((d & 31) >> 1) + 16 * (d & 1)


@inner
def merge_row(plan: int, index: int, row: int, shape: Shape, paired: bool, io: Io, partials: Partials) -> None:
    """Merge the splits of one row in their order and write its output and log-sum-exp (natural logarithm).

    Splits beyond the table come last: keys that are zero rows score 0, so such a split has maximum 0, weight equal to
    its number of tokens, and adds nothing to the values. A sink is one more score in the denominator.
    """
    _, kv_heads, group, _, v_dim, _, padded = shape
    heads = kv_heads * group
    at = row_plan(plan, index)
    begin, end = load_i64(at + BEGIN), load_i64(at + END)
    first, count = load_i64(at + FIRST_ITEM), load_i64(at + ITEM_COUNT)
    beyond = (begin // SPLIT + count) * SPLIT
    sums = np.empty(padded, np.float32)
    for h in range(heads):
        peak = float32(-np.inf)
        for item in range(first, first + count):
            peak = max(peak, load_f32(partials[1] + (item * heads + h) * 4))
        if end > beyond:
            peak = max(peak, float32(0.0))
        sink = float32(-np.inf)
        if io[3] != 0:
            sink = float32(load_f32(io[3] + h * 4) * float32(1.0 / math.log(2.0)))
            peak = max(peak, sink)
        total = float32(0.0)
        sums[:] = 0.0
        for item in range(first, first + count):
            weight = power_of_two(load_f32(partials[1] + (item * heads + h) * 4), peak)
            total += weight * load_f32(partials[2] + (item * heads + h) * 4)
            values = partials[0] + (item * heads + h) * padded * 4
            for d in range(padded):
                sums[d] += weight * load_f32(values + d * 4)
        weight = power_of_two(float32(0.0), peak)
        position = beyond
        while position < end:
            total += weight * float32(min(SPLIT, end - position))
            position += SPLIT
        if io[3] != 0:
            total += power_of_two(sink, peak)
        out = io[1] + (row * heads + h) * v_dim * 4
        for d in range(v_dim):
            store_f32(out + d * 4, sums[element_place(d) if paired else d] / total)
        store_f32(io[2] + (row * heads + h) * 4, float32((peak + math.log2(total)) * math.log(2.0)))


@inner
def power_of_two(x: float, peak: float) -> float:
    """``2**(x - peak)`` in float32; 1 where the two are equal, infinities included."""
    return float32(1.0) if x == peak else float32(math.exp((float(x) - float(peak)) * math.log(2.0)))
