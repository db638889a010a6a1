"""The CPU driver: torch for dense work, numba kernels for doors and attention, an op tape for capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import numba
import numpy as np
import torch
from torch import Tensor

from forebay.backends.torch_shared.guard import HostReadGuard
from forebay.backends.torch_shared.namespace import TORCH_DTYPE, TorchNamespace
from forebay.kernels.numba import paged_decode as attention
from forebay.kernels.numba import rows
from forebay.specs.attention import DecodeCall
from forebay.specs.capabilities import Capabilities
from forebay.specs.driver import Driver, ForeignMemory
from forebay.specs.dtypes import BITS_DTYPE, HostArray, host_from_bits
from forebay.specs.errors import CaptureViolation, InvalidInput, InvalidLayout
from forebay.specs.geometry import kv_views
from forebay.specs.pool import Pool
from forebay.specs.segment import Buffer, Effects, Fetch, Step
from forebay.specs.write_loc import WriteLoc

from .kernel_calls import KernelCalls
from .kernel_namespace import KernelNamespace
from .memory import BufferMemory, bits_of
from .tape import Recorder, Tape

Views = tuple[HostArray, HostArray]
MAX_THREADS = 256
"""More than the processors of any machine; a larger number makes OpenMP end the process."""


class CpuTrace:
    """What ``capture`` leaves: the tape, and the arena tensors that hold the emits after a replay."""

    def __init__(self, tape: Tape, emits: dict[str, Tensor]) -> None:
        self.tape: Tape | None = tape
        self.emits = emits


class CpuDriver(Driver):
    """torch tensors are the device arrays; everything is done when a call returns, so nothing is ever in flight.

    Args:
        threads: threads for dense work and kernels; None keeps torch's choice. The kernels' results do not depend on it. torch
            counts its threads for the whole process; ``close`` gives it back the number it had.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and (
            isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS
        ):
            raise InvalidInput(f"cpu option threads: got {threads!r}, expected None or an int from 1 to {MAX_THREADS}")
        self._torch_threads = torch.get_num_threads()
        self._threads = threads or self._torch_threads
        torch.set_num_threads(self._threads)
        self._calls = KernelCalls()
        self._memory = BufferMemory()
        self._xp = KernelNamespace(self._calls, self._threads)
        self._views: WeakKeyDictionary[Pool, dict[int, Views]] = WeakKeyDictionary()
        self.capabilities = Capabilities(
            layouts=("NHD", "HND", "KV2", "PACKED", "FUSED", "LATENT"),
            kv_dtypes=("float32", "bfloat16"),
            addressable=True,
        )
        self.info = {
            "device": "cpu",
            "torch": torch.__version__,
            "numba": numba.__version__,
            "threads": self._threads,
        }

    @property
    def xp(self) -> KernelNamespace:
        """torch and kernels."""
        return self._xp

    # -- memory ----------------------------------------------------------------------------------------------------------
    def allocate(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Memory the operating system commits when it is first touched."""
        return self._memory.empty(shape, dtype)

    def from_host(self, bits: HostArray, dtype: str) -> Tensor:
        """A copy of the bytes."""
        signed = bits.view(np.int16) if dtype == "bfloat16" else bits
        return torch.from_numpy(signed.copy()).view(TORCH_DTYPE[dtype])

    def to_host(self, x: Tensor) -> HostArray:
        """A copy of the bytes."""
        return bits_of(x).copy()

    def load(self, buffer: Buffer) -> Tensor:
        """The tensor the Buffer holds."""
        tensor: Tensor = buffer.handle
        return tensor

    def store(self, buffer: Buffer, bits: HostArray, row: int | None) -> None:
        """Copy bytes in."""
        target = bits_of(buffer.handle)
        if row is None:
            target[...] = bits
        else:
            target[row : row + len(bits)] = bits

    def free(self, buffer: Buffer) -> None:
        """Drop the tensor."""
        buffer.handle = None

    def wrap(self, x: object, dtype: str) -> ForeignMemory:
        """Share numpy memory or take a torch tensor as it is."""
        if isinstance(x, np.ndarray):
            if x.dtype != BITS_DTYPE[dtype]:
                raise InvalidLayout(f"wrap_pool: got numpy {x.dtype}, a {dtype} pool takes {BITS_DTYPE[dtype]}")
            if not x.flags.writeable:
                raise InvalidLayout("wrap_pool: the array is read-only; a pool must be writable")
            try:
                tensor = torch.from_numpy(x.view(np.int16) if dtype == "bfloat16" else x).view(TORCH_DTYPE[dtype])
            except ValueError as error:
                raise InvalidLayout(f"wrap_pool: strides {x.strides} bytes over shape {x.shape}: {error}") from error
        elif isinstance(x, Tensor) and x.device.type == "cpu":
            tensor = x.detach()
            if tensor.dtype != TORCH_DTYPE[dtype]:
                raise InvalidLayout(f"wrap_pool: got torch {tensor.dtype}, expected {TORCH_DTYPE[dtype]}")
        else:
            raise InvalidLayout(f"wrap_pool: got {type(x).__name__}, expected a numpy array or a torch CPU tensor")
        size = tensor.element_size()
        strides = tuple(step * size for step in tensor.stride())
        return ForeignMemory(tensor, tuple(tensor.shape), strides, tensor.data_ptr())

    # -- steps -----------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def run(self, step: Step) -> Fetch:
        """Evaluate, then commit; values that share a Buffer's memory are copied before the first update lands (clause C13)."""
        effects = step()
        memory = {b.handle.untyped_storage().data_ptr() for b in (*step.segment.buffers, *effects.taken)}

        def settled(x: Tensor) -> Tensor:
            return x.clone() if x.untyped_storage().data_ptr() in memory else x

        emits = {name: settled(x) for name, x in effects.emits.items()}
        values = [(buffer, settled(x)) for buffer, x in effects.updates]
        for buffer, x in values:
            buffer.handle[: x.shape[0]].copy_(x) if x.dim() else buffer.handle.copy_(x)
        return lambda: {name: _value_of(x) for name, x in emits.items()}

    @torch.no_grad()
    def capture(self, step: Step) -> CpuTrace:
        """Record the step onto a tape; nothing but the trace's own arena is written."""
        recorder = Recorder(str(step.segment), [b.handle for b in step.segment.buffers])
        self._calls.recorder = recorder
        try:
            with HostReadGuard(recorder), recorder:
                effects = step()
                emits = self._record_commit(recorder, effects)
        except TypeError as error:
            if "numpy" not in str(error).lower():
                raise
            raise CaptureViolation(
                f"a numpy array among device arrays while capturing Segment {step.segment}; constants are Buffers made before "
                f"capture ({error})"
            ) from error
        finally:
            self._calls.recorder = None
        return CpuTrace(recorder.tape, emits)

    def _record_commit(self, recorder: Recorder, effects: Effects) -> dict[str, Tensor]:
        for name, x in effects.emits.items():
            recorder.check_held(f"emit {name!r}", x)
        for buffer, x in effects.updates:
            recorder.check_held(f"update of {buffer.name!r}", x)
        emits = {name: x.clone() if recorder.is_declared(x) else x for name, x in effects.emits.items()}
        values = [(buffer, x.clone() if recorder.is_declared(x) else x) for buffer, x in effects.updates]
        with recorder.pause():
            for buffer, x in values:
                target = buffer.handle[: x.shape[0]] if x.dim() else buffer.handle
                recorder.tape.operations.append(partial(_copy_into, target, x))
        return emits

    @torch.no_grad()
    def replay(self, payload: CpuTrace) -> Fetch:
        """Run the tape; the emits are copied out, for the next replay overwrites them."""
        if payload.tape is not None:
            payload.tape.replay()
        emits = {name: x.clone() for name, x in payload.emits.items()}
        return lambda: {name: _value_of(x) for name, x in emits.items()}

    def release_trace(self, payload: CpuTrace) -> None:
        """Drop tape and arena."""
        payload.tape, payload.emits = None, {}

    def close(self) -> None:
        """Forget the pools' views."""
        self._views.clear()
        torch.set_num_threads(self._torch_threads)

    # -- operations ------------------------------------------------------------------------------------------------------
    def zero(self, buffer: Buffer) -> None:
        """Fill with zeros in place."""
        tensor: Tensor = buffer.handle
        if self._calls.recorder is not None:
            self._calls.recorder.adopt(tensor)
        self._calls.issue(lambda: lambda: tensor.zero_())

    def write_kv(self, pool: Pool, layer: int, loc: WriteLoc, k: Tensor, v: Tensor | None) -> None:
        """Scatter rows by the numba door."""
        views, first, num_slots = self._door(pool, layer)
        self._calls.check_held("pool.write", k, v)
        slots, k, v = self._slots(pool, loc), _rows_of(k), None if v is None else _rows_of(v)
        self._calls.issue(
            lambda: rows.prepare_write_rows(
                views[0],
                None if v is None else views[1],
                bits_of(slots),
                bits_of(k),
                None if v is None else bits_of(v),
                bits_of(pool.dropped_buffer.handle),
                first_slot=first,
                num_slots=num_slots,
            )
        )

    def read_kv(self, pool: Pool, layer: int, loc: WriteLoc) -> tuple[Tensor, Tensor]:
        """Gather rows by the numba door."""
        views, first, num_slots = self._door(pool, layer)
        g, slots = pool.geometry, self._slots(pool, loc)
        n, dtype = slots.shape[0], TORCH_DTYPE[g.dtype]
        k = self._calls.empty((n, g.num_kv_heads, g.key_dim), dtype)
        v = self._calls.empty((n, g.num_kv_heads, g.value_dim), dtype)
        self._calls.issue(
            lambda: rows.prepare_read_rows(
                views[0],
                views[1],
                bits_of(slots),
                bits_of(k),
                bits_of(v),
                bits_of(pool.dropped_buffer.handle),
                first_slot=first,
                num_slots=num_slots,
            )
        )
        return k, v

    def copy_kv(self, pool: Pool, src: WriteLoc, dst: WriteLoc) -> None:
        """Copy rows of every layer by the numba door; the first layer counts what is dropped."""
        source, target = self._slots(pool, src), self._slots(pool, dst)
        for layer in range(pool.geometry.num_layers):
            count = pool.dropped_buffer.handle if layer == 0 else self._calls.empty((1,), torch.int32)
            self._calls.issue(partial(self._prepare_copy, pool, layer, source, target, count))

    def _prepare_copy(
        self, pool: Pool, layer: int, source: Tensor, target: Tensor, count: Tensor
    ) -> Callable[[], None]:
        views, first, num_slots = self._door(pool, layer)
        return rows.prepare_copy_rows(
            views[0],
            None if pool.layout == "LATENT" else views[1],
            bits_of(source),
            bits_of(target),
            bits_of(count),
            first_slot=first,
            num_slots=num_slots,
        )

    def paged_decode(self, call: DecodeCall) -> tuple[Tensor, Tensor | None]:
        """Attention by the numba kernel in float32; the output is rounded to q's dtype."""
        g, (batch, query_len, heads, _) = call.pool.geometry, call.q.shape
        views, _, _ = self._door(call.pool, call.layer)
        self._calls.check_held("paged_decode", call.q, call.table, call.visible, call.sinks)
        q = call.q.to(torch.float32).contiguous()
        out = self._calls.empty((batch, query_len, heads, g.value_dim), torch.float32)
        lse = self._calls.empty((batch, query_len, heads), torch.float32)
        visible = call.visible.contiguous()
        sinks = None if call.sinks is None else call.sinks.contiguous()
        self._calls.issue(
            lambda: attention.prepare(
                bits_of(q),
                views[0],
                views[1],
                bits_of(call.table),
                bits_of(visible),
                bits_of(out),
                bits_of(lse),
                bits_of(call.pool.invalid_buffer.handle),
                table_len=call.table_len,
                first_block=call.pool.first_block,
                num_blocks=g.num_blocks,
                block_size=g.block_size,
                scale=call.scale,
                window=call.window,
                softcap=call.softcap,
                sinks=None if sinks is None else bits_of(sinks),
                path=call.path,
                on_gather=call.gathered,
                threads=self._threads,
            )
        )
        return out.to(call.q.dtype), lse if call.return_lse else None

    def merge_partials(self, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Weights ``exp(lse_i - lse)``; an empty part (LSE -inf) is selected away, so its output may be anything."""
        out, lse = torch.stack([x.to(torch.float32) for x in outs]), torch.stack(list(lses))
        peak = torch.amax(lse, 0)
        safe = torch.where(torch.isneginf(peak), 0.0, peak)
        weight = torch.where(lse == peak, 1.0, torch.exp(lse - safe))
        empty, none = torch.isneginf(lse), torch.isneginf(peak)
        weight = torch.where(empty, 0.0, weight)
        total = torch.where(none, 1.0, torch.sum(weight, 0))
        merged = torch.sum(torch.where(empty[..., None], 0.0, out * (weight / total)[..., None]), 0)
        return merged.to(outs[0].dtype), torch.where(none, -torch.inf, safe + torch.log(total))

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
        """Copy host blocks by their own strides into the pool's memory."""
        bs = pool.geometry.block_size
        for target, source in zip(self._door(pool, layer)[0], (k, v), strict=True):
            if source is not None:
                for i, (src, dst) in enumerate(zip(src_blocks, dst_blocks, strict=True)):
                    n = min(bs, tokens - i * bs)
                    target[dst, :n] = source[src, :n]

    # -- inside ----------------------------------------------------------------------------------------------------------
    def _door(self, pool: Pool, layer: int) -> tuple[Views, int, int]:
        """(K and V views in bytes' numpy dtype, first live slot, slots)."""
        cache = self._views.setdefault(pool, {})
        if layer not in cache:
            cache[layer] = self._make_views(pool, layer)
        return cache[layer], pool.first_block * pool.geometry.block_size, pool.num_slots

    def _make_views(self, pool: Pool, layer: int) -> Views:
        with self._calls.unrecorded():
            k, v = kv_views(pool.layout, tuple(b.handle for b in pool.storage(layer)), pool.geometry)
            return bits_of(k), bits_of(v)

    def _slots(self, pool: Pool, loc: WriteLoc) -> Tensor:
        """Flat int32 slots of a location; a table is lowered on the device."""
        if loc.ids is not None:
            self._calls.check_held("a door's slot ids", loc.ids)
            flat: Tensor = loc.ids.contiguous()
            return flat
        if loc.table is None or loc.positions is None or loc.table_len is None:
            raise InvalidInput("WriteLoc: neither ids nor a table with positions")
        self._calls.check_held("a door's table and positions", loc.table.array, loc.positions)
        table, positions, table_len = loc.table.array, loc.positions.contiguous(), loc.table_len
        slots = self._calls.empty((positions.numel(),), torch.int32)
        self._calls.issue(
            lambda: rows.prepare_slots_from_table(
                bits_of(table),
                bits_of(positions),
                table_len,
                pool.geometry.block_size,
                pool.first_block,
                pool.geometry.num_blocks,
                bits_of(slots),
            )
        )
        return slots


def _rows_of(x: Tensor) -> Tensor:
    """Rows as the doors take them: contiguous float32 or bfloat16 (float16 goes through float32, exactly)."""
    return (x.to(torch.float32) if x.dtype == torch.float16 else x).contiguous()


def _copy_into(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _value_of(x: Tensor) -> HostArray:
    return host_from_bits(bits_of(x), TorchNamespace().dtype(x))
