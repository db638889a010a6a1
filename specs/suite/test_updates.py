"""Updates are simultaneous, doors act in order, Tickets keep their values (clauses C13, C12, S5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import Backend, Buffer, InvalidInput, Segment, Trace, WriteLoc
from forebay.specs.suite.attention import Array
from forebay.specs.suite.kv import HEAD_DIM, geometry, int32, new_pool, same_arrays, unchanged
from forebay.specs.suite.steps import copies, same_emits


def three_ways(backend: Backend, segment: Segment, start: dict[Buffer, Array]) -> None:
    """Run twice, then capture and replay twice from the same start: the same Buffers and emits, bit for bit."""

    def reset() -> None:
        for buffer, value in start.items():
            backend.upload(buffer, value)

    reset()
    ran = []
    for _ in range(2):
        emits = copies(backend.run(segment))
        ran.append((emits, [backend.fetch(buffer) for buffer in start]))
    reset()
    trace = backend.capture(segment)
    for buffer, value in start.items():
        np.testing.assert_array_equal(backend.fetch(buffer), value)
    for emits, values in ran:
        same_emits(emits, backend.replay(trace).get())
        same_arrays([backend.fetch(buffer) for buffer in start], values)
    backend.release(trace)


@pytest.mark.clause("C13", "C12")
@pytest.mark.case("A09")
@pytest.mark.parametrize("how", ["run", pytest.param("replay", marks=pytest.mark.smoke("C13"))])
def test_two_buffers_swap(backend: Backend, pair: Any, how: str) -> None:
    a, b = pair
    segment = Segment("swap", lambda _: ({a: b.get(), b: a.get()}, {"a": a.get(), "b": b.get()}), updates=(a, b))
    backend.run(segment)
    trace = backend.capture(segment)
    assert backend.fetch(a).tolist() == [10, 11, 12, 13]
    for step in range(4):
        before = (backend.fetch(a), backend.fetch(b))
        ticket = backend.run(segment) if how == "run" else backend.replay(trace)
        np.testing.assert_array_equal(backend.fetch(a), before[1])
        np.testing.assert_array_equal(backend.fetch(b), before[0])
        np.testing.assert_array_equal(ticket.get()["a"], before[0], err_msg=f"emit of step {step}")
        np.testing.assert_array_equal(ticket.get()["b"], before[1])
    backend.release(trace)


@pytest.mark.clause("C13", "C3")
@pytest.mark.case("A09")
def test_ping_pong_state_counts_1_2_3_4(backend: Backend) -> None:
    """s' = s + x over two cells that change places at each step; one trace serves, for a cell keeps its identity."""
    current, previous = (backend.buffer(name, np.zeros(1, np.float32)) for name in ("current", "previous"))
    x = backend.buffer("x", np.ones(1, np.float32))

    def step(b: Backend) -> Any:
        new = current.get() + x.get()
        return {current: new, previous: current.get()}, {"state": new}

    segment = Segment("ping", step, reads=(x,), updates=(current, previous))
    backend.run(segment)
    trace = backend.capture(segment)
    backend.upload(current, np.zeros(1, np.float32))
    assert [float(backend.replay(trace).get()["state"][0]) for _ in range(4)] == [1, 2, 3, 4]
    assert (backend.fetch(current)[0], backend.fetch(previous)[0]) == (4, 3)
    backend.release(trace)
    even = Segment("even", lambda _: ({previous: current.get() + x.get()}, {}), reads=(x, current), updates=(previous,))
    odd = Segment("odd", lambda _: ({current: previous.get() + x.get()}, {}), reads=(x, previous), updates=(current,))
    traces = []
    for segment in (even, odd):
        backend.run(segment)
        traces.append(backend.capture(segment))
    backend.upload(current, np.zeros(1, np.float32))
    states = []
    for step_number in range(4):
        backend.replay(traces[step_number % 2])
        states.append(float(backend.fetch((previous, current)[step_number % 2])[0]))
    assert states == [1, 2, 3, 4]
    things: tuple[Buffer | Trace, ...] = (*traces, current, previous, x)
    for thing in things:
        backend.release(thing)


@pytest.mark.clause("C12", "C3")
def test_traces_that_take_turns_keep_their_emits(backend: Backend, pair: Any) -> None:
    """Traces whose emits are alike in name, shape and dtype; every Ticket is read after the last replay, in another order."""
    a, b = pair
    segments = [
        Segment(f"times {n}", lambda _, n=n: ({a: a.get() + 1}, {"y": a.get() * n + b.get()}), reads=(b,), updates=(a,))  # type: ignore[misc]
        for n in (2, 3, 5)
    ]
    for segment in segments:
        backend.run(segment)
    traces = [backend.capture(segment) for segment in segments]
    start = np.arange(4, dtype=np.float32)
    backend.upload(a, start)
    tickets = [backend.replay(traces[turn % 3]) for turn in range(9)]
    for turn in (4, 0, 8, 1, 7, 2, 6, 3, 5):
        want = (start + turn) * (2, 3, 5)[turn % 3] + np.arange(10, 14)
        assert tickets[turn].get()["y"].tolist() == want.tolist(), f"turn {turn}"
    for trace in traces:
        backend.release(trace)


@pytest.mark.clause("C13", "S4")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
@given(data=st.data())
def test_any_rows_of_a_buffer_are_uploaded(backend: Backend, dtype: str, data: st.DataObject) -> None:
    """One row, or several from any row on, of a Buffer of one to three axes: they change, and no other does."""
    shape = (data.draw(st.integers(1, 9)), *data.draw(st.lists(st.integers(1, 4), max_size=2)))
    kind = np.int32 if dtype == "int32" else np.float32
    start = data.draw(st.integers(0, shape[0] - 1))
    n = data.draw(st.integers(1, shape[0] - start))
    x = backend.buffer("x", np.full(shape, -1, kind), dtype)
    new = np.arange(1, 1 + n * int(np.prod(shape[1:])), dtype=kind).reshape(n, *shape[1:])
    want = np.full(shape, -1, kind)
    want[start : start + n] = new
    backend.upload(x, new, start)
    np.testing.assert_array_equal(backend.fetch(x), want)
    backend.release(x)


CELLS = 3


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[int, str, int, int]]:
    """For each updated cell: the cell it is made from, how, and how many first rows of it change."""
    cells = draw(st.lists(st.integers(0, CELLS - 1), min_size=1, max_size=CELLS, unique=True))
    how = st.sampled_from(["same", "plus", "slice", "both"])
    return [(cell, draw(how), draw(st.integers(0, CELLS - 1)), draw(st.integers(0, 4))) for cell in cells]


@pytest.mark.clause("C13", "C3", "C12")
@pytest.mark.case("A09")
@given(program=programs(), emit=st.integers(0, CELLS - 1))
def test_any_updates_are_simultaneous(backend: Backend, program: list[tuple[int, str, int, int]], emit: int) -> None:
    """Updates by other cells, by views of them, by first rows, by sums; emits that alias an updated cell: against numpy."""
    start = np.arange(CELLS * 4, dtype=np.float32).reshape(CELLS, 4) + 1
    cells = [backend.buffer(f"cell {i}", start[i]) for i in range(CELLS)]

    def made(values: Any, how: str, source: int, rows: int) -> Any:
        x = values[source]
        return {"same": x, "plus": x + 1, "slice": x[:rows], "both": x + values[(source + 1) % CELLS]}[how]

    def fn(b: Backend) -> Any:
        values = [cell.get() for cell in cells]
        updates = {cells[i]: made(values, how, source, rows) for i, how, source, rows in program}
        return updates, {"view": values[emit], "part": values[emit][1:3]}

    updated: Any = cells  # a list is taken too, though the annotation names a tuple
    segment = Segment("program", fn, updates=updated)
    three_ways(backend, segment, dict(zip(cells, start, strict=True)))
    for cell, value in zip(cells, start, strict=True):
        backend.upload(cell, value)
    want = start.copy()
    ticket = backend.run(segment)
    for i, how, source, rows in program:
        new = made(start, how, source, rows)
        want[i, : len(new)] = new
    for cell, value in zip(cells, want, strict=True):
        np.testing.assert_array_equal(backend.fetch(cell), value)
    np.testing.assert_array_equal(ticket.get()["view"], start[emit])
    np.testing.assert_array_equal(ticket.get()["part"], start[emit][1:3])
    for cell in cells:
        backend.release(cell)


@pytest.mark.clause("C13")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool"])
def test_updates_and_emits_of_every_dtype(backend: Backend, dtype: str) -> None:
    kind = {"int32": np.int32, "bool": bool}.get(dtype, np.float32)
    start = np.array([1, 0, 1, 0]).astype(kind)
    a, b = backend.buffer("a", start, dtype), backend.buffer("b", 1 - start.astype(np.int32) == 1, "bool")
    scalar = backend.buffer("scalar", 3)
    other = backend.buffer("other", start[::-1].copy(), dtype)

    def fn(_: Backend) -> Any:
        return {a: other.get(), other: a.get(), scalar: scalar.get() + 1}, {
            "a": a.get(),
            "n": scalar.get(),
            "b": b.get(),
        }

    three_ways(
        backend,
        Segment("dtypes", fn, reads=(b,), updates=(a, other, scalar)),
        {a: start, other: start[::-1].copy(), scalar: np.array(3, np.int32)},
    )
    for buffer in (a, b, other, scalar):
        backend.release(buffer)


@pytest.mark.clause("C13")
@pytest.mark.parametrize("how", ["run", "replay"])
def test_attention_sees_what_its_own_step_wrote(backend: Backend, how: str) -> None:
    """Write, attend, overwrite, attend, copy, read, zero: each door sees the ones before it."""
    with new_pool(backend, geometry(num_blocks=3, num_kv_heads=1)) as pool:
        rows = backend.buffer("rows", np.full((1, 1, HEAD_DIM), 2.0, np.float32))
        ids = backend.buffer("ids", int32(16))
        other = backend.buffer("other", int32(32))
        table, visible = backend.buffer("table", int32([1], [1])), backend.buffer("visible", int32(1, 1))
        k, q = (backend.buffer(name, np.zeros((n, 1, HEAD_DIM), np.float32)) for name, n in (("k", 1), ("q", 2)))

        def fn(b: Backend) -> Any:
            loc, to = WriteLoc.slots(ids.get()), WriteLoc.slots(other.get())
            outs = []
            for scale in (1, 3):
                pool.write(0, loc, k.get(), rows.get() * scale)
                outs.append(b.paged_decode(q.get(), pool, 0, table.get(), visible.get(), table_len=1))
            pool.copy(loc, to)
            _, copied = pool.read(0, to)
            for buffer in pool.storage(0):
                b.zero(buffer)
            _, cleared = pool.read(0, to)
            pool.write(0, to, k.get(), rows.get() * 5)
            return {}, {"first": outs[0], "second": outs[1], "copied": copied, "cleared": cleared}

        reads = (rows, ids, other, table, visible, k, q)
        segment = Segment("order", fn, reads=reads, pools=(pool,))
        ticket = backend.run(segment)
        trace = backend.capture(segment)
        for buffer in pool.storage(0):
            backend.upload(buffer, np.full(buffer.shape, np.nan, np.float32))
        ticket = backend.run(segment) if how == "run" else backend.replay(trace)
        got = {name: set(value.reshape(-1).tolist()) for name, value in ticket.get().items()}
        assert got == {"first": {2}, "second": {6}, "copied": {6}, "cleared": {0}}
        assert backend.to_host(pool.read(0, WriteLoc.slots(int32(16, 32)))[1])[:, 0, 0].tolist() == [0, 10]
        backend.release(trace)
        for buffer in reads:
            backend.release(buffer)


@pytest.mark.clause("C13", "S5")
def test_a_zero_fill_of_a_declared_update_commits_with_the_others(backend: Backend, pair: Any) -> None:
    a, b = pair

    def fn(be: Backend) -> Any:
        be.zero(a)
        return {b: a.get() + 1}, {"a": a.get() + 0, "b": b.get() + 1}

    three_ways(
        backend,
        Segment("zero", fn, updates=(a, b)),
        {a: np.array([1, np.nan, np.inf, 4], np.float32), b: np.zeros(4, np.float32)},
    )
    backend.run(Segment("zero", fn, updates=(a, b)))
    assert backend.fetch(a).tolist() == [0] * 4
    assert backend.fetch(b).tolist() == [1] * 4

    def both(be: Backend) -> Any:
        be.zero(a)
        return {a: b.get()}, {}

    for act in (backend.run, backend.capture):
        with unchanged(backend, a, b), pytest.raises(InvalidInput, match="'a' is both zeroed and updated"):
            act(Segment("both", both, updates=(a, b)))


@pytest.mark.clause("C3", "C13")
def test_tickets_keep_their_values(backend: Backend, pair: Any) -> None:
    """Read late, in any order, after later runs and replays have overwritten everything."""
    a, _ = pair
    segment = Segment("count", lambda b: ({a: a.get() + 1}, {"old": a.get(), "new": a.get() + 1}), updates=(a,))
    tickets = [backend.run(segment), backend.run(segment)]
    trace = backend.capture(segment)
    tickets += [backend.replay(trace) for _ in range(4)]
    tickets += [backend.run(segment), backend.replay(trace)]
    assert [ticket.retired for ticket in tickets] == [False] * 8
    assert [t.serial for t in tickets] == sorted({t.serial for t in tickets})
    backend.upload(a, np.full(4, -1, np.float32))
    backend.release(trace)
    for step in (5, 0, 7, 3, 1, 2, 6, 4):
        got = tickets[step].get()
        assert got["old"].tolist() == [step, step + 1, step + 2, step + 3]
        assert got["new"].tolist() == [step + 1, step + 2, step + 3, step + 4]
        assert tickets[step].retired
