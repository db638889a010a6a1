"""The simulated device's own memory: poisoned when it is handed out and when it is given back, counted, and bounded.

Nothing here is reachable through an array: a :class:`~.arrays.SimArray` names an allocation and a place in it, and only kernels and
transfers that the queue executes turn that into memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final
from weakref import WeakSet

import numpy as np

from forebay.specs.dtypes import HostArray

from .faults import Faults

POISON: Final = np.uint16(0x7FFF)
"""Two bytes that make a NaN of float32, bfloat16 and float16 alike, and of int32 a number no index or position reaches."""

ALIGNMENT: Final = 64
"""Bytes; arena places start at multiples of it."""


class Allocation:
    """A run of device bytes with an identity.

    Attributes:
        size: bytes.
        freed: True once it was given back; what it held is poison.
        what: what it is for, in messages.
    """

    def __init__(
        self, memory: DeviceMemory, size: int, what: str, data: HostArray | None, owner: HostArray | None = None
    ) -> None:
        self._memory = memory
        self._data = data
        self._owner = owner
        self.size = size
        self.what = what
        self.freed = False

    @property
    def foreign(self) -> bool:
        """True for memory somebody else owns and may look at whenever no call is in progress."""
        return self._owner is not None

    @property
    def data(self) -> HostArray:
        """The bytes; for the queue alone.

        Raises:
            RuntimeError: an arena that has not been reserved yet: a fault of this package.
        """
        if self._data is None:
            raise RuntimeError(f"the memory of {self.what} is used before it was reserved")
        return self._data

    def grow(self, size: int) -> int:
        """Make room for ``size`` bytes more in an arena that is not reserved yet; the offset of the new place."""
        offset = self.size
        self.size += -(-size // ALIGNMENT) * ALIGNMENT
        return offset

    def bind(self, data: HostArray) -> None:
        """Give an arena its memory."""
        self._data = data

    def give_back(self) -> None:
        """The owner has let go of it; nobody may use it from now on. The bytes are poisoned when the queue gets there."""
        if not self.freed:
            self.freed = True
            self._memory.forget(self)

    def poison(self) -> None:
        """Overwrite every byte, so that whoever still looks here sees NaN."""
        if self._data is not None and not self.foreign:
            fill_with_poison(self._data)

    def __del__(self) -> None:
        if not self.freed:
            self.give_back()
            self.poison()


class DeviceMemory:
    """Hands out allocations and counts them.

    Args:
        limit: bytes there are, None for as much as the host has.
        faults: injected exhaustion.
        make_room: waits for the queue, so that memory freed behind it comes back; called before exhaustion is reported.

    Attributes:
        live_bytes, peak_bytes: owned by allocations now, and at most so far.
        allocations, frees: how many were made and given back so far.
        sealed: True while a trace is replayed: nothing may be allocated.
    """

    def __init__(self, limit: int | None, faults: Faults, make_room: Callable[[], None]) -> None:
        self._limit = limit
        self._faults = faults
        self._make_room = make_room
        self._live: WeakSet[Allocation] = WeakSet()
        self.live_bytes = self.peak_bytes = self.allocations = self.frees = 0
        self.sealed = False

    def allocate(self, size: int, what: str) -> Allocation:
        """Poisoned memory.

        Raises:
            MemoryError: more than is left, or an injected exhaustion.
        """
        data = self._take(size, what)
        made = Allocation(self, size, what, data)
        self._live.add(made)
        return made

    def arena(self, what: str) -> Allocation:
        """A trace's memory, empty so far: it grows while the trace is recorded and is reserved at its end."""
        return Allocation(self, 0, what, None)

    def reserve(self, arena: Allocation) -> None:
        """Give a recorded arena its memory, once and for all.

        Raises:
            MemoryError: as :meth:`allocate`.
        """
        arena.bind(self._take(arena.size, arena.what))
        self._live.add(arena)

    def adopt(self, owner: HostArray, what: str) -> Allocation:
        """Foreign bytes as they are: not counted, not poisoned."""
        data = bytes_under(owner)
        return Allocation(self, data.nbytes, what, data, owner)

    def forget(self, allocation: Allocation) -> None:
        """Take an allocation out of the books."""
        if allocation in self._live:
            self._live.discard(allocation)
            self.live_bytes -= allocation.size
            self.frees += 1

    def close(self) -> None:
        """Give back everything, poisoned; arrays that are still held cannot be used any more."""
        for allocation in tuple(self._live):
            allocation.give_back()
            allocation.poison()

    def _take(self, size: int, what: str) -> HostArray:
        if self.sealed:
            raise RuntimeError(f"{what} was to be allocated while a trace replays; a trace works in its arena alone")
        if self._limit is not None and self.live_bytes + size > self._limit:
            self._make_room()
        exhausted = self._faults.allocation()
        if exhausted or (self._limit is not None and self.live_bytes + size > self._limit):
            there = "an injected exhaustion" if exhausted else f"{self._limit} bytes, {self.live_bytes} of them in use"
            raise MemoryError(f"sim: {what} needs {size} bytes; the device has {there}")
        data = np.empty(size, np.uint8)
        fill_with_poison(data)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.allocations += 1
        return data


def fill_with_poison(data: HostArray) -> None:
    """Poison every byte of a flat uint8 array, an odd last one included."""
    whole = data[: data.nbytes // 2 * 2].view(np.uint16)
    whole[...] = POISON
    data[whole.nbytes :] = 0x7F


def bytes_under(x: HostArray) -> HostArray:
    """The bytes between the first and the last element of a strided array, as a flat uint8 view; it does not keep ``x`` alive."""
    if not x.size:
        return np.empty(0, np.uint8)
    reach = x.itemsize + sum((n - 1) * step for n, step in zip(x.shape, x.strides, strict=True))
    return np.frombuffer((ctypes.c_uint8 * reach).from_address(x.ctypes.data), np.uint8)
