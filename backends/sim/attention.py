"""Paged attention of the simulated device, one query of one sequence at a time, so that nothing depends on its neighbours (D5).

Keys are taken in tiles of absolute positions with a running maximum and sum (Milakov & Gimelshein 2018; Dao et al. 2022). The direct
path looks up each tile's rows in the pool; the gather path first lays the visible rows end to end and cuts the same tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from forebay.specs.dtypes import HostArray

from .doors import Plan, add_count
from .views import View, as_numbers

TILE: Final = 512
"""Positions a tile covers; its bounds are multiples of it."""

Rows = tuple[HostArray, HostArray]
Tile = Callable[[int, int], Rows]
"""Keys ``[Hkv, n, D]`` and values ``[Hkv, n, Dv]`` of positions ``low`` to ``high - 1``, float32."""


@dataclass(frozen=True)
class Call:
    """What is static about one call."""

    table_len: int
    scale: float
    window: int | None
    softcap: float | None
    path: str

    def reach(self, plan: Plan) -> int:
        """Positions the table has blocks for."""
        return self.table_len * plan.geometry.block_size


def paged_decode(outs: list[View], ins: list[View | None], plan: Plan, call: Call) -> None:
    """Outs: out ``[B, T, Hq, Dv]``, LSE ``[B, T, Hq]``, the count of invalid entries. Ins: q, table, visible, sinks, storage."""
    q_view, table_view, visible, sink_view, *stored = ins
    storage = [x for x in stored if x is not None]
    if q_view is None or table_view is None or visible is None:
        return
    q, sinks = q_view.values(), None if sink_view is None else sink_view.values()
    batch, query_len, heads, _ = q.shape
    out = np.zeros((batch, query_len, heads, plan.geometry.value_dim), np.float32)
    lse = np.full((batch, query_len, heads), -np.inf, np.float32)
    views = plan.views(storage)
    invalid = 0
    for b in range(batch):
        ends = [int(visible.bits[b]) - (query_len - 1 - t) for t in range(query_len)]
        spans = [(max(end - (call.window or end), 0), end) for end in ends]
        last = max(ends)
        if last <= 0:
            continue
        first = min(start for start, end in spans if end > 0)
        pages = _pages(table_view.bits[b], first, last, plan, call)
        columns = -(-last // plan.geometry.block_size) - first // plan.geometry.block_size
        invalid += int((pages[1] < 0).sum()) + columns - len(pages[1])
        tile = _lookup(views, pages, plan)
        if call.path == "gather":
            tile = _gathered(tile, first, min(last, call.reach(plan)))
        for t, (start, end) in enumerate(spans):
            if end > 0:
                out[b, t], lse[b, t] = _attend(q[b, t], tile, start, end, plan, call, sinks)
    outs[0].put(out)
    outs[1].put(lse)
    add_count(outs[2], invalid)


def _pages(table: HostArray, first: int, last: int, plan: Plan, call: Call) -> tuple[int, HostArray]:
    """(first column, block of each column that the positions reach and the table has; -1 where it is no block of the pool)."""
    g = plan.geometry
    low, high = first // g.block_size, min(-(-last // g.block_size), call.table_len)
    held = table[low : max(high, low)].astype(np.int64)
    return low, np.where((held >= plan.first_block) & (held < g.num_blocks), held, -1)


def _lookup(views: Rows, pages: tuple[int, HostArray], plan: Plan) -> Tile:
    column, blocks = pages
    g = plan.geometry

    def tile(low: int, high: int) -> Rows:
        position = np.arange(low, high)
        block = blocks[position // g.block_size - column]
        here = block >= 0
        made = []
        for view, dim in zip(views, (g.key_dim, g.value_dim), strict=True):
            rows = np.zeros((high - low, g.num_kv_heads, dim), np.float32)
            rows[here] = as_numbers(view[block[here], position[here] % g.block_size], g.dtype)
            made.append(np.ascontiguousarray(rows.swapaxes(0, 1)))
        return made[0], made[1]

    return tile


def _gathered(tile: Tile, first: int, last: int) -> Tile:
    k, v = tile(first, max(first, last))
    return lambda low, high: (
        np.ascontiguousarray(k[:, low - first : high - first]),
        np.ascontiguousarray(v[:, low - first : high - first]),
    )


def _attend(q: HostArray, tile: Tile, start: int, end: int, plan: Plan, call: Call, sinks: HostArray | None) -> Rows:
    """One query ``[Hq, D]`` over positions ``start`` to ``end - 1``: out ``[Hq, Dv]`` and LSE ``[Hq]``.

    Positions behind the table's end are rows of zeros, however many there are: each has the score 0 and adds nothing to the output.
    """
    g = plan.geometry
    grouped = q.reshape(g.num_kv_heads, -1, g.key_dim).copy()
    shape = grouped.shape[:2]
    peak = np.full(shape, -np.inf, np.float32) if sinks is None else sinks.reshape(shape).copy()
    weight = np.zeros(shape, np.float32) if sinks is None else np.ones(shape, np.float32)
    acc = np.zeros((*shape, g.value_dim), np.float32)
    held = max(min(end, call.reach(plan)), start)
    first = start - start % TILE if held > start else held
    for low in range(first, held, TILE):
        k, v = tile(max(low, start), min(low + TILE, held))
        scores = np.matmul(grouped, k.swapaxes(1, 2)) * np.float32(call.scale)
        if call.softcap is not None:
            scores = np.float32(call.softcap) * np.tanh(scores / np.float32(call.softcap))
        new = np.maximum(peak, scores.max(-1))
        p, shrink = np.exp(scores - new[..., None]), np.exp(peak - new)
        weight = weight * shrink + np.add.reduce(p, -1)
        acc = acc * shrink[..., None] + np.matmul(p, v)
        peak = new
    missing = end - held
    if missing > 0:
        new = np.maximum(peak, np.float32(0))
        shrink = np.exp(peak - new)
        weight = weight * shrink + np.float32(missing) * np.exp(-new)
        acc, peak = acc * shrink[..., None], new
    out = acc / weight[..., None]
    return out.reshape(-1, g.value_dim), (peak + np.log(weight)).reshape(-1)


def merge_partials(outs: list[View], ins: list[View]) -> None:
    """Ins: n partial outputs, then their n LSEs. A part whose LSE is -inf weighs nothing, whatever it holds."""
    n = len(ins) // 2
    parts = [x.values() for x in ins[:n]]
    lses = np.stack([x.values() for x in ins[n:]])
    peak = np.maximum.reduce(lses)
    nothing = np.isneginf(peak)
    base = np.where(nothing, np.float32(0), peak)
    weights = np.where(lses == peak, np.float32(1), np.exp(lses - base))
    weights = np.where(np.isneginf(lses), np.float32(0), weights)
    whole = np.where(nothing, np.float32(1), np.add.reduce(weights))
    merged = np.zeros(parts[0].shape, np.float32)
    for part, weight, lse in zip(parts, weights, lses, strict=True):
        share = part * (weight / whole)[..., None]
        merged += np.where(np.isneginf(lse)[..., None], np.float32(0), share)
    outs[0].put(merged)
    outs[1].put(np.where(nothing, np.float32(-np.inf), base + np.log(whole)))
