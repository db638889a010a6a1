"""JAX on the host's own processor: what computes here is XLA for CPUs."""

from __future__ import annotations

import jax
import pytest

from tests.backends_tpu.device import Device

jax.config.update("jax_platforms", "cpu")


@pytest.fixture(scope="session")
def device() -> Device:
    """Arrays and their namespace without a driver."""
    return Device()
