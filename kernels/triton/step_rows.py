"""What a decode step does with each row beside attention: check it, advance it, and digest what it consumed (clauses C4, C5)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import triton.language as tl

from .jit import kernel
from .launching import Launch, cdiv, launch_now, power_of_two
from .spans import DEVICE_SPANS, SpanTiles
from .tiles import DEVICE_TILES, RowTiles


@kernel(general=("num_rows", "width"))
def accepted_rows_kernel(
    position: tl.tensor,
    visible: tl.tensor,
    epoch: tl.tensor,
    limit: tl.tensor,
    stamp: tl.tensor,
    steps: tl.tuple,
    table: tl.tensor,
    table_strides: tl.tuple,
    accepted: tl.tensor,
    accepted_step: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    block_size: tl.tensor,
    first_block: tl.tensor,
    num_blocks: tl.tensor,
    ROWS: tl.constexpr,
) -> None:
    """One program: ``ROWS`` rows; the page of a position is looked at where the table has a column for it."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    at = tl.load(position + row * steps[0], mask=inside, other=-1)
    seen = tl.load(visible + row * steps[1], mask=inside, other=0)
    own = tl.load(epoch + row * steps[2], mask=inside, other=0)
    end = tl.load(limit + row * steps[3], mask=inside, other=0)
    marked = tl.load(stamp + row * steps[4], mask=inside, other=0)
    column = at // block_size
    held = (at >= 0) & (column < width)
    page = tl.load(table + row * table_strides[0] + column.to(tl.int64) * table_strides[1], mask=held, other=-1)
    has_page = held & (page >= first_block) & (page < num_blocks)
    live = (marked == own) & (seen == tl.add(at, 1, sanitize_overflow=False)) & (at < end) & has_page
    tl.store(accepted + row * accepted_step, live, mask=inside)


def accepted_rows(
    position: Tensor,
    visible: Tensor,
    epoch: Tensor,
    limit: Tensor,
    stamp: Tensor,
    table: Tensor,
    accepted: Tensor,
    *,
    block_size: int,
    first_block: int,
    num_blocks: int,
    tiles: RowTiles = DEVICE_TILES,
    launch: Launch = launch_now,
) -> None:
    """Which rows may act: position not negative, stamp the epoch, visible one more than position, position below its limit and on a
    page that is a block of the pool.

    Args:
        position, visible, epoch, limit, stamp: int32 ``[B]``, any stride.
        table: int32 ``[B, width]`` of block ids, any strides.
        accepted: bool ``[B]``, any stride; written.
        block_size: tokens a block.
        first_block: lowest block id, not negative; from ``num_blocks`` on there are none.
    """
    rows = (position, visible, epoch, limit, stamp)
    num_rows, width = table.shape
    if num_rows:
        launch(
            accepted_rows_kernel,
            (cdiv(num_rows, tiles.entries),),
            *rows,
            tuple(x.stride(0) for x in rows),
            table,
            tuple(table.stride()),
            accepted,
            accepted.stride(0),
            num_rows,
            width,
            block_size,
            first_block,
            num_blocks,
            ROWS=tiles.entries,
        )


@kernel(general=("num_rows", "num_stops"))
def advance_rows_kernel(
    token: tl.tensor,
    position: tl.tensor,
    visible: tl.tensor,
    limit: tl.tensor,
    accepted: tl.tensor,
    next_token: tl.tensor,
    steps: tl.tuple,
    stop: tl.tensor,
    stop_strides: tl.tuple,
    token_out: tl.tensor,
    position_out: tl.tensor,
    visible_out: tl.tensor,
    out_steps: tl.tuple,
    num_rows: tl.tensor,
    num_stops: tl.tensor,
    ROWS: tl.constexpr,
    STOPS: tl.constexpr,
) -> None:
    """One program: ``ROWS`` rows with all their stop tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    held = tl.load(token + row * steps[0], mask=inside, other=0)
    at = tl.load(position + row * steps[1], mask=inside, other=-1)
    seen = tl.load(visible + row * steps[2], mask=inside, other=0)
    end = tl.load(limit + row * steps[3], mask=inside, other=0)
    acts = tl.load(accepted + row * steps[4], mask=inside, other=0) != 0
    chosen = tl.load(next_token + row * steps[5], mask=inside, other=0)
    place = tl.arange(0, STOPS)
    mask = inside[:, None] & (place < num_stops)[None, :]
    stops = tl.load(stop + (row * stop_strides[0])[:, None] + (place * stop_strides[1])[None, :], mask=mask, other=0)
    stopped = tl.max((mask & (stops == chosen[:, None])).to(tl.int32), 1) > 0
    behind = tl.add(at, 1, sanitize_overflow=False)
    retires = acts & ((behind >= end) | stopped)
    longer = tl.add(seen, 1, sanitize_overflow=False)
    tl.store(token_out + row * out_steps[0], tl.where(acts, chosen, held), mask=inside)
    tl.store(position_out + row * out_steps[1], tl.where(retires, -1, tl.where(acts, behind, at)), mask=inside)
    tl.store(visible_out + row * out_steps[2], tl.where(retires, 0, tl.where(acts, longer, seen)), mask=inside)


def advance_rows(
    token: Tensor,
    position: Tensor,
    visible: Tensor,
    limit: Tensor,
    accepted: Tensor,
    next_token: Tensor,
    stop: Tensor,
    out: Sequence[Tensor],
    *,
    tiles: RowTiles = DEVICE_TILES,
    launch: Launch = launch_now,
) -> None:
    """The state of each row behind a step: one that acted has the token it chose and is one further; one that reached its limit or
    chose a stop token is retired (position -1, visible 0); the others stay.

    Args:
        token, position, visible, limit, next_token: int32 ``[B]``, any stride.
        accepted: bool ``[B]``, any stride: which rows acted.
        stop: int32 ``[B, S]``, any strides.
        out: token, position and visible, int32 ``[B]`` each, any stride; written.
    """
    rows = (token, position, visible, limit, accepted, next_token)
    num_rows, num_stops = stop.shape
    columns = power_of_two(num_stops)
    per_program = max(tiles.entries // columns, 1)
    if num_rows:
        launch(
            advance_rows_kernel,
            (cdiv(num_rows, per_program),),
            *rows,
            tuple(x.stride(0) for x in rows),
            stop,
            tuple(stop.stride()),
            *out,
            tuple(x.stride(0) for x in out),
            num_rows,
            num_stops,
            ROWS=per_program,
            STOPS=columns,
        )


@kernel(general=("num_rows", "width"))
def digest_rows_kernel(
    values: tl.tensor,
    value_strides: tl.tuple,
    weights: tl.tensor,
    weight_step: tl.tensor,
    out: tl.tensor,
    out_step: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program: ``ROWS`` rows, ``COLUMNS`` of them at a time."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.int32)
    for start in range(0, width, COLUMNS):
        column = (start + lane).to(tl.int64)
        mask = (row < num_rows)[:, None] & (column < width)[None, :]
        places = (row * value_strides[0])[:, None] + (column * value_strides[1])[None, :]
        part = tl.load(values + places, mask=mask, other=0)
        weight = tl.load(weights + column * weight_step, mask=column < width, other=0)
        product = tl.mul(part, weight[None, :], sanitize_overflow=False)
        sums = tl.add(sums, product, sanitize_overflow=False)
    tl.store(out + row * out_step, tl.sum(sums, 1), mask=row < num_rows)


def digest_rows(
    values: Tensor,
    weights: Tensor,
    out: Tensor,
    *,
    tiles: SpanTiles = DEVICE_SPANS,
    launch: Launch = launch_now,
) -> None:
    """The sum of each row's elements times the weights of their columns, in int32 that wraps.

    Args:
        values: int32 ``[B, N]``, any strides.
        weights: int32 ``[N]``, any stride.
        out: int32 ``[B]``, any stride; written.
    """
    num_rows, width = values.shape
    if num_rows:
        rows = tiles.row_tile(num_rows, width)
        launch(
            digest_rows_kernel,
            (cdiv(num_rows, rows),),
            values,
            tuple(values.stride()),
            weights,
            weights.stride(0),
            out,
            out.stride(0),
            num_rows,
            width,
            ROWS=rows,
            COLUMNS=tiles.column_tile(width),
        )
