"""Slots of token positions through block tables (clauses W1, W6)."""

from __future__ import annotations

from typing import Final

from torch import Tensor

import triton.language as tl

from .jit import jit
from .launching import Launch, cdiv, launch_now
from .tiles import DEVICE_TILES, RowTiles

INVALID_SLOT: Final = tl.constexpr(-2)
"""What a table entry or position that names no live row becomes: a slot that every door drops and counts."""


@jit
def slots_from_table_kernel(
    table: tl.tensor,
    table_strides: tl.tuple,
    positions: tl.tensor,
    position_strides: tl.tuple,
    slots: tl.tensor,
    count: tl.tensor,
    length: tl.tensor,
    table_len: tl.tensor,
    block_size: tl.tensor,
    first_block: tl.tensor,
    num_blocks: tl.tensor,
    ENTRIES: tl.constexpr,
) -> None:
    """One program: the slots of ``ENTRIES`` positions; ``length`` positions share a row of the table."""
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < count
    row, step = entry // length, entry % length
    position = tl.load(positions + row * position_strides[0] + step * position_strides[1], mask=inside, other=-1)
    column = position // block_size
    held = (position >= 0) & (column < table_len)
    block = tl.load(table + row * table_strides[0] + column.to(tl.int64) * table_strides[1], mask=held, other=-1)
    live = (block >= first_block) & (block < num_blocks)
    slot = tl.where(live, block * block_size + position % block_size, INVALID_SLOT)
    tl.store(slots + entry, tl.where(position == -1, -1, slot), mask=inside)


def slots_from_table(
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    table_len: int,
    block_size: int,
    first_block: int,
    num_blocks: int,
    tiles: RowTiles = DEVICE_TILES,
    launch: Launch = launch_now,
) -> None:
    """Slots of token positions through a block table.

    Args:
        table: int32 ``[B, width]``, any strides; only the first ``table_len`` columns are read.
        positions: int32 ``[B]`` or ``[B, T]``, any strides; -1 gives slot -1.
        slots: int32 ``[B * T]``, contiguous; written. A position without a live block gives :data:`INVALID_SLOT`.
        table_len: number of columns that are blocks.
        block_size: tokens a block.
        first_block: lowest live block id (1 with a sink, else 0), not negative.
        num_blocks: block ids from here on are invalid; ``num_blocks * block_size`` fits int32.
    """
    batch, length = positions.shape[0], positions.shape[1] if positions.ndim == 2 else 1
    strides = (positions.stride(0), positions.stride(1) if positions.ndim == 2 else 0)
    count = batch * length
    if count:
        launch(
            slots_from_table_kernel,
            (cdiv(count, tiles.entries),),
            table,
            tuple(table.stride()),
            positions,
            strides,
            slots,
            count,
            length,
            table_len,
            block_size,
            first_block,
            num_blocks,
            ENTRIES=tiles.entries,
        )
