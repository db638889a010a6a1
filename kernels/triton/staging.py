"""Staging: blocks of a strided source into a pool, bit for bit (clauses S1, S2)."""

from __future__ import annotations

from torch import Tensor

import triton.language as tl

from .addresses import column_mask, slot_offsets, slot_steps
from .bits import as_integers
from .jit import kernel
from .launching import Launch, cdiv, launch_now
from .tiles import DEVICE_TILES, RowTiles


@kernel(general=("tokens",))
def stage_rows_kernel(
    k_source: tl.tensor,
    k_source_steps: tl.tuple,
    v_source: tl.tensor,
    v_source_steps: tl.tuple,
    k_target: tl.tensor,
    k_target_steps: tl.tuple,
    v_target: tl.tensor,
    v_target_steps: tl.tuple,
    src_blocks: tl.tensor,
    src_stride: tl.tensor,
    dst_blocks: tl.tensor,
    dst_stride: tl.tensor,
    num_source_blocks: tl.tensor,
    num_target_blocks: tl.tensor,
    tokens: tl.tensor,
    block_size: tl.tensor,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ALIKE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program: columns of ``ROWS`` tokens of K and V."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place, inside = token // block_size, token < tokens
    src = tl.load(src_blocks + place * src_stride, mask=inside, other=-1).to(tl.int64)
    dst = tl.load(dst_blocks + place * dst_stride, mask=inside, other=-1).to(tl.int64)
    moved = (src >= 0) & (src < num_source_blocks) & (dst >= 0) & (dst < num_target_blocks)
    mask = column_mask(moved, column, HEADS * K_DIM, HEADS * V_DIM, COLUMNS)
    offset = token - place * block_size
    source_slot, target_slot = src * block_size + offset, dst * block_size + offset
    source = slot_offsets(source_slot, column, k_source_steps, block_size, K_DIM)
    target = slot_offsets(target_slot, column, k_target_steps, block_size, K_DIM)
    tl.store(as_integers(k_target) + target, tl.load(as_integers(k_source) + source, mask=mask), mask=mask)
    if v_source is not None:
        if not ALIKE:
            mask = column_mask(moved, column, HEADS * V_DIM, HEADS * K_DIM, COLUMNS)
            source = slot_offsets(source_slot, column, v_source_steps, block_size, V_DIM)
            target = slot_offsets(target_slot, column, v_target_steps, block_size, V_DIM)
        tl.store(as_integers(v_target) + target, tl.load(as_integers(v_source) + source, mask=mask), mask=mask)


def expect_alike(what: str, source: Tensor | None, target: Tensor | None) -> None:
    """Raise ValueError unless both have blocks of one shape and type, or both are None."""
    kinds = [None if x is None else (list(x.shape[1:]), x.dtype) for x in (source, target)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{what}: got blocks {kinds[0]} for a target of blocks {kinds[1]}, expected the same of both")


def stage_rows(
    k_source: Tensor,
    v_source: Tensor | None,
    k_target: Tensor,
    v_target: Tensor | None,
    src_blocks: Tensor,
    dst_blocks: Tensor,
    *,
    tokens: int,
    tiles: RowTiles = DEVICE_TILES,
    launch: Launch = launch_now,
) -> None:
    """Copy the first ``tokens`` rows of a sequence of blocks; nothing else of the target is touched.

    Args:
        k_source: ``[M, BS, Hkv, Dk]``, any strides, readable by the device: an unbind(1) view of ``[M, 2, BS, Hkv, D]`` too.
        v_source: ``[M, BS, Hkv, Dv]`` likewise, or None where V lives in K's columns.
        k_target: ``[NB, BS, Hkv, Dk]`` of the same type, any strides; written.
        v_target: ``[NB, BS, Hkv, Dv]``, written, or None with ``v_source``.
        src_blocks: int32 ``[n]``, any stride: token i comes from block ``src_blocks[i // BS]``.
        dst_blocks: int32 ``[n]``, any stride: and goes to ``dst_blocks[i // BS]``. A pair that is not of both memories moves nothing.
        tokens: rows, at most ``n * BS``; the last block may be partial.

    Raises:
        ValueError: sources and targets that differ in anything but their number of blocks; nothing was launched.
    """
    expect_alike("k", k_source, k_target)
    expect_alike("v", v_source, v_target)
    block_size, heads, k_dim = k_target.shape[1:]
    v_dim = 0 if v_target is None else v_target.shape[3]
    k_steps = slot_steps(k_source), slot_steps(k_target)
    v_steps = None if v_source is None else slot_steps(v_source), None if v_target is None else slot_steps(v_target)
    rows, columns = tiles.row_tile(tokens), tiles.column_tile(heads * max(k_dim, v_dim))
    if tokens:
        launch(
            stage_rows_kernel,
            (cdiv(tokens, rows), cdiv(heads * max(k_dim, v_dim), columns)),
            k_source,
            k_steps[0],
            v_source,
            v_steps[0],
            k_target,
            k_steps[1],
            v_target,
            v_steps[1],
            src_blocks,
            src_blocks.stride(0),
            dst_blocks,
            dst_blocks.stride(0),
            k_source.shape[0],
            k_target.shape[0],
            tokens,
            block_size,
            HEADS=heads,
            K_DIM=k_dim,
            V_DIM=v_dim,
            ALIKE=(k_dim, k_steps) == (v_dim, v_steps),
            ROWS=rows,
            COLUMNS=columns,
        )
