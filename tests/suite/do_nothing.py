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
from tests.contract.numpy_port import DeviceArray, NumpyArrays

EVERYTHING = Capabilities(
    layouts=("NHD", "HND", "KV2", "PACKED", "LATENT"),
    kv_dtypes=("float32", "bfloat16", "float16"),
    addressable=True,
    deferred=True,
)
"""Claims all it can: a claimed ability is one the suite asks for."""


def zeros(shape: Sequence[int], dtype: str) -> DeviceArray:
    return DeviceArray(np.zeros(tuple(shape), BITS_DTYPE[dtype]), dtype)


def _emptied(result: Any) -> Any:
    """The same result with every element zero; what is not a device array stays."""
    if isinstance(result, DeviceArray):
        return zeros(result.bits.shape, result.dtype)
    if isinstance(result, tuple):
        return tuple(_emptied(part) if isinstance(part, DeviceArray) else part for part in result)
    return result


def _without_effect(operation: Callable[..., Any]) -> Callable[..., Any]:
    def method(*arguments: Any, **options: Any) -> Any:
        with np.errstate(all="ignore"):
            return _emptied(operation(*arguments, **options))

    return method


class IdleArrays(NumpyArrays):
    """The array namespace: results of the right shape and dtype, all zero."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return _without_effect(found) if callable(found) and name not in ("is_array", "shape", "dtype") else found


class IdleDriver(Driver):
    """Every operation is its own (none is left to numpy) and none does anything."""

    def __init__(self) -> None:
        self.arrays = IdleArrays()
        self.capabilities = EVERYTHING
        self.info = {"device": "none"}

    @property
    def xp(self) -> Any:
        return self.arrays

    def allocate(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        return zeros(shape, dtype)

    def from_host(self, bits: HostArray, dtype: str) -> DeviceArray:
        return zeros(bits.shape, dtype)

    def to_host(self, x: DeviceArray) -> HostArray:
        return np.zeros_like(x.bits)

    def load(self, buffer: Buffer) -> DeviceArray:
        return zeros(buffer.shape, buffer.dtype)

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

    def write_kv(self, pool: Pool, layer: int, loc: WriteLoc, k: DeviceArray, v: DeviceArray | None) -> None:
        pass

    def read_kv(self, pool: Pool, layer: int, loc: WriteLoc) -> tuple[DeviceArray, DeviceArray]:
        g, n = pool.geometry, loc.ids.bits.shape[0]  # type: ignore[union-attr]
        return zeros((n, g.num_kv_heads, g.key_dim), g.dtype), zeros((n, g.num_kv_heads, g.value_dim), g.dtype)

    def copy_kv(self, pool: Pool, src: WriteLoc, dst: WriteLoc) -> None:
        pass

    def paged_decode(self, call: DecodeCall) -> tuple[DeviceArray, DeviceArray | None]:
        shape = call.q.bits.shape
        lse = zeros(shape[:-1], "float32") if call.return_lse else None
        return zeros((*shape[:-1], call.pool.geometry.value_dim), call.q.dtype), lse

    def merge_partials(self, outs: Sequence[Any], lses: Sequence[Any]) -> tuple[DeviceArray, DeviceArray]:
        return zeros(outs[0].bits.shape, outs[0].dtype), zeros(lses[0].bits.shape, lses[0].dtype)

    def stage(self, *_: Any) -> None:
        pass


def _zeros_of(step: Step) -> Fetch:
    """Zeros of the shapes and dtypes that the step emits."""
    emits = {name: host_from_bits(np.zeros_like(x.bits), x.dtype) for name, x in step().emits.items()}
    return lambda: dict(emits)
