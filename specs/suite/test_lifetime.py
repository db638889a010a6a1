"""What holds when memory is shared, declared twice or lost: nothing is freed twice, and closing always closes (clauses B5, B6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.specs import (
    Backend,
    InvalidInput,
    InvalidLayout,
    KVGeometry,
    Segment,
    StaleTrace,
    Unsupported,
    WriteLoc,
)
from forebay.specs.suite.fixtures import Another
from forebay.specs.suite.kv import HEAD_DIM, geometry, held, int32, put_values, same_arrays, same_bits, slot
from forebay.specs.suite.scenes import scene


@pytest.mark.refuses("B6", "C13")
def test_a_buffer_is_read_or_updated(backend: Backend) -> None:
    """Declared in both it would be handed to a donating backend twice."""
    x = backend.buffer("x", int32(1))
    with pytest.raises(InvalidInput, match=r"\['x'\] in reads and updates"):
        Segment("both", lambda _: ({}, {}), reads=(x,), updates=(x,))
    backend.release(x)


@pytest.mark.clause("S5", "C13")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_a_zeroed_update_keeps_its_dtype(backend: Backend, dtype: str) -> None:
    """Poison must go too: NaN times zero is not zero."""
    value = np.array([np.nan, np.inf, 3.0], np.float32) if dtype in ("float32", "bfloat16") else np.array([1, 0, 1])
    x = backend.buffer("x", value.astype(bool) if dtype == "bool" else value, dtype)

    def step(b: Backend) -> Any:
        b.zero(x)
        return {}, {"before": x.get()}

    segment = Segment("zero", step, updates=(x,))
    before = backend.run(segment).get()["before"]
    np.testing.assert_array_equal(before.astype(np.float32), value.astype(np.float32))
    assert not backend.fetch(x).any()
    backend.upload(x, value.astype(bool) if dtype == "bool" else value)
    trace = backend.capture(segment)
    backend.replay(trace)
    assert not backend.fetch(x).any()
    backend.release(trace)
    backend.release(x)


@pytest.mark.clause("C13", "L3")
@pytest.mark.parametrize("how", ["run", "replay"])
def test_a_ticket_outlives_the_memory_it_was_made_of(backend: Backend, how: str) -> None:
    """Its trace and its Buffers are released, and others made in their place, before anybody reads it."""
    n, turns = 96, 8
    x = np.arange(n * n, dtype=np.float32).reshape(n, n)
    turn = np.roll(np.eye(n, dtype=np.float32), 1, axis=1)
    buffers = [backend.buffer(name, value) for name, value in (("rows", x), ("turn", turn), ("count", int32(7)))]
    rows, by, count = buffers

    def step(b: Backend) -> Any:
        turned = rows.get()
        for _ in range(turns):
            turned = b.xp.matmul(turned, by.get())
        return {count: count.get() + 1}, {"turned": turned, "rows": rows.get(), "count": count.get()}

    segment = Segment("turn", step, reads=(rows, by), updates=(count,))
    backend.synchronize()  # The uploads are there, and it is the step alone that is still to come.
    if how == "replay":
        backend.run(segment)
        trace = backend.capture(segment)
        ticket = backend.replay(trace)
        backend.release(trace)
    else:
        ticket = backend.run(segment)
    for buffer in buffers:
        backend.release(buffer)
    others = [backend.buffer("other", np.full(shape, -1, np.float32)) for shape in (x.shape, turn.shape)]
    got = ticket.get()
    same_bits(got["turned"], np.roll(x, turns, axis=1))
    same_bits(got["rows"], x)
    assert got["count"].tolist() == [7 if how == "run" else 8]
    for buffer in others:
        backend.release(buffer)


@pytest.mark.clause("C13", "L3")
def test_what_a_call_was_given_may_be_released_at_once(backend: Backend) -> None:
    """Buffers that decode reads and a door writes from: others take their place before anybody waits."""
    with scene(backend, (70, 5, 0), heads=4) as s:
        want = s.decode()
        given = {name: backend.buffer(name, getattr(s, name)) for name in ("q", "table", "visible")}
        rows = backend.buffer("rows", np.full((1, 2, HEAD_DIM), 5, np.float32))
        backend.synchronize()
        q, table, visible = (buffer.get() for buffer in given.values())
        result = backend.paged_decode(q, s.pool, 0, table, visible, table_len=s.table_len, return_lse=True)
        s.pool.write(0, WriteLoc.slots(int32(slot(s.pool, 0))), rows.get(), rows.get())
        for buffer in (*given.values(), rows):
            backend.release(buffer)
        others = [backend.buffer("other", np.full(buffer.shape, 1e9, np.float32)) for buffer in (*given.values(), rows)]
        same_arrays([backend.to_host(x) for x in result], want)
        assert held(backend, s.pool, [slot(s.pool, 0)]).tolist() == [5]
        for buffer in others:
            backend.release(buffer)


@pytest.mark.clause("C9")
def test_launches_of_runs_and_replays_are_counted_alike(backend: Backend) -> None:
    pool = backend.create_pool(geometry(num_kv_heads=1))
    slots, rows = backend.buffer("slots", int32(16)), backend.buffer("rows", np.ones((1, 1, HEAD_DIM), np.float32))

    def step(_: Backend) -> Any:
        pool.write(0, WriteLoc.slots(slots.get()), rows.get(), rows.get())
        return {}, {}

    segment = Segment("write", step, reads=(slots, rows), pools=(pool,))
    launches = []
    backend.run(segment)
    trace = None
    for act in ("run", "capture", "replay", "replay"):
        before = backend.counters.launches["write_kv"]
        if act == "run":
            backend.run(segment)
        elif act == "capture":
            trace = backend.capture(segment)
        elif trace is not None:
            backend.replay(trace)
        launches.append(backend.counters.launches["write_kv"] - before)
    assert launches == [1, 0, 1, 1]
    assert (backend.to_host(pool.read(0, WriteLoc.slots(int32(16)))[0]) == 1).all()
    if trace is not None:
        backend.release(trace)
    backend.release(pool)


@pytest.mark.refuses("B6", "D10")
def test_host_arrays_are_refused_where_device_arrays_belong(backend: Backend) -> None:
    host = np.zeros((1, 2, 4), np.float32)
    with pytest.raises(InvalidInput, match="to_host: got ndarray"):
        backend.to_host(host)
    with pytest.raises(InvalidInput, match="merge_partials: got ndarray"):
        backend.merge_partials([host], [host[..., 0]])


@pytest.mark.refuses("L1")
def test_one_memory_is_not_wrapped_twice(backend: Backend) -> None:
    g = KVGeometry(2, 2, 1, 4)
    k = np.zeros((2, 2, 1, 4), np.float32)
    with pytest.raises(InvalidLayout, match=r"kv0\.1: overlaps the memory of kv0\.0"):
        backend.wrap_pool((k, k), layout="NHD", geometry=g)
    with pytest.raises(InvalidLayout, match=r"kv1\.0: overlaps the memory of kv0\.0"):
        backend.wrap_pool([(k, k.copy()), (k, k.copy())], layout="NHD", geometry=KVGeometry(2, 2, 1, 4, num_layers=2))


@pytest.mark.clause("L1")
@pytest.mark.case("B05")
def test_parts_that_overlap_in_one_store_are_refused_and_interleaved_ones_taken(backend: Backend) -> None:
    g = KVGeometry(4, 2, 2, 4)
    store = np.zeros((8, 2, 2, 4), np.float32)
    with pytest.raises(InvalidLayout, match="overlaps the memory"):
        backend.wrap_pool((store[0:4], store[2:6]), layout="NHD", geometry=g)
    wide = np.zeros((4, 2, 2, 8), np.float32)
    with pytest.raises(InvalidLayout, match="overlaps the memory"):
        backend.wrap_pool((wide[..., :4], wide[..., 2:6]), layout="NHD", geometry=g)
    both = np.zeros((4, 2, 2, 2, 4), np.float32)
    for k, v in (
        (store[0::2], store[1::2]),
        (wide[..., :4], wide[..., 4:]),
        (both[:, 0], both[:, 1]),
        (both[:, 1], both[:, 0]),
    ):
        pool = backend.wrap_pool((k, v), layout="NHD", geometry=g)
        put_values(backend, pool, [3], [7])
        backend.synchronize()
        assert (v[1, 1] == 7).all()
        assert not k.any()
        v[...] = 0
        backend.release(pool)


@pytest.mark.clause("B5")
def test_closing_frees_what_is_still_referenced(another: Another) -> None:
    with another() as backend:
        x = backend.buffer("x", int32(1, 2))
        pool = backend.create_pool(geometry(num_kv_heads=1))
    assert not x.live
    assert x.handle is None
    assert not any(buffer.live for buffer in pool.buffers)
    backend.release(x)
    backend.release(pool)


@pytest.mark.refuses("L1")
def test_sizes_no_machine_has_are_refused_by_name(backend: Backend) -> None:
    for shape in ((2**50,), (2**40, 2**40)):
        with pytest.raises(Unsupported, match=f"{4 * int(np.prod([int(n) for n in shape], dtype=object))} bytes"):
            backend.reserve("huge", shape, "float32")
    with pytest.raises(Unsupported, match="bytes, more than there is"):
        backend.create_pool(KVGeometry(2, 2, 10**30, 8))
    bad: Any  # wrong types too: a type checker would refuse them before the backend does
    for bad in (None, (-1,), ("x",), (1.5,), 5.0, True):
        with pytest.raises(InvalidInput, match="expected non-negative ints"):
            backend.reserve("bad", bad, "float32")


@pytest.mark.refuses("C10")
def test_a_trace_of_another_backend_is_not_replayed(backend: Backend, another: Another) -> None:
    with another() as other:
        x = other.buffer("x", int32(1))
        segment = Segment("inc", lambda _: ({x: x.get() + 1}, {}), updates=(x,))
        other.run(segment)
        trace = other.capture(segment)
        with pytest.raises(StaleTrace, match="did not capture"):
            backend.replay(trace)
