"""The numpy port of the contract's tests, with what a self-test needs and a memory of how it was loaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.contract.numpy_port import DeviceArray, NumpyArrays, NumpyPort


class SelfTestArrays(NumpyArrays):
    """With products, which a self-test asks for."""

    def matmul(self, a: DeviceArray, b: DeviceArray) -> DeviceArray:
        return DeviceArray(np.matmul(a.bits, b.bits), a.dtype)


class WrongArrays(SelfTestArrays):
    """A device whose products are off by one."""

    def matmul(self, a: DeviceArray, b: DeviceArray) -> DeviceArray:
        right = super().matmul(a, b)
        return DeviceArray(right.bits + np.float32(1), right.dtype)


class NumpyDriver(NumpyPort):
    """``closed`` counts the calls of ``close``; ``options`` are what it was loaded with."""

    def __init__(self, arrays: SelfTestArrays | None = None, **options: Any) -> None:
        super().__init__()
        self.arrays = arrays or SelfTestArrays()
        self.options = options
        self.closed = 0

    def close(self) -> None:
        self.closed += 1
