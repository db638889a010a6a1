"""Addresses of rows in 64 bits (clause L1), by steps that a wrapper takes from the strides of a tensor.

A column counts on through the heads of a row, a slot through the tokens of a pool. What one more head or block adds to such a step is
its own number, so that an address needs a quotient and no remainder.
"""

from __future__ import annotations

from torch import Tensor

import triton.language as tl

from .jit import jit


def row_steps(rows: Tensor) -> tuple[int, int, int]:
    """Of rows ``[N, Hkv, D]``: elements from row to row, what one more head adds to a step of columns, from column to column."""
    row, head, dim = rows.stride()
    return row, head - rows.shape[2] * dim, dim


def slot_steps(view: Tensor) -> tuple[int, int, int, int]:
    """The same of a view ``[NB, BS, Hkv, D]`` by slots: what one more block adds to a step of slots comes first."""
    block, token, head, dim = view.stride()
    return block - view.shape[1] * token, token, head - view.shape[3] * dim, dim


@jit
def row_offsets(row: tl.tensor, column: tl.tensor, steps: tl.tuple, DIM: tl.constexpr) -> tl.tensor:
    """Offsets int64 ``[R, C]`` of elements ``column [C]`` of ``row [R]``, int64, by :func:`row_steps`."""
    along = column.to(tl.int64) * steps[2] + (column // DIM).to(tl.int64) * steps[1]
    return (row * steps[0])[:, None] + along[None, :]


@jit
def slot_offsets(
    slot: tl.tensor, column: tl.tensor, steps: tl.tuple, block_size: tl.tensor, DIM: tl.constexpr
) -> tl.tensor:
    """Offsets int64 ``[R, C]`` of elements ``column [C]`` of the rows at ``slot [R]``, int64, by :func:`slot_steps`."""
    along = column.to(tl.int64) * steps[3] + (column // DIM).to(tl.int64) * steps[2]
    return (slot * steps[1] + slot // block_size * steps[0])[:, None] + along[None, :]


@jit
def column_mask(
    rows: tl.tensor, column: tl.tensor, WIDTH: tl.constexpr, OTHER: tl.constexpr, COLUMNS: tl.constexpr
) -> tl.tensor:
    """``rows [R]`` that are true, at columns ``[C]`` below WIDTH; programs go as far as the wider of WIDTH and OTHER."""
    if WIDTH % COLUMNS == 0 and WIDTH >= OTHER:
        return rows[:, None]
    else:
        return rows[:, None] & (column < WIDTH)[None, :]
