"""The CUDA driver: torch for dense work, Triton kernels for doors, attention and sampling, graphs for capture.

It runs on a device or on the stand-in for one (:mod:`.standin`); :class:`.platform.Platform` is all it knows of either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from forebay.backends.torch_shared.guard import CaptureGuard, HostReadGuard
from forebay.backends.torch_shared.namespace import TORCH_DTYPE
from forebay.specs.attention import DecodeCall
from forebay.specs.capabilities import Capabilities
from forebay.specs.driver import Driver, ForeignMemory
from forebay.specs.dtypes import BITS_DTYPE, HostArray
from forebay.specs.errors import CaptureDeclined, CaptureViolation, DeviceLost, InvalidLayout
from forebay.specs.live_info import LiveInfo
from forebay.specs.pool import Pool
from forebay.specs.segment import Buffer, Effects, Fetch, Step
from forebay.specs.write_loc import WriteLoc

from .kernels import Kernels
from .namespace import CudaNamespace
from .platform import Graph, Platform
from .transfers import Counts, Readback, StagingRing

LAYOUTS = ("NHD", "HND", "KV2", "PACKED", "FUSED", "LATENT")
KV_DTYPES = ("float32", "bfloat16", "float16")


class CudaTrace:
    """What ``capture`` leaves: the graph, the tensors that hold the emits after a replay, and the kernels recorded, by name; nothing
    where it was a rehearsal."""

    def __init__(self, graph: Graph | None, emits: Mapping[str, Tensor], kernels: Counter[str]) -> None:
        self.graph = graph
        self.emits = emits
        self.kernels = kernels


class CudaDriver(Driver):
    """Tensors of the platform are the device arrays; work is asked for and done later, in order.

    ``info`` holds, by the name of the kernel, ``launches`` asked for (or recorded) and those ``replayed`` by graphs.

    Args:
        platform: runs the work; :meth:`close` closes it.
        interpreted: kernels run in Triton's interpreter, so that large tiles are cheap and programs are dear.
    """

    def __init__(self, platform: Platform, *, interpreted: bool) -> None:
        self._platform = platform
        self._kernels = Kernels(platform, interpreted=interpreted)
        self._xp = CudaNamespace(self._kernels)
        self._counts = Counts()
        self._replayed: Counter[str] = Counter()
        self._ring = StagingRing(platform, self._counts)
        self._rehearsed: WeakKeyDictionary[Buffer, Tensor] | None = None
        self.capabilities = Capabilities(layouts=LAYOUTS, kv_dtypes=KV_DTYPES, addressable=True, deferred=True)
        self.info = LiveInfo(self._describe)

    @property
    def xp(self) -> CudaNamespace:
        """torch and kernels."""
        return self._xp

    def _describe(self) -> dict[str, Any]:
        return {
            **self._platform.describe(),
            "waits": self._counts.waits,
            "bytes_down": self._counts.bytes_down,
            "launches": dict(self._kernels.launches),
            "replayed": dict(self._replayed),
        }

    # -- memory ----------------------------------------------------------------------------------------------------------
    def allocate(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Memory of undefined content."""
        return self._platform.empty(shape, TORCH_DTYPE[dtype])

    def from_host(self, bits: HostArray, dtype: str) -> Tensor:
        """A new tensor; the bytes go through pinned memory."""
        with self._device():
            made = self._platform.empty(bits.shape, TORCH_DTYPE[dtype])
            self._ring.send(bits, made)
            return made

    def to_host(self, x: Tensor) -> HostArray:
        """The bytes, after everything asked for before."""
        with self._device():
            return Readback(self._platform, self._counts, {"x": x}).bits()["x"]

    def load(self, buffer: Buffer) -> Tensor:
        """The tensor the Buffer holds; in a rehearsal one of its shape without data."""
        held: Tensor = buffer.handle
        if self._rehearsed is None:
            return held
        if buffer not in self._rehearsed:
            self._rehearsed[buffer] = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="meta")
        return self._rehearsed[buffer]

    def store(self, buffer: Buffer, bits: HostArray, row: int | None) -> None:
        """Ask for a copy of the bytes."""
        whole: Tensor = buffer.handle
        target = whole if row is None else whole[row : row + len(bits)]
        with self._device():
            if target.is_contiguous():
                self._ring.send(bits, target)
            else:
                target.copy_(self.from_host(bits, buffer.dtype))
            self._platform.settle()

    def free(self, buffer: Buffer) -> None:
        """Drop the tensor; memory is used again behind everything asked for before."""
        self._platform.forget(buffer.handle)
        buffer.handle = None

    def wrap(self, x: object, dtype: str) -> ForeignMemory:
        """Share a tensor of the device, or numpy memory by way of the host's."""
        if isinstance(x, np.ndarray):
            if x.dtype != BITS_DTYPE[dtype]:
                raise InvalidLayout(f"wrap_pool: got numpy {x.dtype}, a {dtype} pool takes {BITS_DTYPE[dtype]}")
            if not x.flags.writeable:
                raise InvalidLayout("wrap_pool: the array is read-only; a pool must be writable")
        elif isinstance(x, Tensor) and x.dtype != TORCH_DTYPE[dtype]:
            raise InvalidLayout(f"wrap_pool: got torch {x.dtype}, expected {TORCH_DTYPE[dtype]}")
        try:
            shared = self._platform.adopt(x, TORCH_DTYPE[dtype])
        except ValueError as error:
            raise InvalidLayout(f"wrap_pool: {error}") from error
        if shared is None:
            raise InvalidLayout(f"wrap_pool: got {type(x).__name__}, expected a numpy array or a tensor of this device")
        size = shared.element_size()
        strides = tuple(step * size for step in shared.stride())
        return ForeignMemory(shared, tuple(shared.shape), strides, self._platform.address_of(shared))

    # -- steps -----------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def run(self, step: Step) -> Fetch:
        """Evaluate, then commit; values that share a Buffer's memory are copied before the first update lands (clause C13)."""
        with self._device():
            effects = step()
            held = (*step.segment.buffers, *effects.taken)
            shared = {self._platform.memory_of(buffer.handle) for buffer in held}
            emits, values = _settled(effects, lambda x: self._platform.memory_of(x) in shared)
            _update(values)
            return self._fetch(emits)

    @torch.no_grad()
    def capture(self, step: Step) -> CudaTrace:
        """Record a graph; nothing is done. A step that is not warm is rehearsed on tensors without data.

        Raises:
            CaptureViolation: what :class:`.guard.CaptureGuard` refuses.
            CaptureDeclined: no memory for the graph.
        """
        if not step.warm:
            with self._rehearsal(step), self._guarded(step) as guard:
                self._check_results(guard, step())
            return CudaTrace(None, {}, Counter())
        before = Counter(self._kernels.launches)
        try:
            with self._device(), self._platform.capture() as graph, self._guarded(step) as guard:
                effects = step()
                self._check_results(guard, effects)
                emits, values = _settled(effects, guard.is_declared)
                with guard.pause():
                    _update(values)
        except MemoryError as error:
            raise CaptureDeclined(f"no memory for the graph of Segment {step.segment}: {error}") from error
        return CudaTrace(graph, emits, self._kernels.launches - before)

    @torch.no_grad()
    def replay(self, payload: CudaTrace) -> Fetch:
        """Ask for the graph once more; the emits are copied out behind it, for the next replay overwrites them."""
        with self._device():
            if payload.graph is not None:
                payload.graph.replay()
                self._replayed.update(payload.kernels)
            return self._fetch(payload.emits)

    def release_trace(self, payload: CudaTrace) -> None:
        """Give the graph's memory back."""
        graph, payload.graph, payload.emits = payload.graph, None, {}
        if graph is not None:
            graph.release()

    def synchronize(self) -> None:
        """Wait for everything asked for."""
        with self._device():
            self._platform.synchronize()

    def close(self) -> None:
        """Give everything back."""
        self._platform.close()

    # -- operations ------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def zero(self, buffer: Buffer) -> None:
        """Fill with zeros in place."""
        held, guard = self.load(buffer), self._kernels.guard
        if guard is not None:
            guard.adopt(held)
        with nullcontext() if guard is None else guard.pause():
            held.zero_()
        self._platform.settle()

    def write_kv(self, pool: Pool, layer: int, loc: WriteLoc, k: Tensor, v: Tensor | None) -> None:
        """Scatter rows."""
        with self._device():
            self._kernels.write(pool, self._storage(pool, layer), self.load(pool.dropped_buffer), loc, k, v)
            self._platform.settle()

    def read_kv(self, pool: Pool, layer: int, loc: WriteLoc) -> tuple[Tensor, Tensor]:
        """Gather rows."""
        with self._device():
            return self._kernels.read(pool, self._storage(pool, layer), self.load(pool.dropped_buffer), loc)

    def copy_kv(self, pool: Pool, src: WriteLoc, dst: WriteLoc) -> None:
        """Copy rows of every layer; the first layer counts what is dropped."""
        with self._device():
            layers = [self._storage(pool, layer) for layer in range(pool.geometry.num_layers)]
            self._kernels.copy(pool, layers, self.load(pool.dropped_buffer), src, dst)
            self._platform.settle()

    def paged_decode(self, call: DecodeCall) -> tuple[Tensor, Tensor | None]:
        """Attention in float32, rounded to q's dtype."""
        with self._device():
            storage = self._storage(call.pool, call.layer)
            return self._kernels.paged_decode(call, storage, self.load(call.pool.invalid_buffer))

    def merge_partials(self, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """One launch."""
        with self._device():
            return self._kernels.merge_partials(outs, lses)

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
        """Pack the host blocks by their own strides into pinned memory; a kernel puts them where they belong."""
        with self._device():
            packed = [self.from_host(x[src_blocks], pool.geometry.dtype) for x in (k, v) if x is not None]
            order = np.arange(len(dst_blocks))
            blocks = self.from_host(np.stack((order, dst_blocks)).astype(np.int32), "int32")
            self._kernels.stage(pool, self._storage(pool, layer), packed, blocks, tokens)
            self._platform.settle()

    # -- inside ----------------------------------------------------------------------------------------------------------
    def _storage(self, pool: Pool, layer: int) -> tuple[Tensor, ...]:
        return tuple(self.load(buffer) for buffer in pool.storage(layer))

    def _check_results(self, guard: CaptureGuard, effects: Effects) -> None:
        for name, x in effects.emits.items():
            guard.check_held(f"emit {name!r}", x)
        for buffer, x in effects.updates:
            guard.check_held(f"update of {buffer.name!r}", x)

    @contextmanager
    def _guarded(self, step: Step) -> Iterator[CaptureGuard]:
        declared = [self.load(buffer) for buffer in step.segment.buffers]
        guard = CaptureGuard(str(step.segment), declared, self._platform.memory_of)
        self._kernels.guard = guard
        try:
            with HostReadGuard(guard), guard:
                yield guard
        except TypeError as error:
            if "numpy" not in str(error).lower():
                raise
            raise CaptureViolation(
                f"a numpy array among device arrays while capturing Segment {step.segment}; constants are Buffers made before "
                f"capture ({error})"
            ) from error
        finally:
            self._kernels.guard = None

    @contextmanager
    def _rehearsal(self, step: Step) -> Iterator[None]:
        """Buffers without data, and no launches: the Segment is evaluated for what it may not do (clause C2), and nothing is done."""
        self._rehearsed = WeakKeyDictionary()
        self._kernels.rehearsing = True
        try:
            yield
        finally:
            self._rehearsed, self._kernels.rehearsing = None, False

    @contextmanager
    def _device(self) -> Iterator[None]:
        """Errors of a device that is lost become DeviceLost."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if self._platform.lost(error):
                raise DeviceLost(f"{error}") from error
            raise

    def _fetch(self, emits: Mapping[str, Tensor]) -> Fetch:
        readback = Readback(self._platform, self._counts, emits)

        def fetch() -> dict[str, HostArray]:
            with self._device():
                return readback.values()

        return fetch


def _settled(
    effects: Effects, shares: Callable[[Tensor], bool]
) -> tuple[dict[str, Tensor], list[tuple[Buffer, Tensor]]]:
    """Emits and updates, copied where they share memory with a Buffer that the commit may change (clause C13)."""
    emits = {name: x.clone() if shares(x) else x for name, x in effects.emits.items()}
    return emits, [(buffer, x.clone() if shares(x) else x) for buffer, x in effects.updates]


def _update(values: Sequence[tuple[Buffer, Tensor]]) -> None:
    for buffer, x in values:
        buffer.handle[: x.shape[0]].copy_(x) if x.dim() else buffer.handle.copy_(x)
