"""Checks at the door of compiled code, which trusts addresses: a wrong array is refused before it can be read as
another."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_FLOAT32: Final = np.dtype(np.float32)
_INT32: Final = np.dtype(np.int32)
_STORAGE: Final = (_FLOAT32, np.dtype(np.uint16))
_INT32_MAX: Final = int(np.iinfo(np.int32).max)
_INDEX: Final = (_INT32, np.dtype(np.int64))


def _refuse(name: str, array: Array, expected: str) -> None:
    kind = "contiguous" if array.flags.c_contiguous else "strided"
    raise ValueError(f"{name}: got {kind} {array.dtype}{list(array.shape)}, expected {expected}")


def expect_float32(name: str, array: Array, shape: tuple[int, ...]) -> None:
    """Refuse anything but contiguous float32 of ``shape``."""
    if array.dtype != _FLOAT32 or array.shape != shape or not array.flags.c_contiguous:
        _refuse(name, array, f"contiguous float32{list(shape)}")


def expect_int32(name: str, array: Array, shape: tuple[int | None, ...]) -> None:
    """Refuse anything but int32 of ``shape``, in which None is any size; any strides will do."""
    fits = array.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
    if array.dtype != _INT32 or not fits:
        _refuse(name, array, f"int32[{', '.join('any' if n is None else str(n) for n in shape)}]")


def expect_indices(name: str, array: Array, count: int | None = None) -> None:
    """Refuse anything but a vector of int32 or int64 (of ``count`` elements)."""
    if array.dtype not in _INDEX or array.ndim != 1 or count not in (None, len(array)):
        _refuse(name, array, f"int32 or int64 [{'N' if count is None else count}]")


def expect_storage(name: str, array: Array, shape: tuple[int | None, ...]) -> None:
    """Refuse anything but float32 or uint16 (bfloat16 bits) of ``shape``, in which None is any size; any strides will
    do."""
    fits = array.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True))
    if array.dtype not in _STORAGE or not fits:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        _refuse(name, array, f"float32 or uint16 (bfloat16 bits) [{wanted}]")


def add_count(counter: npt.NDArray[np.int32], n: int) -> None:
    """Add ``n`` to an int32 ``[1]`` counter, which stays at its largest value rather than wrap."""
    counter[0] = min(int(counter[0]) + int(n), _INT32_MAX)


def place_rows(name: str, array: Array, shape: tuple[int, int], *, integers: bool = False) -> tuple[int, int]:
    """Address and bytes from row to row of float32 or int32 ``shape`` whose rows are contiguous each; anything else is
    refused."""
    fits = array.shape == shape and (array.shape[1] <= 1 or array.strides[1] == array.itemsize)
    if array.dtype != (_INT32 if integers else _FLOAT32) or not fits:
        _refuse(name, array, f"{'int32' if integers else 'float32'}{list(shape)} with contiguous rows")
    return (int(array.__array_interface__["data"][0]), array.strides[0])
