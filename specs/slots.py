"""Slot arithmetic on the host: lowering of tables to slots, and the checks of host-known ids (clauses W6, W8)."""

from __future__ import annotations

import numpy as np

from .dtypes import HostArray
from .errors import InvalidInput
from .geometry import KVGeometry
from .write_loc import IDLE_POSITION, PAD_SLOT


def lower_paged(table: HostArray, positions: HostArray, table_len: int, geometry: KVGeometry) -> HostArray:
    """Slots int64 ``[B*T]`` of ``positions [B]`` or ``[B, T]``.

    An idle position gives PAD_SLOT. A position past the table, or a block that is not in the pool, gives ``num_slots``: out of
    range, so that a door counts it and never writes it elsewhere. A block of the sink gives a slot of the sink.
    """
    bs = geometry.block_size
    pos = positions.reshape(len(positions), int(np.prod(positions.shape[1:]))).astype(np.int64)
    column = np.where(pos >= 0, pos // bs, 0)
    inside = (pos >= 0) & (column < table_len)
    reach = np.minimum(column, max(table.shape[1] - 1, 0))
    block = (
        np.take_along_axis(table, reach, axis=1).astype(np.int64)
        if table.shape[1]
        else np.full(pos.shape, -1, np.int64)
    )
    known = inside & (block >= 0) & (block < geometry.num_blocks)
    slots = np.where(known, block * bs + pos % bs, geometry.num_slots)
    return np.where(pos == IDLE_POSITION, PAD_SLOT, slots).reshape(-1)


def check_host_slots(slots: HostArray, geometry: KVGeometry, first_block: int, what: str, *, unique: bool) -> None:
    """Refuse host-known ids that are neither a pad, nor in the sink, nor a slot of the pool; refuse duplicates of a write.

    Raises:
        InvalidInput: naming the first bad row and id; nothing was written.
    """
    bad = (slots < PAD_SLOT) | (slots >= geometry.num_slots)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise InvalidInput(
            f"{what}: row {row} has slot {int(slots[row])}, expected 0 <= slot < {geometry.num_slots} "
            f"({geometry.num_blocks} blocks of {geometry.block_size}) or {PAD_SLOT} for a pad; nothing was written"
        )
    if unique:
        live = slots[slots >= first_block * geometry.block_size]
        values, counts = np.unique(live, return_counts=True)
        if (counts > 1).any():
            raise InvalidInput(
                f"{what}: slot {int(values[counts > 1][0])} is given to {int(counts.max())} rows of one call; "
                "each row needs its own slot; nothing was written"
            )


def live_rows(slots: HostArray, geometry: KVGeometry, first_block: int) -> tuple[HostArray, int]:
    """(mask of rows that reach the pool, how many others count as dropped; pads count as neither)."""
    live = (slots >= first_block * geometry.block_size) & (slots < geometry.num_slots)
    return live, int((~live & (slots != PAD_SLOT)).sum())
