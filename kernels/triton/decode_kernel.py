"""First stage of paged decode: one query block over its share of the splits of its keys.

The softmax over the tiles of a split is the online one of Milakov and Gimelshein (2018), with scores, weights and sums in float32.
"""

from __future__ import annotations

import triton.language as tl

from .decode_math import LEAST, capped, row_splits
from .jit import jit, kernel


@jit
def load_tile(
    pointers: tl.tensor, held: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr
) -> tl.tensor:
    """Columns FIRST to FIRST + WIDTH of the rows at ``pointers [N, WIDTH]`` that are ``held [N]``, zeros elsewhere."""
    if FIRST + WIDTH <= DIM:
        return tl.load(pointers, mask=held[:, None], other=0.0)
    else:
        inside = FIRST + tl.arange(0, WIDTH) < DIM
        return tl.load(pointers, mask=held[:, None] & inside[None, :], other=0.0)


@jit
def load_query(
    pointers: tl.tensor,
    rows_held: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
) -> tl.tensor:
    """The same of query rows, in float32 if so asked."""
    tile = load_tile(pointers, rows_held, DIM, WIDTH, FIRST)
    if IN_FLOAT32:
        return tile.to(tl.float32)
    else:
        return tile


@jit
def products(queries: tl.tensor, keys: tl.tensor, USE_DOT: tl.constexpr, IN_FLOAT32: tl.constexpr) -> tl.tensor:
    """Scores ``[M, N]`` in float32 of queries ``[M, D]`` and keys ``[N, D]``; ``M`` is 1 without USE_DOT."""
    if IN_FLOAT32:
        keys = keys.to(tl.float32)
    if USE_DOT:
        return tl.dot(queries, tl.trans(keys), input_precision="ieee")
    else:
        return tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)[None, :]


@jit
def weighted(
    weights: tl.tensor, values: tl.tensor, total: tl.tensor, USE_DOT: tl.constexpr, IN_FLOAT32: tl.constexpr
) -> tl.tensor:
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


@jit
def not_finite(tile: tl.tensor, rows: tl.tensor) -> tl.tensor:
    """1 if one of ``rows [M]`` holds NaN or an infinity in ``tile [M, D]``, else 0.

    In one dimension: by rows, Triton 3.7 does not compile it for sm_100 where ``tile`` lies in tensor memory.
    """
    strange = rows[:, None] & ((tl.abs(tile) < float("inf")) == 0)
    return tl.max(tl.reshape(strange.to(tl.int32), [tile.shape[0] * tile.shape[1]], can_reorder=True), 0)


@jit
def store_rows(
    pointers: tl.tensor,
    tile: tl.tensor,
    rows_held: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
) -> tl.tensor:
    """Store the columns of ``tile [M, WIDTH]`` that are below DIM, in the rows that are ``rows_held [M]``."""
    held = rows_held[:, None]
    if FIRST + WIDTH > DIM:
        held = held & (FIRST + tl.arange(0, WIDTH) < DIM)[None, :]
    tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=held)


@kernel(
    general=(
        "table_tokens",
        "first_block",
        "num_blocks",
        "query_len",
        "window",
        "slots",
    )
)
def decode_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    table: tl.tensor,
    visible: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    part_out: tl.tensor,
    part_lse: tl.tensor,
    table_tokens: tl.tensor,
    first_block: tl.tensor,
    num_blocks: tl.tensor,
    query_len: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    slots: tl.tensor,
    q_b: tl.tensor,
    q_t: tl.tensor,
    q_h: tl.tensor,
    q_d: tl.tensor,
    k_n: tl.tensor,
    k_s: tl.tensor,
    k_h: tl.tensor,
    k_d: tl.tensor,
    v_n: tl.tensor,
    v_s: tl.tensor,
    v_h: tl.tensor,
    v_d: tl.tensor,
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
) -> None:
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
        opening = lowest // split
        stop = first + count if SINGLE_QUERY else tl.max(first + count, 0)
        s = opening + tl.program_id(2)
        turn = 0  # of all queries at once, or turn t + 1 of query t alone: see the end of this loop
        while s < stop:
            least, most = lowest, highest
            if not SINGLE_QUERY:
                if turn > 0:
                    most = tl.minimum(seen - query_len + turn, table_tokens)
                    least = 0 if window is None else tl.maximum(seen - query_len + turn - window, 0)
            begin = tl.maximum(s * split, least // BLOCK_N * BLOCK_N)
            until = tl.minimum(s * split + split, most)
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
                    live = live & (token >= least)
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
                        sees = sees & (token[None, :] >= start[:, None])  # type: ignore[index]  # a vector here
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
                mine = mine & ((turn == 0) | (t + 1 == turn))
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
            # Weight 0 times NaN or infinity is NaN. Where a result is not finite, the split is done anew for one query after the other,
            # without the keys and values that this query does not see: the same tiles in the same order, so the same bits.
            if SINGLE_QUERY:
                s += tl.num_programs(2)
            else:
                strange = not_finite(acc, mine)
                if V_REST > 0:
                    strange = tl.maximum(strange, not_finite(acc_rest, mine))
                turn = tl.where((turn > 0) | (strange > 0), turn + 1, 0)
                if (turn == 0) | (turn > query_len):
                    turn = 0
                    s += tl.num_programs(2)
