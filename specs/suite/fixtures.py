"""What a test of the suite asks for: the judged backend, a second one like it, and things made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from forebay.specs import Backend, Buffer, Shadow
from forebay.specs.suite.failure import causes
from forebay.specs.suite.judge import CANNOT_START, JUDGE
from forebay.specs.suite.kv import poison
from forebay.specs.suite.staging import G

OpenBackend = Callable[..., Backend]
"""``open_backend(NAME[:MODE], **options)`` of the runtime, free of the machine's own settings."""
Another = Callable[..., Backend]
"""Opens one more backend of the judged kind, with options if given; a context manager."""


@pytest.fixture(scope="session")
def backend_name(request: pytest.FixtureRequest) -> str:
    """What ``--backend`` names."""
    name: str = request.config.getoption("--backend")
    return name


@pytest.fixture(scope="session")
def backend(open_backend: OpenBackend, backend_name: str, pytestconfig: pytest.Config) -> Iterator[Backend]:
    """The judged backend, opened once; every test leaves it as it found it. The run ends, with the cause, where it cannot start."""
    try:
        opened = open_backend(backend_name)
    except Exception as error:  # noqa: BLE001  # whatever a vendor library raises
        pytest.exit(f"backend {backend_name!r} cannot start: {causes(error)}", returncode=CANNOT_START)
    judge = pytestconfig.stash[JUDGE]
    with opened:
        judge.opened(opened)
        yield opened
        judge.closing(opened)


@pytest.fixture
def another(open_backend: OpenBackend, backend_name: str) -> Another:
    """Opens one more backend of the judged kind."""

    def opened(**options: object) -> Backend:
        return open_backend(backend_name, **options)

    return opened


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
