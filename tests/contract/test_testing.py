"""Backends that are made to claim, decline or do something else, whatever way their drivers are written, and made right again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, CaptureDeclined, KVGeometry, Segment, Unsupported
from forebay.specs.testing import claiming, declining, doing, own_operations
from tests.contract.numpy_port import NumpyPort, opened


class Computed(NumpyPort):
    """Its capabilities are computed, and cannot be set."""

    @property
    def capabilities(self) -> Any:
        return vars(self)["held"]

    @capabilities.setter
    def capabilities(self, value: Any) -> None:
        if "held" in vars(self):
            raise AttributeError("what a device can do is not set")
        vars(self)["held"] = value


class Shared(NumpyPort):
    """Its capabilities are of the class alone."""

    def __init__(self) -> None:
        super().__init__()
        del self.capabilities


Shared.capabilities = NumpyPort().capabilities

WRITTEN = [NumpyPort, Computed, Shared]
G = KVGeometry(4, 4, 1, 8)


def counted(backend: Backend) -> Segment:
    """A segment that was run once: it can be captured."""
    buffer = backend.buffer("n", np.zeros(1, np.int32))
    made = Segment("count", lambda _: ({buffer: buffer.get() + 1}, {}), updates=(buffer,))
    backend.run(made).get()
    return made


@pytest.mark.parametrize("port", WRITTEN)
def test_a_claim_holds_for_a_while_however_a_driver_keeps_its_capabilities(port: type[NumpyPort]) -> None:
    driver = port()
    with opened(driver) as backend:
        honest = backend.capabilities
        with claiming(backend, max_pool_elements=3, kv_dtypes=("float32",)):
            assert (backend.capabilities.max_pool_elements, backend.capabilities.kv_dtypes) == (3, ("float32",))
            assert backend.capabilities.layouts == honest.layouts
            with pytest.raises(Unsupported, match="at most 3"):
                backend.create_pool(G)
        assert (type(driver), backend.capabilities) == (port, honest)
        backend.release(backend.create_pool(G))
        with pytest.raises(ZeroDivisionError), claiming(backend, lse=False):
            _ = 1 // 0
        assert backend.capabilities == honest
        with pytest.raises(TypeError, match="speed"), claiming(backend, speed=3):
            pass


def test_a_device_declines_as_many_captures_as_it_is_told() -> None:
    class Recording(NumpyPort):
        def capture(self, step: Any) -> Any:
            step()
            return "a trace"

    driver = Recording()
    with opened(driver) as backend, claiming(backend, capture=True):
        segment = counted(backend)
        with declining(backend, 2) as declines:
            for _ in range(2):
                with pytest.raises(CaptureDeclined, match="no room"):
                    backend.capture(segment)
            backend.release(backend.capture(segment))
            assert (declines.left, declines.tried) == (0, 3)
            declines.left = 1
            with pytest.raises(CaptureDeclined):
                backend.capture(segment)
        backend.release(backend.capture(segment))
        assert "capture" not in vars(driver)


def test_operations_are_replaced_for_a_while_and_stay_whose_they_are() -> None:
    class Own(NumpyPort):
        def zero(self, buffer: Any) -> None:
            buffer.handle[...] = 0

    driver = Own()
    with opened(driver) as backend:
        assert own_operations(backend) == own_operations(opened(NumpyPort())) | {"zero"}
        asked: list[Any] = []
        buffer = backend.buffer("n", np.ones(2, np.float32))
        with doing(backend, zero=asked.append):
            backend.zero(buffer)
            assert own_operations(backend) >= {"zero"}
        assert (asked, backend.fetch(buffer).tolist()) == ([buffer], [1, 1])
        backend.zero(buffer)
        assert backend.fetch(buffer).tolist() == [0, 0]
