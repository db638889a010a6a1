"""The deferred queue: when work happens, in which order, and whose values a Ticket gives (clauses C5, C9, S4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, KVGeometry, Segment, WriteLoc
from forebay.specs.suite.kv import int32
from tests.backends_sim.opened import counter, launched, open_sim


@pytest.mark.clause("C5", "C9")
@pytest.mark.parametrize("how", ["run", "replay"])
def test_a_steps_work_has_not_happened_before_it_is_read(how: str) -> None:
    """And reading a step does that step and those before it, none of those behind it."""
    with open_sim() as b:
        x, segment = counter(b)
        b.run(segment).get()
        trace = b.capture(segment)
        b.synchronize()
        before, queued = launched(b), b.info["queued"]
        assert queued == 0
        tickets = [b.run(segment) if how == "run" else b.replay(trace) for _ in range(5)]
        assert launched(b) == before
        each = b.info["queued"] // 5
        assert each > 1
        assert [float(tickets[i].get()["x"][0]) for i in (1, 3)] == [2, 4]
        assert b.info["queued"] == each
        assert tickets[2].get()["x"].tolist() == [3, 3], "its values are its own, though a later one was read first"
        assert b.info["queued"] == each
        assert b.fetch(x).tolist() == [6, 6]
        assert b.info["queued"] == 0
        assert tickets[4].get()["x"].tolist() == [5, 5]


@pytest.mark.clause("C9")
def test_a_host_read_and_synchronize_do_everything() -> None:
    for explicit in (True, False):
        with open_sim() as b:
            _, segment = counter(b)
            for _ in range(3):
                b.run(segment)
            assert launched(b) == 0
            if explicit:
                b.synchronize()
            else:
                b.to_host(b.to_device(np.zeros(1, np.float32)))
            assert b.info["queued"] == 0
            assert launched(b) == sum(b.info["launches"].values()) > 0


def test_a_long_queue_is_worked_off() -> None:
    with open_sim(queue_limit=8) as b:
        _, segment = counter(b)
        tickets = [b.run(segment) for _ in range(6)]
        assert b.info["queued"] <= 8
        assert launched(b) > 0
        assert [float(ticket.get()["x"][0]) for ticket in tickets] == [0, 1, 2, 3, 4, 5]


@pytest.mark.clause("C13", "S4")
def test_host_writes_are_ordered_against_queued_work() -> None:
    """Each step sees what was uploaded before it and nothing later; the host array is reused at once."""
    with open_sim() as b:
        x = b.buffer("x", np.zeros(3, np.float32))
        segment = Segment("show", lambda _: ({}, {"x": x.get()}), reads=(x,))
        host, tickets = np.zeros(3, np.float32), []
        for i in range(4):
            host[:] = i
            b.upload(x, host)
            row = np.full(1, 10.0 * i, np.float32)
            b.upload(x, row, 1)
            row[:] = host[:] = -1
            tickets.append(b.run(segment))
        assert launched(b) == 0
        assert [ticket.get()["x"].tolist() for ticket in tickets] == [[i, 10 * i, i] for i in range(4)]


@pytest.mark.clause("S4", "S2")
def test_staging_is_ordered_against_queued_work() -> None:
    """Steps before it read the old rows, steps behind it the new ones, though the host array is overwritten at once."""
    with open_sim() as b:
        pool = b.create_pool(KVGeometry(3, 2, 1, 2))
        ids = b.buffer("ids", int32(2, 3))

        def fn(_: Backend) -> Any:
            k, v = pool.read(0, WriteLoc.slots(ids.get()))
            return {}, {"k": k, "v": v}

        segment, tickets = Segment("read", fn, reads=(ids,), pools=(pool,)), []
        host = np.zeros((1, 2, 2, 1, 2), np.float32)
        for i in range(3):
            host[...] = i
            b.stage(
                host[:, 0],
                host[:, 1],
                pool,
                0,
                src_blocks=[0],
                dst_blocks=[1],
                tokens=2,
                dtype="float32",
                accept_strided=True,
            )
            host[...] = np.nan
            tickets.append(b.run(segment))
        assert launched(b) == 0
        got = [ticket.get() for ticket in tickets]
        assert [(g["k"].ravel().tolist(), g["v"].ravel().tolist()) for g in got] == [
            ([i] * 4, [i] * 4) for i in range(3)
        ]


@pytest.mark.clause("C9")
def test_what_is_moved_is_counted_in_bytes() -> None:
    with open_sim() as b:
        x = b.buffer("x", np.zeros(3, np.float32))
        b.upload(x, np.ones(2, np.float32), 1)
        assert (b.info["bytes_up"], b.counters.upload_bytes) == (0, 20), "asked for, and not done"
        assert b.fetch(x).tolist() == [0, 1, 1]
        assert (b.info["bytes_up"], b.info["bytes_down"], b.counters.downloads) == (20, 12, 1)
        segment = Segment("show", lambda _: ({}, {"half": x.get()[:2]}), reads=(x,))
        ticket = b.run(segment)
        assert (b.info["bytes_down"], b.counters.downloads, b.counters.syncs) == (12, 1, 0)
        ticket.get()
        assert (b.info["bytes_down"], b.counters.downloads, b.counters.syncs) == (20, 2, 0)
        assert b.info["waits"] == 2


@pytest.mark.clause("L1")
def test_foreign_memory_is_never_behind() -> None:
    """Its owner may look at it as soon as a call returns, whatever is queued."""
    with open_sim() as b:
        store = np.zeros((2, 2, 2, 1, 2), np.float32)
        pool = b.wrap_pool(store, layout="KV2", geometry=KVGeometry(2, 2, 1, 2))
        ids, rows = b.buffer("ids", int32(1)), b.buffer("rows", np.full((1, 1, 2), 5, np.float32))

        def fn(_: Backend) -> Any:
            pool.write(0, WriteLoc.slots(ids.get()), rows.get(), rows.get() + 1)
            return {}, {}

        segment = Segment("write", fn, reads=(ids, rows), pools=(pool,))
        b.run(segment)
        assert (store[0, 0, 1, 0, 0], store[0, 1, 1, 0, 0]) == (5, 6)
        trace = b.capture(segment)
        b.upload(ids, int32(2))
        b.replay(trace)
        assert (store[1, 0, 0, 0, 0], store[1, 1, 0, 0, 0]) == (5, 6)
