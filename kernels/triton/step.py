"""The choice of the next token without sampling: the place of the largest logit."""

from __future__ import annotations

import torch
from torch import Tensor

import triton.language as tl

from .bits import as_integers, float32_of
from .jit import jit, kernel
from .launching import Empty, Launch, cdiv, launch_now, power_of_two
from .spans import DEVICE_SPANS, SpanTiles


@jit
def _ranked(bits: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Floats as int32 in the same order: both zeros are 0, a NaN is above any number, and nothing is as low as ``-2^31 + 1``."""
    wide = float32_of(bits, TYPE).to(tl.int32, bitcast=True)
    size = wide & 0x7FFFFFFF
    return tl.where(size > 0x7F800000, 0x7FFFFFFF, tl.where(wide < 0, -size, size))


@kernel(general=("num_rows",))
def largest_places_kernel(
    x: tl.tensor,
    row_step: tl.tensor,
    column_step: tl.tensor,
    found: tl.tensor,
    found_step: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program: the first largest element among ``COLUMNS`` of ``ROWS`` rows; its place if ``LAST``, else rank and place."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    bits = tl.load(as_integers(x) + (row * row_step)[:, None] + (column * column_step)[None, :], mask=mask, other=0)
    ranks = tl.where(mask, _ranked(bits, x.dtype.element_ty), -0x7FFFFFFF).to(tl.int64)
    # Rank above, place below: of equal ranks the earlier place is larger, and one maximum decides on both.
    best = tl.max((ranks << 32) - column[None, :], 1)
    if LAST:
        tl.store(found + row * found_step, (-best).to(tl.int32), mask=row < num_rows)
    else:
        tl.store(found + row * found_step + tl.program_id(1), best, mask=row < num_rows)


@jit
def largest_of_parts_kernel(
    parts: tl.tensor, places: tl.tensor, place_step: tl.tensor, PARTS: tl.constexpr, WIDTH: tl.constexpr
) -> None:
    """One program: the place of the largest of ``PARTS`` of one row, as :func:`largest_places_kernel` left them."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, WIDTH)
    best = tl.max(tl.load(parts + row * PARTS + part, mask=part < PARTS, other=-0x7FFFFFFFFFFFFFFF), 0)
    tl.store(places + row * place_step, (-best).to(tl.int32))


def argmax_rows(
    x: Tensor,
    out: Tensor,
    *,
    empty: Empty,
    tiles: SpanTiles = DEVICE_SPANS,
    launch: Launch = launch_now,
) -> None:
    """The place of the first largest element of each row; a NaN is larger than any number.

    Args:
        x: float32, bfloat16 or float16 ``[B, N]``, any strides, N from 1 to ``2^31 - 1``.
        out: int32 ``[B]``, any stride; written.
        empty: gives scratch int64 ``[B, number of tiles of a row]`` where a row has more than one.

    Raises:
        ValueError: rows without elements.
    """
    num_rows, width = x.shape
    if not width:
        raise ValueError(f"argmax_rows: got rows {list(x.shape)}, expected at least one column")
    if not num_rows:
        return
    columns, rows = tiles.column_tile(width), tiles.row_tile(num_rows, width)
    parts = cdiv(width, columns)
    found = out if parts == 1 else empty((num_rows, parts), torch.int64)
    launch(
        largest_places_kernel,
        (cdiv(num_rows, rows), parts),
        x,
        x.stride(0),
        x.stride(1),
        found,
        found.stride(0),
        num_rows,
        width,
        LAST=parts == 1,
        ROWS=rows,
        COLUMNS=columns,
    )
    if parts > 1:
        launch(
            largest_of_parts_kernel,
            (num_rows,),
            found,
            out,
            out.stride(0),
            PARTS=parts,
            WIDTH=power_of_two(parts),
        )
