"""The smallest port that decodes: the ten members a port must supply, and no kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from forebay.specs import Backend, Buffer, Capabilities, CaptureDeclined, Driver, Selection
from forebay.specs.dtypes import BITS_DTYPE, HostArray, host_from_bits
from forebay.specs.segment import Fetch, Step
from tests.sample_backend.src.forebay_sample.arrays import Device, SampleArray
from tests.sample_backend.src.forebay_sample.namespace import SampleNamespace


class NumpyPort(Driver):
    """Ten members over the arrays of the sample backend, run eagerly; it declines to capture."""

    def __init__(self, **limits: Any) -> None:
        self.device = Device()
        self.arrays = SampleNamespace(self.device)
        base = Capabilities(
            layouts=("NHD", "HND", "KV2", "PACKED", "FUSED", "LATENT"), kv_dtypes=("float32", "bfloat16", "float16")
        )
        self.capabilities = replace(base, capture=False, **limits)
        self.info = {"device": "numpy"}

    @property
    def xp(self) -> Any:
        return self.arrays

    def allocate(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        return np.empty(shape, BITS_DTYPE[dtype])

    def from_host(self, bits: HostArray, dtype: str) -> SampleArray:
        return SampleArray(self.device, bits.copy(), dtype, None)

    def to_host(self, x: SampleArray) -> HostArray:
        return x.bits.copy()

    def load(self, buffer: Buffer) -> SampleArray:
        return SampleArray(self.device, buffer.handle, buffer.dtype, None)

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
