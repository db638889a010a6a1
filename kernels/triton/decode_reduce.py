"""Second stage of paged decode: rows of several splits are merged in the order of their splits, and invalid blocks are counted."""

from __future__ import annotations

import triton.language as tl

from .counting import add_count
from .decode_math import LEAST, row_splits
from .jit import jit, kernel


@jit
def merge_tile(
    pointers: tl.tensor,
    acc: tl.tensor,
    shrink: tl.tensor,
    share: tl.tensor,
    there: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
) -> tl.tensor:
    """``acc * shrink + share * part`` of the columns of a partial result; what is not ``there [R]`` is not read."""
    held = there[:, None] & (FIRST + tl.arange(0, WIDTH) < DIM)[None, :]
    return acc * shrink[:, None] + share[:, None] * tl.load(pointers, mask=held, other=0.0)


@jit
def merge_rows(
    visible: tl.tensor, out: tl.tensor, lse: tl.tensor, part_out: tl.tensor, part_lse: tl.tensor, pid: tl.tensor,
    rows: tl.tensor, table_tokens: tl.tensor, query_len: tl.tensor, window: tl.tensor, slots: tl.tensor,
    out_b: tl.tensor, out_t: tl.tensor, out_h: tl.tensor, out_d: tl.tensor, lse_b: tl.tensor, lse_t: tl.tensor, lse_h: tl.tensor,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, V_MAIN: tl.constexpr, V_REST: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Merge those of ROWS rows (batch row, query, head) that have more than one split."""
    row = pid.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    query = row // HEADS
    b = query // query_len
    t = query % query_len
    end = tl.maximum(tl.load(visible + b, mask=row < rows, other=0), 0) - (query_len - 1 - t.to(tl.int32))
    if window is None:
        start = 0
    else:
        start = tl.maximum(end - window, 0)
    kept = tl.minimum(end, table_tokens)
    length = row_splits(start, kept, BLOCK_N, MIN_SPLIT, MAX_SPLITS)
    count = (kept + length - 1) // length - start // length
    most = tl.max(count, 0)
    if most > 1:
        column = tl.arange(0, V_MAIN).to(tl.int64)
        peak = tl.full([ROWS], LEAST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, V_MAIN], tl.float32)
        if V_REST > 0:
            rest = V_MAIN + tl.arange(0, V_REST).to(tl.int64)
            acc_rest = tl.zeros([ROWS, V_REST], tl.float32)
        several = count > 1
        for s in tl.range(0, most, loop_unroll_factor=4):
            place = row * slots + s
            part = tl.load(part_lse + place, mask=several & (s < count), other=float("-inf"))
            there = part > float("-inf")  # whatever the output of an empty part holds, it weighs nothing
            higher = tl.maximum(peak, part)
            shrink = tl.exp(peak - higher)
            share = tl.exp(part - higher)
            total = total * shrink + share
            peak = higher
            partial = (part_out + place * VALUE_DIM)[:, None]
            acc = merge_tile(partial + column[None, :], acc, shrink, share, there, VALUE_DIM, V_MAIN, 0)
            if V_REST > 0:
                acc_rest = merge_tile(
                    partial + rest[None, :], acc_rest, shrink, share, there, VALUE_DIM, V_REST, V_MAIN
                )
        head = row % HEADS
        result = ((out + b * out_b) + t * out_t + head * out_h)[:, None]
        acc = acc / total[:, None]
        held = several[:, None] & (column < VALUE_DIM)[None, :]
        tl.store(result + (column * out_d)[None, :], acc.to(out.dtype.element_ty), mask=held)
        if V_REST > 0:
            acc_rest = acc_rest / total[:, None]
            held = several[:, None] & (rest < VALUE_DIM)[None, :]
            tl.store(result + (rest * out_d)[None, :], acc_rest.to(out.dtype.element_ty), mask=held)
        tl.store((lse + b * lse_b) + t * lse_t + head * lse_h, peak + tl.log(total), mask=several)


@jit
def count_invalid(
    visible: tl.tensor, table: tl.tensor, invalid: tl.tensor, pid: tl.tensor, batch: tl.tensor, table_len: tl.tensor,
    first_block: tl.tensor, num_blocks: tl.tensor, query_len: tl.tensor, window: tl.tensor, table_b: tl.tensor, table_c: tl.tensor,
    BLOCK_SIZE: tl.constexpr, COUNT_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Add to ``invalid [1]`` the table entries that are no block of the pool, or missing, in the columns that a row's queries see."""
    b = pid.to(tl.int64) * COUNT_ROWS + tl.arange(0, COUNT_ROWS)
    end = tl.maximum(tl.load(visible + b, mask=b < batch, other=0), 0)
    if window is None:
        low = tl.zeros([COUNT_ROWS], tl.int32)
    else:
        low = tl.maximum(end - (query_len - 1) - window, 0) // BLOCK_SIZE
    high = (end - 1) // BLOCK_SIZE + (end > 0).to(tl.int32)
    # Missing blocks are counted by the first of the programs that share these rows, entries by whoever reads them.
    found = tl.where(tl.program_id(1) == 0, tl.maximum(high - tl.maximum(low, table_len), 0), 0)
    high = tl.minimum(high, table_len)
    step = tl.num_programs(1) * COLUMNS
    opening = tl.min(tl.where(low < high, low, table_len), 0) + tl.program_id(1) * COLUMNS
    for c in range(opening, tl.max(high, 0), step):
        column = (c + tl.arange(0, COLUMNS))[None, :]
        live = (column >= low[:, None]) & (column < high[:, None])
        entries = (table + b * table_b)[:, None] + column.to(tl.int64) * table_c
        block = tl.load(entries, mask=live, other=0)
        bad = live & ((block < first_block) | (block >= num_blocks))
        found += tl.sum(bad.to(tl.int32), 1)
    add_count(invalid, tl.sum(found.to(tl.int64), 0))


@kernel(
    general=(
        "rows",
        "batch",
        "table_tokens",
        "table_len",
        "first_block",
        "num_blocks",
        "query_len",
        "window",
        "slots",
    )
)
def reduce_kernel(
    visible: tl.tensor,
    table: tl.tensor,
    invalid: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    part_out: tl.tensor,
    part_lse: tl.tensor,
    rows: tl.tensor,
    batch: tl.tensor,
    table_tokens: tl.tensor,
    table_len: tl.tensor,
    first_block: tl.tensor,
    num_blocks: tl.tensor,
    query_len: tl.tensor,
    window: tl.tensor,
    slots: tl.tensor,
    table_b: tl.tensor,
    table_c: tl.tensor,
    out_b: tl.tensor,
    out_t: tl.tensor,
    out_h: tl.tensor,
    out_d: tl.tensor,
    lse_b: tl.tensor,
    lse_t: tl.tensor,
    lse_h: tl.tensor,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    V_MAIN: tl.constexpr,
    V_REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAY_SPLIT: tl.constexpr,
) -> None:
    """Grid: (programs for all rows, and for all batch rows to count in, programs that share the columns of a batch row).

    ``table`` is the one to count in. Without MAY_SPLIT no row can have several splits, and there is no scratch.
    """
    pid = tl.program_id(0)
    if MAY_SPLIT:
        if (tl.program_id(1) == 0) & (pid * ROWS < rows):
            merge_rows(
                visible, out, lse, part_out, part_lse, pid, rows, table_tokens, query_len, window, slots,
                out_b, out_t, out_h, out_d, lse_b, lse_t, lse_h,
                HEADS, VALUE_DIM, V_MAIN, V_REST, BLOCK_N, MIN_SPLIT, MAX_SPLITS, ROWS,
            )  # fmt: skip
    if pid * COUNT_ROWS < batch:
        count_invalid(
            visible, table, invalid, pid, batch, table_len, first_block, num_blocks, query_len, window,
            table_b, table_c, BLOCK_SIZE, COUNT_ROWS, COLUMNS,
        )  # fmt: skip
