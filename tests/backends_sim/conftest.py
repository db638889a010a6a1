"""The simulated device, opened for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.backends.sim.driver import SimDriver
from forebay.specs import Backend
from tests.backends_sim.opened import open_sim
from tests.contract.conftest import pair, shadow  # noqa: F401  (fixtures of the shared tests)


@pytest.fixture(scope="session")
def backend() -> Iterator[Backend]:
    """One device for the tests that leave it as they found it."""
    with open_sim() as made:
        yield made


@pytest.fixture
def driver() -> SimDriver:
    """A driver without a backend in front."""
    return SimDriver()
