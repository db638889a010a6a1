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
import numpy.typing as npt

from .address import load_f32, load_i32, load_u32, move_bytes, store_f32, store_i32, store_u32
from .checks import Array, place_rows
from .compiled import SOURCES, compiled, float32, inner, int64, uint32
from .elementwise_ops import sum_row

Rows = tuple[int, int]
"""Address, bytes from row to row; elements of 4 bytes lie side by side."""

_BITS: Final = 11
_BINS: Final = 1 << _BITS
_UPPER: Final = 21
"""Where the upper digit begins."""
_LOWER: Final = ((10, 21), (0, 10))
"""Where the other digits begin, and the digits known before them; the last one takes in a bit of the second."""
_NAN: Final = 0xFFFFFFFF
_SIGN: Final = 0x80000000
_INFINITY: Final = 0x7F800000
_LOWEST_BITS: Final = 0xFF800000


@inner
def _order(bits: int) -> int:
    """A float32's bits as an integer that is larger for a larger number, equal for both zeros, and largest for every
    NaN."""
    if bits & 0x7FFFFFFF > _INFINITY:
        return int64(_NAN)
    if bits == _SIGN:
        return int64(_SIGN)
    return int64(~bits & 0xFFFFFFFF) if bits & _SIGN else int64(bits | _SIGN)


@inner
def _from_order(place: int) -> int:
    """The bits of the number that :func:`_order` maps to ``place``; 0xFFFFFFFF gives a NaN."""
    return uint32(place & 0x7FFFFFFF) if place & _SIGN else uint32(~place & 0xFFFFFFFF)


@inner
def _gather(row: int, count: int, digit: int, members: npt.NDArray[np.int64]) -> int:
    """Addresses of the elements whose upper digit is ``digit``; returns how many there are."""
    found = 0
    for address in range(row, row + count * 4, 4):
        if _order(load_u32(address)) >> _UPPER == digit:
            members[found] = address
            found += 1
    return found


@inner
def _descend(bins: npt.NDArray[np.int64], missing: int) -> tuple[int, int]:
    """The upmost bin with which ``missing`` elements from above are complete, and how many of them it has to give."""
    digit = int64(_BINS - 1)
    while bins[digit] < missing:
        missing -= bins[digit]
        digit -= 1
    return digit, missing


@compiled
def _rank_rows(x: Rows, k: Rows, y: Rows, n: int, count: int, _sources: int = SOURCES) -> None:
    bins, members = np.empty(_BINS, np.int64), np.empty(count, np.int64)
    for i in range(n):
        row, missing = x[0] + i * x[1], int64(load_i32(k[0] + i * k[1]))
        if missing < 1 or missing > count:
            store_u32(y[0] + i * y[1], uint32(_LOWEST_BITS))
            continue
        bins[:] = 0
        for address in range(row, row + count * 4, 4):
            bins[_order(load_u32(address)) >> _UPPER] += 1
        digit, missing = _descend(bins, missing)
        found, held = digit << _UPPER, _gather(row, count, digit, members)
        for shift, before in _LOWER:
            bins[:] = 0
            for j in range(held):
                place = _order(load_u32(members[j]))
                if place >> before == found >> before:
                    bins[(place >> shift) & (_BINS - 1)] += 1
            digit, missing = _descend(bins, missing)
            found |= digit << shift
        store_u32(y[0] + i * y[1], _from_order(found))


@inner
def _reach(
    bins: npt.NDArray[np.float64], held: npt.NDArray[np.int64], above: float, wanted: float
) -> tuple[int, float]:
    """The upmost bin with which the sum from above comes to ``wanted``, and the sum of the bins above it; bin -1 if none
    does."""
    for digit in range(_BINS - 1, -1, -1):
        if held[digit]:
            if not above + bins[digit] < wanted:
                return digit, above
            above += bins[digit]
    return -1, above


@inner
def _lowest(held: npt.NDArray[np.int64]) -> int:
    digit = 0
    while not held[digit]:
        digit += 1
    return digit


@compiled
def _mass_rows(p: Rows, mass: Rows, y: Rows, n: int, count: int, _sources: int = SOURCES) -> None:
    bins, held, members = np.empty(_BINS, np.float64), np.empty(_BINS, np.int64), np.empty(count, np.int64)
    for i in range(n):
        row, wanted = p[0] + i * p[1], load_f32(mass[0] + i * mass[1])
        store_u32(y[0] + i * y[1], uint32(_LOWEST_BITS))
        if not wanted < np.inf:
            continue
        bins[:] = 0.0
        held[:] = 0
        for address in range(row, row + count * 4, 4):
            digit = _order(load_u32(address)) >> _UPPER
            bins[digit] += load_f32(address)
            held[digit] += 1
        digit, above = _reach(bins, held, 0.0, wanted)
        if digit < 0:
            continue
        found, inside = digit << _UPPER, _gather(row, count, digit, members)
        for shift, before in _LOWER:
            bins[:] = 0.0
            held[:] = 0
            for j in range(inside):
                place = _order(load_u32(members[j]))
                if place >> before == found >> before:
                    bins[(place >> shift) & (_BINS - 1)] += load_f32(members[j])
                    held[(place >> shift) & (_BINS - 1)] += 1
            digit, above = _reach(bins, held, above, wanted)
            # The same elements, summed in another order, may fall short by a rounding: then the smallest is the threshold.
            found |= (_lowest(held) if digit < 0 else digit) << shift
        if found != _NAN:
            store_u32(y[0] + i * y[1], _from_order(found))


@compiled
def _top_rows(x: Rows, values: Rows, places: Rows, n: int, count: int, k: int, _sources: int = SOURCES) -> None:
    for i in range(n):
        row, best, where = x[0] + i * x[1], values[0] + i * values[1], places[0] + i * places[1]
        kept, least = 0, int64(-1)
        for j in range(count):
            place = _order(load_u32(row + j * 4))
            if kept == k and place <= least:
                continue
            at = kept if kept < k else k - 1
            while at > 0 and _order(load_u32(best + at * 4 - 4)) < place:
                store_u32(best + at * 4, load_u32(best + at * 4 - 4))
                store_i32(where + at * 4, load_i32(where + at * 4 - 4))
                at -= 1
            store_u32(best + at * 4, load_u32(row + j * 4))
            store_i32(where + at * 4, j)
            kept = min(kept + 1, k)
            least = _order(load_u32(best + kept * 4 - 4))


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


def prepare_sum(x: Array, out: Array) -> Callable[[], None]:
    """Prepare ``out[i]``, the sum of row ``i``: lane j adds elements j, j + 16, ..., the lanes are added by halves.

    Args:
        x: float32 ``[N, C]``, rows contiguous, any step from row to row.
        out: float32 ``[N, 1]``; written.

    Raises:
        ValueError: arrays that do not fit together.
    """
    n, count = x.shape if x.ndim == 2 else (0, 0)
    source, target = place_rows("x", x, (n, count)), place_rows("out", out, (n, 1))

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
    source, ranks, target = (
        place_rows("x", x, (n, count)),
        place_rows("k", k, (n, 1), integers=True),
        place_rows("out", out, (n, 1)),
    )

    def select(_alive: tuple[Array, ...] = (x, k, out)) -> None:
        _rank_rows(source, ranks, target, n, count)

    return select


def prepare_top_k(x: Array, values: Array, places: Array) -> Callable[[], None]:
    """Prepare the k largest elements of each row in falling order, and their places; of equals the first comes first.

    A NaN is larger than any number.

    Args:
        x: float32 ``[N, C]``, rows contiguous, any step from row to row.
        values: float32 ``[N, k]``, k from 1 to C; written.
        places: int32 ``[N, k]``; written.

    Raises:
        ValueError: arrays that do not fit together.
    """
    n, count = x.shape if x.ndim == 2 else (0, 0)
    k = values.shape[-1] if values.ndim else 0
    source, best = place_rows("x", x, (n, count)), place_rows("values", values, (n, k))
    where = place_rows("places", places, (n, k), integers=True)
    if not 1 <= k <= count:
        raise ValueError(f"top_k: got k={k} of rows of {count} elements, expected 1 to {count}")

    def select(_alive: tuple[Array, ...] = (x, values, places)) -> None:
        _top_rows(source, best, where, n, count, k)

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
    source, wanted, target = (
        place_rows("p", p, (n, count)),
        place_rows("mass", mass, (n, 1)),
        place_rows("out", out, (n, 1)),
    )

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
    source, at = (
        place_rows("x", x, (n, count), integers=integers),
        place_rows("indices", indices, (n, m), integers=True),
    )
    added = place_rows("values", values, (n, m), integers=integers)
    target, add = place_rows("out", out, (n, count), integers=integers), _add_ints if integers else _add_floats

    def add_along(_alive: tuple[Array, ...] = (x, indices, values, out)) -> None:
        add(source, at, added, target, n, count, m)

    return add_along
