"""The kernels of the device: doors of a pool and paged attention. They see memory alone: numpy arrays, and what is static.

``k_view [NB, BS, Hkv, D]`` and ``v_view [NB, BS, Hkv, Dv]`` are one layer of a pool by its own strides; memory is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from forebay.specs.attention import DecodeCall
from forebay.specs.dtypes import HostArray
from forebay.specs.geometry import KVGeometry
from forebay.specs.slots import live_rows

from .arrays import bits_of, values_of

Views = tuple[HostArray, HostArray]
LARGEST: Final = np.iinfo(np.int32).max
TILE: Final = 256
"""Tokens that attention takes at a time; its bounds are multiples of it."""


@dataclass(frozen=True)
class Shape:
    """What is static about a pool: sizes, and the first block that is no sink."""

    geometry: KVGeometry
    first_block: int


def count(counter: HostArray, n: int) -> None:
    """Add to an int32 count ``[1]`` that stays at its largest value."""
    counter[0] = min(int(counter[0]) + n, LARGEST)


# -- doors: rows that are pads, in the sink or outside the pool are never stored (clause W6) ---------------------------------
def write_rows(views: Views, slots: HostArray, rows: list[HostArray], dropped: HostArray, shape: Shape) -> None:
    """Store rows in the pool's bytes; ``rows`` is K alone where V lies inside it."""
    live, lost = live_rows(slots, shape.geometry, shape.first_block)
    block, offset = np.divmod(slots[live], shape.geometry.block_size)
    for view, new in zip(views, rows, strict=False):
        view[block, offset] = new[live]
    count(dropped, lost)


def read_rows(views: Views, slots: HostArray, outs: list[HostArray], dropped: HostArray, shape: Shape) -> None:
    """Fetch rows; those that are not live are zero."""
    live, lost = live_rows(slots, shape.geometry, shape.first_block)
    block, offset = np.divmod(slots[live], shape.geometry.block_size)
    for view, out in zip(views, outs, strict=True):
        out[...] = 0
        out[live] = view[block, offset]
    count(dropped, lost)


def copy_rows(layers: list[Views], src: HostArray, dst: HostArray, dropped: HostArray, shape: Shape) -> None:
    """Copy rows in every layer as if all reads came before all writes; a row counts as dropped once."""
    g, first = shape.geometry, shape.first_block
    live = live_rows(src, g, first)[0] & live_rows(dst, g, first)[0]
    (from_block, from_offset), (block, offset) = (np.divmod(slots[live], g.block_size) for slots in (src, dst))
    for views in layers:
        moved = [view[from_block, from_offset] for view in views]
        for view, rows in zip(views, moved, strict=True):
            view[block, offset] = rows
    count(dropped, int((~live & (src != -1) & (dst != -1)).sum()))


# -- attention -----------------------------------------------------------------------------------------------------------------
def decode(views: Views, arrays: dict[str, HostArray], call: DecodeCall, q_dtype: str) -> None:
    """Attention of every row and query by itself, so that its bits depend on nothing else (clause D5).

    ``arrays``: ``q [B, T, Hq, D]``, ``table [B, width]``, ``visible [B]``, ``sinks [Hq]`` if there are some; written are
    ``out [B, T, Hq, Dv]``, ``lse [B, T, Hq]`` and the count ``invalid [1]``. Gather differs in where a tile comes from alone, so that
    it gives the same bits (clause D4).
    """
    q, queries, g = values_of(arrays["q"], q_dtype), arrays["q"].shape[1], call.pool.geometry
    out = np.zeros(arrays["out"].shape, np.float32)
    arrays["lse"][...] = -np.inf
    invalid, reach = 0, call.table_len * g.block_size
    for b, visible in enumerate(arrays["visible"].tolist()):
        ends = [max(visible - (queries - 1 - t), 0) for t in range(queries)]
        starts = [0 if call.window is None else max(end - call.window, 0) for end in ends]
        first, last, row = min(starts), min(max(ends), reach), arrays["table"][b]
        blocks = row[first // g.block_size : max(-(-last // g.block_size), first // g.block_size)]
        invalid += -(-max(ends) // g.block_size) - first // g.block_size - int(_valid(blocks, call).sum())
        tile = partial(_rows, views, row, call)
        if call.path == "gather" and first < last:
            tile = partial(_cut, tile(first, last), first)
        for t, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end > 0:
                out[b, t], arrays["lse"][b, t] = _attend(q[b, t], tile, start, end, call, arrays.get("sinks"))
    arrays["out"][...] = bits_of(out, q_dtype)
    count(arrays["invalid"], invalid)


def _valid(blocks: HostArray, call: DecodeCall) -> HostArray:
    return (blocks >= call.pool.first_block) & (blocks < call.pool.geometry.num_blocks)


def _rows(views: Views, row: HostArray, call: DecodeCall, start: int, end: int) -> Views:
    """float32 keys ``[end - start, Hkv, D]`` and values of tokens that the table reaches; zero where a block is not the pool's."""
    g, position = call.pool.geometry, np.arange(start, end)
    block = row[position // g.block_size].astype(np.int64)
    live = _valid(block, call)
    found = []
    for view in views:
        rows = np.zeros((len(position), *view.shape[2:]), np.float32)
        rows[live] = values_of(view[block[live], position[live] % g.block_size], g.dtype)
        found.append(rows)
    return found[0], found[1]


def _cut(gathered: Views, first: int, start: int, end: int) -> Views:
    """The same tokens out of rows that were gathered from token ``first`` on."""
    return gathered[0][start - first : end - first], gathered[1][start - first : end - first]


def _attend(
    q: HostArray, tile: Callable[[int, int], Views], start: int, end: int, call: DecodeCall, sinks: HostArray | None
) -> tuple[HostArray, HostArray]:
    """One query ``[Hq, D]`` over tokens ``start`` to ``end``: out ``[Hq, Dv]`` and the natural-log LSE ``[Hq]``.

    Keys and values of tokens behind the table's end are zero: their score is 0.
    """
    g = call.pool.geometry
    held = max(min(end, call.table_len * g.block_size), start)
    absent, bounds = end - held, [start, *range(start - start % TILE + TILE, held, TILE), held]
    tiles = [tile(low, high) for low, high in pairwise(bounds)] if held > start else []
    grouped = q.reshape(g.num_kv_heads, -1, q.shape[1])
    empty = np.zeros((*grouped.shape[:2], 0), np.float32)
    products = [np.matmul(grouped, np.ascontiguousarray(keys.transpose(1, 2, 0))) for keys, _ in tiles]
    scores = np.concatenate([empty, *products], -1) * np.float32(call.scale)
    if call.softcap is not None:
        scores = np.float32(call.softcap) * np.tanh(scores / np.float32(call.softcap))
    peak = scores.max(-1, keepdims=True, initial=0 if absent else -np.inf)
    extra = None if sinks is None else sinks.reshape(g.num_kv_heads, -1, 1)
    if extra is not None:
        peak = np.maximum(peak, extra)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    if absent:
        total = total + np.float32(absent) * np.exp(-peak)
    if extra is not None:
        total = total + np.exp(extra - peak)
    out = np.zeros((*grouped.shape[:2], g.value_dim), np.float32)
    for (low, high), (_, values) in zip(pairwise(bounds), tiles, strict=False):
        out += np.matmul(weights[..., low - start : high - start], np.ascontiguousarray(values.transpose(1, 0, 2)))
    return (out / total).reshape(len(q), -1), (peak + np.log(total)).reshape(-1)


def merge(outs: list[HostArray], lses: list[HostArray], dtype: str, made: HostArray, made_lse: HostArray) -> None:
    """Weights ``exp(lse_i - lse)``; a part whose LSE is -inf is empty, whatever its output holds (clause D10)."""
    with np.errstate(all="ignore"):
        parts, lse = np.stack([values_of(x, dtype) for x in outs]), np.stack(lses)
        empty, peak = np.isneginf(lse), lse.max(0)
        none = np.isneginf(peak)
        base = np.where(none, np.float32(0), peak)
        weight = np.where(empty, np.float32(0), np.where(lse == peak, np.float32(1), np.exp(lse - base)))
        total = np.where(none, np.float32(1), weight.sum(0))
        merged = np.where(empty[..., None], np.float32(0), parts * (weight / total)[..., None]).sum(0)
        made[...] = bits_of(merged, dtype)
        made_lse[...] = np.where(none, np.float32(-np.inf), base + np.log(total))
