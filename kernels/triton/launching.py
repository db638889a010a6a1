"""How a wrapper launches its kernel and takes its scratch: both are handed in, so that a caller may queue or record them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Launch = Callable[..., None]
"""``launch(kernel, grid, *args, **meta)``: run, queue or record one launch of a Triton kernel over ``grid`` (1 to 3 sizes)."""
Empty = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""``empty(shape, dtype)``: contiguous scratch whose bytes may be anything; it lives until the launches of the call have ended."""


def launch_now(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launch ``kernel`` on the current stream, or run it to its end where the process interprets Triton."""
    kernel[grid](*args, **meta)


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()
