"""Paged attention in float64, written from the contract and apart from the kernels: the measure of every kernel
test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
TOLERANCE = 5e-6
"""Largest error allowed, a fraction of the largest visible |V|. The contract grants bfloat16 8e-3; these kernels read
bfloat16
exactly and compute in float32, so they are held to the bound of float32."""


@dataclass
class Result:
    """What attention gives: out ``[B, T, Hq, Dv]``, lse ``[B, T, Hq]``, invalid blocks, and the largest visible |V|."""

    out: npt.NDArray[np.float64]
    lse: npt.NDArray[np.float64]
    invalid: int
    largest: float


def values(stored: Array) -> npt.NDArray[np.float64]:
    """Stored KV (float32, or uint16 with bfloat16 bits) as float64."""
    if stored.dtype == np.uint16:
        stored = (stored.astype(np.uint32) * np.uint32(65536)).view(np.float32)
    return stored.astype(np.float64)


def round_to_bfloat16(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Nearest bfloat16 bits by comparing both neighbours (no NaN); a tie goes to the even one."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    below = bits >> np.uint32(16)
    distance = (bits & np.uint32(0xFFFF)).astype(np.int64)
    up = (distance > 32768) | ((distance == 32768) & (below % 2 == 1))
    rounded: npt.NDArray[np.uint16] = (below + up).astype(np.uint16)
    return rounded


def attend(
    q: Array,
    k: Array,
    v: Array,
    table: Array,
    visible: Array,
    *,
    table_len: int,
    first_block: int,
    num_blocks: int,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Result:
    """Attention over strided views ``k [NB, BS, Hkv, Dk]`` and ``v [NB, BS, Hkv, Dv]``, one query and one head at a
    time."""
    batch, query_len, heads, _ = q.shape
    group = heads // k.shape[2]
    result = Result(
        np.zeros((batch, query_len, heads, v.shape[3])), np.full((batch, query_len, heads), -np.inf), 0, 1e-30
    )
    for b in range(batch):
        invalid = set()
        for t in range(query_len):
            end = int(visible[b]) - (query_len - 1 - t)
            if end <= 0:
                continue
            positions = np.arange(0 if window is None else max(0, end - window), end)
            columns = positions // block_size
            pages = np.array([table[b, c] if c < table_len else -1 for c in columns])
            held = (pages >= first_block) & (pages < num_blocks)
            invalid.update(columns[~held].tolist())
            keys = np.zeros((len(positions), *k.shape[2:]))
            rows = np.zeros((len(positions), *v.shape[2:]))
            keys[held] = values(k[pages[held], positions[held] % block_size])
            rows[held] = values(v[pages[held], positions[held] % block_size])
            result.largest = max(result.largest, float(np.abs(rows).max()))
            for h in range(heads):
                scores = keys[:, h // group] @ q[b, t, h].astype(np.float64) * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                logits = scores if sinks is None else np.append(scores, float(sinks[h]))
                peak = logits.max()
                total = np.exp(logits - peak).sum()
                result.out[b, t, h] = np.exp(scores - peak) @ rows[:, h // group] / total
                result.lse[b, t, h] = peak + np.log(total)
        result.invalid += len(invalid)
    return result
