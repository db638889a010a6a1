"""A device that was lost: closing and releasing still free everything (clause B5)."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.specs import (
    Backend,
    DeviceLost,
    InvalidInput,
    KVGeometry,
    Selection,
)
from forebay.specs.suite.kv import int32
from tests.contract.numpy_port import NumpyPort


class LostDriver(NumpyPort):
    """A device that can be lost: from then on it neither answers nor frees."""

    lost = False
    closed = False

    def to_host(self, x: Any) -> Any:
        if self.lost:
            raise DeviceLost("the device stopped answering")
        return super().to_host(x)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def lost() -> tuple[Backend, LostDriver]:
    driver = LostDriver()
    return Backend(driver, Selection("lost", "")), driver


@pytest.mark.clause("B5")
def test_closing_closes_a_lost_device(lost: tuple[Backend, LostDriver]) -> None:
    backend, driver = lost
    backend.create_pool(KVGeometry(4, 2, 1, 2))
    driver.lost = True
    with pytest.raises(DeviceLost):
        backend.close()
    assert driver.closed
    backend.close()
    with pytest.raises(InvalidInput, match="is closed"):
        backend.buffer("x", int32(1))


@pytest.mark.clause("B5")
def test_releasing_a_pool_of_a_lost_device_frees_it(lost: tuple[Backend, LostDriver]) -> None:
    backend, driver = lost
    pool = backend.create_pool(KVGeometry(4, 2, 1, 2))
    driver.lost = True
    with pytest.raises(DeviceLost):
        backend.release(pool)
    assert not any(buffer.live for buffer in pool.buffers)
