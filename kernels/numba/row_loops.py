"""The loops behind the doors: bits, strided rows, and one plane (K or V) of paged storage at a time.

Memory arrives as addresses and byte strides (see :data:`View`); :mod:`.rows` makes them from arrays.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .address import (
    clear_bytes,
    load_i32,
    load_i64,
    load_u16,
    load_u32,
    move_bytes,
    store_i32,
    store_i64,
    store_u16,
    store_u32,
)
from .compiled import SOURCES, compiled, inner, int32, int64, uint16, uint32

View = tuple[int, int, int, int, int, int]
"""Strided KV memory: address, bytes per step along block (or row), token, head and d, bytes per element."""

Vector = tuple[int, int, int]
"""An integer vector: address, bytes per step, bytes per element."""

INVALID_SLOT: Final = -2
"""What a table entry or position that names no live row becomes: a slot that every door drops and counts."""


@inner
def load_int(vector: Vector, index: int) -> int:
    """Element ``index`` of an ``int32`` or ``int64`` vector, as 64 bits."""
    address = vector[0] + index * vector[1]
    return load_i64(address) if vector[2] == 8 else int64(load_i32(address))


@inner
def bf16_from_f32_bits(bits: int) -> int:
    """bfloat16 bits nearest to float32 bits, ties to even; a NaN stays a NaN and becomes quiet."""
    bits = uint32(bits)
    if (bits & uint32(0x7FFFFFFF)) > uint32(0x7F800000):
        return uint16((bits >> uint32(16)) | uint32(0x40))
    half = uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))
    return uint16(uint32(bits + half) >> uint32(16))


@inner
def copy_vector(
    target: int, target_step: int, target_size: int, source: int, source_step: int, source_size: int, n: int
) -> None:
    """Copy ``n`` elements between strided addresses, converting between float32 (4 bytes) and bfloat16 (2) where
    sizes differ."""
    if target_size == source_size:
        if target_step == target_size and source_step == source_size:
            move_bytes(target, source, n * target_size)
        elif target_size == 4:
            for i in range(n):
                store_u32(target + i * target_step, load_u32(source + i * source_step))
        else:
            for i in range(n):
                store_u16(target + i * target_step, load_u16(source + i * source_step))
    elif target_size == 2:
        for i in range(n):
            store_u16(target + i * target_step, bf16_from_f32_bits(load_u32(source + i * source_step)))
    else:
        for i in range(n):
            store_u32(target + i * target_step, uint32(load_u16(source + i * source_step)) << uint32(16))


@inner
def clear_vector(target: int, target_step: int, target_size: int, n: int) -> None:
    """Set ``n`` strided elements to zero."""
    if target_step == target_size:
        clear_bytes(target, n * target_size)
    elif target_size == 4:
        for i in range(n):
            store_u32(target + i * target_step, uint32(0))
    else:
        for i in range(n):
            store_u16(target + i * target_step, uint16(0))


@inner
def row_address(view: View, block_size: int, slot: int) -> int:
    """Address of head 0 of the row at ``slot``."""
    return view[0] + (slot // block_size) * view[1] + (slot % block_size) * view[2]


@inner
def copy_row(target: int, target_view: View, source: int, source_view: View, heads: int, dim: int) -> None:
    """Copy all heads of one row; only the head and d strides of the views are used."""
    packed = target_view[3] == dim * target_view[4] and source_view[3] == dim * source_view[4]
    if packed:
        heads, dim = 1, heads * dim
    for h in range(heads):
        at, of = target + h * target_view[3], source + h * source_view[3]
        copy_vector(at, target_view[4], target_view[5], of, source_view[4], source_view[5], dim)


@inner
def clear_row(target: int, target_view: View, heads: int, dim: int) -> None:
    """Zero all heads of one row."""
    for h in range(heads):
        clear_vector(target + h * target_view[3], target_view[4], target_view[5], dim)


@compiled
def write_plane(
    pool: View,
    rows: View,
    slots: Vector,
    n: int,
    block_size: int,
    heads: int,
    dim: int,
    first_slot: int,
    num_slots: int,
    _sources: int = SOURCES,
) -> int:
    """Write ``n`` rows into one plane (K or V); returns how many were dropped."""
    dropped = 0
    for i in range(n):
        slot = load_int(slots, i)
        if slot == -1:
            continue
        if slot < first_slot or slot >= num_slots or slot < 0:
            dropped += 1
            continue
        copy_row(row_address(pool, block_size, slot), pool, rows[0] + i * rows[1], rows, heads, dim)
    return dropped


@compiled
def read_plane(
    pool: View,
    rows: View,
    slots: Vector,
    n: int,
    block_size: int,
    heads: int,
    dim: int,
    first_slot: int,
    num_slots: int,
    _sources: int = SOURCES,
) -> int:
    """Read ``n`` rows of one plane; rows that are not there become zero. Returns how many were dropped."""
    dropped = 0
    for i in range(n):
        slot = load_int(slots, i)
        at = rows[0] + i * rows[1]
        if slot >= 0 and slot >= first_slot and slot < num_slots:
            copy_row(at, rows, row_address(pool, block_size, slot), pool, heads, dim)
        else:
            clear_row(at, rows, heads, dim)
            dropped += slot != -1
    return dropped


@compiled
def copy_plane(
    pool: View,
    held: View,
    origins: Vector,
    targets: Vector,
    n: int,
    block_size: int,
    heads: int,
    dim: int,
    first_slot: int,
    num_slots: int,
    _sources: int = SOURCES,
) -> int:
    """Copy ``n`` rows of one plane by way of ``held`` (``n`` rows), all reads before all writes. Returns how many pairs
    were dropped."""
    live = np.zeros(n, np.bool_)
    dropped = 0
    for i in range(n):
        source, target = load_int(origins, i), load_int(targets, i)
        if source == -1 or target == -1:
            continue
        lowest, highest = min(source, target), max(source, target)
        if lowest < 0 or lowest < first_slot or highest >= num_slots:
            dropped += 1
            continue
        live[i] = True
        copy_row(held[0] + i * held[1], held, row_address(pool, block_size, source), pool, heads, dim)
    for i in range(n):
        if live[i]:
            slot = load_int(targets, i)
            copy_row(row_address(pool, block_size, slot), pool, held[0] + i * held[1], held, heads, dim)
    return dropped


@compiled
def resolve_slots(
    table: tuple[int, int, int],
    positions: tuple[int, int, int],
    out: tuple[int, int],
    batch: int,
    length: int,
    table_len: int,
    block_size: int,
    first_block: int,
    num_blocks: int,
    _sources: int = SOURCES,
) -> None:
    """Slots of ``positions [B, T]`` through ``table [B, width]``; strides are those of row and column."""
    for b in range(batch):
        for t in range(length):
            position = int64(load_i32(positions[0] + b * positions[1] + t * positions[2]))
            slot = int64(INVALID_SLOT)
            if position == -1:
                slot = int64(-1)
            elif position >= 0 and position // block_size < table_len:
                page = int64(load_i32(table[0] + b * table[1] + (position // block_size) * table[2]))
                if page >= first_block and page < num_blocks:
                    slot = page * block_size + position % block_size
            at = out[0] + (b * length + t) * out[1]
            if out[1] == 8:
                store_i64(at, slot)
            else:
                store_i32(at, int32(slot))
