"""A device that does nothing: it takes every call, answers zeros of the right shape and dtype, and changes no memory.

What it refuses is refused by the host checks in front of it (``specs.Backend``), so a test of a value that passes on it proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from forebay.specs import Buffer, Capabilities, Driver, Pool, WriteLoc
from forebay.specs.attention import DecodeCall
from forebay.specs.driver import ForeignMemory
from forebay.specs.dtypes import BITS_DTYPE, HostArray, host_from_bits
from forebay.specs.segment import Fetch, Step
from tests.sample_backend.src.forebay_sample.arrays import Compute, Device, SampleArray
from tests.sample_backend.src.forebay_sample.namespace import SampleNamespace

EVERYTHING = Capabilities(
    layouts=("NHD", "HND", "KV2", "PACKED", "FUSED", "LATENT"),
    kv_dtypes=("float32", "bfloat16", "float16"),
    addressable=True,
    deferred=True,
)
"""Claims all it can: a claimed ability is one the suite asks for."""


class IdleDevice(Device):
    """Computes zeros of the right shape and dtype, and launches nothing."""

    def apply(self, compute: Compute, dtype: str, *operands: Any) -> SampleArray:
        made = super().apply(compute, dtype, *operands)
        made.bits.fill(0)
        return made

    def issue(self, kernel: Callable[[], None]) -> None:
        pass


class IdleDriver(Driver):
    """Every operation is its own (none is left to numpy) and none does anything."""

    def __init__(self, capabilities: Capabilities = EVERYTHING) -> None:
        self.device = IdleDevice()
        self.arrays = SampleNamespace(self.device)
        self.capabilities = capabilities
        self.info = {"device": "none"}

    @property
    def xp(self) -> Any:
        return self.arrays

    def allocate(self, shape: tuple[int, ...], dtype: str) -> SampleArray:
        return self.device.new(shape, dtype)

    def from_host(self, bits: HostArray, dtype: str) -> SampleArray:
        return self.device.new(bits.shape, dtype)

    def to_host(self, x: SampleArray) -> HostArray:
        return np.zeros_like(x.bits)

    def load(self, buffer: Buffer) -> SampleArray:
        return self.device.new(buffer.shape, buffer.dtype)

    def store(self, buffer: Buffer, bits: HostArray, row: int | None) -> None:
        pass

    def free(self, buffer: Buffer) -> None:
        pass

    def run(self, step: Step) -> Fetch:
        return _zeros_of(step)

    def capture(self, step: Step) -> Fetch:
        return _zeros_of(step)

    def replay(self, payload: Fetch) -> Fetch:
        return payload

    def wrap(self, x: object, dtype: str) -> ForeignMemory:
        """Whatever it is given: the checks of foreign memory are the driver's own, and this one does nothing."""
        array = x if isinstance(x, np.ndarray) else np.zeros(1, BITS_DTYPE[dtype])
        return ForeignMemory(None, array.shape, array.strides, array.ctypes.data)

    def zero(self, buffer: Buffer) -> None:
        pass

    def write_kv(self, pool: Pool, layer: int, loc: WriteLoc, k: SampleArray, v: SampleArray | None) -> None:
        pass

    def read_kv(self, pool: Pool, layer: int, loc: WriteLoc) -> tuple[SampleArray, SampleArray]:
        """As many rows as there are ids, or positions."""
        g = pool.geometry
        ids: Any = loc.positions if loc.ids is None else loc.ids
        n = int(np.prod(self.arrays.shape(ids)))
        k, v = (self.device.new((n, g.num_kv_heads, dim), g.dtype) for dim in (g.key_dim, g.value_dim))
        return k, v

    def copy_kv(self, pool: Pool, src: WriteLoc, dst: WriteLoc) -> None:
        pass

    def paged_decode(self, call: DecodeCall) -> tuple[SampleArray, SampleArray | None]:
        shape = call.q.bits.shape
        lse = self.device.new(shape[:-1], "float32") if call.return_lse else None
        return self.device.new((*shape[:-1], call.pool.geometry.value_dim), call.q.dtype), lse

    def merge_partials(self, outs: Sequence[Any], lses: Sequence[Any]) -> tuple[SampleArray, SampleArray]:
        return self.device.new(outs[0].bits.shape, outs[0].dtype), self.device.new(lses[0].bits.shape, lses[0].dtype)

    def stage(self, *_: Any) -> None:
        pass


def _zeros_of(step: Step) -> Fetch:
    """Zeros of the shapes and dtypes that the step emits."""
    emits = {name: host_from_bits(np.zeros_like(x.bits), x.dtype) for name, x in step().emits.items()}
    return lambda: dict(emits)
