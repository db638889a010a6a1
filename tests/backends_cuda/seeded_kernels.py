"""Kernels that the ahead-of-time gate has to find fault with: one spills, one takes too much shared memory, none is in a case."""

from __future__ import annotations

import triton.language as tl

from forebay.kernels.triton.jit import jit


@jit
def helper(x: tl.tensor) -> tl.tensor:
    return x + 1.0


@jit
def spilling_kernel(x: tl.tensor, out: tl.tensor, steps: tl.constexpr, width: tl.constexpr) -> None:
    """Holds more sums than one warp has registers for."""
    lane = tl.arange(0, width)
    first = tl.load(x + lane)
    second = tl.load(x + width + lane)
    for step in range(steps):
        first = helper(first * second) + tl.load(x + step * width + lane)
        second = second * first + step
    tl.store(out + lane, first + second)


@jit
def greedy_kernel(x: tl.tensor, out: tl.tensor, rows: tl.constexpr, inner: tl.constexpr) -> None:
    """A product whose operands fill more shared memory than a program may have."""
    row = tl.arange(0, rows)
    column = tl.arange(0, inner)
    left = tl.load(x + row[:, None] * inner + column[None, :])
    right = tl.load(x + row[None, :] * inner + column[:, None])
    tl.store(out + row[:, None] * rows + row[None, :], tl.dot(left, right))
