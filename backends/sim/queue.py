"""The deferred queue: what was asked for is done in order, and only when somebody waits for it or the queue is long."""

from __future__ import annotations

import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from forebay.specs.dtypes import HostArray
from forebay.specs.errors import DeviceLost

from .arrays import SimArray
from .faults import Faults
from .memory import Allocation
from .views import View

Kernel = Callable[..., None]
"""``kernel(outs, ins, *constants)`` over :class:`.views.View`; an operand that is not given is None."""


class Work(Protocol):
    """One entry of the queue."""

    def do(self, queue: Queue) -> None:
        """Do it; an exception loses the device."""


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel over device arrays.

    Attributes:
        outs: arrays it writes.
        ins: arrays it reads, or None where an operand is not given.
        constants: numbers and sizes that are part of the program.
    """

    name: str
    kernel: Kernel
    outs: tuple[SimArray, ...]
    ins: tuple[SimArray | None, ...]
    constants: tuple[Any, ...] = ()

    @property
    def program(self) -> tuple[Any, ...]:
        """What a compiler would see: the kernel, shapes and dtypes."""
        return (self.name, *((x.dtype, x.shape) if x is not None else None for x in (*self.outs, *self.ins)))

    def do(self, queue: Queue) -> None:
        """Count, strike if a fault is due, compute."""
        queue.begin(self.name)
        outs = [View(x.memory(), x.dtype) for x in self.outs]
        ins = [None if x is None else View(x.memory(), x.dtype) for x in self.ins]
        try:
            with np.errstate(all="ignore"):
                self.kernel(outs, ins, *self.constants)
        except IndexError as error:
            raise DeviceLost(f"sim: kernel {self.name} reached outside its arrays: {error}") from error


@dataclass(frozen=True, eq=False)
class Upload:
    """Host bytes to a device array. ``checked``: hold a checksum of what arrived against what was sent."""

    target: SimArray
    bits: HostArray
    checked: bool

    def do(self, queue: Queue) -> None:
        """Copy, or half of it where a torn transfer is injected."""
        memory, sent = self.target.memory(), self.bits
        queue.bytes_up += sent.nbytes
        if queue.faults.upload():
            sent = torn(sent, memory)
        memory[...] = sent
        if self.checked and checksum(memory) != checksum(self.bits):
            raise DeviceLost(
                f"sim: a transfer of {self.bits.nbytes} bytes to {self.target!r} arrived torn (its checksum differs)"
            )


@dataclass(frozen=True, eq=False)
class Readback:
    """Device arrays to host memory of one step's own."""

    sources: Mapping[str, SimArray]
    values: dict[str, HostArray] = field(default_factory=dict)

    def do(self, queue: Queue) -> None:
        """Copy."""
        for name, x in self.sources.items():
            self.values[name] = x.memory().copy()
            queue.bytes_down += self.values[name].nbytes


@dataclass(frozen=True, eq=False)
class Poisoning:
    """The end of an allocation, behind everything that still uses it."""

    allocation: Allocation

    def do(self, queue: Queue) -> None:
        """Overwrite it."""
        self.allocation.poison()


class Queue:
    """Entries in the order they were asked for.

    Args:
        faults: what is to go wrong.
        limit: entries beyond which the oldest half is done at once.
        stuck_timeout: seconds a wait for a kernel that never ends takes.

    Attributes:
        launches: kernels done, by name.
        bytes_up, bytes_down: moved to and from the device.
        waits: how often somebody had to wait for work.
    """

    def __init__(self, faults: Faults, limit: int, stuck_timeout: float) -> None:
        self.faults: Final = faults
        self.launches: Final[Counter[str]] = Counter()
        self.bytes_up = self.bytes_down = self.waits = 0
        self._limit = limit
        self._stuck_timeout = stuck_timeout
        self._entries: deque[Work] = deque()
        self._done = 0
        self._lost = ""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def lost(self) -> str:
        """Why the device is lost, ``""`` while it is not."""
        return self._lost

    def submit(self, *work: Work) -> int:
        """Add entries; the serial of the last one.

        Raises:
            DeviceLost: it is.
        """
        self.check()
        self._entries.extend(work)
        serial = self._done + len(self._entries)
        if len(self._entries) > self._limit:
            self.wait(serial - self._limit // 2)
        return serial

    def check(self) -> None:
        """Raise DeviceLost, with the first reason, once the device is lost."""
        if self._lost:
            raise DeviceLost(self._lost)

    def wait(self, serial: int) -> None:
        """Do everything up to entry ``serial``, and nothing behind it.

        Raises:
            DeviceLost: on the way, or before.
        """
        if serial <= self._done:
            return
        self.check()
        self.waits += 1
        while self._done < serial:
            try:
                self._entries[0].do(self)
            except BaseException as error:
                self.lose(f"{error}" if isinstance(error, DeviceLost) else f"sim: {type(error).__name__}: {error}")
                if isinstance(error, Exception) and not isinstance(error, DeviceLost):
                    raise DeviceLost(self._lost) from error
                raise
            self._entries.popleft()
            self._done += 1

    def drain(self) -> None:
        """Do everything.

        Raises:
            DeviceLost: on the way, or before.
        """
        self.check()
        self.wait(self._done + len(self._entries))

    def lose(self, why: str) -> None:
        """The device is lost, with everything that is queued."""
        self._lost = self._lost or why
        entries, self._entries = self._entries, deque()
        for entry in entries:
            if isinstance(entry, Poisoning):
                entry.allocation.poison()

    def begin(self, name: str) -> None:
        """A kernel begins.

        Raises:
            DeviceLost: an injected loss, or a kernel that never ends.
        """
        fault = self.faults.launch()
        if fault == "lost":
            raise DeviceLost(f"sim: the device was lost at launch {self.faults.counts['at_launch']} ({name})")
        if fault == "stuck":
            time.sleep(self._stuck_timeout)
            raise DeviceLost(
                f"sim: the queue is stuck: launch {self.faults.counts['at_launch']} ({name}) did not end within "
                f"{self._stuck_timeout:g} s"
            )
        self.launches[name] += 1


def torn(sent: HostArray, held: HostArray) -> HostArray:
    """What a target that held ``held`` holds after ``sent`` arrived without its first half."""
    mixed = np.array(sent, order="C")
    flat, old = mixed.reshape(-1).view(np.uint8), np.array(held, order="C").reshape(-1).view(np.uint8)
    half = -(-len(flat) // 2)
    flat[:half] = old[:half]
    return mixed


def checksum(x: HostArray) -> int:
    """CRC-32 of an array's bytes in row-major order."""
    return zlib.crc32(x.tobytes())


def sizes(arrays: Sequence[SimArray]) -> str:
    """Shapes and dtypes, for messages."""
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
