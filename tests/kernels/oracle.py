"""What the kernels are measured by: attention and values of strided views, in float64."""

from __future__ import annotations

from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from forebay.specs.suite import attention
from forebay.specs.suite.attention import Array, Attention

TOLERANCE = 5e-6
"""Largest error allowed, a fraction of the largest visible |V|. The contract grants bfloat16 8e-3; these kernels read
bfloat16 exactly and compute in float32, so they are held to the bound of float32."""


class Options(TypedDict):
    """What the kernel and the oracle take beside arrays: where blocks lie, and the parameters of attention."""

    table_len: int
    first_block: int
    num_blocks: int
    block_size: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Array | None


def values(stored: Array) -> npt.NDArray[np.float64]:
    """Stored KV (float32, or uint16 with bfloat16 bits) as float64."""
    return attention.values(stored).astype(np.float64)


def attend(q: Array, k: Array, v: Array, table: Array, visible: Array, **options: Unpack[Options]) -> Attention:
    """Attention over strided views ``k [NB, BS, Hkv, Dk]`` and ``v [NB, BS, Hkv, Dv]``."""

    def rows(block: Array, offset: Array) -> tuple[Array, Array]:
        return attention.values(k[block, offset]), attention.values(v[block, offset])

    return attention.attend(q, rows, table, visible, kv_heads=k.shape[2], value_dim=v.shape[3], **options)
