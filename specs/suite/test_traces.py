"""The life of a trace: warm and cold, its Buffers, release, counters (clauses C1, C7, C9, C10, C12)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from forebay.specs import (
    Backend,
    CaptureViolation,
    ColdCapture,
    ForebayError,
    InvalidInput,
    Segment,
    StaleTrace,
    Trace,
    WriteLoc,
)
from forebay.specs.suite.fixtures import Another
from forebay.specs.suite.kv import (
    HEAD_DIM,
    LAYOUTS,
    geometry,
    int32,
    new_pool,
    put_values,
    same_arrays,
    unchanged,
)
from forebay.specs.suite.steps import decoder, everything, same_emits


def nothing(b: Backend) -> Any:
    return {}, {}


@pytest.mark.clause("C1")
@pytest.mark.refuses("C1")
def test_capture_of_a_cold_segment_raises(backend: Backend, pair: Any, another: Another) -> None:
    """Warm is this very Segment: its twin with the same function and key is cold, and so is one whose run failed."""
    a, b = pair

    def fn(_: Backend) -> Any:
        return {a: a.get() + 1}, {}

    segment, twin = (Segment("s", fn, key=(1,), updates=(a,)) for _ in range(2))
    before = backend.counters.capture
    with unchanged(backend, a, b), pytest.raises(ColdCapture, match=r"Segment s\[1\] was never run"):
        backend.capture(segment)
    backend.run(segment)
    with unchanged(backend, a, b), pytest.raises(ColdCapture, match="never run"):
        backend.capture(twin)
    assert backend.counters.capture == before
    trace = backend.capture(segment)
    backend.replay(trace)
    assert backend.fetch(a).tolist() == [2, 3, 4, 5]
    backend.release(trace)
    fails = [True]

    def flaky(_: Backend) -> Any:
        if fails:
            raise RuntimeError("from the Segment")
        return {a: a.get() + 1}, {}

    third = Segment("third", flaky, updates=(a,))
    with unchanged(backend, a), pytest.raises(RuntimeError, match="from the Segment"):
        backend.run(third)
    with unchanged(backend, a), pytest.raises(RuntimeError, match="from the Segment"):
        backend.capture(third)
    fails.clear()
    with pytest.raises(ColdCapture):
        backend.capture(third)
    with another() as other, pytest.raises(InvalidInput, match="expected a Buffer of backend"):
        other.run(segment)


@pytest.mark.clause("C10", "C1")
@pytest.mark.refuses("C10")
@pytest.mark.case("A10")
def test_a_released_or_empty_trace_is_not_replayed(backend: Backend, pair: Any, another: Another) -> None:
    """Capture x += 1, release, capture x += 10: only the second program ever runs; releasing twice is harmless."""
    a, _ = pair
    segments = [
        Segment(f"plus {n}", lambda b, n=n: ({a: a.get() + n}, {}), updates=(a,))  # type: ignore[misc]
        for n in (1, 10)
    ]
    for segment in segments:
        backend.run(segment)
    first = backend.capture(segments[0])
    backend.release(first)
    second = backend.capture(segments[1])
    backend.upload(a, np.zeros(4, np.float32))
    with unchanged(backend, a), pytest.raises(StaleTrace, match=r"released Trace; capture the Segment"):
        backend.replay(first)
    backend.replay(second)
    assert backend.fetch(a).tolist() == [10] * 4
    for _ in range(3):
        backend.release(first)
        backend.release(second)
    replays = backend.counters.replay
    stale: Any  # things that are no trace at all, which a type checker would refuse first
    for stale in (first, second, Trace(segments[0], None, ()), None, segments[0]):
        with unchanged(backend, a), pytest.raises(StaleTrace, match="capture the Segment on this backend"):
            backend.replay(stale)
    with another() as other:
        mine = backend.capture(segments[0])
        with unchanged(backend, a), pytest.raises(StaleTrace):
            other.replay(mine)
        backend.release(mine)
    assert backend.counters.replay == replays
    again = backend.capture(segments[0])
    backend.replay(again)
    assert backend.fetch(a).tolist() == [11] * 4
    del first, second
    backend.release(again)


@pytest.mark.clause("C10", "B5")
@pytest.mark.refuses("C10", "B5")
def test_close_ends_every_trace(another: Another) -> None:
    with another() as other:
        x = other.buffer("x", np.zeros(2, np.float32))
        segment = Segment("s", lambda b: ({x: x.get() + 1}, {}), updates=(x,))
        other.run(segment)
        trace = other.capture(segment)
        assert other.fetch(x).tolist() == [1, 1]
        pool = other.create_pool(geometry())
    assert not trace.live
    other.close()
    for use in (
        lambda: other.replay(trace),
        lambda: other.run(segment),
        lambda: other.capture(segment),
        lambda: x.get(),
        lambda: other.fetch(x),
        lambda: pool.read(0, WriteLoc.slots(int32(16))),
        lambda: other.synchronize(),
    ):
        with pytest.raises(ForebayError, match=r"closed|released"):
            use()


@pytest.mark.clause("C7", "C2", "C10")
@pytest.mark.smoke("C7")
@pytest.mark.refuses("C10")
def test_a_trace_lists_its_buffers_and_none_is_released_under_it(backend: Backend) -> None:
    with new_pool(backend, geometry()) as pool:
        read, update = backend.buffer("read", np.ones(2, np.float32)), backend.buffer("update", np.zeros(2, np.float32))
        spare, unused = backend.reserve("spare", (2,), "float32"), backend.reserve("unused", (2,), "float32")

        def fn(b: Backend) -> Any:
            b.zero(spare)
            return {update: read.get() + spare.get()}, {}

        segment = Segment("s", fn, reads=(read,), updates=(update,), pools=(pool,))
        backend.run(segment)
        trace = backend.capture(segment)
        used = {read, update, spare, *pool.buffers}
        assert set(trace.buffers) == used
        for thing in (read, update, spare, pool):
            with (
                unchanged(backend, *used),
                pytest.raises(CaptureViolation, match=r"live trace of Segment s\[\] uses it"),
            ):
                backend.release(thing)
        backend.release(unused)
        backend.replay(trace)
        assert backend.fetch(update).tolist() == [1, 1]
        backend.release(trace)
        for thing in (read, update, spare):
            backend.release(thing)
            backend.release(thing)
            assert not thing.live
            for use in (thing.get, lambda thing=thing: backend.fetch(thing), lambda thing=thing: backend.zero(thing)):
                with pytest.raises(InvalidInput, match="was released"):
                    use()
        for act in (backend.run, backend.capture):
            with pytest.raises(InvalidInput, match="was released"):
                act(segment)


@pytest.mark.clause("C7", "B5")
def test_memory_of_a_pool_is_released_with_the_pool(backend: Backend, another: Another) -> None:
    """One Buffer of a pool cannot go alone, and no backend frees another's memory."""
    with new_pool(backend, geometry()) as pool, another() as other:
        put_values(backend, pool, [16], [3])
        for buffer in pool.buffers:
            with unchanged(backend, pool), pytest.raises(InvalidInput, match=r"belongs to a pool|release the pool"):
                backend.release(buffer)
        mine = backend.buffer("mine", np.ones(2, np.float32))
        for thing in (mine, pool):
            with unchanged(backend, mine, pool), pytest.raises(InvalidInput, match="backend"):
                other.release(thing)
        neither: tuple[Any, ...] = (None, 3, "pool")  # Any: a type checker would refuse them before the backend does
        for wrong in neither:
            with pytest.raises(InvalidInput, match="expected a Buffer, a Pool or a Trace"):
                backend.release(wrong)
        assert backend.fetch(mine).tolist() == [1, 1]
        backend.release(mine)


@pytest.mark.clause("C12")
@pytest.mark.smoke("C12")
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_capturing_changes_no_byte_and_the_replay_is_the_step(backend: Backend, layout: str | None) -> None:
    ran, captured = (decoder(backend, layout=layout) for _ in range(2))
    for d in (ran, captured):
        d.seat(1, 5, [3, 1, 7])
        d.seat(2, 8, [2, 5])
        for _ in range(3):
            backend.run(d.segment)
    traces = []
    for _ in range(3):
        with unchanged(backend, *captured.buffers):
            traces.append(backend.capture(captured.segment))
    for trace in traces:
        same_emits(backend.run(ran.segment).get(), backend.replay(trace).get())
    same_arrays(everything(ran), everything(captured))
    for trace in traces:
        backend.release(trace)
    ran.close()
    captured.close()


@pytest.mark.clause("C9", "C12")
@pytest.mark.smoke("C9")
def test_counters_are_exact(backend: Backend, pair: Any) -> None:
    a, _ = pair
    with new_pool(backend, geometry()) as pool:
        rows = backend.buffer("rows", np.ones((1, 2, HEAD_DIM), np.float32))
        ids, table, visible = (backend.buffer(n, x) for n, x in (("i", int32(16)), ("t", int32([1])), ("v", int32(1))))

        def fn(b: Backend) -> Any:
            pool.write(0, WriteLoc.slots(ids.get()), rows.get(), rows.get())
            out = b.paged_decode(rows.get(), pool, 0, table.get(), visible.get(), table_len=1, path="gather")
            return {a: a.get() + 1}, {"out": out}

        segment = Segment("s", fn, reads=(rows, ids, table, visible), updates=(a,), pools=(pool,))
        c = backend.counters
        names = ("run", "capture", "replay", "recapture", "declined", "uploads", "upload_bytes", "downloads", "syncs")

        def delta(act: Any) -> tuple[dict[str, int], dict[str, int]]:
            before = {name: getattr(c, name) for name in names}
            launches = Counter(c.launches)
            act()
            counts = {name: getattr(c, name) - before[name] for name in names if getattr(c, name) != before[name]}
            return counts, dict(c.launches - launches)

        step = {"write_kv": 1, "paged_decode": 1, "gather": 1}
        held: list[Any] = []
        assert delta(lambda: backend.run(segment)) == ({"run": 1}, step)
        assert delta(lambda: held.append(backend.capture(segment))) == ({"capture": 1}, {})
        assert delta(lambda: held.append(backend.capture(segment))) == ({"capture": 1, "recapture": 1}, {})
        assert delta(lambda: held.append(backend.replay(held[0]))) == ({"replay": 1}, step)
        assert delta(lambda: held[2].get()) == ({"downloads": 1}, {})
        assert (held[2].get()["out"] == 1).all()
        assert delta(lambda: held[2].get()) == ({}, {})
        assert delta(lambda: backend.release(held[1])) == ({}, {})
        with pytest.raises(ColdCapture):
            backend.capture(Segment("cold", nothing))
        assert delta(lambda: backend.upload(ids, int32(17))) == ({"uploads": 1, "upload_bytes": 4}, {})
        assert delta(lambda: backend.upload(a, np.ones(2, np.float32), 1)) == ({"uploads": 1, "upload_bytes": 8}, {})
        assert delta(lambda: backend.fetch(a)) == ({"downloads": 1}, {})
        assert delta(lambda: backend.zero(a)) == ({}, {"zero": 1})
        assert delta(lambda: backend.synchronize()) == ({"syncs": 1}, {})
        assert delta(lambda: held.append(backend.to_device(np.zeros(3, np.int64)))) == (
            {"uploads": 1, "upload_bytes": 12},
            {},
        )
        shown = c.as_dict()
        assert set(shown) == {*names, "dropped", "invalid", "launches", "delegated"}
        assert {name: shown[name] for name in names} == {name: getattr(c, name) for name in names}
        backend.release(held[0])
        for buffer in (rows, ids, table, visible):
            backend.release(buffer)


@pytest.mark.refuses("C1", "C2")
def test_what_a_segment_returns_is_checked(backend: Backend, pair: Any) -> None:
    a, b = pair
    fn: Any  # its wrong results are what a type checker would refuse first
    for fn, error, says in (
        (lambda _: None, InvalidInput, "fn returned NoneType"),
        (lambda _: {a: a.get()}, InvalidInput, "fn returned dict"),
        (lambda _: ({a: b.get()[:2]}, []), InvalidInput, "fn returned tuple"),
        (lambda _: ({b: a.get()}, {}), CaptureViolation, "'b'.*not declared in updates"),
        (lambda _: ({a: a.get() > 0}, {}), InvalidInput, "by bool, expected float32"),
        (lambda _: ({a: a.get()[None]}, {}), InvalidInput, r"by shape \[1, 4\]"),
        (lambda _: ({a: np.zeros(4, np.float32)}, {}), CaptureViolation, "'a' by a host ndarray"),
        (lambda _: ({a: 0.0}, {}), CaptureViolation, "'a' by a host float"),
        (lambda _: ({}, {"x": np.zeros(1)}), CaptureViolation, "emit 'x' is a host ndarray"),
        (lambda _: ({}, {"x": 3}), CaptureViolation, "emit 'x' is a host int"),
    ):
        segment = Segment("wrong", fn, reads=(b,), updates=(a,))
        for act in (backend.run, backend.capture):
            with unchanged(backend, a, b), pytest.raises(error, match=says):
                act(segment)
    wrong: Any
    for wrong in (None, "decode", 3):
        with pytest.raises(InvalidInput, match="expected a function of the backend"):
            Segment("s", wrong)
        with pytest.raises(InvalidInput, match="expected a Segment"):
            backend.run(wrong)
    no_buffers: Any = (np.zeros(1),)
    with pytest.raises(InvalidInput, match="expected Buffers"):
        Segment("s", nothing, reads=no_buffers)
