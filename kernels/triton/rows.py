"""The doors: how KV rows enter and leave paged storage (clauses L1, W6, W8).

Storage is float32, bfloat16 or float16, seen through views ``[NB, BS, Hkv, D]`` of any strides. A slot is ``block * BS + offset``.
One rule for every door: slot -1 is padding and is passed over; a slot below ``first_slot`` (the sink) or outside ``[0, num_slots)``
is dropped and counted; nothing is ever wrapped or clamped. Addresses are computed in 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from .bits import as_integers, recast
from .launching import Empty, Launch, launch_now

INVALID_SLOT: Final = tl.constexpr(-2)
"""What a table entry or position that names no live row becomes: a slot that every door drops and counts."""


@dataclass(frozen=True)
class RowTiles:
    """How much one program of a door does.

    Attributes:
        rows: rows of a program, a power of two.
        columns: at most so many of the ``Hkv * D`` elements of a row, a power of two.
        entries: entries of a table or list of ids that a program resolves, a power of two.
        fitted: fewer rows where a call has fewer: worth it where a masked lane costs as much as another, not where each
            size has to be compiled.
    """

    rows: int
    columns: int
    entries: int
    fitted: bool

    def row_tile(self, rows: int) -> int:
        """Rows of a program of a call of ``rows``."""
        return min(self.rows, triton.next_power_of_2(rows)) if self.fitted else self.rows

    def column_tile(self, columns: int) -> int:
        """Elements of a row that a program moves."""
        return min(self.columns, triton.next_power_of_2(columns))


DEVICE_TILES: Final = RowTiles(rows=4, columns=512, entries=128, fitted=False)
INTERPRETER_TILES: Final = RowTiles(rows=512, columns=1024, entries=1024, fitted=True)


@triton.jit
def slots_from_table_kernel(
    table: Any,
    table_strides: Any,
    positions: Any,
    position_strides: Any,
    slots: Any,
    count: Any,
    length: Any,
    table_len: Any,
    block_size: Any,
    first_block: Any,
    num_blocks: Any,
    ENTRIES: tl.constexpr,  # noqa: N803
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
            (triton.cdiv(count, tiles.entries),),
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


@triton.jit
def _served_rows(
    row: Any,
    slots: Any,
    slot_stride: Any,
    partners: Any,
    partner_stride: Any,
    num_rows: Any,
    first_slot: Any,
    num_slots: Any,
) -> Any:
    """(slot, whether the row is moved, whether it counts as dropped) of rows; a row whose partner does not check is not moved."""
    inside = row < num_rows
    slot = tl.load(slots + row * slot_stride, mask=inside, other=-1)
    live = (slot >= first_slot) & (slot < num_slots)
    padded = slot == -1
    if partners is not None:
        partner = tl.load(partners + row * partner_stride, mask=inside, other=-1)
        live = live & (partner >= first_slot) & (partner < num_slots)
        padded = padded | (partner == -1)
    return slot, live, (live | padded) == 0


@triton.jit
def _count_dropped(dropped: Any, counts: Any) -> None:
    """Add the dropped rows of this program to ``dropped``, unless another program of the same rows does."""
    if dropped is not None:
        number = tl.sum(counts.to(tl.int32), 0)
        tl.atomic_add(dropped, number, mask=(number > 0) & (tl.program_id(1) == 0))


@triton.jit
def _pool_offsets(slot: Any, block_size: Any, head: Any, dim: Any, strides: Any) -> Any:
    """Offsets ``[R, C]`` of elements ``(head, dim)`` ``[C]`` of the rows at ``slot [R]``."""
    row = (slot // block_size).to(tl.int64) * strides[0] + (slot % block_size).to(tl.int64) * strides[1]
    return row[:, None] + (head * strides[2] + dim * strides[3])[None, :]


@triton.jit
def _write_plane(
    view: Any,
    view_strides: Any,
    rows: Any,
    row_strides: Any,
    row: Any,
    slot: Any,
    live: Any,
    block_size: Any,
    HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
) -> None:
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head, dim = (column // DIM).to(tl.int64), (column % DIM).to(tl.int64)
    mask = live[:, None] & (column < HEADS * DIM)[None, :]
    source = rows + (row * row_strides[0])[:, None] + (head * row_strides[1] + dim * row_strides[2])[None, :]
    bits = recast(tl.load(as_integers(source), mask=mask), rows.dtype.element_ty, view.dtype.element_ty)
    target = view + _pool_offsets(slot, block_size, head, dim, view_strides)
    tl.store(as_integers(target), bits, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def write_rows_kernel(
    k_view: Any,
    k_view_strides: Any,
    v_view: Any,
    v_view_strides: Any,
    slots: Any,
    slot_stride: Any,
    partners: Any,
    partner_stride: Any,
    k: Any,
    k_strides: Any,
    v: Any,
    v_strides: Any,
    dropped: Any,
    num_rows: Any,
    first_slot: Any,
    num_slots: Any,
    block_size: Any,
    HEADS: tl.constexpr,  # noqa: N803
    K_DIM: tl.constexpr,  # noqa: N803
    V_DIM: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
) -> None:
    """One program: columns of ``ROWS`` rows of K and V into the storage."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot, live, lost = _served_rows(
        row, slots, slot_stride, partners, partner_stride, num_rows, first_slot, num_slots
    )
    _count_dropped(dropped, lost)
    _write_plane(k_view, k_view_strides, k, k_strides, row, slot, live, block_size, HEADS, K_DIM, COLUMNS)
    if v_view is not None:
        _write_plane(v_view, v_view_strides, v, v_strides, row, slot, live, block_size, HEADS, V_DIM, COLUMNS)


@triton.jit
def _read_plane(
    view: Any,
    view_strides: Any,
    rows: Any,
    row_strides: Any,
    row: Any,
    slot: Any,
    live: Any,
    num_rows: Any,
    block_size: Any,
    HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
) -> None:
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head, dim = (column // DIM).to(tl.int64), (column % DIM).to(tl.int64)
    within = (column < HEADS * DIM)[None, :]
    source = view + _pool_offsets(slot, block_size, head, dim, view_strides)
    bits = tl.load(as_integers(source), mask=live[:, None] & within, other=0)
    target = rows + (row * row_strides[0])[:, None] + (head * row_strides[1] + dim * row_strides[2])[None, :]
    tl.store(as_integers(target), bits, mask=(row < num_rows)[:, None] & within)


@triton.jit(do_not_specialize=["num_rows"])
def read_rows_kernel(
    k_view: Any,
    k_view_strides: Any,
    v_view: Any,
    v_view_strides: Any,
    slots: Any,
    slot_stride: Any,
    partners: Any,
    partner_stride: Any,
    k: Any,
    k_strides: Any,
    v: Any,
    v_strides: Any,
    dropped: Any,
    num_rows: Any,
    first_slot: Any,
    num_slots: Any,
    block_size: Any,
    HEADS: tl.constexpr,  # noqa: N803
    K_DIM: tl.constexpr,  # noqa: N803
    V_DIM: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
) -> None:
    """One program: columns of ``ROWS`` rows of K and V out of the storage; rows that are not there become zero."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot, live, lost = _served_rows(
        row, slots, slot_stride, partners, partner_stride, num_rows, first_slot, num_slots
    )
    _count_dropped(dropped, lost)
    _read_plane(k_view, k_view_strides, k, k_strides, row, slot, live, num_rows, block_size, HEADS, K_DIM, COLUMNS)
    if v_view is not None:
        _read_plane(v_view, v_view_strides, v, v_strides, row, slot, live, num_rows, block_size, HEADS, V_DIM, COLUMNS)


@dataclass(frozen=True)
class _Door:
    """One pool's views with the limits of its slots, and how its kernels are launched."""

    k_view: Tensor
    v_view: Tensor | None
    first_slot: int
    num_slots: int
    tiles: RowTiles
    launch: Launch

    def move(
        self,
        kernel: Any,
        slots: Tensor,
        partners: Tensor | None,
        k: Tensor,
        v: Tensor | None,
        dropped: Tensor | None,
    ) -> None:
        """Run ``kernel`` over all rows and columns."""
        num_rows, heads, k_dim = k.shape
        v_dim = 0 if v is None else v.shape[2]
        rows = self.tiles.row_tile(num_rows)
        columns = self.tiles.column_tile(heads * max(k_dim, v_dim))
        if num_rows:
            self.launch(
                kernel,
                (triton.cdiv(num_rows, rows), triton.cdiv(heads * max(k_dim, v_dim), columns)),
                self.k_view,
                tuple(self.k_view.stride()),
                self.v_view,
                None if self.v_view is None else tuple(self.v_view.stride()),
                slots,
                slots.stride(0),
                partners,
                None if partners is None else partners.stride(0),
                k,
                tuple(k.stride()),
                v,
                None if v is None else tuple(v.stride()),
                dropped,
                num_rows,
                self.first_slot,
                self.num_slots,
                self.k_view.shape[1],
                HEADS=heads,
                K_DIM=k_dim,
                V_DIM=v_dim,
                ROWS=rows,
                COLUMNS=columns,
            )


def write_rows(
    k_view: Tensor,
    v_view: Tensor | None,
    slots: Tensor,
    k: Tensor,
    v: Tensor | None,
    dropped: Tensor | None,
    *,
    first_slot: int,
    num_slots: int,
    tiles: RowTiles = DEVICE_TILES,
    launch: Launch = launch_now,
) -> None:
    """Write rows into paged storage; of rows that share a slot any one stays, element by element.

    Args:
        k_view: K storage ``[NB, BS, Hkv, Dk]``, float32, bfloat16 or float16, any strides; written.
        v_view: V storage ``[NB, BS, Hkv, Dv]`` likewise, or None where V lives in K's columns (LATENT).
        slots: int32 or int64 ``[N]``, any stride; -1 writes nothing.
        k: rows ``[N, Hkv, Dk]`` of any of the three types, any strides, rounded to nearest even; the same type keeps its bits.
        v: rows ``[N, Hkv, Dv]``, or None with ``v_view``.
        dropped: int32 ``[1]``, to which the number of dropped rows is added; None counts nothing.
        first_slot: lowest live slot (BS for a pool with a sink, else 0).
        num_slots: ``NB * BS``; slots from here on are dropped.
    """
    _Door(k_view, v_view, first_slot, num_slots, tiles, launch).move(write_rows_kernel, slots, None, k, v, dropped)


def read_rows(
    k_view: Tensor,
    v_view: Tensor | None,
    slots: Tensor,
    k_out: Tensor,
    v_out: Tensor | None,
    dropped: Tensor | None,
    *,
    first_slot: int,
    num_slots: int,
    tiles: RowTiles = DEVICE_TILES,
    launch: Launch = launch_now,
) -> None:
    """Read rows bit for bit into ``k_out [N, Hkv, Dk]`` and ``v_out [N, Hkv, Dv]`` of the storage's type, any strides.

    Every output row is written: a dropped slot (counted) and slot -1 (not counted) give a row of zeros. Other arguments as for
    :func:`write_rows`.
    """
    _Door(k_view, v_view, first_slot, num_slots, tiles, launch).move(
        read_rows_kernel, slots, None, k_out, v_out, dropped
    )


def copy_rows(
    k_view: Tensor,
    v_view: Tensor | None,
    src_slots: Tensor,
    dst_slots: Tensor,
    dropped: Tensor | None,
    *,
    first_slot: int,
    num_slots: int,
    empty: Empty,
    tiles: RowTiles = DEVICE_TILES,
    launch: Launch = launch_now,
) -> None:
    """Copy rows from slot to slot, bit for bit, as if every row were read before any is written.

    ``src_slots`` and ``dst_slots`` are int32 or int64 ``[N]``. A pair with -1 in either place copies nothing; a pair with a slot
    outside ``[first_slot, num_slots)`` copies nothing and counts once in ``dropped``. ``empty`` gives scratch for N rows of K and V.
    Other arguments as for :func:`write_rows`; a pool of several layers passes ``dropped`` for one of them.
    """
    door = _Door(k_view, v_view, first_slot, num_slots, tiles, launch)
    count = src_slots.shape[0]
    k = empty((count, *k_view.shape[2:]), k_view.dtype)
    v = None if v_view is None else empty((count, *v_view.shape[2:]), v_view.dtype)
    door.move(read_rows_kernel, src_slots, dst_slots, k, v, dropped)
    door.move(write_rows_kernel, dst_slots, src_slots, k, v, None)
