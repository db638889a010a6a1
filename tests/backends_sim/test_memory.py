"""Device memory: poison, accounts and bounds (clauses B5, C12, L1)."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from forebay.backends.sim.driver import SimDriver
from forebay.specs import CaptureDeclined, InvalidInput, KVGeometry, Segment, Unsupported
from tests.backends_sim.opened import counter, open_sim


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_fresh_memory_is_poison(dtype: str) -> None:
    """NaN in every float dtype; no index, position or token in int32."""
    with open_sim() as b:
        held = b.fetch(b.reserve("spare", (5, 3), dtype))
        assert (np.isnan(held) if dtype != "int32" else held > 2**30).all()
        if dtype in ("float32", "bfloat16"):
            pool = b.create_pool(KVGeometry(3, 2, 1, 3, dtype=dtype))
            for buffer in pool.storage(0):
                assert np.isnan(b.fetch(buffer)).all()


def test_freed_memory_is_poison_behind_the_work_that_uses_it() -> None:
    """A step that is queued still reads the Buffer; afterwards every byte is poison, odd sizes included."""
    with open_sim() as b:
        x = b.buffer("x", np.array([True, True, True]))
        memory = x.get().allocation
        ticket = b.run(Segment("show", lambda _: ({}, {"x": x.get()}), reads=(x,)))
        b.release(x)
        assert ticket.get()["x"].tolist() == [True] * 3
        b.synchronize()
        assert memory.data.tolist() == [0xFF, 0x7F, 0x7F]


def test_an_array_whose_memory_was_given_back_is_refused() -> None:
    with open_sim() as b:
        x = b.buffer("x", np.ones(2, np.float32))
        stale = x.get()
        b.release(x)
        for use in (
            lambda: stale + 1,
            lambda: b.to_host(stale),
            lambda: b.xp.exp(stale),
            lambda: b.xp.reshape(stale, (1, 2)),
        ):
            with pytest.raises(InvalidInput, match="whose memory was given back"):
                use()


def test_temporaries_come_back_when_nobody_names_them() -> None:
    with open_sim() as b:
        x = b.buffer("x", np.ones(1000, np.float32))
        b.synchronize()
        before = b.info["live_bytes"]
        y = (x.get() + 1) * 2 - x.get()
        assert b.info["live_bytes"] == before + 3 * 4000, "queued work holds its operands"
        assert b.to_host(y).tolist() == [3] * 1000
        assert b.info["live_bytes"] == before + 4000
        del y
        gc.collect()
        assert b.info["live_bytes"] == before
        assert b.info["peak_bytes"] == before + 3 * 4000


@pytest.mark.clause("L1")
def test_memory_is_bounded() -> None:
    """The limit is named; what is freed behind the queue counts as free; nothing is taken by a refusal."""
    with open_sim(memory_limit=10_000) as b:
        x = b.buffer("x", np.ones(1000, np.float32))
        with pytest.raises(
            Unsupported, match=r"8000 bytes, more than there is: .*the device has 10000 bytes, 4000 of them in use"
        ):
            b.reserve("y", (2000,), "float32")
        with pytest.raises(Unsupported, match=r"an uploaded array needs 8000 bytes; the device has 10000 bytes"):
            b.to_device(np.ones(2000, np.float32))
        big = x.get() + 1
        with pytest.raises(Unsupported, match="the output of add needs 4000 bytes"):
            big + 1
        assert b.info["live_bytes"] == 8000
        del big
        b.release(x)
        y = b.buffer("y", np.ones(2000, np.float32))
        assert b.fetch(y).sum() == 2000


@pytest.mark.clause("C9", "C12")
def test_capture_declines_without_room_for_the_arena() -> None:
    with open_sim(memory_limit=10_000) as b:
        x = b.buffer("x", np.zeros(600, np.float32))
        segment = Segment("wide", lambda _: ({x: ((x.get() + 1) * 2) * 0.5}, {}), updates=(x,))
        with pytest.raises(Unsupported, match="the output of mul"):
            b.run(Segment("wider", lambda _: ({x: ((x.get() + 1) * 2 + 1) * 0.5}, {}), updates=(x,)))
        b.run(segment)
        spare = b.reserve("spare", (800,), "float32")
        with pytest.raises(
            CaptureDeclined, match=r"the arena of Segment wide\[\] needs 7296 bytes; the device has 10000 bytes"
        ):
            b.capture(segment)
        assert b.counters.declined == 1
        b.release(spare)
        trace = b.capture(segment)
        b.replay(trace)
        assert (b.fetch(x) == 2).all()
        b.release(trace)


@pytest.mark.clause("C7", "C10", "C12")
def test_a_trace_works_in_its_arena_alone() -> None:
    """Its memory is reserved at capture and stays where it is; a replay allocates nothing; release gives it back, poisoned."""
    with open_sim() as b:
        x, segment = counter(b)
        b.run(segment)
        b.synchronize()
        before = b.info["live_bytes"]
        trace = b.capture(segment)
        arena = trace.payload.arena
        assert b.info["live_bytes"] == before + arena.size > before
        assert np.isnan(arena.data.view(np.float32)).all(), "capturing computes nothing"
        own = {y.allocation for launch in trace.payload.launches for y in launch.outs} - {x.get().allocation}
        assert own == {arena}
        address, allocations = arena.data.ctypes.data, b.info["allocations"]
        for i in range(20):
            assert b.replay(trace).get()["x"][0] == 1 + i
        assert b.info["allocations"] == allocations
        assert b.info["live_bytes"] == before + arena.size
        assert arena.data.ctypes.data == address
        assert not np.isnan(arena.data[:8].view(np.float32)).any()
        memory = arena.data
        ticket = b.replay(trace)
        b.release(trace)
        assert b.info["live_bytes"] == before
        assert ticket.get()["x"][0] == 21, "a step that is queued still has its arena"
        b.synchronize()
        assert np.isnan(memory.view(np.float32)).all()


@pytest.mark.clause("C7")
def test_memory_is_sealed_while_a_trace_replays() -> None:
    """The guard itself: an allocation made then is a fault of the driver, and is not passed over."""
    with open_sim() as b:
        driver = b._driver
        assert isinstance(driver, SimDriver)
        memory = driver._memory
        memory.sealed = True
        with pytest.raises(RuntimeError, match="a trace works in its arena alone"):
            b.to_device(np.ones(2, np.float32))
        memory.sealed = False
        assert b.to_host(b.to_device(np.ones(2, np.float32))).tolist() == [1, 1]
