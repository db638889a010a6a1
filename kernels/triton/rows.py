"""The doors: how KV rows enter and leave paged storage (clauses L1, W6, W8).

Storage is float32, bfloat16 or float16, seen through views ``[NB, BS, Hkv, D]`` of any strides. A slot is ``block * BS + offset``.
One rule for every door: slot -1 is padding and is passed over; a slot below ``first_slot`` (the sink) or outside ``[0, num_slots)``
is dropped and counted; nothing is ever wrapped or clamped. Addresses are computed in 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

import triton.language as tl

from .addresses import column_mask, row_offsets, row_steps, slot_offsets, slot_steps
from .bits import as_integers, recast
from .counting import add_count
from .jit import jit, kernel
from .launching import Empty, Launch, cdiv, launch_now
from .tiles import DEVICE_TILES, RowTiles

FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


@jit
def _served_rows(
    row: tl.tensor,
    slots: tl.tensor,
    slot_stride: tl.tensor,
    partners: tl.tensor,
    partner_stride: tl.tensor,
    dropped: tl.tensor,
    num_rows: tl.tensor,
    first_slot: tl.tensor,
    num_slots: tl.tensor,
) -> tl.tensor:
    """(slot, whether the row is moved) of rows. A row whose partner does not check is not moved; dropped ones are counted once."""
    inside = row < num_rows
    slot = tl.load(slots + row * slot_stride, mask=inside, other=-1)
    live = (slot >= first_slot) & (slot < num_slots)
    passed = live | (slot == -1)
    if partners is not None:
        partner = tl.load(partners + row * partner_stride, mask=inside, other=-1)
        partner_lives = (partner >= first_slot) & (partner < num_slots)
        # A pad in either place is no drop, whatever the other place holds.
        passed = (live & partner_lives) | (slot == -1) | (partner == -1)
        live = live & partner_lives
    if dropped is not None:
        if tl.program_id(1) == 0:
            add_count(dropped, tl.sum((passed == 0).to(tl.int64), 0))
    return slot.to(tl.int64), live


@kernel(general=("num_rows",))
def write_rows_kernel(
    k_view: tl.tensor,
    k_view_steps: tl.tuple,
    v_view: tl.tensor,
    v_view_steps: tl.tuple,
    slots: tl.tensor,
    slot_stride: tl.tensor,
    partners: tl.tensor,
    partner_stride: tl.tensor,
    k: tl.tensor,
    k_steps: tl.tuple,
    v: tl.tensor,
    v_steps: tl.tuple,
    dropped: tl.tensor,
    num_rows: tl.tensor,
    first_slot: tl.tensor,
    num_slots: tl.tensor,
    block_size: tl.tensor,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ALIKE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program: columns of ``ROWS`` rows of K and V into the storage; ``ALIKE``: both have the same sizes and strides."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot, live = _served_rows(
        row, slots, slot_stride, partners, partner_stride, dropped, num_rows, first_slot, num_slots
    )
    mask = column_mask(live, column, HEADS * K_DIM, HEADS * V_DIM, COLUMNS)
    source = row_offsets(row, column, k_steps, K_DIM)
    target = slot_offsets(slot, column, k_view_steps, block_size, K_DIM)
    bits = tl.load(as_integers(k) + source, mask=mask)
    tl.store(as_integers(k_view) + target, recast(bits, k.dtype.element_ty, k_view.dtype.element_ty), mask=mask)
    if v_view is not None:
        if not ALIKE:
            mask = column_mask(live, column, HEADS * V_DIM, HEADS * K_DIM, COLUMNS)
            source = row_offsets(row, column, v_steps, V_DIM)
            target = slot_offsets(slot, column, v_view_steps, block_size, V_DIM)
        bits = tl.load(as_integers(v) + source, mask=mask)
        tl.store(as_integers(v_view) + target, recast(bits, v.dtype.element_ty, v_view.dtype.element_ty), mask=mask)


@kernel(general=("num_rows",))
def read_rows_kernel(
    k_view: tl.tensor,
    k_view_steps: tl.tuple,
    v_view: tl.tensor,
    v_view_steps: tl.tuple,
    slots: tl.tensor,
    slot_stride: tl.tensor,
    partners: tl.tensor,
    partner_stride: tl.tensor,
    k: tl.tensor,
    k_steps: tl.tuple,
    v: tl.tensor,
    v_steps: tl.tuple,
    dropped: tl.tensor,
    num_rows: tl.tensor,
    first_slot: tl.tensor,
    num_slots: tl.tensor,
    block_size: tl.tensor,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ALIKE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program: columns of ``ROWS`` rows of K and V out of the storage; rows that are not there become zero."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot, live = _served_rows(
        row, slots, slot_stride, partners, partner_stride, dropped, num_rows, first_slot, num_slots
    )
    inside = row < num_rows
    held = column_mask(live, column, HEADS * K_DIM, HEADS * V_DIM, COLUMNS)
    written = column_mask(inside, column, HEADS * K_DIM, HEADS * V_DIM, COLUMNS)
    source = slot_offsets(slot, column, k_view_steps, block_size, K_DIM)
    target = row_offsets(row, column, k_steps, K_DIM)
    tl.store(as_integers(k) + target, tl.load(as_integers(k_view) + source, mask=held, other=0), mask=written)
    if v_view is not None:
        if not ALIKE:
            held = column_mask(live, column, HEADS * V_DIM, HEADS * K_DIM, COLUMNS)
            written = column_mask(inside, column, HEADS * V_DIM, HEADS * K_DIM, COLUMNS)
            source = slot_offsets(slot, column, v_view_steps, block_size, V_DIM)
            target = row_offsets(row, column, v_steps, V_DIM)
        tl.store(as_integers(v) + target, tl.load(as_integers(v_view) + source, mask=held, other=0), mask=written)


def expect_rows(what: str, view: Tensor | None, rows: Tensor | None, count: int) -> None:
    """Raise ValueError unless ``rows`` are ``count`` rows for ``view [NB, BS, Hkv, D]``, both of floats, or both are None."""
    if view is None and rows is None:
        return
    if view is None or rows is None:
        raise ValueError(f"{what}: got only one of view and rows, expected both or neither")
    expected = (count, *view.shape[2:])
    if tuple(rows.shape) != expected:
        raise ValueError(
            f"{what}: got rows {list(rows.shape)}, expected {list(expected)} for a view {list(view.shape)}"
        )
    for name, x in (("view", view), ("rows", rows)):
        if x.dtype not in FLOATS:
            raise ValueError(f"{what}: got a {name} of {x.dtype}, expected one of {', '.join(map(str, FLOATS))}")


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
        num_rows = slots.shape[0]
        expect_rows("k", self.k_view, k, num_rows)
        expect_rows("v", self.v_view, v, num_rows)
        heads, k_dim = k.shape[1:]
        v_dim = 0 if v is None else v.shape[2]
        k_steps, k_view_steps = row_steps(k), slot_steps(self.k_view)
        v_steps, v_view_steps = (
            None if v is None else row_steps(v),
            None if self.v_view is None else slot_steps(self.v_view),
        )
        rows, columns = self.tiles.row_tile(num_rows), self.tiles.column_tile(heads * max(k_dim, v_dim))
        if num_rows:
            self.launch(
                kernel,
                (cdiv(num_rows, rows), cdiv(heads * max(k_dim, v_dim), columns)),
                self.k_view,
                k_view_steps,
                self.v_view,
                v_view_steps,
                slots,
                slots.stride(0),
                partners,
                None if partners is None else partners.stride(0),
                k,
                k_steps,
                v,
                v_steps,
                dropped,
                num_rows,
                self.first_slot,
                self.num_slots,
                self.k_view.shape[1],
                HEADS=heads,
                K_DIM=k_dim,
                V_DIM=v_dim,
                ALIKE=(k_dim, k_steps, k_view_steps) == (v_dim, v_steps, v_view_steps),
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

    Raises:
        ValueError: rows whose shape or type does not fit the views; nothing was launched.
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
