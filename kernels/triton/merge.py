"""Merging partial attention results by their log-sum-exps, a few parts a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

import triton.language as tl

from .decode_math import LEAST
from .jit import jit, kernel
from .launching import Empty, Launch, cdiv, launch_now, power_of_two

AT_ONCE: Final = 8
"""Parts that one launch merges into what the launches before it have merged."""


@jit
def add_part(
    out: tl.tensor,
    lse: tl.tensor,
    out_row: tl.tensor,
    out_d: tl.tensor,
    lse_row: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    held: tl.tensor,
    inside: tl.tensor,
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
) -> tl.tensor:
    """The running (acc ``[R, D]``, peak ``[R]``, total ``[R]``) with one part more; an empty part changes nothing."""
    part_lse = tl.load(lse + row * lse_row, mask=held, other=float("-inf"))
    there = part_lse > float("-inf")
    part = tl.load((out + row * out_row)[:, None] + (column * out_d)[None, :], mask=there[:, None] & inside, other=0.0)
    higher = tl.maximum(peak, part_lse)
    shrink = tl.where(peak == higher, 1.0, tl.exp(peak - higher))  # an infinite LSE outweighs all others
    share = tl.where(part_lse == higher, 1.0, tl.exp(part_lse - higher))
    return acc * shrink[:, None] + share[:, None] * part.to(tl.float32), higher, total * shrink + share


@kernel(
    general=(
        "rows",
        "count",
        "merged",
    )
)
def merge_kernel(
    out0: tl.tensor,
    out1: tl.tensor,
    out2: tl.tensor,
    out3: tl.tensor,
    out4: tl.tensor,
    out5: tl.tensor,
    out6: tl.tensor,
    out7: tl.tensor,
    lse0: tl.tensor,
    lse1: tl.tensor,
    lse2: tl.tensor,
    lse3: tl.tensor,
    lse4: tl.tensor,
    lse5: tl.tensor,
    lse6: tl.tensor,
    lse7: tl.tensor,
    or0: tl.tensor,
    or1: tl.tensor,
    or2: tl.tensor,
    or3: tl.tensor,
    or4: tl.tensor,
    or5: tl.tensor,
    or6: tl.tensor,
    or7: tl.tensor,
    od0: tl.tensor,
    od1: tl.tensor,
    od2: tl.tensor,
    od3: tl.tensor,
    od4: tl.tensor,
    od5: tl.tensor,
    od6: tl.tensor,
    od7: tl.tensor,
    lr0: tl.tensor,
    lr1: tl.tensor,
    lr2: tl.tensor,
    lr3: tl.tensor,
    lr4: tl.tensor,
    lr5: tl.tensor,
    lr6: tl.tensor,
    lr7: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    sum_out: tl.tensor,
    sum_peak: tl.tensor,
    sum_total: tl.tensor,
    rows: tl.tensor,
    count: tl.tensor,
    merged: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FINAL: tl.constexpr,
) -> None:
    """Merge ``count`` parts into the sums of ``merged`` parts before them; FINAL writes ``out`` and ``lse``, else the sums."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D).to(tl.int64)
    held = row < rows
    inside = held[:, None] & (column < DIM)[None, :]
    flat = row[:, None] * DIM + column[None, :]
    peak = tl.full([BLOCK_R], LEAST, tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    if merged > 0:
        peak = tl.load(sum_peak + row, mask=held, other=0.0)
        total = tl.load(sum_total + row, mask=held, other=0.0)
        # Where one launch merges all, ``out`` stands in for the sums, in a type of its own.
        acc = tl.load(sum_out + flat, mask=inside, other=0.0).to(tl.float32)
    acc, peak, total = add_part(out0, lse0, or0, od0, lr0, row, column, held, inside, acc, peak, total)
    if count > 1:
        acc, peak, total = add_part(out1, lse1, or1, od1, lr1, row, column, held, inside, acc, peak, total)
    if count > 2:
        acc, peak, total = add_part(out2, lse2, or2, od2, lr2, row, column, held, inside, acc, peak, total)
    if count > 3:
        acc, peak, total = add_part(out3, lse3, or3, od3, lr3, row, column, held, inside, acc, peak, total)
    if count > 4:
        acc, peak, total = add_part(out4, lse4, or4, od4, lr4, row, column, held, inside, acc, peak, total)
    if count > 5:
        acc, peak, total = add_part(out5, lse5, or5, od5, lr5, row, column, held, inside, acc, peak, total)
    if count > 6:
        acc, peak, total = add_part(out6, lse6, or6, od6, lr6, row, column, held, inside, acc, peak, total)
    if count > 7:
        acc, peak, total = add_part(out7, lse7, or7, od7, lr7, row, column, held, inside, acc, peak, total)
    if FINAL:
        some = total != 0.0
        total = tl.where(some, total, 1.0)
        tl.store(out + flat, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
        tl.store(lse + row, tl.where(some, peak + tl.log(total), float("-inf")), mask=held)
    else:
        tl.store(sum_out + flat, acc, mask=inside)
        tl.store(sum_peak + row, peak, mask=held)
        tl.store(sum_total + row, total, mask=held)


def merge_partials(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    empty: Empty,
    rows_a_program: int = 16,
    launch: Launch = launch_now,
) -> None:
    """The attention over the keys of all parts, from the results of each over its own.

    A part whose LSE is -inf in a row saw no key there: it weighs nothing, and its output may hold anything. Sums run in float32.

    Args:
        outs: one or more ``[..., D]`` of one shape and dtype (float32, bfloat16, float16). The rows of each lie evenly spaced: all but
            the last axis of its strides are those of one axis.
        lses: as many float32 ``[...]``, natural logarithms, evenly spaced as well.
        out: contiguous ``[..., D]`` in the dtype of ``outs``, written.
        lse: contiguous float32 ``[...]``, written.
        empty: makes scratch, for the sums of more than eight parts.
        rows_a_program: rows that a program merges, a power of two.
        launch: launches the kernel, once for each eight parts.

    Raises:
        ValueError: no parts, parts that do not belong together, or rows that are not evenly spaced.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"got {len(outs)} outputs and {len(lses)} LSEs, expected as many, at least one")
    for part, part_lse in zip((*outs, out), (*lses, lse), strict=True):
        if part.shape != out.shape or part.dtype != out.dtype or part_lse.dtype != torch.float32:
            raise ValueError(
                f"got a part {part.dtype} {list(part.shape)} with LSE {part_lse.dtype}, expected {out.dtype} {list(out.shape)}"
            )
        if tuple(part_lse.shape) != tuple(out.shape[:-1]):
            raise ValueError(f"got an LSE {list(part_lse.shape)} for an output {list(out.shape)}")
    dim = out.shape[-1]
    rows = 1
    for size in lse.shape:
        rows *= size
    if rows == 0:
        return
    sums = (out, lse, lse)
    if len(outs) > AT_ONCE:
        sums = (empty((rows, dim), torch.float32), empty((rows,), torch.float32), empty((rows,), torch.float32))
    block_d = power_of_two(dim)
    for first in range(0, len(outs), AT_ONCE):
        some = list(range(first, min(first + AT_ONCE, len(outs))))
        named = (some + [first] * AT_ONCE)[:AT_ONCE]
        launch(
            merge_kernel,
            (cdiv(rows, rows_a_program),),
            *(*(outs[i] for i in named), *(lses[i] for i in named)),
            *(row_stride(tuple(outs[i].shape[:-1]), outs[i].stride()[:-1]) for i in named),
            *(outs[i].stride(-1) for i in named),
            *(row_stride(tuple(lses[i].shape), lses[i].stride()) for i in named),
            *(out, lse, *sums, rows, len(some), first),
            DIM=dim,
            BLOCK_R=rows_a_program,
            BLOCK_D=block_d,
            FINAL=first + AT_ONCE >= len(outs),
            num_warps=4,
        )


def row_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from one row to the next where the axes ``shape`` of all rows count as one.

    Raises:
        ValueError: the rows are not evenly spaced.
    """
    step, expected = 0, None
    for size, own in zip(reversed(shape), reversed(stride), strict=True):
        if size == 1:
            continue
        if expected is None:
            step = own
        elif own != expected:
            raise ValueError(
                f"rows of shape {list(shape)} and strides {list(stride)} are not evenly spaced; make the tensor contiguous"
            )
        expected = own * size
    return step
