"""Identity, arrays and Buffers of an opened backend: the part of :class:`forebay.specs.backend.Backend` below pools and Segments."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import TracebackType
from typing import Any, Final, Self
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from .array_namespace import ArrayNamespace
from .capabilities import Capabilities
from .counters import Counters
from .descriptor import Selection
from .driver import Driver, is_delegated
from .dtypes import ITEMSIZE, Array, HostArray, check_dtype, host_bits, host_from_bits
from .errors import CaptureDeclined, CaptureViolation, InvalidInput, Unsupported
from .pool import Pool
from .scope import Evaluation, Scope
from .segment import Buffer, Segment, Trace

MAX_BYTES: Final = 2**62
"""Beyond any address space; a size above it is a mistake, and arithmetic on it would wrap."""


class BackendMemory:
    """One opened device. Also a context manager; ``close`` frees everything it opened. One thread uses it at a time.

    Attributes:
        selection: the resolved choice and where it came from.
        counters: exact public counts (clause C9).
    """

    def __init__(self, driver: Driver, selection: Selection) -> None:
        self.selection = selection
        self.counters = Counters(device_counts=self._device_counts)
        self._open_driver: Driver | None = driver
        self._scope: Scope | None = None
        self._serial = 0
        self._pools: list[Pool] = []
        self._retained = (0, 0)
        self._traces: set[Trace] = set()
        self._warm: WeakSet[Segment] = WeakSet()
        self._captured: WeakSet[Segment] = WeakSet()
        self._buffers: WeakSet[Buffer] = WeakSet()
        self._evaluated: WeakKeyDictionary[Segment, Evaluation] = WeakKeyDictionary()

    # -- identity and life ---------------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        """The configuration name, such as ``cpu``."""
        return self.selection.name

    @property
    def mode(self) -> str:
        """The mode, ``""`` for the device itself."""
        return self.selection.mode

    @property
    def info(self) -> dict[str, Any]:
        """Device, driver and library versions."""
        return dict(self._driver.info)

    @property
    def capabilities(self) -> Capabilities:
        """What the backend can do."""
        return self._driver.capabilities

    @property
    def xp(self) -> ArrayNamespace:
        """The array namespace models are written against."""
        return self._driver.xp

    @property
    def _driver(self) -> Driver:
        if self._open_driver is None:
            raise InvalidInput(f"backend {self.name!r} is closed; open it again with open_backend")
        return self._open_driver

    def close(self) -> None:
        """Free everything; closing twice is harmless, using a closed backend raises InvalidInput."""
        if self._open_driver is not None:
            # The driver is closed whatever the device says: a lost one can neither be read nor released from.
            driver = self._open_driver
            try:
                self._retained = self._device_counts()
                for trace in tuple(self._traces):
                    self.release(trace)
            finally:
                try:
                    self._free(tuple(self._buffers))
                finally:
                    self._open_driver = None
                    self._pools.clear()
                    self._traces.clear()
                    driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- arrays ----------------------------------------------------------------------------------------------------------
    def to_device(self, x: object, dtype: str | None = None) -> Array:
        """A device array with the values of a host array; counts one upload.

        int64 becomes int32 and float64 float32 only where no value changes; ``dtype="bfloat16"`` rounds float32 to nearest even,
        and takes uint16 as bit patterns.

        Raises:
            InvalidInput: a value would be narrowed.
            CaptureViolation: inside a Segment.
        """
        self.forbid_in_segment("to_device (a host write)")
        bits, name = host_bits(x, dtype, "to_device")
        self._count_upload(bits)
        return self._driver.from_host(bits, name)

    def to_host(self, x: Array) -> HostArray:
        """The values of a device array (bfloat16 as float32); waits for everything queued before.

        Raises:
            CaptureViolation: inside a Segment.
        """
        self.forbid_in_segment("to_host (a host read)")
        if not self.xp.is_array(x):
            raise InvalidInput(f"to_host: got {type(x).__name__}, expected a device array of backend {self.name!r}")
        self._count_download()
        return host_from_bits(self._driver.to_host(x), self.xp.dtype(x))

    def synchronize(self) -> None:
        """Wait for everything queued."""
        self.forbid_in_segment("synchronize")
        self.counters.syncs += 1
        self._driver.synchronize()

    # -- buffers ---------------------------------------------------------------------------------------------------------
    def buffer(self, name: str, host: object, dtype: str | None = None) -> Buffer:
        """A Buffer with the values of a host array, converted as in :meth:`to_device`; counts one upload.

        Raises:
            CaptureViolation: inside a Segment (a captured step creates no Buffer).
        """
        self.forbid_in_segment(f"creating Buffer {name!r}")
        bits, dtype = host_bits(host, dtype, f"Buffer {name!r}")
        made = self._make_buffer(name, bits.shape, dtype)
        self._count_upload(bits)
        self._driver.store(made, bits, None)
        return made

    def reserve(self, name: str, shape: Sequence[int], dtype: str) -> Buffer:
        """Spare memory of undefined content that exists before capture; a device-side zero fill may take it (clause S5)."""
        self.forbid_in_segment(f"reserving Buffer {name!r}")
        check_dtype(dtype, what=f"reserve {name!r} dtype")
        sizes: tuple[object, ...] = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
        if any(isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0 for n in sizes):
            raise InvalidInput(f"reserve {name!r}: got shape {shape!r}, expected non-negative ints")
        return self._make_buffer(name, tuple(int(n) for n in shape), dtype, reserved=True)

    def upload(self, buffer: Buffer, host: object, row: int | None = None) -> None:
        """Write a host array into a Buffer: all of it, or rows from ``row`` on (``[n, …]``, or one row without its axis).

        Raises:
            InvalidInput: shape, dtype or row do not fit; nothing was written.
            CaptureViolation: inside a Segment.
        """
        self._check_buffer(buffer)
        self.forbid_in_segment(f"upload to {buffer.name!r} (a host write)")
        if row is not None and (isinstance(row, bool) or not isinstance(row, int | np.integer) or not buffer.shape):
            raise InvalidInput(
                f"upload to {buffer!r}: got row {row!r}, expected None, or an int where the Buffer has rows"
            )
        bits, _ = host_bits(host, buffer.dtype, f"upload to {buffer.name!r}")
        if row is None:
            fits = bits.shape == buffer.shape
        else:
            bits = bits.reshape(1, *bits.shape) if bits.shape == buffer.shape[1:] else bits
            fits = bits.ndim > 0 and bits.shape[1:] == buffer.shape[1:] and 0 <= row <= buffer.shape[0] - bits.shape[0]
        if not fits:
            raise InvalidInput(f"upload to {buffer!r}: got shape {list(bits.shape)} at row {row}; nothing was written")
        self._count_upload(bits)
        self._driver.store(buffer, bits, row)

    def zero(self, buffer: Buffer) -> None:
        """Fill a Buffer with zeros on the device; allowed under capture.

        Inside a Segment a declared update commits with the others; a pool's Buffer and a reserved one are filled in program order,
        and a reserved one belongs to the trace from then on.
        """
        self._check_buffer(buffer)
        scope = self._scope
        if scope is not None:
            if buffer in scope.segment.updates:
                scope.zeroed.append(buffer)
                return
            if buffer.reserved and buffer not in scope.taken:
                scope.taken.append(buffer)
            if not buffer.reserved and not any(buffer in pool.buffers for pool in scope.segment.pools):
                scope.check_declared(buffer)
                raise CaptureViolation(
                    f"Segment {scope.segment}: zero of {buffer.name!r}, which it declares as read only"
                )
        self._launch("zero")
        self._driver.zero(buffer)

    def fetch(self, buffer: Buffer) -> HostArray:
        """The values of a Buffer (bfloat16 as float32), a copy; waits for everything queued before."""
        self._check_buffer(buffer)
        self.forbid_in_segment(f"fetch of {buffer.name!r} (a host read)")
        self._count_download()
        return host_from_bits(self._driver.to_host(self._driver.load(buffer)), buffer.dtype)

    def load(self, buffer: Buffer) -> Array:
        """What ``buffer.get()`` returns."""
        self._check_buffer(buffer)
        if self._scope is not None:
            self._scope.check_declared(buffer)
        return self._driver.load(buffer)

    def release(self, thing: Buffer | Pool | Trace) -> None:
        """Free a Buffer, a Pool or a Trace; releasing twice is harmless.

        Raises:
            CaptureViolation: inside a Segment, or a live Trace uses the memory (release the trace first).
            InvalidInput: another backend's, or one Buffer of a pool (release the pool); nothing was freed.
        """
        self.forbid_in_segment(f"release of {type(thing).__name__}")
        self._check_releasable(thing)
        if self._open_driver is None:
            return  # closing has freed it
        if isinstance(thing, Trace):
            if thing.live:
                thing.live = False
                self._traces.discard(thing)
                self._driver.release_trace(thing.payload)
            return
        buffers = (thing,) if isinstance(thing, Buffer) else thing.buffers
        user = next((t for t in self._traces if not set(t.buffers).isdisjoint(buffers)), None)
        if user is not None:
            raise CaptureViolation(
                f"release of {type(thing).__name__}: the live trace of Segment {user.segment} uses it; release it first"
            )
        if isinstance(thing, Pool) and thing in self._pools:
            self._pools.remove(thing)
            try:
                dropped, invalid = self._retained
                counts = self._host_count(thing.dropped_buffer), self._host_count(thing.invalid_buffer)
                self._retained = (dropped + counts[0], invalid + counts[1])
            finally:
                self._free(buffers)
            return
        self._free(buffers)

    # -- inside ------------------------------------------------------------------------------------------------------------
    def forbid_in_segment(self, act: str) -> None:
        """Raise CaptureViolation naming ``act`` if a Segment is being evaluated (clause C2)."""
        if self._scope is not None:
            raise CaptureViolation(f"{act} inside Segment {self._scope.segment}; a captured step does no such thing")

    def _launch(self, operation: str, implemented_by: str | None = None) -> None:
        """Count a kernel: at once outside a Segment, inside it once for each run and replay of the Segment."""
        scope = self._scope
        if not is_delegated(self._driver, implemented_by or operation):
            (self.counters if scope is None else scope).launches[operation] += 1
            return
        if scope is not None and (scope.capturing or self.capabilities.traces_run):
            raise CaptureDeclined(f"{operation} is delegated to numpy on backend {self.name!r} and cannot be captured")
        self.counters.delegated[operation] += 1

    def _free(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            if buffer.live:
                buffer.live = False
                self._driver.free(buffer)

    def _make_buffer(self, name: str, shape: tuple[int, ...], dtype: str, *, reserved: bool = False) -> Buffer:
        if not self.capabilities.allows("max_pool_elements", prod(shape)):
            limit = self.capabilities.max_pool_elements
            raise Unsupported(
                f"Buffer {name!r}: {list(shape)} elements, backend {self.name!r} holds at most {limit} in one array",
                capability="max_pool_elements",
                value=prod(shape),
            )
        size = prod(shape) * ITEMSIZE[dtype]
        try:
            if size > MAX_BYTES:
                raise MemoryError(f"{size} bytes are beyond any address space")
            handle = self._driver.allocate(shape, dtype)
        except MemoryError as error:
            raise Unsupported(
                f"Buffer {name!r}: {list(shape)} of {dtype} are {size} bytes, more than there is: {error}"
            ) from error
        return self._track(Buffer(self, name, shape, dtype, handle, reserved))

    def _track(self, buffer: Buffer) -> Buffer:
        """Remember a Buffer, so that closing frees it."""
        self._buffers.add(buffer)
        return buffer

    def _check_releasable(self, thing: Buffer | Pool | Trace) -> None:
        if isinstance(thing, Trace):
            mine = thing in self._traces or not thing.live
        elif isinstance(thing, Buffer | Pool):
            mine = all(buffer.belongs_to(self) for buffer in (thing.buffers if isinstance(thing, Pool) else (thing,)))
        else:
            raise InvalidInput(f"release: got {type(thing).__name__}, expected a Buffer, a Pool or a Trace")
        if not mine:
            raise InvalidInput(f"release: got {thing!r} of another backend; nothing was freed")
        if isinstance(thing, Buffer) and any(thing in pool.buffers for pool in self._pools):
            raise InvalidInput(f"release: {thing!r} belongs to a pool; release the pool; nothing was freed")

    def _check_buffer(self, buffer: Buffer) -> None:
        if not isinstance(buffer, Buffer) or not buffer.belongs_to(self):
            raise InvalidInput(f"got {buffer!r}, expected a Buffer of backend {self.name!r}")
        if not buffer.live:
            raise InvalidInput(f"{buffer!r} was released")

    def _count_upload(self, bits: HostArray) -> None:
        self.counters.uploads += 1
        self.counters.upload_bytes += bits.nbytes

    def _count_download(self) -> None:
        self.counters.downloads += 1

    def _host_count(self, buffer: Buffer) -> int:
        return int(self._driver.to_host(self._driver.load(buffer))[0])

    def _device_counts(self) -> tuple[int, int]:
        dropped, invalid = self._retained
        if self._open_driver is not None:
            self.forbid_in_segment("reading the dropped and invalid counts (a host read)")
            for pool in self._pools:
                dropped += self._host_count(pool.dropped_buffer)
                invalid += self._host_count(pool.invalid_buffer)
        return dropped, invalid
