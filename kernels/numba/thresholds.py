"""Row operations of sampling, on one thread: sums, thresholds by rank and by mass, additions to chosen columns.

The bits of a row depend on that row alone. A threshold is found by its digits: the floats are seen as unsigned integers
in the same order, a histogram over their upper 11 bits says in which bin the threshold lies, and two more passes over
the elements of that bin find the remaining 11 and 10 bits. No row is sorted. Each operation has a ``prepare_`` form that
resolves addresses once; its callable works on what the arrays hold when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from .address import load_f32, load_i32, load_u32, move_bytes, store_f32, store_u32
from .checks import Array
from .compiled import SOURCES, compiled, float32, inner, int64, uint32
from .elementwise_ops import sum_row

Rows = tuple[int, int]
"""Address, bytes from row to row; elements of 4 bytes lie side by side."""

_SHIFTS: Final = (21, 10, 0)
"""Where the digits begin; the last one takes in the bit above it, which is known by then."""
_BINS: Final = 2048
_SIGN: Final = 0x80000000
_ABOVE_INFINITY: Final = 0x7F800000
_LOWEST_BITS: Final = 0xFF800000


@inner
def _order(bits: int) -> int:
    """A float32's bits as an integer that is larger for a larger number, and largest for every NaN."""
    if bits & 0x7FFFFFFF > _ABOVE_INFINITY:
        return int64(0xFFFFFFFF)
    return int64(~bits & 0xFFFFFFFF) if bits & _SIGN else int64(bits | _SIGN)


@inner
def _from_order(place: int) -> int:
    """The bits of the number that :func:`_order` maps to ``place``; 0xFFFFFFFF gives a NaN."""
    return uint32(place & 0x7FFFFFFF) if place & _SIGN else uint32(~place & 0xFFFFFFFF)


@compiled
def _rank_rows(x: Rows, k: Rows, y: Rows, n: int, count: int, _sources: int = SOURCES) -> None:
    bins = np.zeros(_BINS, np.int64)
    for i in range(n):
        row, missing = x[0] + i * x[1], int64(load_i32(k[0] + i * k[1]))
        if missing < 1 or missing > count:
            store_u32(y[0] + i * y[1], uint32(_LOWEST_BITS))
            continue
        found, known = int64(0), int64(0)
        for shift in _SHIFTS:
            bins[:] = 0
            for j in range(count):
                place = _order(load_u32(row + j * 4))
                if place & known == found:
                    bins[(place >> shift) & (_BINS - 1)] += 1
            digit = int64(_BINS - 1)
            while bins[digit] < missing:
                missing -= bins[digit]
                digit -= 1
            found |= digit << shift
            known |= int64(_BINS - 1) << shift
        store_u32(y[0] + i * y[1], _from_order(found))


@compiled
def _mass_rows(p: Rows, mass: Rows, y: Rows, n: int, count: int, _sources: int = SOURCES) -> None:
    bins, held = np.zeros(_BINS, np.float64), np.zeros(_BINS, np.int64)
    for i in range(n):
        row, wanted = p[0] + i * p[1], load_f32(mass[0] + i * mass[1])
        store_u32(y[0] + i * y[1], uint32(_LOWEST_BITS))
        if not wanted < np.inf:
            continue
        above, found, known = 0.0, int64(0), int64(0)
        reached = True
        for shift in _SHIFTS:
            bins[:] = 0.0
            held[:] = 0
            for j in range(count):
                place = _order(load_u32(row + j * 4))
                if place & known == found:
                    digit = (place >> shift) & (_BINS - 1)
                    bins[digit] += load_f32(row + j * 4)
                    held[digit] += 1
            digit = int64(_BINS - 1)
            last = int64(-1)
            while digit >= 0:
                if held[digit]:
                    last = digit
                    if not above + bins[digit] < wanted:
                        break
                    above += bins[digit]
                digit -= 1
            if digit < 0 and known == 0:
                reached = False
                break
            if digit < 0:
                # The bin's sum in another order fell short by a rounding: its smallest element is the threshold.
                digit, above = last, above - bins[last]
            found |= digit << shift
            known |= int64(_BINS - 1) << shift
        if reached and found != 0xFFFFFFFF:
            store_u32(y[0] + i * y[1], _from_order(found))


@compiled
def _add_floats(x: Rows, at: Rows, values: Rows, y: Rows, n: int, count: int, m: int, _sources: int = SOURCES) -> None:
    for i in range(n):
        target = y[0] + i * y[1]
        move_bytes(target, x[0] + i * x[1], count * 4)
        for j in range(m):
            column = int64(load_i32(at[0] + i * at[1] + j * 4))
            if 0 <= column < count:
                place = target + column * 4
                store_f32(place, float32(load_f32(place) + load_f32(values[0] + i * values[1] + j * 4)))


@compiled
def _add_ints(x: Rows, at: Rows, values: Rows, y: Rows, n: int, count: int, m: int, _sources: int = SOURCES) -> None:
    for i in range(n):
        target = y[0] + i * y[1]
        move_bytes(target, x[0] + i * x[1], count * 4)
        for j in range(m):
            column = int64(load_i32(at[0] + i * at[1] + j * 4))
            if 0 <= column < count:
                place = target + column * 4
                added = int64(load_u32(place)) + int64(load_u32(values[0] + i * values[1] + j * 4))
                store_u32(place, uint32(added & 0xFFFFFFFF))


@compiled
def _sum_rows(x: Rows, y: Rows, n: int, count: int, _sources: int = SOURCES) -> None:
    for i in range(n):
        store_f32(y[0] + i * y[1], sum_row(x[0] + i * x[1], count))


def _rows(name: str, array: Array, shape: tuple[int, int], *, integers: bool = False) -> Rows:
    """Address and step of an array of float32 or int32 rows that are contiguous each; ValueError for any other."""
    fits = array.shape == shape and (array.shape[1] <= 1 or array.strides[1] == array.itemsize)
    if array.dtype != (np.int32 if integers else np.float32) or not fits:
        raise ValueError(
            f"{name}: got {array.dtype}{list(array.shape)} with strides {array.strides} bytes, expected "
            f"{'int32' if integers else 'float32'}{list(shape)} with contiguous rows"
        )
    return (int(array.__array_interface__["data"][0]), array.strides[0])


def prepare_sum(x: Array, out: Array) -> Callable[[], None]:
    """Prepare ``out[i]``, the sum of row ``i``: lane j adds elements j, j + 16, ..., the lanes are added by halves.

    Args:
        x: float32 ``[N, C]``, rows contiguous, any step from row to row.
        out: float32 ``[N, 1]``; written.

    Raises:
        ValueError: arrays that do not fit together.
    """
    n, count = x.shape if x.ndim == 2 else (0, 0)
    source, target = _rows("x", x, (n, count)), _rows("out", out, (n, 1))

    # The default keeps the arrays alive: compiled code sees only their addresses.
    def total(_alive: tuple[Array, ...] = (x, out)) -> None:
        _sum_rows(source, target, n, count)

    return total


def prepare_kth_largest(x: Array, k: Array, out: Array) -> Callable[[], None]:
    """Prepare ``out[i]``, the ``k[i]``-th largest element of row ``i``; -inf where ``k[i]`` is not within ``[1, C]``.

    A NaN is larger than any number and comes out as a NaN.

    Args:
        x: float32 ``[N, C]``, rows contiguous, any step from row to row.
        k: int32 ``[N, 1]``.
        out: float32 ``[N, 1]``; written.

    Raises:
        ValueError: arrays that do not fit together.
    """
    n, count = x.shape if x.ndim == 2 else (0, 0)
    source, ranks, target = _rows("x", x, (n, count)), _rows("k", k, (n, 1), integers=True), _rows("out", out, (n, 1))

    def select(_alive: tuple[Array, ...] = (x, k, out)) -> None:
        _rank_rows(source, ranks, target, n, count)

    return select


def prepare_mass_cutoff(p: Array, mass: Array, out: Array) -> Callable[[], None]:
    """Prepare ``out[i]``, the largest element t of row ``i`` for which the elements ``>= t`` sum to ``mass[i]`` or more.

    Sums are float64. A row whose sum stays below its mass, or that has a NaN, gives -inf; so does a mass that is
    infinite or NaN, without a look at the row.

    Args:
        p: float32 ``[N, C]``, not negative, rows contiguous, any step from row to row.
        mass: float32 ``[N, 1]``.
        out: float32 ``[N, 1]``; written.

    Raises:
        ValueError: arrays that do not fit together.
    """
    n, count = p.shape if p.ndim == 2 else (0, 0)
    source, wanted, target = _rows("p", p, (n, count)), _rows("mass", mass, (n, 1)), _rows("out", out, (n, 1))

    def cut(_alive: tuple[Array, ...] = (p, mass, out)) -> None:
        _mass_rows(source, wanted, target, n, count)

    return cut


def prepare_add_along(x: Array, indices: Array, values: Array, out: Array) -> Callable[[], None]:
    """Prepare ``out = x``, then ``out[i, indices[i, j]] += values[i, j]`` for all j in order.

    Args:
        x: float32 or int32 ``[N, C]``, rows contiguous, any step from row to row; int32 wraps.
        indices: int32 ``[N, M]``; those outside ``[0, C)`` add nothing.
        values: ``[N, M]``, same dtype as ``x``.
        out: ``[N, C]``, same dtype; written, shares no memory with the others.

    Raises:
        ValueError: arrays that do not fit together.
    """
    n, count = x.shape if x.ndim == 2 else (0, 0)
    m = indices.shape[-1] if indices.ndim else 0
    integers = x.dtype == np.int32
    source, at = _rows("x", x, (n, count), integers=integers), _rows("indices", indices, (n, m), integers=True)
    added = _rows("values", values, (n, m), integers=integers)
    target, add = _rows("out", out, (n, count), integers=integers), _add_ints if integers else _add_floats

    def add_along(_alive: tuple[Array, ...] = (x, indices, values, out)) -> None:
        add(source, at, added, target, n, count, m)

    return add_along
