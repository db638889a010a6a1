"""The tile loop of paged decode attention, in specialised builds and one for any geometry.

There is one loop. A build with a literal head size reads K and V rows where they lie; the build for any geometry
first brings a tile's rows into vectors of float32 (any element stride, any head size, zero beyond its end). Both then
do the same operations in the same order, so they agree bit for bit. Where rows lie is a table of addresses, which is
all that tells the direct path from the gathered one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .address import (
    atomic_add_i64,
    clear_bytes,
    load_f32,
    load_i32,
    load_i64,
    load_u16,
    load_u32,
    store_f32,
    store_i64,
    store_u32,
)
from .compiled import SOURCES, compiled, float32, inner, int64, uint32
from .decode_plan import (
    BEGIN,
    DONE,
    END,
    FIRST_ITEM,
    SPLIT,
    Io,
    Limits,
    Partials,
    Shape,
    Table,
    claim_item,
    element_place,
    find_row,
    finish_item,
    merge_row,
    row_plan,
)
from .row_loops import View
from .tile_ops import TILE, add_values, cap_scores, score_tokens, soften, tokens_at_once

Scratch = tuple[int, int, int, int, int, int, int]
"""Addresses of one thread's memory: query, scores, scales, row tables, K rows, V rows, a row of zeros."""
ENTRIES = TILE * 8
"""Bytes of one row table; there are four: K rows, K steps, V rows, V steps."""


@inner
def place_query(query: int, q: int, heads: int, dim: int, padded: int, scale: float, paired: bool) -> None:
    """Scale one query ``[heads, dim]`` into vectors ``[heads, padded]``, zero beyond ``dim``."""
    clear_bytes(query, heads * padded * 4)
    for h in range(heads):
        for d in range(dim):
            value = float32(load_f32(q + (h * dim + d) * 4) * float32(scale))
            store_f32(query + (h * padded + element_place(d, paired)) * 4, value)


@inner
def form_rows(
    tables: int, tile: int, low: int, high: int, row: int, table: Table, limits: Limits, k: View, v: View, zeros: int
) -> None:
    """Write the row tables of a tile. Tokens outside ``[low, high)`` and blocks the pool does not hold are the row of
    zeros."""
    table_len, first_block, num_blocks, block_size = limits
    for t in range(TILE):
        k_row, k_step, v_row, v_step = zeros, int64(0), zeros, int64(0)
        column = (tile + t) // block_size
        if low <= t < high and column < table_len:
            page = int64(load_i32(table[0] + row * table[1] + column * table[2]))
            if page >= first_block and page < num_blocks:
                token = tile + t - column * block_size
                k_row, k_step = k[0] + page * k[1] + token * k[2], k[3]
                v_row, v_step = v[0] + page * v[1] + token * v[2], v[3]
        store_i64(tables + t * 8, k_row)
        store_i64(tables + ENTRIES + t * 8, k_step)
        store_i64(tables + 2 * ENTRIES + t * 8, v_row)
        store_i64(tables + 3 * ENTRIES + t * 8, v_step)


@inner
def bring_rows(
    rows: int, low: int, high: int, view: View, heads: int, dim: int, padded: int, target: int, zeros: int
) -> None:
    """Bring the rows of tokens ``[low, high)`` to ``target``, float32 ``[TILE, heads, padded]``, and point their
    tables there."""
    for t in range(low, high):
        source, step = load_i64(rows + t * 8), load_i64(rows + ENTRIES + t * 8)
        place = target + t * heads * padded * 4
        clear_bytes(place, heads * padded * 4)
        if source != zeros:
            for h in range(heads):
                at = source + h * step
                to = place + h * padded * 4
                if view[5] == 2:
                    for d in range(dim):
                        bits = uint32(load_u16(at + d * view[4])) << uint32(16)
                        store_u32(to + element_place(d, True) * 4, bits)
                else:
                    for d in range(dim):
                        store_u32(to + d * 4, load_u32(at + d * view[4]))
        store_i64(rows + t * 8, place)
        store_i64(rows + ENTRIES + t * 8, padded * 4)


@inner
def soften_tile(
    scores: int, low: int, high: int, heads: int, cap: float, maxima: int, weights: int, scales: int
) -> None:
    """Softmax of one tile for all query heads: scores become weights; maxima, weights and scales ``[heads]`` are
    updated."""
    for h in range(heads):
        at = scores + h * TILE * 4
        if cap > 0.0:
            cap_scores(at, float32(cap))
        for t in range(low):
            store_f32(at + t * 4, float32(-np.inf))
        for t in range(high, TILE):
            store_f32(at + t * 4, float32(-np.inf))
        peak, total, scale = soften(at, float32(load_f32(maxima + h * 4)))
        store_f32(maxima + h * 4, peak)
        store_f32(weights + h * 4, load_f32(weights + h * 4) * scale + total)
        store_f32(scales + h * 4, scale)


def build(dim: int, group: int, bf16: int) -> Any:
    """Compile the loop for one head size, group of query heads and storage, or (``dim = 0``) for whatever it is
    called with.

    The result takes items off the plan until none is left; any number of threads may run it at once on the same plan,
    each with its own ``scratch``.
    """
    tokens = tokens_at_once(group or 1)

    @compiled
    def attend(
        plan: int,
        first_row: int,
        rows: int,
        shape: Shape,
        k: View,
        v: View,
        table: Table,
        limits: Limits,
        scales: tuple[float, float],
        io: Io,
        partials: Partials,
        scratch: Scratch,
        _sources: int = SOURCES,
    ) -> None:
        query_len, kv_heads, groups, k_dim, v_dim, k_padded, v_padded = shape
        heads = kv_heads * groups
        query, scores, shrink, tables, k_rows, v_rows, zeros = scratch
        while True:
            item = claim_item(plan)
            if item < 0:
                break
            index = find_row(plan, rows, item)
            at, row = row_plan(plan, index), first_row + index
            split = load_i64(at + BEGIN) // SPLIT + item - load_i64(at + FIRST_ITEM)
            begin = max(load_i64(at + BEGIN), split * SPLIT)
            end = min(load_i64(at + END), (split + 1) * SPLIT)
            sums = partials[0] + item * heads * v_padded * 4
            maxima, weights = partials[1] + item * heads * 4, partials[2] + item * heads * 4
            clear_bytes(sums, heads * v_padded * 4)
            clear_bytes(weights, heads * 4)
            for h in range(heads):
                store_f32(maxima + h * 4, float32(-np.inf))
            place_query(query, io[0] + row * heads * k_dim * 4, heads, k_dim, k_padded, scales[0], k[5] == 2)
            first = begin // TILE * TILE
            here, ahead = tables, tables + 4 * ENTRIES
            form_rows(here, first, begin - first, end - first, row // query_len, table, limits, k, v, zeros)
            for tile in range(first, end, TILE):
                low, high = max(begin - tile, 0), min(end - tile, TILE)
                form_rows(ahead, tile + TILE, 0, end - tile - TILE, row // query_len, table, limits, k, v, zeros)
                if dim == 0:
                    bring_rows(here, low, high, k, kv_heads, k_dim, k_padded, k_rows, zeros)
                    bring_rows(here + 2 * ENTRIES, low, high, v, kv_heads, v_dim, v_padded, v_rows, zeros)
                for t in range(low // tokens * tokens, high, tokens):
                    for h in range(kv_heads):
                        key, step, value = here + t * 8, here + ENTRIES + t * 8, here + 2 * ENTRIES + t * 8
                        q_at, to = query + h * groups * k_padded * 4, scores + (h * groups * TILE + t) * 4
                        if dim == 0:
                            for g in range(groups):
                                score_tokens(
                                    key, step, h, q_at + g * k_padded * 4, to + g * TILE * 4, value, k_padded, 1, 0
                                )
                        else:
                            score_tokens(key, step, h, q_at, to, value, dim, group, bf16)
                soften_tile(scores, low, high, heads, scales[1], maxima, weights, shrink)
                value, step = here + 2 * ENTRIES, here + 3 * ENTRIES
                for h in range(kv_heads):
                    to, w, s = sums + h * groups * v_padded * 4, scores + h * groups * TILE * 4, shrink + h * groups * 4
                    if dim == 0:
                        for g in range(groups):
                            add_values(
                                value,
                                step,
                                h,
                                low,
                                high,
                                to + g * v_padded * 4,
                                w + g * TILE * 4,
                                s + g * 4,
                                ahead,
                                v_padded,
                                1,
                                0,
                            )
                    else:
                        add_values(value, step, h, low, high, to, w, s, ahead, dim, group, bf16)
                here, ahead = ahead, here
            if finish_item(plan, index):
                merge_row(plan, index, row, shape, k[5] == 2, io, partials)
            atomic_add_i64(plan + DONE, int64(1))

    return attend
