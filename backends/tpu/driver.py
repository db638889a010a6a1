"""The TPU driver: JAX arrays in cells, doors and attention by kernels of our own, and compiled programs for steps.

It runs on a TPU, on the host with Pallas interpreted, or on the host with attention as a loop of XLA: :class:`Way` says which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from forebay.kernels.pallas.paged_decode import NO_WINDOW
from forebay.kernels.pallas.pages import MOST_SCALARS, PageFormat, scalars_of
from forebay.specs.attention import DecodeCall
from forebay.specs.capabilities import Capabilities
from forebay.specs.driver import Driver
from forebay.specs.dtypes import BITS_DTYPE, Array, HostArray, host_from_bits
from forebay.specs.errors import CaptureDeclined, Unsupported
from forebay.specs.live_info import LiveInfo
from forebay.specs.pool import Pool
from forebay.specs.segment import Buffer, Fetch, Segment, Step
from forebay.specs.write_loc import WriteLoc

from . import calls
from .arrays import DeviceArray, TraceScope
from .compiles import compiles
from .formats import cell_format, zeros
from .namespace import TpuNamespace
from .programs import Program, Programs
from .way import ON_DEVICE, Way

KV_DTYPES: Final = ("float32", "bfloat16")
"""What a TPU's kernels take; the host could take more, and refuses what the device would."""
EXHAUSTED: Final = "RESOURCE_EXHAUSTED"
"""What XLA's message of an error says where there is not enough memory."""


class TpuDriver(Driver):
    """A Buffer's handle is the JAX array it holds now; whatever changes a Buffer takes its memory and leaves another array.

    ``info`` holds, by the name of the kernel, ``launches`` that were asked for by themselves and ``replayed`` as parts of programs, and
    how many programs XLA ``compiles`` in this process.

    Args:
        device: a JAX device.
        way: how kernels are run.
    """

    def __init__(self, device: Any, way: Way) -> None:
        self._device = device
        self._way = way
        self._scope = TraceScope()
        self._xp = TpuNamespace(self._scope)
        self._compiled = calls.Compiled(way.options, lower_once=way.by == "pallas" and bool(way.interpret))
        self._programs = Programs(self._scope, device, way.options)
        self._by_segment: WeakKeyDictionary[Segment, Program] = WeakKeyDictionary()
        self._latest: list[jax.Array] = []
        self._launches: Counter[str] = Counter()
        self._replayed: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        compiles()
        self.capabilities = Capabilities(
            layouts=("FUSED", "LATENT"),
            kv_dtypes=KV_DTYPES,
            traces_run=True,
            deferred=True,
        )
        self.info = LiveInfo(self._describe)

    @property
    def xp(self) -> TpuNamespace:
        """JAX, wrapped."""
        return self._xp

    def _describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "device": self._device.device_kind,
            "platform": self._device.platform,
            "attention": self._way.by,
            "jax": jax.__version__,
            "jaxlib": version("jaxlib"),
            "compiles": compiles(),
            "bytes_down": self._counts["bytes_down"],
            "waits": self._counts["waits"],
            "launches": dict(self._launches),
            "replayed": dict(self._replayed),
        }
        with suppress(PackageNotFoundError):
            found["libtpu"] = version("libtpu")
        memory = self._device.memory_stats()
        if memory and "bytes_limit" in memory:
            found["total_bytes"] = memory["bytes_limit"]
            found["free_bytes"] = memory["bytes_limit"] - memory["bytes_in_use"]
        return found

    # -- memory ----------------------------------------------------------------------------------------------------------
    def allocate(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        """Zeros, which are as undefined as anything.

        Raises:
            MemoryError: there is not that much.
        """
        try:
            return zeros(shape, dtype, self._device).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            if EXHAUSTED not in str(error):
                raise
            raise MemoryError(f"{self._device}: {error}") from error

    def from_host(self, bits: HostArray, dtype: str) -> DeviceArray:
        """A new array."""
        return self._scope.wrap(self._placed(bits, dtype))

    def _placed(self, bits: HostArray, dtype: str, where: Any = None) -> jax.Array:
        # A copy of our own: JAX may read host memory until a transfer is done, or even keep to it where host and device share it.
        own = np.array(bits, order="C", copy=True)
        placed: jax.Array = jax.device_put(own.view(np.dtype(dtype)), where or self._device, may_alias=False)
        return placed

    def to_host(self, x: DeviceArray) -> HostArray:
        """The bytes, after everything asked for before."""
        value = self._scope.unwrap("to_host", x)
        found = self._read(value)
        return found.view(BITS_DTYPE[x.dtype]) if x.dtype in BITS_DTYPE else found

    def _read(self, value: Any) -> HostArray:
        # Whether it is ready by now is a matter of luck: to read is to wait.
        self._counts["waits"] += 1
        self._counts["bytes_down"] += value.nbytes
        return np.array(value)

    def load(self, buffer: Buffer) -> DeviceArray:
        """What the Buffer holds now; in a trace, what it holds there."""
        return self._scope.wrap(self._held(buffer))

    def _held(self, buffer: Buffer) -> jax.Array:
        cells = self._programs.cells
        held: jax.Array = buffer.handle if cells is None else cells[buffer]
        return held

    def _hold(self, buffer: Buffer, value: jax.Array) -> None:
        cells = self._programs.cells
        if cells is None:
            buffer.handle = value
        else:
            cells[buffer] = value

    def store(self, buffer: Buffer, bits: HostArray, row: int | None) -> None:
        """Another array, or the old one with other rows."""
        if row is None:
            form = cell_format(buffer.shape, jax.sharding.SingleDeviceSharding(self._device))
            buffer.handle = self._placed(bits, buffer.dtype, form)
        elif len(bits):
            part = self._placed(bits, buffer.dtype)
            buffer.handle = self._compiled(calls.set_rows, buffer.handle, part, self._number(row))

    def _number(self, n: int) -> jax.Array:
        number: jax.Array = jax.device_put(np.int32(n), self._device)
        return number

    def free(self, buffer: Buffer) -> None:
        """Give the memory back, once nothing that was asked for needs it; programs still name the array they ran on last."""
        if isinstance(buffer.handle, jax.Array):
            buffer.handle.delete()
        buffer.handle = None

    # -- steps -----------------------------------------------------------------------------------------------------------
    def run(self, step: Step) -> Fetch:
        """Run the step's program, which is compiled the first time; its Python is not asked again."""
        program = self._by_segment.get(step.segment)
        if program is None:
            program = self._programs.compile(self._programs.trace(step))
            self._by_segment[step.segment] = program
        return self._ran(program)

    def capture(self, step: Step) -> Program | None:
        """Trace the step anew; its program is that of its run where the text is the same. None for a step that is not warm."""
        traced = self._programs.trace(step)
        if not step.warm:
            return None
        try:
            return self._programs.compile(traced)
        except jax.errors.JaxRuntimeError as error:
            if EXHAUSTED not in str(error):
                raise
            raise CaptureDeclined(f"Segment {step.segment} does not fit {self._device}: {error}") from error

    def replay(self, payload: Program) -> Fetch:
        """Run it on what the Buffers hold."""
        return self._ran(payload)

    def _ran(self, program: Program) -> Fetch:
        emits = program.run()
        self._latest = [*emits.values(), *(buffer.handle for buffer in program.outputs)]
        self._replayed.update(program.kernels)
        for x in emits.values():
            x.copy_to_host_async()

        def fetch() -> dict[str, HostArray]:
            found = {name: (self._read(x), str(x.dtype)) for name, x in emits.items()}
            return {
                name: host_from_bits(x.view(BITS_DTYPE[kind]) if kind in BITS_DTYPE else x, kind)
                for name, (x, kind) in found.items()
            }

        return fetch

    def synchronize(self) -> None:
        """Wait until the device has done what was asked for so far: it does one after the other, so what was asked last is the last."""
        for value in self._latest:
            if not value.is_deleted():
                value.block_until_ready()

    def close(self) -> None:
        """Forget programs."""
        self._latest = []
        self._by_segment.clear()
        self._programs.clear()
        self._compiled.clear()

    # -- operations ------------------------------------------------------------------------------------------------------
    def _count(self, kernel: str) -> None:
        (self._launches if self._programs.cells is None else self._programs.kernels)[kernel] += 1

    def zero(self, buffer: Buffer) -> None:
        """Zeros in its place."""
        self._count("zero")
        self._hold(buffer, self._blank(buffer))

    def _blank(self, buffer: Buffer) -> jax.Array:
        if self._programs.cells is None:
            return self.allocate(buffer.shape, buffer.dtype)
        return jnp.zeros(buffer.shape, buffer.dtype)

    def write_kv(self, pool: Pool, layer: int, loc: WriteLoc, k: DeviceArray, v: DeviceArray | None) -> None:
        """A scatter into the donated pages."""
        given, where = self._where("pool.write", loc)
        rows = [None if x is None else self._scope.unwrap("pool.write", x) for x in (k, v)]
        storage, dropped = self._door("write_rows", calls.write, store=_store(pool), where=where)(
            self._held(pool.storage(layer)[0]), self._held(pool.dropped_buffer), given, *rows
        )
        self._hold(pool.storage(layer)[0], storage)
        self._hold(pool.dropped_buffer, dropped)

    def read_kv(self, pool: Pool, layer: int, loc: WriteLoc) -> tuple[DeviceArray, DeviceArray]:
        """A gather."""
        given, where = self._where("pool.read", loc)
        k, v, dropped = self._door("read_rows", calls.read, store=_store(pool), where=where)(
            self._held(pool.storage(layer)[0]), self._held(pool.dropped_buffer), given
        )
        self._hold(pool.dropped_buffer, dropped)
        return self._scope.wrap(k), self._scope.wrap(v)

    def copy_kv(self, pool: Pool, src: WriteLoc, dst: WriteLoc) -> None:
        """A gather and a scatter for each layer."""
        source, from_where = self._where("pool.copy", src)
        target, to_where = self._where("pool.copy", dst)
        buffers = [pool.storage(layer)[0] for layer in range(pool.geometry.num_layers)]
        copy = self._door("copy_rows", calls.copy, store=_store(pool), from_where=from_where, to_where=to_where)
        layers, dropped = copy(
            tuple(self._held(buffer) for buffer in buffers), self._held(pool.dropped_buffer), source, target
        )
        for buffer, value in zip(buffers, layers, strict=True):
            self._hold(buffer, value)
        self._hold(pool.dropped_buffer, dropped)

    def _door(self, kernel: str, function: Callable[..., Any], **sizes: Any) -> Callable[..., Any]:
        self._count(kernel)
        if self._programs.cells is None:
            return partial(self._asked, function, **sizes)
        return partial(self._compiled.traced, function, **sizes)

    def _asked(self, function: Callable[..., Any], *arrays: Any, **sizes: Any) -> Any:
        made = self._compiled(function, *arrays, **sizes)
        self._latest = jax.tree.leaves(made)
        return made

    def _where(self, act: str, loc: WriteLoc) -> tuple[tuple[jax.Array, ...], calls.Where]:
        if loc.ids is not None:
            return (self._scope.unwrap(act, loc.ids),), calls.Where(None)
        table = None if loc.table is None else loc.table.array
        return (self._scope.unwrap(act, table), self._scope.unwrap(act, loc.positions)), calls.Where(loc.table_len)

    def paged_decode(self, call: DecodeCall) -> tuple[DeviceArray, DeviceArray | None]:
        """The Pallas kernel, or the loop of XLA; gathering first is a pass of its own in front of the same."""
        act, pool = "paged_decode", call.pool
        self._check_fetched(pool, self._xp.shape(call.q)[0], call.table_len)
        arrays = [self._scope.unwrap(act, x) for x in (call.q, call.table, call.visible)]
        sinks = None if call.sinks is None else self._scope.unwrap(act, call.sinks)
        if call.path == "gather":
            self._count("gather_pages")
            call.gathered()
        attend = self._door(
            "paged_decode",
            calls.attend,
            store=_store(pool),
            table_len=call.table_len,
            path=call.path,
            by=self._way.by,
            interpret=self._way.interpret,
        )
        out, lse, invalid = attend(
            self._held(pool.storage(call.layer)[0]),
            self._held(pool.invalid_buffer),
            *arrays,
            sinks,
            np.float32(call.scale),
            np.int32(NO_WINDOW if call.window is None else call.window),
            None if call.softcap is None else np.float32(call.softcap),
        )
        self._hold(pool.invalid_buffer, invalid)
        return self._scope.wrap(out), self._scope.wrap(lse) if call.return_lse else None

    def _check_fetched(self, pool: Pool, rows: int, table_len: int) -> None:
        """Refuse what the Pallas kernel cannot fetch: pages that are parts of a word, and tables that scalar memory does not hold."""
        if self._way == ON_DEVICE and pool.geometry.block_size == 1:
            raise Unsupported(
                "paged_decode: the pool has blocks of 1 token, which a TPU stores so that no single one can be fetched; "
                "make it of blocks of 2 tokens or more, 16 at best"
            )
        scalars = scalars_of(rows, table_len)
        if self._way.by == "pallas" and scalars > MOST_SCALARS:
            raise Unsupported(
                f"paged_decode: {rows} rows of {table_len} table columns are {scalars} scalars, the scalar memory of a TPU holds "
                f"{MOST_SCALARS}; decode fewer rows at a time, or take larger blocks",
            )

    def merge_partials(self, outs: Sequence[Array], lses: Sequence[Array]) -> tuple[DeviceArray, DeviceArray]:
        """Parts of one attention, by their LSE."""
        act = "merge_partials"
        out, lse = self._door(act, calls.merge)(
            tuple(self._scope.unwrap(act, x) for x in outs), tuple(self._scope.unwrap(act, x) for x in lses)
        )
        return self._scope.wrap(out), self._scope.wrap(lse)

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
        """One upload of the blocks as pages, and a scatter of whole pages; the rows behind a last partial block keep their bytes."""
        g, form = pool.geometry, _store(pool).form
        if not len(src_blocks):
            return
        # As many pages as the next power of two, so that few programs are compiled; those too many land nowhere.
        places = 1 << (len(src_blocks) - 1).bit_length()
        new = np.zeros((places, g.num_kv_heads, g.block_size, form.lanes), k.dtype)
        targets, rows = np.full(places, g.num_blocks, np.int32), np.zeros(places, np.int32)
        for i, (src, dst) in enumerate(zip(src_blocks, dst_blocks, strict=True)):
            n = min(g.block_size, tokens - i * g.block_size)
            targets[i], rows[i] = dst, n
            new[i, :, :n, : form.key_dim] = k[src, :n].swapaxes(0, 1)
            if v is not None:
                new[i, :, :n, form.value_offset : form.value_offset + form.value_dim] = v[src, :n].swapaxes(0, 1)
        buffer = pool.storage(layer)[0]
        buffer.handle = self._door("stage_pages", calls.stage, store=_store(pool))(
            buffer.handle,
            self._placed(new, g.dtype),
            self._placed(targets, "int32"),
            self._placed(rows, "int32"),
        )


def _store(pool: Pool) -> calls.Store:
    """How a pool is stored.

    Raises:
        Unsupported: elements that no kernel here takes.
    """
    if pool.geometry.dtype not in KV_DTYPES:
        message = f"KV dtype {pool.geometry.dtype!r}: the kernels of a TPU take {', '.join(KV_DTYPES)}"
        raise Unsupported(message, capability="kv_dtypes", value=pool.geometry.dtype)
    g, latent = pool.geometry, pool.layout == "LATENT"
    lanes = g.key_dim if latent else int(pool.storage(0)[0].shape[3])
    form = PageFormat(lanes, g.key_dim, 0 if latent else g.key_dim, g.value_dim)
    return calls.Store(form, latent, pool.first_block)
