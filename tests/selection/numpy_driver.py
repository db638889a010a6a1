"""The smallest working driver: numpy arrays in host memory, everything else left to the defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.specs.capabilities import Capabilities
from forebay.specs.driver import Driver
from forebay.specs.dtypes import HostArray
from forebay.specs.errors import CaptureDeclined
from forebay.specs.segment import Buffer, Fetch, Step


class NumpyNamespace:
    """As much of the array namespace as a self-test uses."""

    def is_array(self, x: object) -> bool:
        return isinstance(x, np.ndarray)

    def shape(self, x: HostArray) -> tuple[int, ...]:
        return x.shape

    def dtype(self, x: HostArray) -> str:
        return str(x.dtype)

    def reshape(self, x: HostArray, shape: Sequence[int]) -> HostArray:
        return x.reshape(tuple(shape))

    def matmul(self, a: HostArray, b: HostArray) -> HostArray:
        product: HostArray = np.matmul(a, b)
        return product


class WrongNamespace(NumpyNamespace):
    """A device whose products are off by one."""

    def matmul(self, a: HostArray, b: HostArray) -> HostArray:
        wrong: HostArray = super().matmul(a, b) + 1
        return wrong


class NumpyDriver(Driver):
    """``closed`` counts the calls of ``close``; ``options`` are what it was loaded with."""

    def __init__(self, namespace: NumpyNamespace | None = None, **options: Any) -> None:
        self.namespace = namespace or NumpyNamespace()
        self.options = options
        self.closed = 0
        self.capabilities = Capabilities(layouts=("NHD",), kv_dtypes=("float32",), capture=False)
        self.info = {"device": "numpy"}

    @property
    def xp(self) -> Any:
        return self.namespace

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.zeros(shape, dtype)

    def from_host(self, bits: HostArray, dtype: str) -> HostArray:
        return bits.copy()

    def to_host(self, x: HostArray) -> HostArray:
        return x.copy()

    def load(self, buffer: Buffer) -> HostArray:
        return np.asarray(buffer.handle)

    def store(self, buffer: Buffer, bits: HostArray, row: int | None) -> None:
        if row is None:
            buffer.handle[...] = bits
        else:
            buffer.handle[row : row + len(bits)] = bits

    def free(self, buffer: Buffer) -> None:
        buffer.handle = None

    def run(self, step: Step) -> Fetch:
        effects = step()
        for buffer, value in effects.updates:
            buffer.handle[: len(value)] = value
        return lambda: effects.emits

    def capture(self, step: Step) -> Any:
        raise CaptureDeclined("numpy records nothing")

    def replay(self, payload: Any) -> Fetch:
        raise CaptureDeclined("numpy records nothing")

    def close(self) -> None:
        self.closed += 1
