"""Kernels of the doors: rows into a pool, out of it, and within it (clauses W6, W8), and the transfer that fills blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from forebay.specs.dtypes import BITS_DTYPE, HostArray
from forebay.specs.errors import DeviceLost
from forebay.specs.geometry import KVGeometry, kv_views
from forebay.specs.write_loc import PAD_SLOT

from .arrays import SimArray
from .queue import Queue, checksum
from .views import View, rows_as_bits

COUNT_MAX: Final = 2**31 - 1
Views = list[View]


@dataclass(frozen=True)
class Plan:
    """What is static about a pool: its layout and geometry, and its first block that is no sink."""

    layout: str
    geometry: KVGeometry
    first_block: int

    def views(self, storage: Views) -> tuple[HostArray, HostArray]:
        """K and V ``[NB, BS, Hkv, D]`` of one layer's storage."""
        return kv_views(self.layout, tuple(view.bits for view in storage), self.geometry)

    def split(self, slots: HostArray) -> tuple[HostArray, HostArray, HostArray, HostArray]:
        """(live mask, counted-as-dropped mask, block and offset of each slot; those of dead slots are 0)."""
        g = self.geometry
        wide = slots.astype(np.int64)
        live = (wide >= self.first_block * g.block_size) & (wide < g.num_slots)
        safe = np.where(live, wide, 0)
        return live, ~live & (wide != PAD_SLOT), safe // g.block_size, safe % g.block_size


def add_count(counter: View, n: int) -> None:
    """Add to an int32 count that stays at its largest value."""
    if n:
        counter.bits[0] = min(int(counter.bits[0]) + n, COUNT_MAX)


def lower(outs: Views, ins: Views, plan: Plan, table_len: int) -> None:
    """Slots int32 ``[N]`` of positions through a table; a position without a block of the pool gets an id out of range."""
    g = plan.geometry
    table, positions = ins[0].bits, ins[1].bits.astype(np.int64)
    positions = positions[:, None] if positions.ndim == 1 else positions
    slots = np.full(positions.shape, g.num_slots, np.int64)
    columns = positions // g.block_size
    known = (positions >= 0) & (columns < table_len)
    rows = np.broadcast_to(np.arange(len(positions))[:, None], positions.shape)
    blocks = np.full(positions.shape, -1, np.int64)
    blocks[known] = table[rows[known], columns[known]]
    known &= (blocks >= 0) & (blocks < g.num_blocks)
    slots[known] = blocks[known] * g.block_size + positions[known] % g.block_size
    slots[positions == -1] = PAD_SLOT
    outs[0].bits[...] = np.minimum(slots, COUNT_MAX).reshape(-1)


def write(outs: Views, ins: list[View | None], plan: Plan) -> None:
    """Outs: the layer's storage, then the count of dropped rows. Ins: slots, k, v or None."""
    *storage, dropped = outs
    slots = ins[0]
    if slots is None:
        return
    live, lost, block, offset = plan.split(slots.bits)
    for view, rows in zip(plan.views(storage), ins[1:], strict=True):
        if rows is not None:
            view[block[live], offset[live]] = rows_as_bits(rows, plan.geometry.dtype)[live]
    add_count(dropped, int(lost.sum()))


def read(outs: Views, ins: Views, plan: Plan) -> None:
    """Outs: k, v, the count. Ins: slots, then the layer's storage."""
    slots, *storage = ins
    live, lost, block, offset = plan.split(slots.bits)
    for out, view in zip(outs[:2], plan.views(storage), strict=True):
        out.bits[...] = 0
        out.bits[live] = view[block[live], offset[live]]
    add_count(outs[2], int(lost.sum()))


def copy_rows(outs: Views, ins: Views, plan: Plan) -> None:
    """Outs: every layer's storage one behind another, then the count. Ins: source and target slots. Reads before it writes."""
    *storage, dropped = outs
    parts = len(storage) // plan.geometry.num_layers
    live, lost, block, offset = plan.split(ins[0].bits)
    into, lost_too, to_block, to_offset = plan.split(ins[1].bits)
    pad = (ins[0].bits == PAD_SLOT) | (ins[1].bits == PAD_SLOT)
    both = live & into
    for layer in range(plan.geometry.num_layers):
        views = plan.views(storage[layer * parts : (layer + 1) * parts])
        rows = [view[block[both], offset[both]] for view in views]
        for view, moved in zip(views, rows, strict=True):
            view[to_block[both], to_offset[both]] = moved
    add_count(dropped, int(((lost | lost_too) & ~pad).sum()))


@dataclass(frozen=True, eq=False)
class Staging:
    """Host blocks on their way to blocks of a pool: an upload and the kernel ``stage`` in one.

    Attributes:
        storage: the layer's arrays.
        blocks: int64 ``[n]`` target blocks.
        tokens: rows that are staged; those behind them keep their bytes.
        rows: K and V (or K alone in LATENT) as ``[n, BS, Hkv, D]`` host bytes of the queue's own.
    """

    storage: tuple[SimArray, ...]
    plan: Plan
    blocks: HostArray
    tokens: int
    rows: tuple[HostArray, ...]

    def do(self, queue: Queue) -> None:
        """Copy row by row, then hold a checksum of what lies in the pool against what was sent."""
        queue.begin("stage")
        position = np.arange(self.tokens)
        column, offset = position // self.plan.geometry.block_size, position % self.plan.geometry.block_size
        views = self.plan.views([View(x.memory(), x.dtype) for x in self.storage])[: len(self.rows)]
        arrives = slice(-(-self.tokens // 2) if queue.faults.upload() else 0, None)
        for view, rows in zip(views, self.rows, strict=True):
            sent = rows[column, offset]
            queue.bytes_up += sent.nbytes
            view[self.blocks[column[arrives]], offset[arrives]] = sent[arrives]
            if checksum(view[self.blocks[column], offset]) != checksum(sent):
                raise DeviceLost(
                    f"sim: {self.tokens} staged rows arrived torn in blocks {self.blocks.tolist()} (their checksum differs)"
                )


def compact(view: HostArray, blocks: HostArray, dtype: str) -> HostArray:
    """Host blocks by their own strides as one array of the queue's own, so that the caller's may be reused at once (clause S4)."""
    return np.array(view[blocks], BITS_DTYPE[dtype], order="C")
