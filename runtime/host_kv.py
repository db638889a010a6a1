"""KV of one sequence in host memory: read from a pool through its door, brought to a pool through ``stage`` (clauses S1 to S4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.specs.backend import Backend
from forebay.specs.dtypes import BITS_DTYPE, HostArray, host_bits
from forebay.specs.pool import Pool
from forebay.specs.write_loc import BlockTable, WriteLoc


@dataclass(frozen=True, eq=False)
class HostKV:
    """KV of positions 0 to ``tokens - 1``.

    Attributes:
        layers: one array ``[n, 2, BS, Hkv, D]`` a layer in the pool's dtype (bfloat16 as uint16 bits); K and V are its ``[:, 0]`` and
            ``[:, 1]``, both strided. Rows behind ``tokens`` in the last block are never staged.
        tokens: rows that hold KV.
        dtype: the pool's.
    """

    layers: tuple[HostArray, ...]
    tokens: int
    dtype: str

    @property
    def num_blocks(self) -> int:
        """n."""
        return len(self.layers[0])

    @classmethod
    def read(cls, backend: Backend, pool: Pool, blocks: Sequence[int], tokens: int) -> HostKV:
        """Copy the first ``tokens`` rows of ``blocks`` to the host, bit for bit; waits for the device."""
        g = pool.geometry
        used = -(-tokens // g.block_size)
        slots = block_slots(blocks[:used], g.block_size)[:tokens]
        loc = WriteLoc.slots(slots, physical=True)
        layers = []
        for layer in range(g.num_layers):
            stored = np.zeros((used, 2, g.block_size, g.num_kv_heads, g.head_dim), BITS_DTYPE[g.dtype])
            for part, rows in enumerate(pool.read(layer, loc)):
                bits, _ = host_bits(backend.to_host(rows), g.dtype)
                flat = np.zeros((used * g.block_size, g.num_kv_heads, g.head_dim), bits.dtype)
                flat[:tokens] = bits
                stored[:, part] = flat.reshape(stored.shape[0], *stored.shape[2:])
            layers.append(stored)
        return cls(tuple(layers), tokens, g.dtype)

    def stage(self, backend: Backend, pool: Pool, blocks: Sequence[int]) -> None:
        """Bring the rows into ``blocks`` of ``pool``; rows of the last block behind them keep their bytes (clause S2)."""
        target = BlockTable(np.asarray(blocks[: self.num_blocks], np.int64), physical=True)
        for layer, stored in enumerate(self.layers):
            backend.stage(
                stored[:, 0],
                stored[:, 1],
                pool,
                layer,
                src_blocks=np.arange(self.num_blocks),
                dst_blocks=target,
                tokens=self.tokens,
                dtype=self.dtype,
                accept_strided=True,
            )


def block_slots(blocks: Sequence[int], block_size: int) -> HostArray:
    """Slots int32 of every row of ``blocks``, in order."""
    first = np.asarray(blocks, np.int32).reshape(-1, 1) * np.int32(block_size)
    return (first + np.arange(block_size, dtype=np.int32)).reshape(-1)
