"""The driver: the ten members a port must supply, then the operations it has kernels of its own for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from forebay.specs.attention import DecodeCall
from forebay.specs.capabilities import Capabilities
from forebay.specs.driver import Driver, ForeignMemory
from forebay.specs.dtypes import BITS_DTYPE, HostArray, host_from_bits
from forebay.specs.errors import InvalidInput, InvalidLayout
from forebay.specs.geometry import kv_views
from forebay.specs.pool import Pool
from forebay.specs.segment import Buffer, Effects, Fetch, Step
from forebay.specs.slots import lower_paged
from forebay.specs.write_loc import WriteLoc

from . import kernels
from .arrays import Device, SampleArray, Tape
from .kernels import Shape, Views
from .namespace import SampleNamespace


@dataclass
class Recorded:
    """What a capture leaves: the tape, and the memory that holds its emits after a replay."""

    tape: Tape
    emits: dict[str, SampleArray]


class SampleDriver(Driver):
    """Device memory is numpy's; work is done when a call returns. What it can do is declared, and the suite holds it to that."""

    def __init__(self) -> None:
        self._device = Device()
        self._xp = SampleNamespace(self._device)
        self.capabilities = Capabilities(
            layouts=("NHD", "HND", "KV2", "PACKED", "FUSED", "LATENT"),
            kv_dtypes=("float32", "bfloat16", "float16"),
            addressable=True,
        )
        self.info = {"device": "sample", "numpy": np.__version__}

    @property
    def xp(self) -> SampleNamespace:
        """Its array operations."""
        return self._xp

    # -- memory ----------------------------------------------------------------------------------------------------------
    def allocate(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        """Memory of undefined content."""
        return np.empty(shape, BITS_DTYPE[dtype])

    def free(self, buffer: Buffer) -> None:
        """Forget the memory."""
        buffer.handle = None

    def from_host(self, bits: HostArray, dtype: str) -> SampleArray:
        """A copy of the bytes."""
        return SampleArray(self._device, bits.copy(), dtype, None)

    def to_host(self, x: SampleArray) -> HostArray:
        """A copy of the bytes."""
        return x.bits.copy()

    def load(self, buffer: Buffer) -> SampleArray:
        """An array over the Buffer's memory, of the step that asks."""
        return SampleArray(self._device, buffer.handle, buffer.dtype, self._device.tape)

    def store(self, buffer: Buffer, bits: HostArray, row: int | None) -> None:
        """Copy bytes in."""
        target = buffer.handle if row is None else buffer.handle[row : row + len(bits)]
        target[...] = bits

    def wrap(self, x: object, dtype: str) -> ForeignMemory:
        """Take numpy memory by its own strides."""
        if not isinstance(x, np.ndarray):
            raise InvalidLayout(f"wrap_pool: got {type(x).__name__}, expected a numpy array")
        if x.dtype != BITS_DTYPE[dtype]:
            raise InvalidLayout(f"wrap_pool: got numpy {x.dtype}, a {dtype} pool takes {BITS_DTYPE[dtype]}")
        if not x.flags.writeable:
            raise InvalidLayout("wrap_pool: the array is read-only; a pool must be writable")
        if not x.flags.aligned or any(step < 0 for step in x.strides):
            raise InvalidLayout(f"wrap_pool: got strides {x.strides} bytes, expected aligned, non-negative ones")
        return ForeignMemory(x, x.shape, x.strides, x.ctypes.data)

    # -- steps -----------------------------------------------------------------------------------------------------------
    def run(self, step: Step) -> Fetch:
        """Evaluate, and commit."""
        emits = self._commit(step())
        return lambda: {name: host_from_bits(x.bits, x.dtype) for name, x in emits.items()}

    def capture(self, step: Step) -> Recorded:
        """Evaluate onto a tape, the commit included."""
        self._device.tape = tape = Tape(str(step.segment))
        try:
            return Recorded(tape, self._commit(step()))
        finally:
            self._device.tape = None

    def replay(self, payload: Recorded) -> Fetch:
        """Run the tape. The next replay overwrites what it emits, so that is copied."""
        for operation in payload.tape.operations:
            operation()
        emits = {name: host_from_bits(x.bits.copy(), x.dtype) for name, x in payload.emits.items()}
        return lambda: emits

    def release_trace(self, payload: Recorded) -> None:
        """Forget tape and memory."""
        payload.tape.operations.clear()
        payload.emits.clear()

    def _commit(self, effects: Effects) -> dict[str, SampleArray]:
        """Copy what is emitted and every new value, and only then change a Buffer: updates are simultaneous (clause C13)."""
        emits = {name: self._copied(x, f"emit {name!r}") for name, x in effects.emits.items()}
        values = [(buffer, self._copied(x, f"update of {buffer.name!r}")) for buffer, x in effects.updates]
        for buffer, x in values:
            target = buffer.handle[: len(x)] if x.shape else buffer.handle
            self._device.issue(partial(np.copyto, target, x.bits))
        return emits

    def _copied(self, x: SampleArray, act: str) -> SampleArray:
        self._device.check(x, act)
        made = self._device.new(x.shape, x.dtype)
        self._device.issue(partial(np.copyto, made.bits, x.bits))
        return made

    # -- operations: each that is not here runs in numpy on the host, counts as delegated, and cannot be captured ---------------
    def zero(self, buffer: Buffer) -> None:
        """Fill with zeros."""
        self._device.issue(partial(buffer.handle.fill, 0))

    def write_kv(self, pool: Pool, layer: int, loc: WriteLoc, k: SampleArray, v: SampleArray | None) -> None:
        """Scatter rows, converted to the pool's dtype."""
        slots, dtype = self._slots(pool, loc), pool.geometry.dtype
        rows = [self._xp.astype(self._device.check(x, "pool.write"), dtype).bits for x in (k, v) if x is not None]
        self._device.issue(
            partial(kernels.write_rows, _views(pool, layer), slots, rows, pool.dropped_buffer.handle, _shape(pool))
        )

    def read_kv(self, pool: Pool, layer: int, loc: WriteLoc) -> tuple[SampleArray, SampleArray]:
        """Gather rows."""
        slots, g = self._slots(pool, loc), pool.geometry
        k, v = (self._device.new((len(slots), g.num_kv_heads, dim), g.dtype) for dim in (g.key_dim, g.value_dim))
        outs = [k.bits, v.bits]
        self._device.issue(
            partial(kernels.read_rows, _views(pool, layer), slots, outs, pool.dropped_buffer.handle, _shape(pool))
        )
        return k, v

    def copy_kv(self, pool: Pool, src: WriteLoc, dst: WriteLoc) -> None:
        """Move rows of every layer."""
        source, target = self._slots(pool, src), self._slots(pool, dst)
        layers = [_views(pool, layer) for layer in range(pool.geometry.num_layers)]
        self._device.issue(partial(kernels.copy_rows, layers, source, target, pool.dropped_buffer.handle, _shape(pool)))

    def paged_decode(self, call: DecodeCall) -> tuple[SampleArray, SampleArray | None]:
        """Attention."""
        given = {"q": call.q, "table": call.table, "visible": call.visible, "sinks": call.sinks}
        arrays = {name: self._device.check(x, "paged_decode").bits for name, x in given.items() if x is not None}
        out = self._device.new((*call.q.shape[:-1], call.pool.geometry.value_dim), call.q.dtype)
        lse = self._device.new(call.q.shape[:-1], "float32")
        arrays |= {"out": out.bits, "lse": lse.bits, "invalid": call.pool.invalid_buffer.handle}
        if call.path == "gather":
            call.gathered()
        self._device.issue(partial(kernels.decode, _views(call.pool, call.layer), arrays, call, call.q.dtype))
        return out, lse if call.return_lse else None

    def merge_partials(
        self, outs: Sequence[SampleArray], lses: Sequence[SampleArray]
    ) -> tuple[SampleArray, SampleArray]:
        """Merge partial results."""
        parts, weights = ([self._device.check(x, "merge_partials").bits for x in xs] for xs in (outs, lses))
        made, lse = self._device.new(outs[0].shape, outs[0].dtype), self._device.new(lses[0].shape, "float32")
        self._device.issue(partial(kernels.merge, parts, weights, outs[0].dtype, made.bits, lse.bits))
        return made, lse

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
        """Copy host blocks by their own strides; never part of a step."""
        bs = pool.geometry.block_size
        for target, source in zip(_views(pool, layer), (k, v), strict=True):
            for i, (src, dst) in enumerate(zip(src_blocks, dst_blocks, strict=True)):
                n = min(bs, tokens - i * bs)
                if source is not None:
                    target[dst, :n] = source[src, :n]

    def _slots(self, pool: Pool, loc: WriteLoc) -> HostArray:
        """Memory for the flat slots int64 ``[N]`` of a location, filled when its kernel runs."""
        if loc.ids is not None:
            ids = self._device.check(loc.ids, "a door's slot ids").bits
            slots: HostArray = np.empty(ids.shape, np.int64)
            self._device.issue(partial(np.copyto, slots, ids))
            return slots
        if loc.table is None or loc.positions is None or loc.table_len is None:
            raise InvalidInput("WriteLoc: neither ids nor a table with positions")
        table, positions = (self._device.check(x, "a door's table") for x in (loc.table.array, loc.positions))
        slots = np.empty(positions.bits.size, np.int64)
        lower = partial(lower_paged, table.bits, positions.bits, loc.table_len, pool.geometry)
        self._device.issue(lambda: np.copyto(slots, lower()))
        return slots


def _views(pool: Pool, layer: int) -> Views:
    return kv_views(pool.layout, tuple(buffer.handle for buffer in pool.storage(layer)), pool.geometry)


def _shape(pool: Pool) -> Shape:
    return Shape(pool.geometry, pool.first_block)
