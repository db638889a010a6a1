"""Gather: the visible rows of each sequence, from paged memory to blocks of its own, for the same attention over those."""

from __future__ import annotations

import torch

import triton.language as tl

from .decode_math import MOST_TOKENS
from .jit import jit, kernel
from .launching import Launch, cdiv, launch_now, power_of_two


@jit
def copy_rows(
    source: tl.tensor, target: tl.tensor, blocks: tl.tensor, offsets: tl.tensor, tokens: tl.tensor, live: tl.tensor, held: tl.tensor,
    s_n: tl.tensor, s_s: tl.tensor, s_h: tl.tensor, s_d: tl.tensor, t_n: tl.tensor, t_s: tl.tensor, t_h: tl.tensor, t_d: tl.tensor,
    WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK_E: tl.constexpr,
) -> None:  # fmt: skip
    """Copy WIDTH = heads x DIM elements a token that is ``held [N]``; one that is ``live`` and not held becomes zeros."""
    rows = (source + blocks * s_n + offsets * s_s)[:, None]
    places = (target + tokens * t_n + offsets * t_s)[:, None]
    for first in range(0, WIDTH, BLOCK_E):
        element = first + tl.arange(0, BLOCK_E)
        inside = (element < WIDTH)[None, :]
        head = (element // DIM).to(tl.int64)
        column = (element % DIM).to(tl.int64)
        row = tl.load(rows + (head * s_h + column * s_d)[None, :], mask=held[:, None] & inside, other=0.0)
        tl.store(places + (head * t_h + column * t_d)[None, :], row, mask=live[:, None] & inside)


@kernel(
    general=(
        "table_tokens",
        "table_len",
        "first_block",
        "num_blocks",
        "query_len",
        "window",
    )
)
def gather_kernel(
    k: tl.tensor,
    v: tl.tensor,
    table: tl.tensor,
    visible: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    identity: tl.tensor,
    table_tokens: tl.tensor,
    table_len: tl.tensor,
    first_block: tl.tensor,
    num_blocks: tl.tensor,
    query_len: tl.tensor,
    window: tl.tensor,
    k_n: tl.tensor,
    k_s: tl.tensor,
    k_h: tl.tensor,
    k_d: tl.tensor,
    v_n: tl.tensor,
    v_s: tl.tensor,
    v_h: tl.tensor,
    v_d: tl.tensor,
    ko_n: tl.tensor,
    ko_s: tl.tensor,
    ko_h: tl.tensor,
    ko_d: tl.tensor,
    vo_n: tl.tensor,
    vo_s: tl.tensor,
    vo_h: tl.tensor,
    vo_d: tl.tensor,
    table_b: tl.tensor,
    table_c: tl.tensor,
    identity_b: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Grid: (batch rows, programs that share the tokens of a row)."""
    b = tl.program_id(0).to(tl.int64)
    end = tl.maximum(tl.load(visible + b), 0)
    if window is None:
        start = 0
    else:
        start = tl.maximum(end - (query_len - 1) - window, 0)
    until = tl.minimum(end, table_tokens)
    opening = start // BLOCK_T * BLOCK_T
    for low in range(opening + tl.program_id(1) * BLOCK_T, until, tl.num_programs(1) * BLOCK_T):
        token = low + tl.arange(0, BLOCK_T)
        live = (token >= start) & (token < until)
        column = (token // BLOCK_SIZE).to(tl.int64)
        offset = (token % BLOCK_SIZE).to(tl.int64)
        block = tl.load(table + b * table_b + column * table_c, mask=live, other=-1)
        held = live & (block >= first_block) & (block < num_blocks)
        place = b * table_len + column
        tl.store(identity + b * identity_b + column, place.to(tl.int32), mask=live)
        copy_rows(
            k, k_out, block.to(tl.int64), offset, place, live, held,
            k_n, k_s, k_h, k_d, ko_n, ko_s, ko_h, ko_d, HEADS * HEAD_DIM, HEAD_DIM, BLOCK_E,
        )  # fmt: skip
        if v is not None:
            copy_rows(
                v, v_out, block.to(tl.int64), offset, place, live, held,
                v_n, v_s, v_h, v_d, vo_n, vo_s, vo_h, vo_d, HEADS * VALUE_DIM, VALUE_DIM, BLOCK_E,
            )  # fmt: skip


def gather(
    k: torch.Tensor,
    v: torch.Tensor | None,
    table: torch.Tensor,
    visible: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor | None,
    identity: torch.Tensor,
    *,
    table_len: int,
    first_block: int,
    num_blocks: int,
    query_len: int = 1,
    window: int | None = None,
    tokens_a_tile: int = 16,
    elements_a_tile: int = 512,
    programs: int = 64,
    launch: Launch = launch_now,
) -> None:
    """Copy the rows that the queries of each sequence see to blocks of its own, and write the table of these blocks.

    Column c of sequence b goes to block ``b * table_len + c``. Of an invalid block the visible rows become zeros. Nothing else is
    written, and nothing behind the visible rows or before the window is read.

    Args:
        k: keys ``[NB, BS, Hkv, D]``, any strides.
        v: values ``[NB, BS, Hkv, Dv]``, or None where they are columns of ``k``.
        table: int32 ``[B, at least table_len]``.
        visible: int32 ``[B]``; what lies beyond ``table_len * BS`` is missing.
        k_out: ``[B * table_len, BS, Hkv, D]`` in the dtype of ``k``, written.
        v_out: ``[B * table_len, BS, Hkv, Dv]``, written, or None as ``v``.
        identity: int32 ``[B, table_len]`` with columns side by side: the table of the blocks, written where rows are copied.
        table_len: columns of ``table`` that may be read.
        first_block: the first valid block id.
        num_blocks: the first id past the valid ones.
        query_len: T, the queries of a sequence: with a window the first of them sees furthest back.
        window: keys that a query sees at most.
        tokens_a_tile: tokens that a program copies at a time, a power of two.
        elements_a_tile: elements of these rows at a time, a power of two.
        programs: most programs that share the tokens of a sequence.
        launch: launches the kernel.

    Raises:
        ValueError: shapes or dtypes that do not belong together, or more blocks than int32 counts.
    """
    batch = table.shape[0]
    block_size, heads, head_dim = k.shape[1], k.shape[2], k.shape[3]
    for name, source, target in (("k_out", k, k_out), ("v_out", v, v_out)):
        if (source is None) != (target is None):
            raise ValueError(f"{name}: given for no source, or missing")
        if source is None or target is None:
            continue
        wanted = (batch * table_len, *source.shape[1:])
        if tuple(target.shape) != wanted or target.dtype != source.dtype:
            raise ValueError(f"{name}: got {target.dtype} {list(target.shape)}, expected {source.dtype} {list(wanted)}")
    if table.dtype != torch.int32 or visible.dtype != torch.int32 or identity.dtype != torch.int32:
        raise ValueError(
            f"table, visible, identity: got {table.dtype}, {visible.dtype}, {identity.dtype}, expected int32"
        )
    if tuple(identity.shape) != (batch, table_len) or (table_len > 1 and identity.stride(1) != 1):
        raise ValueError(f"identity: got {list(identity.shape)}, expected [{batch}, {table_len}], columns side by side")
    if not 0 <= table_len <= table.shape[1] or batch * table_len >= 2**31:
        raise ValueError(
            f"table_len: got {table_len}, expected at most the width {table.shape[1]} and B * table_len below 2^31"
        )
    if batch == 0 or table_len == 0:
        return
    table_tokens = min(table_len * block_size, MOST_TOKENS)
    value_dim = head_dim if v is None else v.shape[3]
    launch(
        gather_kernel,
        (batch, max(1, min(programs, cdiv(table_tokens, tokens_a_tile)))),
        *(k, v, table, visible, k_out, v_out, identity),
        *(table_tokens, table_len, first_block, num_blocks, query_len),
        None if window is None else min(window, MOST_TOKENS),
        *(
            *k.stride(),
            *(k if v is None else v).stride(),
            *k_out.stride(),
            *(k_out if v_out is None else v_out).stride(),
        ),
        *(*table.stride(), identity.stride(0)),
        HEADS=heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        BLOCK_T=tokens_a_tile,
        BLOCK_E=min(elements_a_tile, power_of_two(heads * max(head_dim, value_dim))),
        num_warps=4,
    )
