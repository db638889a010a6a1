"""The gather path of attention: a sequence's visible rows, copied from paged storage to contiguous scratch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .address import load_i32
from .checks import Array
from .compiled import SOURCES, compiled, int64
from .row_loops import Vector, View, clear_row, copy_row, load_int
from .rows import vector_of, view_of


@compiled
def _gather(
    pool: View,
    scratch: View,
    table: tuple[int, int, int],
    visible: Vector,
    sizes: tuple[int, int, int, int, int],
    table_len: int,
    first_block: int,
    num_blocks: int,
    query_len: int,
    window: int,
    _sources: int = SOURCES,
) -> None:
    """Copy the rows that any query of a sequence sees, of one plane, to block ``b * table_len + column`` of
    ``scratch``."""
    batch, block_size, heads, dim, _ = sizes
    for b in range(batch):
        end = load_int(visible, b)
        begin = max(0, end - query_len + 1 - window) if window > 0 else 0
        end = min(end, table_len * block_size)
        position = begin
        while position < end:
            column = position // block_size
            stop = min(end, (column + 1) * block_size)
            page = int64(load_i32(table[0] + b * table[1] + column * table[2]))
            valid = page >= first_block and page < num_blocks
            for token in range(position - column * block_size, stop - column * block_size):
                at = scratch[0] + (b * table_len + column) * scratch[1] + token * scratch[2]
                if valid:
                    copy_row(at, scratch, pool[0] + page * pool[1] + token * pool[2], pool, heads, dim)
                else:
                    clear_row(at, scratch, heads, dim)
            position = stop


def prepare_gather_blocks(
    k_view: Array,
    v_view: Array,
    table: npt.NDArray[np.int32],
    visible: npt.NDArray[np.int32],
    k_scratch: Array,
    v_scratch: Array,
    *,
    table_len: int,
    first_block: int,
    num_blocks: int,
    query_len: int = 1,
    window: int | None = None,
) -> Callable[[], None]:
    """Resolve a :func:`gather_blocks` once; the returned callable gathers what the arrays hold when it is called."""
    block_size = k_view.shape[1]
    where = (table.__array_interface__["data"][0], *table.strides)
    lengths = vector_of(visible)
    blocks = [
        (view_of(pool), view_of(rows.reshape(-1, block_size, *rows.shape[2:])), (len(visible), *pool.shape[1:], 0))
        for pool, rows in ((k_view, k_scratch), (v_view, v_scratch))
    ]
    width = window or 0

    def gather(_alive: tuple[Array, ...] = (k_view, v_view, table, visible, k_scratch, v_scratch)) -> None:
        for pool, scratch, sizes in blocks:
            _gather(pool, scratch, where, lengths, sizes, table_len, first_block, num_blocks, query_len, width)

    return gather


def gather_blocks(
    k_view: Array,
    v_view: Array,
    table: npt.NDArray[np.int32],
    visible: npt.NDArray[np.int32],
    k_scratch: Array,
    v_scratch: Array,
    *,
    table_len: int,
    first_block: int,
    num_blocks: int,
    query_len: int = 1,
    window: int | None = None,
) -> None:
    """Copy each sequence's visible rows to contiguous scratch, in the storage's bits.

    ``k_scratch [B, table_len * BS, Hkv, Dk]`` and ``v_scratch [B, table_len * BS, Hkv, Dv]`` are contiguous; only
    rows that one of the ``query_len`` last positions of a sequence sees (within ``window``) are written. Blocks
    outside ``[first_block, num_blocks)`` become rows of zeros. ``table`` is int32 ``[B, width]`` with any strides,
    ``visible`` int32 ``[B]``.
    """
    prepare_gather_blocks(
        k_view,
        v_view,
        table,
        visible,
        k_scratch,
        v_scratch,
        table_len=table_len,
        first_block=first_block,
        num_blocks=num_blocks,
        query_len=query_len,
        window=window,
    )()
