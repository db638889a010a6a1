"""Paged decode attention in two stages: splits of each row's own length, then their reduction and the count of invalid blocks.

A query block is up to ``block_m`` rows (query t of T, query head g of a group) of one sequence and one KV head. Its programs share the
splits of its keys; a split runs through tiles of ``block_n`` keys with an online softmax in float32 (Milakov and Gimelshein 2018; split
over keys as in Flash-Decoding, Dao et al. 2023). Tiles and splits lie at absolute token positions and their length follows from the
row's own range of keys, so a row's bits depend neither on other rows nor on the number of programs or the width of the table. A row of
one split is written by the first stage, the partial results of other rows go through scratch to the second.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from .decode_config import DecodeTiles
from .decode_math import capped, row_splits
from .decode_reduce import LEAST, reduce_kernel
from .launching import Empty, Launch, cdiv, launch_now

MOST_TOKENS: Final = 2**30
"""Tokens of a row beyond these count as missing: 32-bit sums of positions and tile sizes stay exact."""


@triton.jit
def load_tile(pointers, held, DIM: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr):
    """Columns FIRST to FIRST + WIDTH of the rows at ``pointers [N, WIDTH]`` that are ``held [N]``, zeros elsewhere."""
    if FIRST + WIDTH <= DIM:
        return tl.load(pointers, mask=held[:, None], other=0.0)
    else:
        inside = FIRST + tl.arange(0, WIDTH) < DIM
        return tl.load(pointers, mask=held[:, None] & inside[None, :], other=0.0)


@triton.jit
def load_query(
    pointers, rows_held, DIM: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, IN_FLOAT32: tl.constexpr
):
    """The same of query rows, in float32 if so asked."""
    tile = load_tile(pointers, rows_held, DIM, WIDTH, FIRST)
    if IN_FLOAT32:
        return tile.to(tl.float32)
    else:
        return tile


@triton.jit
def products(queries, keys, USE_DOT: tl.constexpr, IN_FLOAT32: tl.constexpr):
    """Scores ``[M, N]`` in float32 of queries ``[M, D]`` and keys ``[N, D]``; ``M`` is 1 without USE_DOT."""
    if IN_FLOAT32:
        keys = keys.to(tl.float32)
    if USE_DOT:
        return tl.dot(queries, tl.trans(keys), input_precision="ieee")
    else:
        return tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)[None, :]


@triton.jit
def weighted(weights, values, total, USE_DOT: tl.constexpr, IN_FLOAT32: tl.constexpr):
    """``total [M, D] + weights [M, N] @ values [N, D]``, float32.

    Weights keep their precision beside values of two bytes: they are the sum of two numbers of that type.
    """
    if not USE_DOT:
        return total + tl.sum(tl.trans(weights) * values.to(tl.float32), 0)[None, :]
    elif IN_FLOAT32:
        return tl.dot(weights, values.to(tl.float32), total, input_precision="ieee")
    else:
        high = weights.to(values.dtype)
        low = (weights - high.to(tl.float32)).to(values.dtype)
        return tl.dot(low, values, tl.dot(high, values, total))


@triton.jit
def store_rows(pointers, tile, rows_held, DIM: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr):
    """Store the columns of ``tile [M, WIDTH]`` that are below DIM, in the rows that are ``rows_held [M]``."""
    held = rows_held[:, None]
    if FIRST + WIDTH > DIM:
        held = held & (FIRST + tl.arange(0, WIDTH) < DIM)[None, :]
    tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["table_tokens", "first_block", "num_blocks", "query_len", "window", "slots"])
def decode_kernel(
    q,
    k,
    v,
    table,
    visible,
    sinks,
    out,
    lse,
    part_out,
    part_lse,
    table_tokens,
    first_block,
    num_blocks,
    query_len,
    window,
    scale,
    softcap,
    slots,
    q_b,
    q_t,
    q_h,
    q_d,
    k_n,
    k_s,
    k_h,
    k_d,
    v_n,
    v_s,
    v_h,
    v_d,
    table_b,
    table_c,
    out_b,
    out_t,
    out_h,
    out_d,
    lse_b,
    lse_t,
    lse_h,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SINGLE_QUERY: tl.constexpr,
    QUERY_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_REST: tl.constexpr,
    V_MAIN: tl.constexpr,
    V_REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    USE_DOT: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    VALUES_LIKE_KEYS: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    UNIT_COLUMNS: tl.constexpr,
    MAY_SPLIT: tl.constexpr,
):
    """First stage. Grid: (batch rows x query blocks, KV heads, programs).

    VALUES_LIKE_KEYS: V's strides are K's. VALUES_IN_KEYS: V's tiles are columns of K's, which are loaded once.
    """
    # -- which rows ----------------------------------------------------------------------------------------------------
    pid = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    b = pid.to(tl.int64) if QUERY_BLOCKS == 1 else (pid // QUERY_BLOCKS).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    if QUERY_BLOCKS > 1:
        row += pid % QUERY_BLOCKS * BLOCK_M
    seen = tl.maximum(tl.load(visible + b), 0)
    if SINGLE_QUERY:
        row_held = row < GROUP
        head = kv_head * GROUP + row
        query = q + b * q_b
        end = seen
    else:
        row_held = row < query_len * GROUP
        t = tl.minimum(row // GROUP, query_len - 1)
        head = kv_head * GROUP + row % GROUP
        query = (q + b * q_b) + t.to(tl.int64) * q_t
        end = seen - (query_len - 1) + t

    # -- which keys: those from start to kept lie in the table, the others up to end are missing -------------------------
    if window is None:
        start = 0
    else:
        start = tl.maximum(end - window, 0)
    kept = tl.minimum(end, table_tokens)
    length = row_splits(start, kept, BLOCK_N, MIN_SPLIT, MAX_SPLITS)
    if SINGLE_QUERY:
        lowest, highest, final, shortest, longest = start, kept, end, length, length
    else:
        highest, final = tl.max(kept, 0), tl.max(end, 0)
        shortest, longest = tl.min(length, 0), tl.max(length, 0)
        lowest = 0 if window is None else tl.min(start, 0)

    # -- pointers to columns -------------------------------------------------------------------------------------------
    column = tl.arange(0, D_MAIN).to(tl.int64)
    value_column = column if V_MAIN == D_MAIN else tl.arange(0, V_MAIN).to(tl.int64)
    query += head * q_h
    queries = load_query(query[:, None] + (column * q_d)[None, :], row_held, HEAD_DIM, D_MAIN, 0, IN_FLOAT32)
    keys = (k + kv_head * k_h) + (column * k_d)[None, :]
    values = (v + kv_head * v_h) + (value_column * v_d)[None, :]
    if D_REST > 0:
        rest = D_MAIN + tl.arange(0, D_REST).to(tl.int64)
        queries_rest = load_query(
            query[:, None] + (rest * q_d)[None, :], row_held, HEAD_DIM, D_REST, D_MAIN, IN_FLOAT32
        )
        keys_rest = (k + kv_head * k_h) + (rest * k_d)[None, :]
    if V_REST > 0:
        value_rest = V_MAIN + tl.arange(0, V_REST).to(tl.int64)
        values_rest = (v + kv_head * v_h) + (value_rest * v_d)[None, :]
    table += b * table_b
    block_step = tl.cast(k_n, tl.int64)
    token_step = tl.cast(k_s, tl.int64)

    # Queries of one block may differ in the length of their splits: one pass for each.
    for split in range(shortest, longest + 1, BLOCK_N):
        first = start // split
        count = tl.maximum((kept + split - 1) // split - first, 1)
        opening, stop = lowest // split, 0
        if SINGLE_QUERY:
            stop = first + count
        else:
            stop = tl.max(first + count, 0)
        for s in range(opening + tl.program_id(2), stop, tl.num_programs(2)):
            begin = tl.maximum(s * split, lowest // BLOCK_N * BLOCK_N)
            until = tl.minimum(s * split + split, highest)
            peak = tl.full([BLOCK_M], LEAST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, V_MAIN], tl.float32)
            if V_REST > 0:
                acc_rest = tl.zeros([BLOCK_M, V_REST], tl.float32)

            # A sink and the missing keys, whose scores and values are 0, belong to a row's first split.
            if sinks is not None:
                sink = tl.load(sinks + head, mask=row_held & (s == first), other=float("-inf"))
                peak = tl.maximum(peak, sink)
                total = tl.exp(sink - peak)
            if final > table_tokens:
                missing = tl.where(s == first, end - tl.maximum(start, table_tokens), 0).to(tl.float32)
                above = tl.maximum(peak, 0.0)
                total = tl.where(missing > 0, total * tl.exp(peak - above) + missing * tl.exp(-above), total)
                peak = tl.where(missing > 0, above, peak)

            for low in range(begin, until, BLOCK_N):
                token = low + tl.arange(0, BLOCK_N)
                live = token < until
                if window is not None:
                    live = live & (token >= lowest)
                if UNIT_COLUMNS:
                    entries = table + token // BLOCK_SIZE
                else:
                    entries = table + (token // BLOCK_SIZE).to(tl.int64) * table_c
                block = tl.load(entries, mask=live, other=-1)
                held = (block >= first_block) & (block < num_blocks)
                offset = (block * block_step + token % BLOCK_SIZE * token_step)[:, None]
                key = load_tile(keys + offset, held, HEAD_DIM, D_MAIN, 0)
                score = products(queries, key, USE_DOT, IN_FLOAT32)
                if D_REST > 0:
                    key_rest = load_tile(keys_rest + offset, held, HEAD_DIM, D_REST, D_MAIN)
                    score += products(queries_rest, key_rest, USE_DOT, IN_FLOAT32)
                score *= scale
                if softcap is not None:
                    score = capped(score, softcap)
                if SINGLE_QUERY:
                    score = tl.where(live[None, :], score, float("-inf"))
                else:
                    sees = live[None, :] & (token[None, :] < end[:, None])
                    if window is not None:
                        sees = sees & (token[None, :] >= start[:, None])
                    score = tl.where(sees, score, float("-inf"))

                higher = tl.maximum(peak, tl.max(score, 1))
                shrink = tl.exp(peak - higher)
                weight = tl.exp(score - higher[:, None])
                total = total * shrink + tl.sum(weight, 1)
                peak = higher
                if not VALUES_LIKE_KEYS:
                    offset = (block * tl.cast(v_n, tl.int64) + token % BLOCK_SIZE * tl.cast(v_s, tl.int64))[:, None]
                if VALUES_IN_KEYS:
                    value = key
                else:
                    value = load_tile(values + offset, held, VALUE_DIM, V_MAIN, 0)
                acc = weighted(weight, value, acc * shrink[:, None], USE_DOT, IN_FLOAT32)
                if V_REST > 0:
                    if VALUES_IN_KEYS:
                        value_rest_tile = key_rest
                    else:
                        value_rest_tile = load_tile(values_rest + offset, held, VALUE_DIM, V_REST, V_MAIN)
                    acc_rest = weighted(weight, value_rest_tile, acc_rest * shrink[:, None], USE_DOT, IN_FLOAT32)

            # -- results: an empty row is 0 with LSE -inf, also beside a sink --------------------------------------------
            total = tl.where(end > 0, total, 1.0)
            row_lse = tl.where(end > 0, peak + tl.log(total), float("-inf"))
            acc = acc / total[:, None]
            if V_REST > 0:
                acc_rest = acc_rest / total[:, None]
            if SINGLE_QUERY:
                whole, part = row_held, row_held
                any_whole, any_part = count == 1, count > 1
            else:
                mine = row_held & (length == split) & (s >= first) & (s < first + count)
                whole, part = mine & (count == 1), mine & (count > 1)
                any_whole, any_part = True, stop - opening > 1
            if any_whole:
                result, result_lse = out + b * out_b, lse + b * lse_b
                if not SINGLE_QUERY:
                    result += t.to(tl.int64) * out_t
                    result_lse += t.to(tl.int64) * lse_t
                result = (result + head * out_h)[:, None]
                tl.store(result_lse + head * lse_h, row_lse, mask=whole)
                store_rows(result + (value_column * out_d)[None, :], acc, whole, VALUE_DIM, V_MAIN, 0)
                if V_REST > 0:
                    store_rows(result + (value_rest * out_d)[None, :], acc_rest, whole, VALUE_DIM, V_REST, V_MAIN)
            if MAY_SPLIT:
                if any_part:
                    place = b * HEADS * query_len + head
                    if not SINGLE_QUERY:
                        place += t.to(tl.int64) * HEADS
                    place = place * slots + (s - first)
                    tl.store(part_lse + place, row_lse, mask=part)
                    partial = (part_out + place * VALUE_DIM)[:, None]
                    store_rows(partial + value_column[None, :], acc, part, VALUE_DIM, V_MAIN, 0)
                    if V_REST > 0:
                        store_rows(partial + value_rest[None, :], acc_rest, part, VALUE_DIM, V_REST, V_MAIN)


def paged_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    invalid: torch.Tensor,
    *,
    table_len: int,
    first_block: int,
    num_blocks: int,
    scale: float,
    tiles: DecodeTiles,
    empty: Empty,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    count_table: torch.Tensor | None = None,
    count_first_block: int | None = None,
    count_num_blocks: int | None = None,
    values_in_keys: bool = False,
    launch: Launch = launch_now,
) -> None:
    """Attention of ``q [B, T, Hq, D]`` over a paged pool; query t of row b sees keys up to ``visible[b] - (T-1-t)``.

    Any strides are taken. A block outside ``first_block`` to ``num_blocks - 1``, and a column from ``table_len`` on, stands for keys and
    values of 0 that take part in the softmax; nothing is read there, nor behind the visible keys, nor before a window. A row without
    keys is 0 with LSE -inf, also beside a sink. No value of a tensor is read on the host.

    Args:
        q: float32, bfloat16 or float16 ``[B, T, Hq, D]``.
        k: keys ``[NB, BS, Hkv, D]`` in one of these dtypes, a view of a pool.
        v: values ``[NB, BS, Hkv, Dv]`` in the dtype of ``k``.
        table: int32 ``[B, at least table_len]``, blocks of each row.
        visible: int32 ``[B]``, keys that the last query of each row sees; negative ones count as 0.
        out: ``[B, T, Hq, Dv]`` in the dtype of ``q``; every element is written.
        lse: float32 ``[B, T, Hq]``, natural logarithms; every element is written.
        invalid: int32 ``[1]``; the entries that stand for no block are added, once for each table column that a row's queries see.
        table_len: columns of ``table`` that may be read.
        first_block: the first valid block id.
        num_blocks: the first id past the valid ones.
        scale: multiplies the products of queries and keys.
        tiles: tile sizes, which decide the bits; ``programs`` alone does not.
        empty: makes scratch: for partial results of rows of several splits, if the table can hold such rows.
        window: a query sees so many keys at most, its own counted.
        softcap: c: a score s becomes ``c * tanh(s / c)``.
        sinks: float32 ``[Hq]``: one logit more a head, in the denominator and the LSE alone.
        count_table: the table to count in, if not ``table`` (gathered rows have a table of their own).
        count_first_block: ``first_block`` for ``count_table``.
        count_num_blocks: ``num_blocks`` for ``count_table``.
        values_in_keys: ``v`` is the first Dv columns of ``k`` (LATENT), so that what is loaded as keys may serve as values.
        launch: launches the two kernels.

    Raises:
        ValueError: shapes or dtypes that do not belong together.
    """
    check(q, k, v, table, visible, out, lse, table_len, sinks)
    batch, query_len, heads, head_dim = q.shape
    block_size, kv_heads, value_dim = k.shape[1], k.shape[2], v.shape[3]
    if batch == 0:
        return
    group = heads // kv_heads
    query_blocks = cdiv(query_len * group, tiles.block_m)
    table_tokens = min(table_len * block_size, MOST_TOKENS)
    window = None if window is None else min(window, MOST_TOKENS)
    slots = most_splits(table_tokens, window, tiles)
    part_out, part_lse = out, lse  # not touched where no row can have several splits
    if slots > 1:
        part_out = empty((batch * query_len * heads, slots, value_dim), torch.float32)
        part_lse = empty((batch * query_len * heads, slots), torch.float32)
    same_pieces = all(piece in (0, own) for piece, own in zip(tiles.value_pieces, tiles.head_pieces, strict=True))
    launch(
        decode_kernel,
        (batch * query_blocks, kv_heads, max(1, min(tiles.programs, slots))),
        *(q, k, v, table, visible, sinks, out, lse, part_out, part_lse),
        *(table_tokens, first_block, num_blocks, query_len, window, scale, softcap, slots),
        *(*q.stride(), *k.stride(), *v.stride(), *table.stride(), *out.stride(), *lse.stride()),
        HEADS=heads,
        GROUP=group,
        SINGLE_QUERY=query_len == 1,
        QUERY_BLOCKS=query_blocks,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        D_MAIN=tiles.head_pieces[0],
        D_REST=tiles.head_pieces[1],
        V_MAIN=tiles.value_pieces[0],
        V_REST=tiles.value_pieces[1],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        MIN_SPLIT=tiles.min_split,
        MAX_SPLITS=tiles.max_splits,
        USE_DOT=tiles.use_dot,
        IN_FLOAT32=tiles.use_dot and (q.dtype != k.dtype or k.dtype == torch.float32),
        VALUES_LIKE_KEYS=v.stride()[:2] == k.stride()[:2],
        VALUES_IN_KEYS=values_in_keys and same_pieces,
        UNIT_COLUMNS=table.stride(1) == 1,
        MAY_SPLIT=slots > 1,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    counted = table if count_table is None else count_table
    counters = max(1, min(tiles.counters, cdiv(table_len, tiles.count_columns)))
    rows = batch * query_len * heads
    merging = cdiv(rows, tiles.reduce_rows) if slots > 1 else 1
    launch(
        reduce_kernel,
        (max(merging, cdiv(batch, tiles.count_rows)), counters),
        *(visible, counted, invalid, out, lse, part_out, part_lse),
        *(rows, batch, table_tokens, table_len),
        first_block if count_first_block is None else count_first_block,
        num_blocks if count_num_blocks is None else count_num_blocks,
        *(query_len, window, slots),
        *(*counted.stride(), *out.stride(), *lse.stride()),
        HEADS=heads,
        BLOCK_SIZE=block_size,
        VALUE_DIM=value_dim,
        V_MAIN=tiles.value_pieces[0],
        V_REST=tiles.value_pieces[1],
        BLOCK_N=tiles.block_n,
        MIN_SPLIT=tiles.min_split,
        MAX_SPLITS=tiles.max_splits,
        ROWS=tiles.reduce_rows,
        COUNT_ROWS=tiles.count_rows,
        COLUMNS=tiles.count_columns,
        MAY_SPLIT=slots > 1,
        num_warps=4,
    )


def most_splits(table_tokens: int, window: int | None, tiles: DecodeTiles) -> int:
    """Splits of the longest row that ``table_tokens`` and ``window`` allow; a window may begin and end within one."""
    tokens = table_tokens if window is None else min(table_tokens, window)
    length = max(cdiv(max(tokens, 1), tiles.max_splits * tiles.block_n) * tiles.block_n, tiles.min_split)
    return cdiv(max(tokens, 1), length) + (window is not None and table_tokens > tiles.min_split)


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    table_len: int,
    sinks: torch.Tensor | None,
) -> None:
    """Refuse arguments of :func:`paged_decode` whose shapes or dtypes would have a kernel read elsewhere.

    Raises:
        ValueError: what does not belong together.
    """
    batch, query_len, heads, head_dim = q.shape
    blocks, block_size, kv_heads, key_dim = k.shape
    wanted = {
        "v": ((blocks, block_size, kv_heads, v.shape[3]), k.dtype, v),
        "out": ((batch, query_len, heads, v.shape[3]), q.dtype, out),
        "lse": ((batch, query_len, heads), torch.float32, lse),
        "visible": ((batch,), torch.int32, visible),
        "sinks": ((heads,), torch.float32, sinks),
    }
    for name, (shape, dtype, x) in wanted.items():
        if x is not None and (tuple(x.shape) != shape or x.dtype != dtype):
            raise ValueError(f"{name}: got {x.dtype} {list(x.shape)}, expected {dtype} {list(shape)}")
    if key_dim != head_dim or heads % kv_heads:
        raise ValueError(
            f"k: got {kv_heads} heads of {key_dim}, q has {heads} of {head_dim}: no multiple, or another size"
        )
    if table.dtype != torch.int32 or table.shape[0] != batch or not 0 <= table_len <= table.shape[1]:
        raise ValueError(
            f"table: got {table.dtype} {list(table.shape)}, expected int32 [{batch}, at least table_len = {table_len}]"
        )
