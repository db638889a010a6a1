"""The numpy port of the contract's tests, with a memory of how it was loaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.contract.numpy_port import NumpyPort
from tests.sample_backend.src.forebay_sample.arrays import SampleArray
from tests.sample_backend.src.forebay_sample.namespace import SampleNamespace


class WrongArrays(SampleNamespace):
    """A device whose products are off by one."""

    def matmul(self, a: SampleArray, b: SampleArray) -> SampleArray:
        right = super().matmul(a, b)
        return right.view(right.bits + np.float32(1))


class NumpyDriver(NumpyPort):
    """``closed`` counts the calls of ``close``; ``options`` are what it was loaded with."""

    def __init__(self, arrays: type[SampleNamespace] = SampleNamespace, **options: Any) -> None:
        super().__init__()
        self.arrays = arrays(self.device)
        self.options = options
        self.closed = 0

    def close(self) -> None:
        self.closed += 1
