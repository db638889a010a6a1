"""How a kernel is launched and how scratch memory is had: both are handed to the wrappers, so that a caller may queue them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Launch = Callable[..., None]
"""``launch(kernel, grid, *args, **meta)``: run ``kernel`` over ``grid`` once all that was launched before it has run."""

Empty = Callable[[Sequence[int], torch.dtype], Tensor]
"""``empty(shape, dtype)``: a contiguous device tensor whose content is anything."""


def launch_now(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launch on the current stream, or run in the interpreter."""
    kernel[grid](*args, **meta)
