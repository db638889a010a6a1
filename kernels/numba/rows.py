"""The doors: how KV rows enter and leave paged storage (clauses L1, W6, W8, W9).

Storage is ``float32``, or ``uint16`` that holds bfloat16 bit patterns, seen through strided views ``[NB, BS, Hkv,
D]``. A slot is ``block * BS + offset``. One rule for every door: slot -1 is padding and is passed over; a slot below
``first_slot`` (the sink) or outside ``[0, num_slots)`` is dropped and counted; nothing is ever wrapped or clamped.
Each door has a ``prepare_`` form that resolves addresses once and returns a callable: it acts on whatever the same
arrays hold at the time of the call.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .checks import Array, add_count, expect_indices, expect_int32, expect_storage
from .row_loops import INVALID_SLOT, Vector, View, copy_plane, read_plane, resolve_slots, write_plane

__all__ = [
    "INVALID_SLOT",
    "bf16_to_float32",
    "copy_rows",
    "float32_to_bf16",
    "prepare_copy_rows",
    "prepare_read_rows",
    "prepare_slots_from_table",
    "prepare_write_rows",
    "read_rows",
    "slots_from_table",
    "write_rows",
]


def view_of(view: Array | None) -> View:
    """Address, byte strides and element size of a KV view ``[NB, BS, Hkv, D]``; all zero for ``None``."""
    if view is None:
        return (0, 0, 0, 0, 0, 0)
    block, token, head, dim = view.strides
    return (view.__array_interface__["data"][0], block, token, head, dim, view.itemsize)


def rows_of(rows: Array | None) -> View:
    """Like :func:`view_of` for rows ``[N, Hkv, D]``: one row a block."""
    return view_of(None if rows is None else rows[:, None])


def vector_of(vector: Array) -> Vector:
    """Address, byte stride and element size of an integer vector."""
    return (vector.__array_interface__["data"][0], vector.strides[0], vector.itemsize)


Plane = tuple[View, View, int, int, int]


def _planes(k_view: Array, v_view: Array | None, k: Array, v: Array | None, n: int) -> list[Plane]:
    """(pool, rows, block_size, heads, dim) of the K plane and, where V has its own columns, of the V plane."""
    if (v_view is None) != (v is None):
        raise ValueError("v_view and v: got only one of them, expected both or neither")
    planes = []
    for name, pool, rows in (("k", k_view, k), ("v", v_view, v)):
        if pool is not None and rows is not None:
            expect_storage(f"{name}_view", pool, (k_view.shape[0], k_view.shape[1], k_view.shape[2], None))
            expect_storage(name, rows, (n, *pool.shape[2:]))
            planes.append((view_of(pool), rows_of(rows), pool.shape[1], pool.shape[2], pool.shape[3]))
    return planes


def prepare_write_rows(
    k_view: Array,
    v_view: Array | None,
    slots: Array,
    k: Array,
    v: Array | None,
    dropped: npt.NDArray[np.int32],
    *,
    first_slot: int,
    num_slots: int,
) -> Callable[[], None]:
    """Resolve a :func:`write_rows` once; the returned callable writes what the arrays hold when it is called."""
    expect_indices("slots", slots)
    where, n = vector_of(slots), len(slots)
    planes = _planes(k_view, v_view, k, v, n)

    # The default keeps the arrays alive: compiled code sees only their addresses.
    def write(_alive: tuple[Array | None, ...] = (k_view, v_view, slots, k, v)) -> None:
        count = 0
        for pool, rows, block_size, heads, dim in planes:
            count = write_plane(pool, rows, where, n, block_size, heads, dim, first_slot, num_slots)
        if count:
            add_count(dropped, count)

    return write


def write_rows(
    k_view: Array,
    v_view: Array | None,
    slots: Array,
    k: Array,
    v: Array | None,
    dropped: npt.NDArray[np.int32],
    *,
    first_slot: int,
    num_slots: int,
) -> None:
    """Write rows into paged storage, in order (of rows that share a slot the last one stays).

    Args:
        k_view: K storage ``[NB, BS, Hkv, Dk]``, float32 or uint16 (bfloat16 bits), any strides; written.
        v_view: V storage ``[NB, BS, Hkv, Dv]``, written, or ``None`` where V lives in K's columns (latent layouts).
        slots: int32 or int64 ``[N]``; -1 writes nothing.
        k: rows ``[N, Hkv, Dk]`` of either dtype; float32 into bfloat16 rounds to nearest even (a NaN stays one),
        equal dtypes
            copy bits.
        v: rows ``[N, Hkv, Dv]``, or ``None`` with ``v_view``.
        dropped: int32 ``[1]``; the number of dropped rows is added to it.
        first_slot: lowest live slot (``BS`` for a pool with a sink, else 0); slots below it are dropped.
        num_slots: ``NB * BS``; slots from here on are dropped.

    Raises:
        ValueError: an array of another dtype or shape; nothing was written.
    """
    prepare_write_rows(k_view, v_view, slots, k, v, dropped, first_slot=first_slot, num_slots=num_slots)()


def prepare_read_rows(
    k_view: Array,
    v_view: Array | None,
    slots: Array,
    k_out: Array,
    v_out: Array | None,
    dropped: npt.NDArray[np.int32],
    *,
    first_slot: int,
    num_slots: int,
) -> Callable[[], None]:
    """Resolve a :func:`read_rows` once; the returned callable reads what the arrays hold when it is called."""
    expect_indices("slots", slots)
    where, n = vector_of(slots), len(slots)
    planes = _planes(k_view, v_view, k_out, v_out, n)

    def read(_alive: tuple[Array | None, ...] = (k_view, v_view, slots, k_out, v_out)) -> None:
        count = 0
        for pool, rows, block_size, heads, dim in planes:
            count = read_plane(pool, rows, where, n, block_size, heads, dim, first_slot, num_slots)
        if count:
            add_count(dropped, count)

    return read


def read_rows(
    k_view: Array,
    v_view: Array | None,
    slots: Array,
    k_out: Array,
    v_out: Array | None,
    dropped: npt.NDArray[np.int32],
    *,
    first_slot: int,
    num_slots: int,
) -> None:
    """Read rows ``[N, Hkv, D]`` from paged storage into ``k_out`` and ``v_out``; arguments as for :func:`write_rows`.

    Every output row is written: a dropped slot (counted) and slot -1 (not counted) give a row of zeros. Outputs of
    the storage's dtype receive its bits; float32 outputs of bfloat16 storage receive the exact values.
    """
    prepare_read_rows(k_view, v_view, slots, k_out, v_out, dropped, first_slot=first_slot, num_slots=num_slots)()


def prepare_copy_rows(
    k_view: Array,
    v_view: Array | None,
    src_slots: Array,
    dst_slots: Array,
    dropped: npt.NDArray[np.int32],
    *,
    first_slot: int,
    num_slots: int,
) -> Callable[[], None]:
    """Resolve a :func:`copy_rows` once; the returned callable copies what the arrays hold when it is called."""
    expect_indices("src_slots", src_slots)
    expect_indices("dst_slots", dst_slots, len(src_slots))
    origins, targets, n = vector_of(src_slots), vector_of(dst_slots), len(src_slots)
    k_held = np.empty((n, *k_view.shape[2:]), k_view.dtype)
    v_held = None if v_view is None else np.empty((n, *v_view.shape[2:]), v_view.dtype)
    planes = _planes(k_view, v_view, k_held, v_held, n)

    def copy(_alive: tuple[Array | None, ...] = (k_view, v_view, src_slots, dst_slots, k_held, v_held)) -> None:
        count = 0
        for pool, held, block_size, heads, dim in planes:
            count = copy_plane(pool, held, origins, targets, n, block_size, heads, dim, first_slot, num_slots)
        if count:
            add_count(dropped, count)

    return copy


def copy_rows(
    k_view: Array,
    v_view: Array | None,
    src_slots: Array,
    dst_slots: Array,
    dropped: npt.NDArray[np.int32],
    *,
    first_slot: int,
    num_slots: int,
) -> None:
    """Copy rows from slot to slot, bit for bit, as if every row were read before any is written.

    ``src_slots`` and ``dst_slots`` are int32 or int64 ``[N]``. A pair with -1 in either place copies nothing; a pair
    with a slot outside ``[first_slot, num_slots)`` copies nothing and counts once in ``dropped`` (int32 ``[1]``).
    """
    prepare_copy_rows(k_view, v_view, src_slots, dst_slots, dropped, first_slot=first_slot, num_slots=num_slots)()


def prepare_slots_from_table(
    table: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    table_len: int,
    block_size: int,
    first_block: int,
    num_blocks: int,
    out: Array,
) -> Callable[[], None]:
    """Resolve a :func:`slots_from_table` once; the returned callable reads what the arrays hold when it is called."""
    if out.itemsize == 4 and num_blocks * block_size > 2**31:
        raise ValueError(f"slots of {num_blocks} blocks of {block_size} tokens do not fit int32; pass an int64 out")
    grid = positions if positions.ndim == 2 else positions[:, None]
    expect_int32("positions", grid, (None, None))
    expect_int32("table", table, (grid.shape[0], None))
    expect_indices("out", out, grid.size)
    where = (table.__array_interface__["data"][0], *table.strides)
    what = (grid.__array_interface__["data"][0], *grid.strides)
    target = (out.__array_interface__["data"][0], out.itemsize)
    batch, length = grid.shape
    if table_len > table.shape[1]:
        raise ValueError(f"table_len: got {table_len}, expected at most the table's width {table.shape[1]}")
    if not out.flags.c_contiguous:
        raise ValueError("out: got a strided array, expected a contiguous one")

    def resolve(_alive: tuple[Array, ...] = (table, positions, out)) -> None:
        resolve_slots(where, what, target, batch, length, table_len, block_size, first_block, num_blocks)

    return resolve


def slots_from_table(
    table: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    table_len: int,
    block_size: int,
    first_block: int,
    num_blocks: int,
    out: Array,
) -> None:
    """Slots of token positions through a block table.

    Args:
        table: int32 ``[B, width]``, any strides; only the first ``table_len`` columns are read.
        positions: int32 ``[B]`` or ``[B, T]``, any strides; -1 gives slot -1.
        table_len: number of columns that are blocks.
        block_size: tokens per block.
        first_block: lowest live block id (1 with a sink, else 0).
        num_blocks: block ids from here on are invalid.
        out: int32 or int64, contiguous, ``B * T`` elements; written. A position without a live block gives
            :data:`INVALID_SLOT`, which every door drops and counts.

    Raises:
        ValueError: an array of another dtype or shape; ``out`` too small a type for the pool, or strided.
    """
    prepare_slots_from_table(table, positions, table_len, block_size, first_block, num_blocks, out)()


def float32_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """bfloat16 bit patterns nearest to ``values`` (any shape), ties to even; NaN stays NaN and becomes quiet."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet, rounded).astype(np.uint16).reshape(values.shape)


def bf16_to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The exact float32 values of bfloat16 bit patterns (any shape)."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
