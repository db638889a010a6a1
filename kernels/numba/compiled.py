"""How this package compiles: one decorator, and a key that keeps the disk cache honest.

numba keys a cached function by that function's own file, so a change in a file it calls into would go unnoticed.
Every function that Python calls therefore ends in ``_sources: int = SOURCES``: numba puts an omitted default into the
signature it caches under.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np

import numba
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])


def _checksum(folder: Path) -> int:
    value = 0
    for path in sorted(folder.glob("*.py")):
        value = zlib.crc32(path.read_bytes(), value)
    return value


SOURCES: Final[int] = _checksum(Path(__file__).parent)
"""Checksum of the sources of this package."""


# Casts inside compiled code. They are numpy's types; to a type checker they are plain conversions.
int32: Final = cast("Callable[[Any], int]", np.int32)
int64: Final = cast("Callable[[Any], int]", np.int64)
uint16: Final = cast("Callable[[Any], int]", np.uint16)
uint32: Final = cast("Callable[[Any], int]", np.uint32)
float32: Final = cast("Callable[[Any], float]", np.float32)


def compiled(function: F) -> F:
    """Compile a function that Python calls, keep the machine code on disk, release the GIL while it runs.

    Division follows C (no Python exception), and floating point is never reassociated: the order of operations is the
    contract.
    """
    return cast("F", numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def inner(function: F) -> F:
    """Compile a function that compiled code calls; with no place of its own in the disk cache, it cannot be stale."""
    return cast("F", numba.njit(error_model="numpy")(function))


def emitted(function: Callable[..., Any]) -> Any:
    """Make a function that emits LLVM IR callable from compiled code; its literal arguments arrive as literal types."""
    return intrinsic(prefer_literal=True)(function)
