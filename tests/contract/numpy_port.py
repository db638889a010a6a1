"""The smallest port that decodes: a device whose memory is numpy, with the ten members a port must supply and no kernel."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forebay.specs import Backend, Buffer, Capabilities, CaptureDeclined, Driver, Selection, draws
from forebay.specs.dtypes import BITS_DTYPE, HostArray, bfloat16_bits, bfloat16_values, host_from_bits
from forebay.specs.segment import Fetch, Step


class DeviceArray:
    """Bytes and the name of their dtype; numpy does not know it, so nobody takes it for a host array."""

    __slots__ = ("bits", "dtype")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, bits: HostArray, dtype: str) -> None:
        self.bits, self.dtype = bits, dtype

    def __getitem__(self, index: Any) -> DeviceArray:
        return DeviceArray(self.bits[index], self.dtype)


def _operator(apply: Callable[[Any, Any], Any], result: str | None = None) -> Any:
    def method(self: DeviceArray, other: Any) -> DeviceArray:
        bits = apply(self.bits, other.bits if isinstance(other, DeviceArray) else other)
        return DeviceArray(bits.astype(BITS_DTYPE[result or self.dtype]), result or self.dtype)

    return method


def _swapped(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: apply(y, x)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor"):
    setattr(DeviceArray, f"__{_name}__", _operator(getattr(operator, f"__{_name}__")))
for _name in ("add", "sub", "mul"):
    setattr(DeviceArray, f"__r{_name}__", _operator(_swapped(getattr(operator, _name))))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(DeviceArray, f"__{_name}__", _operator(getattr(operator, f"__{_name}__"), "bool"))


def in_falling_order(x: HostArray) -> HostArray:
    """Columns of each row from the largest element to the smallest: NaN first, the first of equals first."""
    return np.argsort(np.where(np.isnan(x), -np.inf, -x), axis=-1, kind="stable")


class NumpyArrays:
    """The part of the array namespace that the doors, attention, shadows and sampling ask for."""

    def is_array(self, x: object) -> bool:
        return isinstance(x, DeviceArray)

    def shape(self, x: DeviceArray) -> tuple[int, ...]:
        return x.bits.shape

    def dtype(self, x: DeviceArray) -> str:
        return x.dtype

    def reshape(self, x: DeviceArray, shape: Sequence[int]) -> DeviceArray:
        return DeviceArray(x.bits.reshape(tuple(shape)), x.dtype)

    def permute(self, x: DeviceArray, axes: Sequence[int]) -> DeviceArray:
        return DeviceArray(x.bits.transpose(tuple(axes)), x.dtype)

    def head(self, x: DeviceArray, n: int) -> DeviceArray:
        return x[:n]

    def take(self, x: DeviceArray, indices: DeviceArray) -> DeviceArray:
        return DeviceArray(x.bits[indices.bits], x.dtype)

    def take_along(self, x: DeviceArray, indices: DeviceArray) -> DeviceArray:
        return DeviceArray(np.take_along_axis(x.bits, indices.bits, axis=1), x.dtype)

    def clip(self, x: DeviceArray, low: int, high: int) -> DeviceArray:
        return DeviceArray(np.clip(x.bits, low, high), x.dtype)

    def where(self, condition: DeviceArray, a: Any, b: Any) -> DeviceArray:
        dtype = next((x.dtype for x in (a, b) if isinstance(x, DeviceArray)), "int32")
        a, b = (x.bits if isinstance(x, DeviceArray) else x for x in (a, b))
        return DeviceArray(np.where(condition.bits, a, b).astype(BITS_DTYPE[dtype]), dtype)

    def astype(self, x: DeviceArray, dtype: str) -> DeviceArray:
        values = bfloat16_values(x.bits) if x.dtype == "bfloat16" else x.bits
        return DeviceArray(bfloat16_bits(values) if dtype == "bfloat16" else values.astype(BITS_DTYPE[dtype]), dtype)

    def bitcast(self, x: DeviceArray, dtype: str) -> DeviceArray:
        return DeviceArray(x.bits.view(BITS_DTYPE[dtype]), dtype)

    def log(self, x: DeviceArray) -> DeviceArray:
        return DeviceArray(np.log(x.bits), x.dtype)

    def sum(self, x: DeviceArray) -> DeviceArray:
        return DeviceArray(x.bits.sum(-1, keepdims=True, dtype=x.bits.dtype), x.dtype)

    def add_along(self, x: DeviceArray, indices: DeviceArray, values: DeviceArray) -> DeviceArray:
        made, rows, inside = x.bits.copy(), np.arange(len(x.bits))[:, None], indices.bits
        inside = (inside >= 0) & (inside < made.shape[1])
        np.add.at(made, (np.broadcast_to(rows, inside.shape)[inside], indices.bits[inside]), values.bits[inside])
        return DeviceArray(made, x.dtype)

    def top_k(self, x: DeviceArray, k: int) -> tuple[DeviceArray, DeviceArray]:
        places = in_falling_order(x.bits)[:, :k]
        return DeviceArray(np.take_along_axis(x.bits, places, 1), x.dtype), DeviceArray(
            places.astype(np.int32), "int32"
        )

    def kth_largest(self, x: DeviceArray, k: DeviceArray) -> DeviceArray:
        falling = np.take_along_axis(x.bits, in_falling_order(x.bits), 1)
        n = x.bits.shape[1]
        found = np.take_along_axis(falling, np.clip(k.bits - 1, 0, n - 1), 1)
        return DeviceArray(np.where((k.bits >= 1) & (k.bits <= n), found, -np.inf).astype(np.float32), x.dtype)

    def mass_cutoff(self, p: DeviceArray, mass: DeviceArray) -> DeviceArray:
        falling = np.take_along_axis(p.bits, in_falling_order(p.bits), 1)
        reached: HostArray = np.cumsum(falling, -1, dtype=np.float64) >= mass.bits
        found = np.take_along_axis(falling, np.argmax(reached, -1)[:, None], 1)
        return DeviceArray(np.where(np.any(reached, -1, keepdims=True), found, -np.inf).astype(np.float32), p.dtype)

    def gumbel(self, keys: DeviceArray, blocks: DeviceArray) -> DeviceArray:
        made: DeviceArray = draws.gumbel(self._namespace, keys, blocks)
        return made

    def penalise(self, x: DeviceArray, seen: DeviceArray, bits: DeviceArray, penalty: DeviceArray) -> DeviceArray:
        made: DeviceArray = draws.penalise(self._namespace, x, seen, bits, penalty)
        return made

    @property
    def _namespace(self) -> Any:
        """Itself, though it lacks what no test of the contract asks for."""
        return self


class NumpyPort(Driver):
    """Ten members, run eagerly; it declines to capture."""

    def __init__(self, **limits: Any) -> None:
        self.arrays = NumpyArrays()
        base = Capabilities(layouts=("NHD", "HND", "KV2", "PACKED", "LATENT"), kv_dtypes=("float32", "bfloat16"))
        self.capabilities = replace(base, capture=False, **limits)
        self.info = {"device": "numpy"}

    @property
    def xp(self) -> Any:
        return self.arrays

    def allocate(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        return np.empty(shape, BITS_DTYPE[dtype])

    def from_host(self, bits: HostArray, dtype: str) -> DeviceArray:
        return DeviceArray(bits.copy(), dtype)

    def to_host(self, x: DeviceArray) -> HostArray:
        return x.bits.copy()

    def load(self, buffer: Buffer) -> DeviceArray:
        return DeviceArray(buffer.handle, buffer.dtype)

    def store(self, buffer: Buffer, bits: HostArray, row: int | None) -> None:
        target = buffer.handle if row is None else buffer.handle[row : row + len(bits)]
        target[...] = bits

    def free(self, buffer: Buffer) -> None:
        buffer.handle = None

    def run(self, step: Step) -> Fetch:
        effects = step()
        emits = {name: host_from_bits(x.bits.copy(), x.dtype) for name, x in effects.emits.items()}
        values = [(buffer, x.bits.copy()) for buffer, x in effects.updates]
        for buffer, bits in values:
            target = buffer.handle if bits.ndim == 0 else buffer.handle[: len(bits)]
            target[...] = bits
        return lambda: emits

    def capture(self, step: Step) -> Any:
        raise CaptureDeclined("the numpy port records nothing")

    def replay(self, payload: Any) -> Fetch:
        raise CaptureDeclined("the numpy port records nothing")


def opened(driver: Driver) -> Backend:
    """A backend in front of a driver, as ``open_backend`` makes it."""
    return Backend(driver, Selection(name="numpy-port", mode="", requested="numpy-port", source="call"))
