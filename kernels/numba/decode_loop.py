"""The tile loop of paged decode attention, in specialised builds and one for any geometry.

There is one loop. A build with a literal head size reads K and V rows where they lie; the build for any geometry first
brings a tile's rows into vectors of float32 (any element stride, any head size, zero beyond its end). Both then do
the same operations in the same order, so they agree bit for bit. Where rows lie is a table of addresses, which is all
that tells the direct path from the gathered one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .address import (
    clear_bytes,
    load_f32,
    load_i32,
    load_i64,
    load_u16,
    load_u32,
    move_bytes,
    store_f32,
    store_i64,
    store_u32,
)
from .claims import claim_item, finish_item
from .compiled import SOURCES, compiled, float32, inner, int64, uint32
from .decode_plan import (
    Io,
    Limits,
    Partials,
    Shape,
    Table,
    element_place,
    find_row,
    item_keys,
    leave_row,
    merge_row,
)
from .row_loops import View
from .tile_ops import TABLE_BYTES, TILE, add_values, cap_scores, score_tokens, soften, tokens_at_once, widen_pairs

Scratch = tuple[int, int, int, int, int, int, int]
"""Addresses of one thread's memory: query, scores, scales, row tables (K, V, twice), K rows, V rows, a row of zeros."""

Ask = tuple[int, int, int]
"""Rows that memory is asked for ahead of their use: row table, first token, KV head."""
LEAD = 4
"""How many calls of :func:`score_tokens` or :func:`add_values` ahead: a few hundred nanoseconds."""


@inner
def place_query(query: int, q: int, heads: int, dim: int, padded: int, scale: float, paired: bool) -> None:
    """Scale one query ``[heads, dim]`` into vectors ``[heads, padded]``, zero beyond ``dim``."""
    clear_bytes(query, heads * padded * 4)
    for h in range(heads):
        source, target = q + h * dim * 4, query + h * padded * 4
        for d in range(dim):
            place = element_place(d) if paired else d
            store_f32(target + place * 4, float32(load_f32(source + d * 4) * float32(scale)))


@inner
def form_tables(
    tables: int, tile: int, keys: tuple[int, int], b: int, table: Table, limits: Limits, k: View, v: View, zeros: int
) -> None:
    """Write the row tables (K, then V) of a tile. Tokens outside ``keys`` and blocks the pool does not hold are
    zeros."""
    table_len, first_block, num_blocks, block_size = limits
    column = tile // block_size
    token = tile - column * block_size - 1
    for t in range(TILE):
        k_row, k_step, v_row, v_step = zeros, int64(0), zeros, int64(0)
        token += 1
        if token == block_size:
            token, column = 0, column + 1
        if keys[0] <= tile + t < keys[1] and column < table_len:
            page = int64(load_i32(table[0] + b * table[1] + column * table[2]))
            if page >= first_block and page < num_blocks:
                k_row, k_step = k[0] + page * k[1] + token * k[2], k[3]
                v_row, v_step = v[0] + page * v[1] + token * v[2], v[3]
        store_i64(tables + t * 8, k_row)
        store_i64(tables + (TILE + t) * 8, k_step)
        store_i64(tables + TABLE_BYTES + t * 8, v_row)
        store_i64(tables + TABLE_BYTES + (TILE + t) * 8, v_step)


@inner
def bring_row(source: int, step: int, size: int, dim: int, target: int) -> None:
    """Bring one row of ``dim`` elements of ``size`` bytes, ``step`` bytes apart, to ``target`` as vectors of
    float32."""
    begin = 0
    if step == size:
        begin = dim if size == 4 else dim // 32 * 32
        if size == 4:
            move_bytes(target, source, dim * 4)
        else:
            widen_pairs(source, target, dim // 32)
    for d in range(begin, dim):
        if size == 2:
            store_u32(target + element_place(d) * 4, uint32(load_u16(source + d * step)) << uint32(16))
        else:
            store_u32(target + d * 4, load_u32(source + d * step))


@inner
def bring_rows(
    table: int, low: int, high: int, view: View, heads: int, dim: int, padded: int, target: int, zeros: int
) -> None:
    """Bring rows of tokens ``[low, high)`` to ``target``, float32 ``[TILE, heads, padded]``, and point their table
    there."""
    for t in range(low, high):
        source, step = load_i64(table + t * 8), load_i64(table + (TILE + t) * 8)
        place = target + t * heads * padded * 4
        if dim < padded or source == zeros:
            clear_bytes(place, heads * padded * 4)
        if source != zeros:
            for h in range(heads):
                bring_row(source + h * step, view[4], view[5], dim, place + h * padded * 4)
        store_i64(table + t * 8, place)
        store_i64(table + (TILE + t) * 8, padded * 4)


@inner
def soften_tile(
    scores: int, low: int, high: int, heads: int, cap: float, maxima: int, weights: int, shrink: int
) -> None:
    """Softmax of one tile for all query heads: scores become weights; maxima, weights and ``shrink [heads]`` are
    updated."""
    for h in range(heads):
        row = scores + h * TILE * 4
        if cap > 0.0:
            cap_scores(row, float32(cap))
        for t in range(low):
            store_f32(row + t * 4, float32(-np.inf))
        for t in range(high, TILE):
            store_f32(row + t * 4, float32(-np.inf))
        peak, total, scale = soften(row, float32(load_f32(maxima + h * 4)))
        store_f32(maxima + h * 4, peak)
        store_f32(weights + h * 4, load_f32(weights + h * 4) * scale + total)
        store_f32(shrink + h * 4, scale)


@inner
def fill(target: int, value: float, count: int) -> None:
    """Set ``count`` float32 to ``value``."""
    for i in range(count):
        store_f32(target + i * 4, float32(value))


@inner
def step_ask(ask: Ask, tokens: int, kv_heads: int, here: int, following: int) -> Ask:
    """What to ask memory for next: the next head, then the next tokens, then V of this tile, then K of the
    following."""
    table, token, head = ask[0], ask[1], ask[2] + 1
    if head == kv_heads:
        head, token = int64(0), token + tokens
    if token == TILE:
        table, token = (here + TABLE_BYTES if table == here else following), int64(0)
    return table, token, head


@inner
def clear_partials(partials: Partials, item: int, heads: int, padded: int) -> Partials:
    """Addresses of the partial result of ``item``, set to that of no keys."""
    sums, maxima, weights = (
        partials[0] + item * heads * padded * 4,
        partials[1] + item * heads * 4,
        partials[2] + item * heads * 4,
    )
    clear_bytes(sums, heads * padded * 4)
    clear_bytes(weights, heads * 4)
    fill(maxima, -np.inf, heads)
    return sums, maxima, weights


def build(dim: int, group: int, bf16: int) -> Any:
    """Make the loop for one head size, group of query heads and storage, or (``dim = 0``) for whatever it is called
    with.

    The result takes items off the plan until none is left; any number of threads may run it at once on the same plan,
    each with its own ``scratch``.
    """
    tokens = tokens_at_once(group)

    @compiled
    def attend(
        plan: int,
        shape: Shape,
        k: View,
        v: View,
        table: Table,
        limits: Limits,
        factors: tuple[float, float],
        io: Io,
        partials: Partials,
        scratch: Scratch,
        _sources: int = SOURCES,
    ) -> None:
        query_len, kv_heads, heads_each, k_dim, v_dim, k_padded, v_padded = shape
        heads = kv_heads * heads_each
        query, scores, shrink, here, k_rows, v_rows, zeros = scratch
        ahead = here + 2 * TABLE_BYTES
        while True:
            item = claim_item(plan)
            if item < 0:
                break
            index, row = find_row(plan, item)
            keys = item_keys(plan, index, item)
            sums, maxima, weights = clear_partials(partials, item, heads, v_padded)
            place_query(query, io[0] + row * heads * k_dim * 4, heads, k_dim, k_padded, factors[0], k[5] == 2)
            first = keys[0] // TILE * TILE
            form_tables(here, first, keys, row // query_len, table, limits, k, v, zeros)
            ask = (here, (keys[0] - first) // tokens * tokens, int64(0))
            for _ in range(LEAD):
                ask = step_ask(ask, tokens, kv_heads, here, here)
            for tile in range(first, keys[1], TILE):
                low, high = max(keys[0] - tile, 0), min(keys[1] - tile, TILE)
                following = here
                if tile + TILE < keys[1]:
                    following = ahead
                    form_tables(ahead, tile + TILE, keys, row // query_len, table, limits, k, v, zeros)
                v_here = here + TABLE_BYTES
                if dim == 0:
                    bring_rows(here, low, high, k, kv_heads, k_dim, k_padded, k_rows, zeros)
                    bring_rows(v_here, low, high, v, kv_heads, v_dim, v_padded, v_rows, zeros)
                for t in range(low // tokens * tokens, high, tokens):
                    for h in range(kv_heads):
                        to = scores + (h * heads_each * TILE + t) * 4
                        q = query + h * heads_each * k_padded * 4
                        if dim == 0:
                            score_tokens(here + t * 8, h, q, to, here, 0, k_padded, heads_each, 0)
                        else:
                            score_tokens(here + t * 8, h, q, to, ask[0] + ask[1] * 8, ask[2], dim, group, bf16)
                            ask = step_ask(ask, tokens, kv_heads, here, following)
                soften_tile(scores, low, high, heads, factors[1], maxima, weights, shrink)
                for t in range(low // tokens * tokens, high, tokens):
                    start, stop = max(t, low), min(t + tokens, high)
                    for h in range(kv_heads):
                        to, w = sums + h * heads_each * v_padded * 4, scores + h * heads_each * TILE * 4
                        scale = shrink + h * heads_each * 4
                        if dim == 0:
                            add_values(v_here, h, start, stop, to, w, scale, here, 0, v_padded, heads_each, 0)
                        else:
                            n_at, n_head = ask[0] + ask[1] * 8, ask[2]
                            add_values(v_here, h, start, stop, to, w, scale, n_at, n_head, dim, group, bf16)
                            ask = step_ask(ask, tokens, kv_heads, here, following)
                    if t <= low:
                        fill(shrink, 1.0, heads)
                here, ahead = ahead, here
            if leave_row(plan, index):
                merge_row(plan, index, row, shape, k[5] == 2, io, partials)
            finish_item(plan)

    return attend
