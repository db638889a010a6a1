"""How bytes cross between host and device: both ways by copies from and to pinned memory that are asked for and not waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from forebay.backends.torch_shared.namespace import dtype_name
from forebay.specs.dtypes import BITS_DTYPE, HostArray, host_from_bits

from .platform import Event, Platform

RING_BYTES: Final = 16 << 20
ALIGNMENT: Final = 256
"""Pieces begin at multiples of it, in bytes, so that any element type may lie there."""


@dataclass
class Counts:
    """What crossed to the host, and how often it was waited for (clause D7's evidence)."""

    bytes_down: int = 0
    waits: int = 0

    def wait(self, event: Event) -> None:
        """Wait for an event, and count it if there was something to wait for."""
        if not event.done():
            self.waits += 1
            event.wait()


class StagingRing:
    """Pinned host memory that copies to the device read from; pieces are given out in order, and wait for the copies of their last use.

    Args:
        platform: makes the memory and the events.
        counts: counts the waits for a piece that is still in use.
        size: bytes, a multiple of :data:`ALIGNMENT`.
    """

    def __init__(self, platform: Platform, counts: Counts, size: int = RING_BYTES) -> None:
        self._platform = platform
        self._counts = counts
        self._memory = platform.pinned(size)
        self._bytes: HostArray = self._memory.numpy()
        self._given = 0
        self._used: deque[tuple[int, Event]] = deque()

    def send(self, bits: HostArray, target: Tensor) -> None:
        """Ask for a copy of the bytes of ``bits`` to ``target``, contiguous and as large; ``bits`` may be used again at once."""
        source = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
        flat = target.reshape(-1).view(torch.uint8)
        most = len(self._bytes)
        for at in range(0, len(source), most):
            part = source[at : at + most]
            start, number = self._take(len(part))
            self._bytes[start : start + len(part)] = part
            flat[at : at + len(part)].copy_(self._memory[start : start + len(part)], non_blocking=True)
            self._used.append((number, self._platform.event()))

    def _take(self, size: int) -> tuple[int, int]:
        """Where ``size`` bytes lie that no copy reads any more, and the number of the first of them.

        Bytes are numbered in the order they are given out, those that are passed over at the end of the memory too: what is given out
        lies where the bytes lay whose numbers are less by the memory's size.
        """
        most = len(self._bytes)
        if self._given % most + size > most:
            self._given += most - self._given % most
        number = self._given
        self._given += -(-size // ALIGNMENT) * ALIGNMENT
        while self._used and self._used[0][0] < self._given - most:
            self._counts.wait(self._used.popleft()[1])
        return number % most, number


class Readback:
    """Device arrays on their way to host memory of their own; the copies are asked for when it is made."""

    def __init__(self, platform: Platform, counts: Counts, arrays: Mapping[str, Tensor]) -> None:
        self._counts = counts
        self._places: dict[str, tuple[int, tuple[int, ...], str]] = {}
        end = 0
        for name, x in arrays.items():
            self._places[name] = (end, tuple(x.shape), dtype_name(x))
            end += -(-x.numel() * x.element_size() // ALIGNMENT) * ALIGNMENT
        self._memory = platform.pinned(end)
        for name, x in arrays.items():
            start = self._places[name][0]
            source = x.contiguous().reshape(-1).view(torch.uint8)
            self._memory[start : start + source.shape[0]].copy_(source, non_blocking=True)
        self._event = platform.event()

    def bits(self) -> dict[str, HostArray]:
        """The bytes by name, once they are there."""
        self._counts.wait(self._event)
        found = {}
        memory: HostArray = self._memory.numpy()
        for name, (start, shape, dtype) in self._places.items():
            kind = BITS_DTYPE.get(dtype) or np.dtype(dtype)  # others than the contract's have numpy's names
            size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            found[name] = memory[start : start + size].copy().view(kind).reshape(shape)
            self._counts.bytes_down += size
        return found

    def values(self) -> dict[str, HostArray]:
        """The values by name (bfloat16 as float32), once they are there."""
        return {name: host_from_bits(bits, self._places[name][2]) for name, bits in self.bits().items()}
