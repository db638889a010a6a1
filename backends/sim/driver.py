"""The driver of the simulated device: what is asked of it is recorded or queued, and done when somebody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from forebay.specs.attention import DecodeCall
from forebay.specs.capabilities import Capabilities
from forebay.specs.driver import Driver, ForeignMemory
from forebay.specs.dtypes import BITS_DTYPE, ITEMSIZE, HostArray, host_from_bits
from forebay.specs.errors import CaptureDeclined, InvalidInput, InvalidLayout
from forebay.specs.pool import Pool
from forebay.specs.segment import Buffer, Effects, Fetch, Segment, Step
from forebay.specs.write_loc import WriteLoc

from . import attention, dense, doors
from .arrays import Place, SimArray
from .faults import Faults
from .issue import Issuer
from .memory import Allocation, DeviceMemory
from .namespace import SimNamespace
from .queue import Launch, Poisoning, Queue, Readback, Upload
from .record import Program, Record, SimTrace, check_warm, program_of

LAYOUTS: Final = ("NHD", "HND", "KV2", "PACKED", "FUSED", "LATENT")


class SimDriver(Driver):
    """A strict accelerator that does not exist.

    Args:
        recapture_at_boundary: the capability of that name.
        memory_limit: bytes of device memory, None for as much as the host has.
        queue_limit: entries the queue holds before it is worked off.
        stuck_timeout: seconds until a wait for a kernel that never ends is given up.
        inject: faults, see :mod:`.faults`.
    """

    def __init__(
        self,
        *,
        recapture_at_boundary: bool = False,
        memory_limit: int | None = None,
        queue_limit: int = 4096,
        stuck_timeout: float = 0.05,
        inject: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        _check_options(recapture_at_boundary, memory_limit, queue_limit, stuck_timeout)
        self._faults = Faults(inject)
        self._queue = Queue(self._faults, queue_limit, stuck_timeout)
        self._memory = DeviceMemory(memory_limit, self._faults, self._queue.drain)
        self._issuer = Issuer(self._memory, self._queue)
        self._xp = SimNamespace(self._issuer)
        self._programs: WeakKeyDictionary[Segment, Program] = WeakKeyDictionary()
        self.capabilities = Capabilities(
            layouts=LAYOUTS,
            kv_dtypes=("float32", "bfloat16", "float16"),
            addressable=True,
            recapture_at_boundary=recapture_at_boundary,
            deferred=True,
        )
        self.info = LiveInfo(self._describe)

    @property
    def xp(self) -> SimNamespace:
        """Launches, by name."""
        return self._xp

    def _describe(self) -> dict[str, Any]:
        memory, queue = self._memory, self._queue
        return {
            "device": "simulated accelerator",
            "numpy": np.__version__,
            "queued": len(queue),
            "waits": queue.waits,
            "launches": dict(queue.launches),
            "bytes_up": queue.bytes_up,
            "bytes_down": queue.bytes_down,
            "live_bytes": memory.live_bytes,
            "peak_bytes": memory.peak_bytes,
            "allocations": memory.allocations,
            "frees": memory.frees,
            "positions": dict(self._faults.counts),
            "faults": [f"{fault.kind} {fault.place}={fault.number}" for fault in self._faults.struck],
            "lost": queue.lost,
        }

    # -- memory ----------------------------------------------------------------------------------------------------------
    def allocate(self, shape: tuple[int, ...], dtype: str) -> SimArray:
        """Poisoned memory of its own."""
        self._queue.check()
        made = self._memory.allocate(prod(shape) * ITEMSIZE[dtype], f"a Buffer {dtype}{list(shape)}")
        return self._issuer.of(made, shape, dtype)

    def from_host(self, bits: HostArray, dtype: str) -> SimArray:
        """A new array; the bytes are copied at once and arrive when the queue gets there."""
        made = self._issuer.new(bits.shape, dtype, "an uploaded array")
        self._queue.submit(Upload(made, bits.copy(), checked=True))
        return made

    def to_host(self, x: SimArray) -> HostArray:
        """The bytes, after everything queued."""
        self._issuer.check(x, "to_host")
        self._queue.drain()
        readback = Readback({"x": x})
        readback.do(self._queue)
        return readback.values["x"]

    def load(self, buffer: Buffer) -> SimArray:
        """The Buffer's memory by name."""
        array: SimArray = buffer.handle
        return array

    def store(self, buffer: Buffer, bits: HostArray, row: int | None) -> None:
        """Queue a copy of the bytes. Rows written into a Buffer are the one transfer without a checksum: whoever consumes them says
        in a receipt what it found (clause C5)."""
        whole: SimArray = buffer.handle
        target = whole if row is None else whole[row : row + len(bits)]
        self._queue.submit(Upload(target, bits.copy(), checked=row is None))
        if whole.allocation.foreign:
            self._queue.drain()

    def free(self, buffer: Buffer) -> None:
        """Take the memory back; it is poisoned behind everything that still uses it."""
        array: SimArray = buffer.handle
        buffer.handle = None
        array.allocation.give_back()
        self._poison(Poisoning(array.allocation))

    def wrap(self, x: object, dtype: str) -> ForeignMemory:
        """numpy memory, or a device array's, by its own strides. Work on it is done before the call that asked for it returns."""
        if isinstance(x, SimArray):
            self._issuer.check(x, "wrap_pool")
            self._queue.drain()
            x = x.memory()
        if not isinstance(x, np.ndarray):
            raise InvalidLayout(f"wrap_pool: got {type(x).__name__}, expected a numpy array or an array of this device")
        if x.dtype != BITS_DTYPE[dtype]:
            raise InvalidLayout(f"wrap_pool: got numpy {x.dtype}, a {dtype} pool takes {BITS_DTYPE[dtype]}")
        if not x.flags.writeable:
            raise InvalidLayout("wrap_pool: the array is read-only; a pool must be writable")
        if not x.flags.aligned or any(step < 0 for step in x.strides):
            raise InvalidLayout(
                f"wrap_pool: strides {x.strides} bytes over shape {x.shape}; sim takes aligned, non-negative ones"
            )
        place = Place(0, x.shape, x.strides)
        handle = SimArray(self._issuer, self._memory.adopt(x, "foreign memory"), place, dtype)
        return ForeignMemory(handle, x.shape, x.strides, x.ctypes.data)

    # -- steps -----------------------------------------------------------------------------------------------------------
    def run(self, step: Step) -> Fetch:
        """Evaluate, then queue everything; nothing is queued if the evaluation fails."""
        self._queue.check()
        with self._recording(step, None) as record:
            emits = self._commit(record, step())
        self._programs[step.segment] = program_of(record.launches)
        return self._send(record.launches, emits)

    def capture(self, step: Step) -> SimTrace:
        """Evaluate and keep the launches; nothing is queued. A step that is not warm leaves no trace.

        Raises:
            CaptureViolation, ColdCapture: see :func:`.record.check_warm`.
            CaptureDeclined: no memory for the arena.
        """
        self._queue.check()
        segment = str(step.segment)
        arena = self._memory.arena(f"the arena of Segment {segment}")
        with self._recording(step, arena) as record:
            emits = self._commit(record, step())
        if not step.warm:
            return SimTrace(None, (), {})
        check_warm(segment, self._programs[step.segment], program_of(record.launches))
        if self._faults.capture():
            raise CaptureDeclined(f"sim: {arena.what} needs {arena.size} bytes; the device has an injected exhaustion")
        try:
            self._memory.reserve(arena)
        except MemoryError as error:
            raise CaptureDeclined(str(error)) from error
        return SimTrace(arena, tuple(record.launches), emits)

    def replay(self, payload: SimTrace) -> Fetch:
        """Queue the recorded launches again; nothing is allocated."""
        self._memory.sealed = True
        try:
            return self._send(payload.launches, payload.emits)
        finally:
            self._memory.sealed = False

    def release_trace(self, payload: SimTrace) -> None:
        """Give the arena back."""
        arena, payload.arena, payload.launches, payload.emits = payload.arena, None, (), {}
        if arena is not None:
            arena.give_back()
            self._poison(Poisoning(arena))

    def synchronize(self) -> None:
        """Work the queue off."""
        self._queue.drain()

    def close(self) -> None:
        """Drop what is queued and give everything back, arrays that are still held included."""
        self._queue.lose("sim: the device was closed")
        self._memory.close()

    # -- operations ------------------------------------------------------------------------------------------------------
    def zero(self, buffer: Buffer) -> None:
        """One launch; a reserved Buffer belongs to the Segment from then on."""
        record = self._issuer.record
        if record is not None:
            record.declare(buffer.handle.allocation)
        self._issuer.put(Launch("zero", dense.zero, (buffer.handle,), ()))

    def write_kv(self, pool: Pool, layer: int, loc: WriteLoc, k: SimArray, v: SimArray | None) -> None:
        """One launch, and one for a location by table."""
        outs = (*self._storage(pool, layer), pool.dropped_buffer.handle)
        self._issuer.put(Launch("write_kv", doors.write, outs, (self._slots(pool, loc), k, v), (_plan(pool),)))

    def read_kv(self, pool: Pool, layer: int, loc: WriteLoc) -> tuple[SimArray, SimArray]:
        """One launch, and one for a location by table."""
        g, slots = pool.geometry, self._slots(pool, loc)
        k, v = (
            self._issuer.new((*slots.shape, g.num_kv_heads, dim), g.dtype, "rows of a pool")
            for dim in (g.key_dim, g.value_dim)
        )
        ins = (slots, *self._storage(pool, layer))
        self._issuer.put(Launch("read_kv", doors.read, (k, v, pool.dropped_buffer.handle), ins, (_plan(pool),)))
        return k, v

    def copy_kv(self, pool: Pool, src: WriteLoc, dst: WriteLoc) -> None:
        """One launch for all layers."""
        storage = [x for layer in range(pool.geometry.num_layers) for x in self._storage(pool, layer)]
        ins = (self._slots(pool, src), self._slots(pool, dst))
        outs = (*storage, pool.dropped_buffer.handle)
        self._issuer.put(Launch("copy_kv", doors.copy_rows, outs, ins, (_plan(pool),)))

    def paged_decode(self, call: DecodeCall) -> tuple[SimArray, SimArray | None]:
        """One launch."""
        pool, (batch, query_len, heads, _) = call.pool, call.q.shape
        out = self._issuer.new((batch, query_len, heads, pool.geometry.value_dim), call.q.dtype, "attention's output")
        lse = self._issuer.new((batch, query_len, heads), "float32", "attention's LSE")
        path = call.path
        if path == "gather":
            call.gathered()
        static = attention.Call(call.table_len, call.scale, call.window, call.softcap, path)
        ins = (call.q, call.table, call.visible, call.sinks, *self._storage(pool, call.layer))
        outs = (out, lse, pool.invalid_buffer.handle)
        self._issuer.put(Launch("paged_decode", attention.paged_decode, outs, ins, (_plan(pool), static)))
        return out, lse if call.return_lse else None

    def merge_partials(self, outs: Sequence[SimArray], lses: Sequence[SimArray]) -> tuple[SimArray, SimArray]:
        """One launch."""
        out = self._issuer.new(outs[0].shape, outs[0].dtype, "a merged output")
        lse = self._issuer.new(lses[0].shape, "float32", "a merged LSE")
        self._issuer.put(Launch("merge_partials", attention.merge_partials, (out, lse), (*outs, *lses)))
        return out, lse

    def stage(
        self,
        pool: Pool,
        layer: int,
        k: HostArray,
        v: HostArray | None,
        src_blocks: HostArray,
        dst_blocks: HostArray,
        tokens: int,
    ) -> None:
        """Copy the host blocks at once by their own strides, queue the transfer, check what arrives by its checksum."""
        dtype = pool.geometry.dtype
        rows = tuple(doors.compact(x, src_blocks, dtype) for x in (k, v) if x is not None)
        storage = self._storage(pool, layer)
        self._queue.submit(doors.Staging(storage, _plan(pool), dst_blocks.copy(), tokens, rows))
        if any(x.allocation.foreign for x in storage):
            self._queue.drain()

    # -- inside ----------------------------------------------------------------------------------------------------------
    @contextmanager
    def _recording(self, step: Step, arena: Allocation | None) -> Iterator[Record]:
        declared = {buffer.handle.allocation for buffer in step.segment.buffers}
        self._issuer.record = record = Record(str(step.segment), declared, arena)
        try:
            yield record
        finally:
            self._issuer.record = None

    def _commit(self, record: Record, effects: Effects) -> dict[str, SimArray]:
        """Record the end of a step: copies of what shares memory with a Buffer, then the updates (clause C13); where the emits lie."""

        def settled(x: SimArray, act: str) -> SimArray:
            self._issuer.check(x, act)
            shared = x.allocation in record.declared
            return self._issuer.launch("copy", dense.copy, x.shape, x.dtype, (x,)) if shared else x

        emits = {name: settled(x, f"emit {name!r}") for name, x in effects.emits.items()}
        values = [(b, settled(x, f"update of {b.name!r}")) for b, x in effects.updates]
        for buffer, x in values:
            whole: SimArray = buffer.handle
            target = whole[: x.shape[0]] if x.shape else whole
            self._issuer.put(Launch("commit", dense.copy, (target,), (x,)))
        return emits

    def _send(self, launches: Sequence[Launch], emits: Mapping[str, SimArray]) -> Fetch:
        readback = Readback(emits)
        dtypes = {name: x.dtype for name, x in emits.items()}
        serial = self._queue.submit(*launches, readback)
        self._issuer.settle(*launches)
        return partial(self._fetch, serial, readback, dtypes)

    def _fetch(self, serial: int, readback: Readback, dtypes: Mapping[str, str]) -> dict[str, HostArray]:
        self._queue.wait(serial)
        return {name: host_from_bits(bits, dtypes[name]) for name, bits in readback.values.items()}

    def _poison(self, poisoning: Poisoning) -> None:
        if self._queue.lost:
            poisoning.do(self._queue)
        else:
            self._queue.submit(poisoning)

    def _storage(self, pool: Pool, layer: int) -> tuple[SimArray, ...]:
        return tuple(buffer.handle for buffer in pool.storage(layer))

    def _slots(self, pool: Pool, loc: WriteLoc) -> SimArray:
        """Flat int32 slots of a location; a table is lowered on the device."""
        if loc.ids is not None:
            ids: SimArray = loc.ids
            return ids
        if loc.table is None or loc.positions is None or loc.table_len is None:
            raise InvalidInput("WriteLoc: neither ids nor a table with positions")
        count = int(np.prod(loc.positions.shape))
        ins = (loc.table.array, loc.positions)
        return self._issuer.launch("lower", doors.lower, (count,), "int32", ins, (_plan(pool), loc.table_len))


class LiveInfo(Mapping[str, Any]):
    """What the device says about itself, asked anew at every look."""

    def __init__(self, describe: Callable[[], dict[str, Any]]) -> None:
        self._describe = describe

    def __getitem__(self, key: str) -> Any:
        return self._describe()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._describe())

    def __len__(self) -> int:
        return len(self._describe())


def _plan(pool: Pool) -> doors.Plan:
    return doors.Plan(pool.layout, pool.geometry, pool.first_block)


def _check_options(recapture: object, memory_limit: object, queue_limit: object, stuck_timeout: object) -> None:
    if not isinstance(recapture, bool):
        raise InvalidInput(f"sim option recapture_at_boundary: got {recapture!r}, expected True or False")
    for name, value in (("memory_limit", memory_limit), ("queue_limit", queue_limit)):
        missing = value is None and name == "memory_limit"
        if not missing and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidInput(f"sim option {name}: got {value!r}, expected an int from 1 on")
    if isinstance(stuck_timeout, bool) or not isinstance(stuck_timeout, int | float) or not 0 <= stuck_timeout <= 60:
        raise InvalidInput(f"sim option stuck_timeout: got {stuck_timeout!r}, expected 0 to 60 seconds")
