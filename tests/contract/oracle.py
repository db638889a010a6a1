"""Attention in float64 over the KV that a pool stores, written from the contract and apart from every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.specs import Backend, KVGeometry, Pool

Array = npt.NDArray[Any]


@dataclass
class Attention:
    """``out [B, T, Hq, Dv]``, ``lse [B, T, Hq]``, invalid table entries met, and the largest visible |V|."""

    out: npt.NDArray[np.float64]
    lse: npt.NDArray[np.float64]
    invalid: int
    largest: float


def rows_at(layout: str, arrays: list[Array], g: KVGeometry, block: Array, offset: Array) -> tuple[Array, Array]:
    """K ``[n, Hkv, D]`` and V ``[n, Hkv, Dv]`` of the tokens at ``(block, offset)``, by each layout's own index formula."""
    if layout == "NHD":
        return arrays[0][block, offset], arrays[1][block, offset]
    if layout == "HND":
        return arrays[0][block, :, offset], arrays[1][block, :, offset]
    if layout == "KV2":
        return arrays[0][block, 0, offset], arrays[0][block, 1, offset]
    if layout == "PACKED":
        both = arrays[0][block, offset]
        return both[..., : g.head_dim], both[..., g.head_dim :]
    if layout == "LATENT":
        entry = arrays[0][block, offset]
        return entry, entry[..., : g.value_dim]
    raise ValueError(f"the oracle has no formula for layout {layout}")


def stored(backend: Backend, pool: Pool, layer: int) -> list[Array]:
    """What the device holds of one layer, as numpy (bfloat16 as exact float32)."""
    return [backend.fetch(buffer) for buffer in pool.storage(layer)]


def attend(
    pool: Pool,
    arrays: list[Array],
    q: Array,
    table: Array,
    visible: Array,
    *,
    table_len: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Attention:
    """Attention of ``q [B, T, Hq, D]``; query t of row b sees ``visible[b] - (T-1-t)`` keys, blocks that are none are zeros."""
    g, (rows, query_len, heads, dim) = pool.geometry, q.shape
    group = heads // g.num_kv_heads
    result = Attention(
        np.zeros((rows, query_len, heads, g.value_dim)), np.full((rows, query_len, heads), -np.inf), 0, 1e-30
    )
    scale = dim**-0.5 if scale is None else scale
    for b in range(rows):
        unheld: set[int] = set()
        for t in range(query_len):
            end = int(visible[b]) - (query_len - 1 - t)
            if end <= 0:
                continue
            positions = np.arange(max(end - window, 0) if window else 0, end)
            columns = positions // g.block_size
            block = np.full(len(positions), -1, np.int64)
            inside = columns < table_len
            block[inside] = table[b, columns[inside]]
            held = (block >= pool.first_block) & (block < g.num_blocks)
            unheld.update(columns[~held].tolist())
            k = np.zeros((len(positions), g.num_kv_heads, g.key_dim))
            v = np.zeros((len(positions), g.num_kv_heads, g.value_dim))
            k[held], v[held] = rows_at(pool.layout, arrays, g, block[held], positions[held] % g.block_size)
            result.largest = max(result.largest, float(np.abs(v).max()))
            for h in range(heads):
                scores = k[:, h // group] @ q[b, t, h].astype(np.float64) * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                logits = scores if sinks is None else np.append(scores, np.float64(sinks[h]))
                peak = logits.max()
                total = np.exp(logits - peak).sum()
                result.out[b, t, h] = np.exp(scores - peak) @ v[:, h // group] / total
                result.lse[b, t, h] = peak + np.log(total)
        result.invalid += len(unheld)
    return result


def upper_halves(x: Array) -> Array:
    """The upper 16 bits of each float32, uint16: a bfloat16 pattern, cut off and not rounded."""
    return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def values(stored: Array) -> Array:
    """float32 values of host KV: float32, or uint16 patterns of bfloat16."""
    return stored if stored.dtype == np.float32 else (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_to_bfloat16(x: Array) -> Array:
    """Nearest bfloat16 of finite float32, ties to even, as float32: found by comparing both neighbours."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    below = (bits & np.uint32(0xFFFF0000)).view(np.float32)
    above = ((bits & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    to_below, to_above = np.abs(x.astype(np.float64) - below), np.abs(above.astype(np.float64) - x)
    even = (bits >> np.uint32(16)) % 2 == 0
    return np.where((to_below < to_above) | ((to_below == to_above) & even), below, above).astype(np.float32)
