"""Row operations of sampling: sums and thresholds whose bits depend on the row alone, random numbers, and the repetition penalty.

A device adds the elements of a tile in an order that follows from how the tile lies in registers, and that from what the compiler
knows of alignment. The kernels that add floats are therefore told nothing of their arguments (``general``), and the size of their
tiles follows from the width of the row: one order for one width.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton.language as tl

from .jit import jit, kernel
from .launching import Launch, cdiv, launch_now
from .spans import DEVICE_SPANS, SpanTiles


@kernel(general=("x", "row_step", "column_step", "out", "out_step", "num_rows", "width"))
def row_sum_kernel(
    x: tl.tensor,
    row_step: tl.tensor,
    column_step: tl.tensor,
    out: tl.tensor,
    out_step: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program: sums of ``ROWS`` rows; lane j adds elements j, j + COLUMNS, ..., then the lanes are added."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], x.dtype.element_ty)
    for start in range(0, width, COLUMNS):
        column = (start + lane).to(tl.int64)
        mask = (row < num_rows)[:, None] & (column < width)[None, :]
        part = tl.load(x + (row * row_step)[:, None] + (column * column_step)[None, :], mask=mask, other=0)
        sums = tl.add(sums, part, sanitize_overflow=False)
    tl.store(out + row * out_step, tl.sum(sums, 1), mask=row < num_rows)


def row_sum(x: Tensor, out: Tensor, *, tiles: SpanTiles = DEVICE_SPANS, launch: Launch = launch_now) -> None:
    """Sums over the last axis in x's type; the bits of a row's sum depend on its elements alone.

    Args:
        x: float32 or int32 (which wraps) ``[B, N]``, any strides.
        out: ``[B, 1]`` of the same type, any strides; written.

    Raises:
        ValueError: another type.
    """
    if x.dtype not in (torch.float32, torch.int32) or out.dtype != x.dtype:
        raise ValueError(f"row_sum: got {x.dtype} and out {out.dtype}, expected torch.float32 or torch.int32 of both")
    num_rows, width = x.shape
    if num_rows:
        rows = tiles.row_tile(num_rows, width) if x.dtype == torch.int32 else 1
        launch(
            row_sum_kernel,
            (cdiv(num_rows, rows),),
            x,
            x.stride(0),
            x.stride(1),
            out,
            out.stride(0),
            num_rows,
            width,
            ROWS=rows,
            COLUMNS=tiles.column_tile(width),
        )


@kernel(general=("falling", "row_step", "mass", "mass_step", "out", "out_step", "width"))
def mass_cutoff_kernel(
    falling: tl.tensor,
    row_step: tl.tensor,
    mass: tl.tensor,
    mass_step: tl.tensor,
    out: tl.tensor,
    out_step: tl.tensor,
    width: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """One program: one row, tile by tile until the sum is reached."""
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(mass + row * mass_step).to(tl.float64)
    lane = tl.arange(0, COLUMNS)
    before = tl.full((), 0.0, tl.float64)
    cutoff = tl.full((), float("-inf"), tl.float32)
    if wanted < float("inf"):
        for start in range(0, width, COLUMNS):
            if cutoff == float("-inf"):
                column = start + lane
                p = tl.load(falling + row * row_step + column, mask=column < width, other=0.0)
                wide = p.to(tl.float64)
                reached = (before + tl.cumsum(wide, 0) >= wanted) & (column < width)
                # The row falls, so the first element at which the sum is reached is the largest one behind which it is.
                cutoff = tl.max(tl.where(reached, p, float("-inf")), 0)
                before += tl.sum(wide, 0)
    tl.store(out + row * out_step, cutoff)


def mass_cutoff(
    falling: Tensor, mass: Tensor, out: Tensor, *, tiles: SpanTiles = DEVICE_SPANS, launch: Launch = launch_now
) -> None:
    """The largest element t of each row for which the elements ``>= t`` sum to ``mass`` or more; sums are float64.

    A row whose sum stays below its mass, or that has a NaN, gives -inf; so does a mass that is infinite or NaN, without a look at
    the row. The bits of a row's result depend on that row alone.

    Args:
        falling: float32 ``[B, N]``, not negative, each row contiguous and in falling order, NaN first (as a descending sort gives).
        mass: float32 ``[B, 1]``, any strides.
        out: float32 ``[B, 1]``, any strides; written.

    Raises:
        ValueError: rows that are not contiguous.
    """
    num_rows, width = falling.shape
    if width > 1 and falling.stride(1) != 1:
        raise ValueError(f"mass_cutoff: got rows with a step of {falling.stride(1)}, expected contiguous ones")
    if num_rows:
        launch(
            mass_cutoff_kernel,
            (num_rows,),
            falling,
            falling.stride(0),
            mass,
            mass.stride(0),
            out,
            out.stride(0),
            width,
            COLUMNS=tiles.column_tile(width),
        )


@jit
def _times(x: tl.tensor, factor: tl.constexpr) -> tl.tensor:
    """A product of uint32 that wraps."""
    return tl.mul(x, tl.full((), factor, tl.uint32), sanitize_overflow=False)


@kernel(general=("num_rows",))
def gumbel_kernel(
    keys: tl.tensor,
    key_step: tl.tensor,
    blocks: tl.tensor,
    out: tl.tensor,
    out_step: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program: variates of ``COLUMNS`` blocks for ``ROWS`` keys."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside, within = row < num_rows, column < width
    key = tl.load(keys + row * key_step, mask=inside, other=0).to(tl.uint32, bitcast=True)
    block = tl.load(blocks + column, mask=within, other=0).to(tl.uint32, bitcast=True)
    h = key[:, None] ^ block[None, :]
    h = tl.add(_times((h << 13) | (h >> 19), 5), 0xE6546B64, sanitize_overflow=False) ^ 8  # 8 bytes were hashed
    h = _times(h ^ (h >> 16), 0x85EBCA6B)
    h = _times(h ^ (h >> 13), 0xC2B2AE35)
    h = h ^ (h >> 16)
    # 31 bits, of which float32 holds up to 2^31 - 128; a half more excludes 0.
    u = (tl.minimum(h >> 1, 2147483520).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    # Near 0, where the largest variates come from, 1 - u would round u away: -log(1 - u) from its series.
    series = u * (1.0 + u * (0.5 + u * 0.3333333333333333))
    variates = -tl.log(tl.where(u < 0.00390625, series, -tl.log(1.0 - u)))
    tl.store(out + (row * out_step)[:, None] + column[None, :], variates, mask=inside[:, None] & within[None, :])


def gumbel(
    keys: Tensor, blocks: Tensor, out: Tensor, *, tiles: SpanTiles = DEVICE_SPANS, launch: Launch = launch_now
) -> None:
    """Standard Gumbel variates ``-log(-log(1 - u))``, u the upper 31 bits of a hash of key and block.

    The hash is what MurmurHash3_x86_32 (A. Appleby, public domain) does with its second and last block.

    Args:
        keys: int32 ``[B, 1]``, any strides: the state after the first block.
        blocks: int32 ``[1, N]``, contiguous: second blocks, mixed already.
        out: float32 ``[B, N]``, rows contiguous; written.
    """
    num_rows, width = out.shape
    if num_rows and width:
        rows, columns = tiles.row_tile(num_rows, width), tiles.column_tile(width)
        launch(
            gumbel_kernel,
            (cdiv(num_rows, rows), cdiv(width, columns)),
            keys,
            keys.stride(0),
            blocks,
            out,
            out.stride(0),
            num_rows,
            width,
            ROWS=rows,
            COLUMNS=columns,
        )


@kernel(general=("num_rows",))
def penalise_kernel(
    x: tl.tensor,
    row_step: tl.tensor,
    seen: tl.tensor,
    seen_step: tl.tensor,
    penalty: tl.tensor,
    penalty_step: tl.tensor,
    out: tl.tensor,
    out_step: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program: ``COLUMNS`` of ``ROWS`` rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < width)[None, :]
    words = tl.load(seen + (row * seen_step)[:, None] + (column >> 5)[None, :], mask=mask, other=0)
    held = ((words >> (column & 31).to(tl.int32)[None, :]) & 1) != 0
    values = tl.load(x + (row * row_step)[:, None] + column[None, :], mask=mask, other=0.0)
    factor = tl.load(penalty + row * penalty_step, mask=row < num_rows, other=1.0)[:, None]
    changed = tl.where(values < 0.0, values * factor, tl.div_rn(values, factor))
    tl.store(out + (row * out_step)[:, None] + column[None, :], tl.where(held, changed, values), mask=mask)


def penalise(
    x: Tensor,
    seen: Tensor,
    penalty: Tensor,
    out: Tensor,
    *,
    tiles: SpanTiles = DEVICE_SPANS,
    launch: Launch = launch_now,
) -> None:
    """Repetition penalty (Keskar et al. 2019): ``x / penalty`` where a column's bit is set, ``x * penalty`` where ``x < 0`` too.

    Args:
        x: float32 ``[B, N]``, rows contiguous.
        seen: int32 ``[B, ceil(N / 32)]``, rows contiguous; column c is bit ``c % 32`` of word ``c // 32``.
        penalty: float32 ``[B, 1]``, any strides.
        out: float32 ``[B, N]``, rows contiguous; written, may be ``x``. Where no bit is set it has the bits of ``x``.
    """
    num_rows, width = x.shape
    if num_rows and width:
        rows, columns = tiles.row_tile(num_rows, width), tiles.column_tile(width)
        launch(
            penalise_kernel,
            (cdiv(num_rows, rows), cdiv(width, columns)),
            x,
            x.stride(0),
            seen,
            seen.stride(0),
            penalty,
            penalty.stride(0),
            out,
            out.stride(0),
            num_rows,
            width,
            ROWS=rows,
            COLUMNS=columns,
        )
