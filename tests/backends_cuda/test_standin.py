"""The stand-in for a device keeps CUDA's rules: what is asked for is done later, in order, and not at all while it is recorded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from forebay.backends.cuda.standin import ARENA_BYTES, POISONED_BYTES, StandIn, StandInTensor
from forebay.runtime import open_backend
from forebay.specs import DeviceLost


@pytest.fixture
def device() -> StandIn:
    return StandIn()


def ones(device: StandIn, n: int = 4) -> Tensor:
    made = device.empty((n,), torch.float32)
    made.fill_(1.0)
    return made


def held(x: Tensor) -> list[float]:
    """What lies in the memory now, whatever is queued."""
    assert isinstance(x, StandInTensor)
    values: list[float] = x.memory.tolist()
    return values


def test_work_is_done_when_somebody_waits_and_in_order(device: StandIn) -> None:
    x = ones(device)
    y = x + 1
    x.mul_(3)
    z = x + y
    assert np.isnan(held(x)).all()
    assert np.isnan(held(y)).all()
    device.synchronize()
    assert (held(x), held(y), held(z)) == ([3] * 4, [2] * 4, [5] * 4)


def test_an_event_waits_for_what_came_before_it_only(device: StandIn) -> None:
    x = ones(device)
    event = device.event()
    y = x + 1
    assert not event.done()
    event.wait()
    assert event.done()
    assert held(x) == [1] * 4
    assert np.isnan(held(y)).all()


def test_views_share_memory(device: StandIn) -> None:
    x = ones(device, 6)
    x.reshape(2, 3).swapaxes(0, 1)[1].fill_(7)
    device.synchronize()
    assert held(x) == [1, 7, 1, 1, 7, 1]


def test_a_copy_takes_what_lies_in_host_memory_when_its_turn_comes(device: StandIn) -> None:
    x, host = ones(device), torch.full((4,), 5.0)
    x.copy_(host, non_blocking=True)
    host.fill_(9)
    device.synchronize()
    assert held(x) == [9] * 4
    x.copy_(host)  # waits, and has taken the values when it returns
    host.fill_(1)
    assert held(x) == [9] * 4


def test_a_recorded_graph_does_nothing_until_it_is_replayed_and_then_uses_the_same_memory(device: StandIn) -> None:
    x = ones(device)
    with device.capture() as graph:
        y = x + 1
        x.copy_(y)
    device.synchronize()
    assert held(x) == [1] * 4
    assert np.isnan(held(y)).all()
    for turn in (2, 3):
        graph.replay()
        device.synchronize()
        assert held(x) == held(y) == [turn] * 4
    graph.release()
    graph.replay()
    device.synchronize()
    assert held(x) == [3] * 4


FORBIDDEN: dict[str, Callable[[StandIn, Tensor], object]] = {
    "synchronize": lambda device, _: device.synchronize(),
    "an event": lambda device, _: device.event().wait(),
    "item": lambda _, x: x[0].item(),
    "nonzero": lambda _, x: torch.nonzero(x),
    "a blocking copy to the host": lambda _, x: torch.empty(4).copy_(x),
    "a blocking copy from the host": lambda _, x: x.copy_(torch.zeros(4)),
    "another capture": lambda device, _: device.capture().__enter__(),
}


@pytest.mark.parametrize("act", FORBIDDEN)
def test_waiting_is_an_error_while_a_graph_is_recorded(device: StandIn, act: str) -> None:
    x = ones(device)
    device.synchronize()
    with pytest.raises(RuntimeError, match="CUDA's rules"), device.capture():
        FORBIDDEN[act](device, x)
    device.synchronize()
    assert held(x) == [1] * 4


def test_memory_of_host_and_device_does_not_mix(device: StandIn) -> None:
    x = ones(device)
    acts: tuple[Callable[[], object], ...] = (
        lambda: x + torch.ones(4),
        lambda: torch.ones(4) + x,
        lambda: torch.add(x, 1, out=torch.empty(4)),
    )
    for act in acts:
        with pytest.raises(RuntimeError, match="a host tensor of shape"):
            act()
    with pytest.raises(RuntimeError, match="pinned memory only"):
        x.to("cpu", torch.float64)


def test_the_host_cannot_read_a_tensor(device: StandIn) -> None:
    x = ones(device)
    reads: tuple[Callable[[], object], ...] = (x.numpy, x.tolist, lambda: np.asarray(x))
    for read in reads:
        with pytest.raises((RuntimeError, TypeError)):
            read()


def test_what_fails_on_the_device_loses_it() -> None:
    backend = open_backend("cuda:interpret")
    weights = backend.to_device(np.zeros((3, 2), np.float32))
    taken = backend.xp.take(weights, backend.to_device(np.array([7], np.int32)))
    with pytest.raises(DeviceLost, match="IndexError"):
        backend.to_host(taken)
    with pytest.raises(DeviceLost, match="IndexError"):
        backend.to_host(weights)
    backend.close()


def test_free_memory_is_what_buffers_uploads_and_outputs_of_kernels_leave(device: StandIn) -> None:
    """Small memory and large, views of it and work that waits for it: it counts as taken until the last of them is gone."""

    def free() -> int:
        return int(device.describe()["free_bytes"])

    whole = free()
    assert whole == device.describe()["total_bytes"] == ARENA_BYTES
    for count in (1000, POISONED_BYTES):
        x = device.empty((count,), torch.int32)
        assert free() == whole - 4 * count
        view = x.reshape(-1, 2)[1:, 1]
        del x
        assert free() == whole - 4 * count
        del view
        assert free() == whole
    x = ones(device)
    del x
    assert free() == whole - 16
    device.synchronize()
    assert free() == whole


def test_a_backend_says_what_is_free() -> None:
    with open_backend("cuda:interpret") as backend:
        before = backend.info["free_bytes"]
        buffer = backend.buffer("x", np.zeros(1000, np.int32))
        backend.synchronize()
        assert backend.info["free_bytes"] == before - 4000
        backend.release(buffer)
        backend.synchronize()
        assert backend.info["free_bytes"] == before
