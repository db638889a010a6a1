"""The backend every contract test is written over, opened once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings

from forebay.runtime import open_backend
from forebay.specs import Backend, Buffer, Shadow
from tests.contract.kv import poison
from tests.contract.numpy_port import NumpyPort, opened
from tests.contract.staging import G

settings.register_profile("contract", deadline=None, derandomize=True, max_examples=40, print_blob=True)
settings.load_profile("contract")


@pytest.fixture(scope="session")
def backend() -> Iterator[Backend]:
    with open_backend("cpu") as opened:
        yield opened


@pytest.fixture(scope="module")
def port() -> Iterator[Backend]:
    """A port that has no kernel at all."""
    with opened(NumpyPort()) as made:
        yield made


@pytest.fixture
def shadow(backend: Backend) -> Iterator[Shadow]:
    """A poisoned shadow of the staging tests' geometry."""
    made = backend.create_shadow(G)
    poison(backend, made)
    yield made
    backend.release(made)


@pytest.fixture
def pair(backend: Backend) -> Iterator[tuple[Buffer, Buffer]]:
    """Two Buffers of four numbers."""
    a = backend.buffer("a", np.arange(4, dtype=np.float32))
    b = backend.buffer("b", np.arange(10, 14, dtype=np.float32))
    yield a, b
    for buffer in (a, b):
        backend.release(buffer)
