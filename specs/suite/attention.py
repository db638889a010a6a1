"""Attention in float64 and bfloat16 on the host, written from the contract and apart from every kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Rows = Callable[[Array, Array], tuple[Array, Array]]
"""K ``[n, Hkv, Dk]`` and V ``[n, Hkv, Dv]`` of the tokens at ``(block [n], offset [n])``; every block is one of the pool."""


@dataclass
class Attention:
    """``out [B, T, Hq, Dv]``, ``lse [B, T, Hq]``, invalid table entries met, and the largest visible |V|."""

    out: npt.NDArray[np.float64]
    lse: npt.NDArray[np.float64]
    invalid: int
    largest: float


def attend(
    q: Array,
    rows: Rows,
    table: Array,
    visible: Array,
    *,
    kv_heads: int,
    value_dim: int,
    table_len: int,
    first_block: int,
    num_blocks: int,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Attention:
    """Attention of ``q [B, T, Hq, Dk]``, one query and one head at a time.

    Query t of row b sees ``visible[b] - (T-1-t)`` keys. Blocks outside ``first_block`` to ``num_blocks - 1``, and columns of
    ``table [B, any]`` from ``table_len`` on, are rows of zeros that take part.
    """
    batch, query_len, heads, dim = q.shape
    group = heads // kv_heads
    result = Attention(
        np.zeros((batch, query_len, heads, value_dim)), np.full((batch, query_len, heads), -np.inf), 0, 1e-30
    )
    for b in range(batch):
        unheld: set[int] = set()
        for t in range(query_len):
            end = int(visible[b]) - (query_len - 1 - t)
            if end <= 0:
                continue
            positions = np.arange(0 if window is None else max(0, end - window), end)
            columns = positions // block_size
            block = np.full(len(positions), -1, np.int64)
            inside = columns < table_len
            block[inside] = table[b, columns[inside]]
            held = (block >= first_block) & (block < num_blocks)
            unheld.update(columns[~held].tolist())
            k, v = np.zeros((len(positions), kv_heads, dim)), np.zeros((len(positions), kv_heads, value_dim))
            k[held], v[held] = rows(block[held], positions[held] % block_size)
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


def values(stored: Array) -> Array:
    """float32 values, of the same shape, of host KV: float32, float16, or uint16 patterns of bfloat16."""
    return (
        stored.astype(np.float32)
        if stored.dtype != np.uint16
        else (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    )


def nearest(x: Array, dtype: str) -> Array:
    """float32, of the same shape: the nearest value of ``dtype`` to each float32, ties to even; beyond float16's range an infinity."""
    if dtype == "bfloat16":
        return values(round_to_bfloat16(x))
    if dtype == "float32":
        return x
    with np.errstate(over="ignore"):  # what float16 cannot hold is its infinity
        return x.astype(np.float16).astype(np.float32)


def upper_halves(x: Array) -> npt.NDArray[np.uint16]:
    """The upper 16 bits of each float32, uint16: a bfloat16 pattern, cut off and not rounded."""
    return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def round_to_bfloat16(x: Array) -> npt.NDArray[np.uint16]:
    """Nearest bfloat16 pattern of each float32 (no NaN) by the distance to both neighbours; a tie goes to the even one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    below = bits >> np.uint32(16)
    distance = (bits & np.uint32(0xFFFF)).astype(np.int64)
    up = (distance > 32768) | ((distance == 32768) & (below % 2 == 1))
    rounded: npt.NDArray[np.uint16] = (below + up).astype(np.uint16)
    return rounded
