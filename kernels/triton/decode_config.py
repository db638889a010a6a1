"""Tile sizes of paged decode: one choice for devices, one for the interpreter, whose cost is a price an operation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .launching import power_of_two

LEAST_TILE = 16
"""The least size of an operand of ``tl.dot``."""


@dataclass(frozen=True)
class DecodeTiles:
    """Tile sizes, all powers of two, and launch options of one kind of decode.

    Attributes:
        block_m: query rows (a query of T times a query head of one KV head) of a program.
        block_n: keys of a tile.
        min_split: the least keys of a split, a multiple of ``block_n``.
        max_splits: into how many splits a row is cut at most.
        programs: most programs that share the splits of one query block; it changes no bit.
        head_pieces: widths of the one or two tiles that cover head_dim; 0 for no second one.
        value_pieces: the same of value_dim.
        use_dot: products by ``tl.dot``, else by a reduction (one query row only).
        num_warps: warps of a program.
        num_stages: stages of a software pipeline.
        reduce_rows: rows of a program that merges splits.
        count_rows: rows of a program that counts invalid blocks.
        count_columns: table columns of a tile there.
        counters: most programs that share the columns of these rows.
    """

    block_m: int
    block_n: int
    min_split: int
    max_splits: int
    programs: int
    head_pieces: tuple[int, int]
    value_pieces: tuple[int, int]
    use_dot: bool
    num_warps: int
    num_stages: int
    reduce_rows: int
    count_rows: int
    count_columns: int
    counters: int


def pieces(dim: int, *, whole_up_to: int = 64) -> tuple[int, int]:
    """Widths of the tiles that cover ``dim``: its largest power of two and one for the rest, or one where it wastes no more.

    Up to ``whole_up_to`` it is one tile in any case.
    """
    padded = max(LEAST_TILE, power_of_two(dim))
    main = padded // 2
    rest = max(LEAST_TILE, power_of_two(dim - main))
    if padded <= whole_up_to or main < LEAST_TILE or main + rest >= padded:
        return padded, 0
    return main, rest


def decode_tiles(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, group: int, query_len: int, head_dim: int, value_dim: int
) -> DecodeTiles:
    """Tiles for a device, within the 64 KiB of shared memory that gfx942 has where the head size allows it.

    ``group`` is Hq / Hkv, ``query_len`` T. Nothing here depends on the batch or on lengths, as a row's bits are its own. A block has
    all the rows of a KV head, so that its keys and values are loaded once, up to :func:`most_rows`, beyond which registers would spill.
    """
    rows = group * query_len
    single = rows == 1
    low = q_dtype == kv_dtype and kv_dtype != torch.float32
    mixed = q_dtype != kv_dtype
    # Two tiles a row would spill where several float32 queries are held beside them.
    head, value = (pieces(dim, whole_up_to=64 if low or single else 256) for dim in (head_dim, value_dim))
    widest = max(sum(head), sum(value))
    most = most_rows(widest, low=low, queries=query_len)
    if mixed and widest > 64:
        most = LEAST_TILE  # keys and values are held in both dtypes
    block_m = 1 if single else min(max(LEAST_TILE, power_of_two(rows)), most)
    wide = block_m > LEAST_TILE
    if low:
        block_n = 16 if wide and widest > (128 if query_len > 1 else 256) else 32
    elif single:
        block_n = 32 if widest <= 256 else 16
    else:
        block_n = 32 if widest <= (64 if wide or mixed else 128) else 16
    if low:
        num_stages = 1 if query_len > 1 and wide and widest > 128 else 2
    else:
        num_stages = 1 if widest > 256 or ((mixed or query_len > 1) and not single and widest > 64) else 2
    return DecodeTiles(
        block_m=block_m,
        block_n=block_n,
        min_split=512 if wide and widest > 256 else 256,  # partial results of many wide heads outweigh short splits
        max_splits=32,
        programs=32,
        head_pieces=head,
        value_pieces=value,
        use_dot=not single,
        num_warps=4 if low and widest <= 256 and not wide else 8,
        num_stages=num_stages,
        reduce_rows=1,
        count_rows=1,
        count_columns=256,
        counters=16,
    )


def most_rows(widest: int, *, low: bool, queries: int) -> int:
    """Rows of the largest query block on a device, by the wider of head_dim and value_dim and by the ``queries`` of a sequence.

    A program holds queries and results in its registers: ``low`` says that products are of operands of two bytes. More rows than these
    spill on one of sm_80, sm_90, sm_100, gfx942 and gfx950; such a call loads keys and values once a block.
    """
    if widest <= 64:
        return 64 if queries == 1 or low else 32
    if queries == 1:
        return 64 if low and widest <= 128 else 32 if low or widest <= 256 else LEAST_TILE
    return 32 if low and widest <= 256 else LEAST_TILE


def interpreted_tiles(
    q_dtype: torch.dtype,  # noqa: ARG001  # the parameters are those of decode_tiles
    kv_dtype: torch.dtype,  # noqa: ARG001
    group: int,
    query_len: int,
    head_dim: int,
    value_dim: int,
) -> DecodeTiles:
    """Tiles for the interpreter: large ones, as it takes some 10 microseconds an operation, and one program a query block."""
    single = group == 1 and query_len == 1
    rows = max(LEAST_TILE, power_of_two(group * query_len))
    return DecodeTiles(
        block_m=1 if single else min(rows, 128),
        block_n=256,
        min_split=512,
        max_splits=32,
        programs=1,
        head_pieces=pieces(head_dim, whole_up_to=256),
        value_pieces=pieces(value_dim, whole_up_to=256),
        use_dot=not single,
        num_warps=4,
        num_stages=1,
        reduce_rows=256,
        count_rows=64,
        count_columns=256,
        counters=1,
    )
