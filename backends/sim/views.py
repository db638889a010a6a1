"""How kernels see memory: bytes with the name of their dtype, read as numbers and written back rounded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forebay.specs.dtypes import HostArray


@dataclass(frozen=True)
class View:
    """A numpy view of device bytes (bfloat16 as uint16) and their dtype."""

    bits: HostArray
    dtype: str

    def values(self) -> HostArray:
        """The elements in row-major order, floats of any width as float32: numpy's loops treat strided memory by other code, and a
        row's bits must not depend on how it lies."""
        return as_numbers(self.bits if self.bits.flags.c_contiguous else self.bits.copy(), self.dtype)

    def put(self, values: HostArray) -> None:
        """Write numbers, rounded to the dtype."""
        self.bits[...] = as_bits(values, self.dtype)


def as_numbers(bits: HostArray, dtype: str) -> HostArray:
    """Bytes of a float dtype as float32, exactly; ints and bools as they are."""
    if dtype == "bfloat16":
        wide = bits.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    return bits.astype(np.float32) if dtype == "float16" else bits


def as_bits(values: HostArray, dtype: str) -> HostArray:
    """Numbers as bytes of a dtype; bfloat16 rounds to nearest even, and a NaN stays one."""
    if dtype != "bfloat16":
        return values
    raw = np.array(values, np.float32, order="C").view(np.uint32)
    odd = (raw >> 16) & 1
    up = ((raw.astype(np.uint64) + 0x7FFF + odd) >> 16).astype(np.uint16)
    return np.where((raw & 0x7FFFFFFF) > 0x7F800000, ((raw >> 16) | 0x40).astype(np.uint16), up)


def rows_as_bits(rows: View, dtype: str) -> HostArray:
    """Rows of one float dtype as bytes of another; the same dtype keeps its bytes, NaN payloads included."""
    return rows.bits if rows.dtype == dtype else as_bits(rows.values(), dtype).astype(_STORED[dtype])


_STORED = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
