"""Triton's decorator with a type: what it makes is called in ways that no signature describes, by grid and from other kernels.

Parameters of kernels are never annotated ``int``: Triton takes that for 32 bits and would cut a stride.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """A kernel, or a function that kernels call: compiled at its first use, or interpreted under ``TRITON_INTERPRET=1``."""
    return triton.jit(function)


def kernel(*, general: tuple[str, ...]) -> Callable[[Callable[..., Any]], Any]:
    """:func:`jit` of a kernel that is not compiled anew where an argument in ``general`` is 1 or a multiple of 16."""
    return triton.jit(do_not_specialize=general)  # type: ignore[no-any-return]
