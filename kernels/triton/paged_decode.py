"""Paged decode attention in two stages: splits of each row's own length, then their reduction and the count of invalid blocks.

A query block is up to ``block_m`` rows (query t of T, query head g of a group) of one sequence and one KV head. Its programs share the
splits of its keys; a split runs through tiles of ``block_n`` keys with an online softmax in float32 (Milakov and Gimelshein 2018; split
over keys as in Flash-Decoding, Dao et al. 2023). Tiles and splits lie at absolute token positions and their length follows from the
row's own range of keys, so a row's bits depend neither on other rows nor on the number of programs or the width of the table. A row of
one split is written by the first stage, the partial results of other rows go through scratch to the second.
"""

from __future__ import annotations

import torch

from .decode_config import DecodeTiles
from .decode_kernel import decode_kernel
from .decode_math import MOST_TOKENS
from .decode_reduce import reduce_kernel
from .launching import Empty, Launch, cdiv, launch_now


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

    Any strides are taken. A block outside ``first_block`` to ``num_blocks - 1``, and a column from ``table_len`` on, stands for keys
    and values of 0 that take part in the softmax; nothing is read there, behind the visible keys, or before a window. A row without
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
