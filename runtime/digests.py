"""Digests of rows in receipts: linear sums in wrapping int32, computed alike on the device and by the host."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from forebay.specs.dtypes import HostArray


def wrapped(value: int) -> int:
    """A whole number as a signed one of 32 bits."""
    return (value + 2**31) % 2**32 - 2**31


def digest_weight(column: int) -> int:
    """Odd int32 weight of a column: Weyl sequence of the 32-bit golden ratio, forced odd."""
    return wrapped(((column + 1) * 0x9E3779B1) | 1)


@lru_cache(maxsize=64)
def digest_weights(n: int) -> HostArray:
    """Weights of columns 0 to n - 1, int32 ``[n]``, read-only."""
    with np.errstate(over="ignore"):
        weights = (np.arange(1, n + 1, dtype=np.uint32) * np.uint32(0x9E3779B1)) | np.uint32(1)
    weights.flags.writeable = False
    return weights.view(np.int32)


def digest(values: HostArray) -> int:
    """``sum(values * weights)`` in wrapping int32: what the device computes over the same columns."""
    products = values.astype(np.int64) * digest_weights(len(values)).astype(np.int64)
    return wrapped(int(products.sum()))


@lru_cache(maxsize=4096)
def digest_of(values: tuple[int, ...]) -> int:
    """:func:`digest` of int32 values and of any number of zeros behind them; remembered, for a row is checked at every step."""
    return digest(np.array(values, np.int32))
