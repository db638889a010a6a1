"""Injected faults at the backend's surface: what each does, that it is told truly, and that closing frees (clauses B5, C5, S4)."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, DeviceLost, KVGeometry, Segment, Unsupported
from tests.backends_sim.opened import counter, launched, open_sim


def answers(b: Backend, x: Any, segment: Segment) -> list[Any]:
    """Everything that would ask the device for something."""
    return [
        lambda: b.run(segment),
        lambda: b.capture(segment),
        lambda: b.fetch(x),
        lambda: b.upload(x, np.zeros(2, np.float32)),
        lambda: b.zero(x),
        lambda: b.to_device(np.zeros(2, np.float32)),
        lambda: b.reserve("y", (2,), "float32"),
        lambda: b.synchronize(),
        lambda: x.get() + 1,
    ]


def closes(b: Backend) -> None:
    """Closing a lost device frees everything, though the counts on it can no longer be read."""
    driver = b._driver
    try:
        b.close()
    except DeviceLost:
        assert b._pools == []
    assert driver.info["live_bytes"] == 0


@pytest.mark.clause("B5")
@pytest.mark.parametrize("at", [1, 2, 3, 7])
def test_a_lost_device_stays_lost(at: int) -> None:
    """Work before the launch is done, its values stay; nothing is answered behind it, with the first reason each time."""
    b = open_sim(inject=[{"kind": "lost", "at_launch": at}])
    x, segment = counter(b)
    tickets = [b.run(segment) for _ in range(4)]
    each = b.info["queued"] // 4
    says = rf"the device was lost at launch {at} \("
    whole = (at - 1) // (each - 1)
    for i, ticket in enumerate(tickets):
        if i < whole:
            assert ticket.get()["x"].tolist() == [i, i]
        else:
            for _ in range(2):
                with pytest.raises(DeviceLost, match=says):
                    ticket.get()
    if whole:
        assert tickets[0].get()["x"].tolist() == [0, 0]
    for ask in answers(b, x, segment):
        with pytest.raises(DeviceLost, match=says):
            ask()
    assert b.info["lost"].startswith("sim: the device was lost")
    assert b.info["faults"] == [f"lost at_launch={at}"]
    assert launched(b) == at - 1
    b.release(x)
    closes(b)


@pytest.mark.clause("C5")
def test_a_loss_in_the_middle_of_a_replay_reaches_the_ticket() -> None:
    b = open_sim(inject=[{"kind": "lost", "at_launch": 8}])
    _, segment = counter(b)
    b.run(segment).get()
    trace = b.capture(segment)
    tickets = [b.replay(trace) for _ in range(3)]
    assert tickets[0].get()["x"].tolist() == [1, 1]
    with pytest.raises(DeviceLost, match="lost at launch 8"):
        tickets[1].get()
    with pytest.raises(DeviceLost, match="lost at launch 8"):
        b.replay(trace)
    assert not tickets[1].retired
    b.release(trace)
    closes(b)


@pytest.mark.clause("C8")
def test_a_stuck_queue_is_given_up_in_time() -> None:
    b = open_sim(inject=[{"kind": "stuck", "at_launch": 2}], stuck_timeout=0.1)
    x, segment = counter(b)
    ticket = b.run(segment)
    start = time.monotonic()
    with pytest.raises(DeviceLost, match=r"the queue is stuck: launch 2 \(\w+\) did not end within 0.1 s"):
        ticket.get()
    assert 0.1 <= time.monotonic() - start < 5
    start = time.monotonic()
    for ask in answers(b, x, segment):
        with pytest.raises(DeviceLost, match="the queue is stuck"):
            ask()
    assert time.monotonic() - start < 0.1, "who asks later is told at once"
    closes(b)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_memory_that_is_used_up_once(at: int) -> None:
    """The refusal names what was wanted; the same call works when it is made again."""
    with open_sim(inject=[{"kind": "memory", "at_allocation": at}]) as b:
        made: list[Any] = []
        steps: list[Any] = [
            lambda: made.append(b.buffer("x", np.ones(2, np.float32))),
            lambda: made.append(b.to_device(np.ones(2, np.float32))),
            lambda: made.append(made[0].get() + made[1]),
        ]
        for i, step in enumerate(steps, start=1):
            if i == at:
                with pytest.raises(Unsupported, match=r"needs 8 bytes; the device has an injected exhaustion"):
                    step()
            step()
        assert b.to_host(made[2]).tolist() == [2, 2]
        assert b.info["faults"] == [f"memory at_allocation={at}"]


def uploaded(b: Backend) -> Any:
    """An array whose second upload is the one that counts."""
    x = b.buffer("x", np.zeros(3, np.float32))
    b.upload(x, np.ones(3, np.float32))
    return x.get()


@pytest.mark.clause("S4", "C5")
def test_a_torn_transfer_is_found_by_its_checksum() -> None:
    """A whole Buffer, a new array: what waits for them gets no value."""
    for at, send in (
        (1, lambda b: b.buffer("x", np.arange(1, 5, dtype=np.float32)).get()),
        (1, lambda b: b.to_device(np.arange(1, 5, dtype=np.int32))),
        (1, lambda b: b.to_device(np.array([7], np.int32))),
        (2, uploaded),
    ):
        b = open_sim(inject=[{"kind": "torn", "at_upload": at}])
        x = send(b)
        with pytest.raises(DeviceLost, match=r"a transfer of \d+ bytes to SimArray.* arrived torn"):
            b.to_host(x)
        closes(b)


@pytest.mark.clause("S4", "S1")
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_a_torn_staging_is_found_by_its_checksum(tokens: int) -> None:
    opened = open_sim()
    pool = opened.create_pool(KVGeometry(4, 2, 1, 2))
    opened.synchronize()
    at = opened.info["positions"]["at_upload"] + 1
    opened.release(pool)
    opened.close()
    b = open_sim(inject=[{"kind": "torn", "at_upload": at}])
    pool = b.create_pool(KVGeometry(4, 2, 1, 2))
    host = np.ones((2, 2, 1, 2), np.float32)
    blocks = list(range(-(-tokens // 2)))
    b.stage(host, host, pool, 0, src_blocks=blocks, dst_blocks=[n + 1 for n in blocks], tokens=tokens, dtype="float32")
    with pytest.raises(DeviceLost, match=rf"{tokens} staged rows arrived torn in blocks"):
        b.fetch(pool.storage(0)[0])
    closes(b)


@pytest.mark.clause("C5")
def test_a_torn_row_of_a_buffer_goes_unnoticed_by_the_driver() -> None:
    """The first half of what is sent never arrives and the old bytes stay; only a receipt can tell."""
    with open_sim(inject=[{"kind": "torn", "at_upload": 2}, {"kind": "torn", "at_upload": 3}]) as b:
        x = b.buffer("x", np.zeros((2, 4), np.float32))
        b.upload(x, np.ones(4, np.float32), 1)
        assert b.fetch(x).tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
        b.upload(x, np.full(4, 2, np.float32), 0)
        assert b.fetch(x)[0].tolist() == [0, 0, 2, 2]
        b.upload(x, np.ones(4, np.float32), 0)
        assert b.fetch(x)[0].tolist() == [1, 1, 1, 1]
        assert b.info["faults"] == ["torn at_upload=2", "torn at_upload=3"]
