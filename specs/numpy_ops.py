"""The defaults of :class:`forebay.specs.driver.Driver` through numpy: slow, plain, and counted as delegated (clause B6).

Each function reads device memory with ``driver.to_host``, computes on the host, and writes back with ``driver.store``. They are a
way to start a port, not a fallback: nothing selects them when a kernel refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from .attention import DecodeCall
from .dtypes import BITS_DTYPE, Array, HostArray, bfloat16_bits, bfloat16_values
from .errors import InvalidInput
from .geometry import kv_views
from .segment import Buffer
from .slots import live_rows, lower_paged
from .write_loc import PAD_SLOT, WriteLoc

if TYPE_CHECKING:
    from .driver import Driver
    from .pool import Pool

TILE = 64
"""Keys a step of the softmax loop; a multiple of absolute positions, so a row's bits do not depend on its neighbours (D5)."""


def _float32(bits: HostArray, dtype: str) -> HostArray:
    return bfloat16_values(bits) if dtype == "bfloat16" else bits.astype(np.float32)


def _bits(values: HostArray, dtype: str) -> HostArray:
    with np.errstate(over="ignore"):  # what float16 cannot hold is its infinity
        return bfloat16_bits(values) if dtype == "bfloat16" else values.astype(BITS_DTYPE[dtype])


def _recast(bits: HostArray, source: str, target: str) -> HostArray:
    """Bytes of one float dtype as bytes of another, through float32; the same dtype keeps its bytes."""
    return bits if source == target else _bits(_float32(bits, source), target)


def _host_storage(driver: Driver, pool: Pool, layer: int) -> tuple[HostArray, ...]:
    return tuple(driver.to_host(driver.load(buffer)) for buffer in pool.storage(layer))


def _count(driver: Driver, buffer: Buffer, n: int) -> None:
    if n:
        total = int(driver.to_host(driver.load(buffer))[0]) + n
        driver.store(buffer, np.array([min(total, np.iinfo(np.int32).max)], np.int32), None)


def _slots(driver: Driver, pool: Pool, loc: WriteLoc) -> HostArray:
    if loc.ids is not None:
        return driver.to_host(loc.ids).astype(np.int64)
    if loc.table is None or loc.positions is None or loc.table_len is None:
        raise InvalidInput(
            "WriteLoc: neither ids nor a table with positions; build it with WriteLoc.slots or WriteLoc.paged"
        )
    table, positions = driver.to_host(loc.table.array), driver.to_host(loc.positions)
    return lower_paged(table, positions, loc.table_len, pool.geometry)


def _scatter(
    views: tuple[HostArray, HostArray], slots: HostArray, rows: tuple[HostArray, HostArray | None], bs: int
) -> None:
    for view, values in zip(views, rows, strict=True):
        if values is not None:
            view[slots // bs, slots % bs] = values


def zero(driver: Driver, buffer: Buffer) -> None:
    """Default of ``Driver.zero``."""
    driver.store(buffer, np.zeros(buffer.shape, BITS_DTYPE[buffer.dtype]), None)


def write_kv(driver: Driver, pool: Pool, layer: int, loc: WriteLoc, k: Array, v: Array | None) -> None:
    """Default of ``Driver.write_kv``."""
    g, slots = pool.geometry, _slots(driver, pool, loc)
    live, dropped = live_rows(slots, g, pool.first_block)
    storage = _host_storage(driver, pool, layer)
    rows_k = _recast(driver.to_host(k), driver.xp.dtype(k), g.dtype)[live]
    rows_v = None if v is None else _recast(driver.to_host(v), driver.xp.dtype(v), g.dtype)[live]
    _scatter(kv_views(pool.layout, storage, g), slots[live], (rows_k, rows_v), g.block_size)
    for buffer, host in zip(pool.storage(layer), storage, strict=True):
        driver.store(buffer, host, None)
    _count(driver, pool.dropped_buffer, dropped)


def read_kv(driver: Driver, pool: Pool, layer: int, loc: WriteLoc) -> tuple[Array, Array]:
    """Default of ``Driver.read_kv``."""
    g, slots = pool.geometry, _slots(driver, pool, loc)
    live, dropped = live_rows(slots, g, pool.first_block)
    safe = np.where(live, slots, 0)
    out = []
    for view in kv_views(pool.layout, _host_storage(driver, pool, layer), g):
        rows = view[safe // g.block_size, safe % g.block_size]
        rows[~live] = 0
        out.append(driver.from_host(np.ascontiguousarray(rows), g.dtype))
    _count(driver, pool.dropped_buffer, dropped)
    return out[0], out[1]


def copy_kv(driver: Driver, pool: Pool, src: WriteLoc, dst: WriteLoc) -> None:
    """Default of ``Driver.copy_kv``."""
    g, source, target = pool.geometry, _slots(driver, pool, src), _slots(driver, pool, dst)
    live = live_rows(source, g, pool.first_block)[0] & live_rows(target, g, pool.first_block)[0]
    padded, bs = (source == PAD_SLOT) | (target == PAD_SLOT), g.block_size
    for layer in range(g.num_layers):
        storage = _host_storage(driver, pool, layer)
        views = kv_views(pool.layout, storage, g)
        rows = tuple(view[source[live] // bs, source[live] % bs] for view in views)
        _scatter(views, target[live], (rows[0], rows[1]), bs)
        for buffer, host in zip(pool.storage(layer), storage, strict=True):
            driver.store(buffer, host, None)
    _count(driver, pool.dropped_buffer, int((~live & ~padded).sum()))


def stage(
    driver: Driver,
    pool: Pool,
    layer: int,
    k: HostArray,
    v: HostArray | None,
    src_blocks: HostArray,
    dst_blocks: HostArray,
    tokens: int,
) -> None:
    """Default of ``Driver.stage``."""
    g, storage = pool.geometry, _host_storage(driver, pool, layer)
    for target, source in zip(kv_views(pool.layout, storage, g), (k, v), strict=True):
        if source is None:
            continue
        for i, (src, dst) in enumerate(zip(src_blocks, dst_blocks, strict=True)):
            n = min(g.block_size, tokens - i * g.block_size)
            target[dst, :n] = source[src, :n]
    for buffer, host in zip(pool.storage(layer), storage, strict=True):
        driver.store(buffer, host, None)


def paged_decode(driver: Driver, call: DecodeCall) -> tuple[Array, Array | None]:
    """Default of ``Driver.paged_decode``: online softmax over tiles of absolute positions, one (row, query) at a time.

    ``direct`` fetches the rows of a tile when their turn comes, ``gather`` all visible rows of a sequence first.
    """
    g, pool = call.pool.geometry, call.pool
    name = driver.xp.dtype(call.q)
    q = _float32(driver.to_host(call.q), name)
    table, visible = driver.to_host(call.table), driver.to_host(call.visible)
    sinks = None if call.sinks is None else driver.to_host(call.sinks)
    k_view, v_view = kv_views(pool.layout, _host_storage(driver, pool, call.layer), g)
    rows, query_len, heads, _ = q.shape
    out = np.zeros((rows, query_len, heads, g.value_dim), np.float32)
    lse = np.full((rows, query_len, heads), -np.inf, np.float32)
    invalid = 0
    if call.path == "gather":
        call.gathered()
    for b in range(rows):
        ends = [max(int(visible[b]) - (query_len - 1 - t), 0) for t in range(query_len)]
        starts = [0 if call.window is None else max(end - call.window, 0) for end in ends]
        invalid += _invalid_blocks(call, table[b], min(starts), max(ends))
        fetch = partial(_rows, call, table[b], (k_view, v_view))
        if call.path == "gather":
            fetch = partial(_slices, fetch(min(starts), max(ends)), min(starts))
        for t, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end > 0:
                out[b, t], lse[b, t] = _attend(q[b, t], fetch, start, end, call, sinks)
    _count(driver, pool.invalid_buffer, invalid)
    device_out = driver.from_host(_bits(out, name), name)
    return device_out, driver.from_host(lse, "float32") if call.return_lse else None


def _blocks(call: DecodeCall, row: HostArray, start: int, end: int) -> HostArray:
    """The block of each column that tokens ``start`` to ``end`` reach; -1 where it is none of the pool's."""
    g = call.pool.geometry
    low, high = start // g.block_size, -(-end // g.block_size)
    held = np.full(high - low, -1, np.int64)
    known = row[low : min(high, call.table_len)]
    held[: len(known)] = known
    return np.where((held >= call.pool.first_block) & (held < g.num_blocks), held, -1)


def _invalid_blocks(call: DecodeCall, row: HostArray, start: int, end: int) -> int:
    return int((_blocks(call, row, start, end) < 0).sum())


def _rows(
    call: DecodeCall, row: HostArray, views: tuple[HostArray, HostArray], start: int, end: int
) -> tuple[HostArray, HostArray]:
    """Keys ``[end - start, Hkv, D]`` and values of tokens of one sequence in float32, zero in invalid blocks."""
    g = call.pool.geometry
    position = np.arange(start, end)
    block = _blocks(call, row, start, end)[position // g.block_size - start // g.block_size]
    held = block >= 0
    found = []
    for view in views:
        made = np.zeros((end - start, *view.shape[2:]), np.float32)
        made[held] = _float32(view[block[held], position[held] % g.block_size], g.dtype)
        found.append(made)
    return found[0], found[1]


def _slices(gathered: tuple[HostArray, HostArray], first: int, start: int, end: int) -> tuple[HostArray, HostArray]:
    """The same of rows that were fetched before, from token ``first`` on."""
    return gathered[0][start - first : end - first], gathered[1][start - first : end - first]


def _attend(
    q: HostArray,
    fetch: Callable[[int, int], tuple[HostArray, HostArray]],
    start: int,
    end: int,
    call: DecodeCall,
    sinks: HostArray | None,
) -> tuple[HostArray, HostArray]:
    """One query ``[Hq, D]`` over tokens ``start`` to ``end``: (out ``[Hq, Dv]``, natural-log LSE ``[Hq]``)."""
    g = call.pool.geometry
    group = q.shape[0] // g.num_kv_heads
    m = np.full(q.shape[0], -np.inf, np.float32) if sinks is None else sinks.astype(np.float32)
    total = np.zeros_like(m) if sinks is None else np.ones_like(m)
    acc = np.zeros((q.shape[0], g.value_dim), np.float32)
    for low, high in pairwise([start, *range(start - start % TILE + TILE, end, TILE), end]):
        keys, values = fetch(low, high)
        k = np.repeat(keys, group, axis=1)
        scores = np.einsum("hd,thd->ht", q, k) * np.float32(call.scale)
        if call.softcap is not None:
            scores = np.float32(call.softcap) * np.tanh(scores / np.float32(call.softcap))
        new_m = np.maximum(m, scores.max(axis=1))
        p, shrink = np.exp(scores - new_m[:, None]), np.exp(m - new_m)
        total = total * shrink + p.sum(axis=1)
        acc = acc * shrink[:, None] + np.einsum("ht,thd->hd", p, np.repeat(values, group, axis=1))
        m = new_m
    return acc / total[:, None], m + np.log(total)


def merge_partials(driver: Driver, outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Default of ``Driver.merge_partials``."""
    name = driver.xp.dtype(outs[0])
    lse = np.stack([driver.to_host(x) for x in lses])
    out = np.stack([_float32(driver.to_host(x), name) for x in outs])
    peak = lse.max(axis=0)
    safe = np.where(np.isneginf(peak), 0.0, peak).astype(np.float32)
    empty, none = np.isneginf(lse), np.isneginf(peak)
    with np.errstate(invalid="ignore"):
        weight = np.where(empty, 0.0, np.where(lse == peak, 1.0, np.exp(lse - safe))).astype(np.float32)
        total = np.where(none, 1.0, weight.sum(axis=0)).astype(np.float32)
        merged = np.where(empty[..., None], 0.0, out * (weight / total)[..., None]).sum(axis=0).astype(np.float32)
        merged_lse = np.where(none, -np.inf, safe + np.log(total)).astype(np.float32)
    return driver.from_host(_bits(merged, name), name), driver.from_host(merged_lse, "float32")
