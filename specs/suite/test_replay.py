"""Replay equals run, bit for bit, whatever lengths, ids and rows the Buffers hold (clauses C3, C4, D4, W9)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import Backend, CaptureViolation, InvalidInput, Segment, WriteLoc
from forebay.specs.suite import oracle
from forebay.specs.suite.attention import Array
from forebay.specs.suite.kv import (
    BLOCK_SIZE,
    EACH_KV_DTYPE,
    HEAD_DIM,
    LAYOUTS,
    claimed,
    geometry,
    int32,
    new_pool,
    own_counts,
    put_values,
    same_arrays,
    slot,
    unchanged,
)
from forebay.specs.suite.steps import copies, decoder, everything, same_emits, warm_trace


@pytest.mark.clause("C3", "C4", "W9")
@pytest.mark.smoke("C3")
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_replay_equals_run_step_after_step(backend: Backend, layout: str | None, dtype: str, path: str) -> None:
    """Across block boundaries, with requests that start, end and change slots, blocks and neighbours in between."""
    ran, replayed = (decoder(backend, layout=layout, dtype=dtype, path=path) for _ in range(2))
    idle, trace = warm_trace(ran), warm_trace(replayed)
    agenda: dict[int, list[tuple[Any, ...]]] = {
        0: [("seat", 1, 5, [3, 1, 7])],
        2: [("seat", 3, 2, [2, 9, 4, 8])],
        9: [("clear", 1), ("seat", 0, 11, [6, 1])],
        11: [("seat", 1, 7, [3, 10, 7])],
        15: [("clear", 3), ("seat", 3, 3, [2, 9, 4, 8], 6)],
    }
    for step in range(36):
        for act, *arguments in agenda.get(step, ()):
            for d in (ran, replayed):
                getattr(d, act)(*arguments)
        same_emits(backend.run(ran.segment).get(), backend.replay(trace).get())
        same_arrays(everything(ran), everything(replayed))
    for one in (idle, trace):
        backend.release(one)
    for d in (ran, replayed):
        d.close()


@pytest.mark.clause("C3")
@given(data=st.data())
def test_any_schedule_replays_as_it_runs(backend: Backend, data: st.DataObject) -> None:
    draw = data.draw
    bucket, block_size = draw(st.integers(1, 4)), draw(claimed(backend, "block_sizes", range(1, 6)))
    layout, path = draw(claimed(backend, "layouts", LAYOUTS)), draw(st.sampled_from(["direct", "gather"]))
    window, seed = draw(st.none() | st.integers(1, 9)), draw(st.integers(0, 99))
    ran, replayed = (
        decoder(
            backend,
            bucket=bucket,
            block_size=block_size,
            layout=layout,
            path=path,
            window=window,
            num_blocks=21,
            seed=seed,
        )
        for _ in range(2)
    )
    backend.run(ran.segment)
    trace = warm_trace(replayed)
    length = 5 * block_size
    for _ in range(3):
        row = draw(st.integers(0, 3))
        seated = draw(st.booleans())
        token = draw(st.integers(0, 28))
        for d in (ran, replayed):
            if seated:
                d.seat(row, token, range(1 + 5 * row, 6 + 5 * row))
            else:
                d.clear(row)
        for _ in range(draw(st.integers(1, min(7, length)))):
            same_emits(backend.run(ran.segment).get(), backend.replay(trace).get())
    same_arrays(everything(ran), everything(replayed))
    backend.release(trace)
    ran.close()
    replayed.close()


@pytest.mark.clause("D4", "C3")
def test_direct_equals_gather_inside_a_captured_step(backend: Backend) -> None:
    direct, gather = (decoder(backend, path=path) for path in ("direct", "gather"))
    traces = [warm_trace(d) for d in (direct, gather)]
    for d in (direct, gather):
        d.seat(0, 5, [3, 1, 7])
        d.seat(2, 9, [4, 2, 11])
    launched = Counter(backend.counters.launches)
    for _ in range(20):
        same_emits(*(backend.replay(trace).get() for trace in traces))
    assert backend.counters.launches["gather"] - launched["gather"] == 20
    assert backend.counters.launches["paged_decode"] - launched["paged_decode"] == 40
    for trace, d in zip(traces, (direct, gather), strict=True):
        backend.release(trace)
        d.close()


@pytest.mark.clause("C4", "D7", "C9")
@pytest.mark.smoke("C4")
def test_a_steady_replay_is_host_free(backend: Backend) -> None:
    """By the counts in front of the driver, and by those the driver keeps itself."""
    d = decoder(backend)
    trace = warm_trace(d)
    c = backend.counters
    backend.synchronize()
    d.seat(0, 5, [3, 1, 7, 2])
    before, own = (c.uploads, c.upload_bytes, c.downloads, c.syncs, c.run, c.capture), own_counts(backend)
    tickets = [backend.replay(trace) for _ in range(20)]
    assert (c.uploads, c.upload_bytes, c.downloads, c.syncs, c.run, c.capture) == before
    assert own_counts(backend) == own
    chosen = [int(ticket.get()["chosen"][0]) for ticket in tickets]
    assert c.downloads == before[2] + 20
    assert [int(ticket.get()["token"][0]) for ticket in tickets] == [5, *chosen[:-1]]
    assert c.downloads == before[2] + 20
    backend.release(trace)
    d.close()


@pytest.mark.clause("C3")
def test_replay_runs_no_python_of_the_segment(backend: Backend) -> None:
    x = backend.buffer("x", np.zeros(3, np.float32))
    calls = []

    def fn(b: Backend) -> Any:
        calls.append(1)
        return {x: x.get() + 1}, {}

    segment = Segment("count", fn, updates=(x,))
    backend.run(segment)
    trace = backend.capture(segment)
    made = len(calls)
    for _ in range(3):
        backend.replay(trace)
    assert len(calls) == made
    assert backend.fetch(x).tolist() == [4, 4, 4]
    backend.release(trace)
    backend.release(x)


# -- A01, A04, A05, A07, A11 inside a captured step --------------------------------------------------------------------------


class Writer:
    """A captured write of 4 rows to ids that live in a Buffer."""

    def __init__(self, backend: Backend, pool: Any) -> None:
        self.backend, g = backend, pool.geometry
        self.ids = backend.buffer("ids", int32(-1, -1, -1, -1))
        self.rows = backend.buffer("rows", np.zeros((4, g.num_kv_heads, g.head_dim), np.float32))

        def fn(b: Backend) -> Any:
            pool.write(0, WriteLoc.slots(self.ids.get()), self.rows.get(), self.rows.get())
            k, _ = pool.read(0, WriteLoc.slots(self.ids.get()))
            return {}, {"read": k}

        self.segment = Segment("write", fn, reads=(self.ids, self.rows), pools=(pool,))
        backend.run(self.segment)
        self.trace = backend.capture(self.segment)

    def __call__(self, ids: list[int], values: list[float], how: str) -> Array:
        b = self.backend
        b.upload(self.ids, np.array(ids, np.int32))
        b.upload(self.rows, np.array(values, np.float32)[:, None, None] * np.ones(self.rows.shape, np.float32))
        ticket = b.run(self.segment) if how == "run" else b.replay(self.trace)
        return ticket.get()["read"][:, 0, 0]

    def close(self) -> None:
        for thing in (self.trace, self.ids, self.rows):
            self.backend.release(thing)


@pytest.mark.clause("W6", "W8")
@pytest.mark.case("A01", "A11")
@pytest.mark.parametrize("how", ["run", pytest.param("replay", marks=pytest.mark.clause("W9"))])
def test_a_captured_write_takes_its_ids_from_a_buffer(backend: Backend, how: str) -> None:
    with new_pool(backend, geometry(num_blocks=5, num_kv_heads=1)) as pool:
        write = Writer(backend, pool)
        last = pool.num_slots - 1
        assert write([last, -1, -1, -1], [7, 9, 9, 9], how).tolist() == [7, 0, 0, 0]
        assert write([16, 17, -1, -1], [1, 2, 99, 99], how).tolist() == [1, 2, 0, 0]
        assert write([-1, -1, last + 1, -2], [99, 99, 99, 99], how).tolist() == [0, 0, 0, 0]
        assert write([0, 2**31 - 1, 18, -1], [99, 99, 3, 99], how).tolist() == [0, 0, 3, 0]
        k = oracle.stored(backend, pool, 0)
        every = np.arange(pool.num_slots)
        got = oracle.rows_at(pool.layout, k, pool.geometry, every // BLOCK_SIZE, every % BLOCK_SIZE)[0][:, 0, 0]
        assert {int(i): got[i] for i in every if np.isfinite(got[i])} == {16: 1, 17: 2, 18: 3, last: 7}
        assert pool.dropped == 8
        write.close()


@pytest.mark.clause("C7", "C2")
@pytest.mark.refuses("C2")
@pytest.mark.case("A11")
def test_a_cache_first_made_inside_the_capture_is_refused(backend: Backend) -> None:
    """Storage that does not exist before capture is refused by name; made before, each replay lands and stays."""
    g = geometry(num_blocks=3, num_kv_heads=1)
    rows = backend.buffer("rows", np.ones((1, 1, HEAD_DIM), np.float32))
    lazy: dict[str, Any] = {}

    def first_write(b: Backend) -> Any:
        pool = lazy.setdefault("pool", None) or b.create_pool(g)
        pool.write(0, WriteLoc.slots(rows.get()), rows.get(), rows.get())
        return {}, {}

    segment = Segment("lazy", first_write, reads=(rows,))
    for act in (backend.run, backend.capture):
        with pytest.raises(CaptureViolation, match="create_pool inside Segment lazy"):
            act(segment)
    backend.release(rows)
    with new_pool(backend, geometry(num_blocks=5, num_kv_heads=1)) as pool:
        write = Writer(backend, pool)
        assert write([16, -1, -1, -1], [1, 0, 0, 0], "replay")[0] == 1
        k = backend.to_host(pool.read(0, WriteLoc.slots(int32(16, 17)))[0])
        assert k[0, 0, 0] == 1
        assert not np.isfinite(k[1]).any()
        write([17, -1, -1, -1], [2, 0, 0, 0], "replay")
        assert backend.to_host(pool.read(0, WriteLoc.slots(int32(16, 17)))[0])[:, 0, 0].tolist() == [1, 2]
        write.close()


class Attention:
    """A captured decode of a bucket: lengths and table live in Buffers, larger than the bucket; V of a token is its number."""

    def __init__(self, backend: Backend, *, bucket: int, rows: int, path: str = "direct") -> None:
        self.backend = backend
        self.pool = backend.create_pool(geometry(num_blocks=8, num_kv_heads=1))
        put_values(
            backend,
            self.pool,
            [slot(self.pool, b, t) for b in range(7) for t in range(BLOCK_SIZE)],
            range(7 * BLOCK_SIZE),
        )
        self.q = backend.buffer("q", np.zeros((rows, 1, HEAD_DIM), np.float32))
        self.table = backend.buffer("table", np.full((rows, 3), 10**6, np.int32))
        self.visible = backend.buffer("visible", np.zeros(rows, np.int32))

        def fn(b: Backend) -> Any:
            q, table, visible = (b.xp.head(x.get(), bucket) for x in (self.q, self.table, self.visible))
            out, lse = b.paged_decode(q, self.pool, 0, table, visible, table_len=3, path=path, return_lse=True)
            return {}, {"out": out, "lse": lse}

        self.segment = Segment(
            "attend", fn, key=(bucket,), reads=(self.q, self.table, self.visible), pools=(self.pool,)
        )

    def close(self) -> None:
        for thing in (self.pool, self.q, self.table, self.visible):
            self.backend.release(thing)


@pytest.mark.clause("C3", "D2", "D3", "L3")
@pytest.mark.case("A04")
@pytest.mark.parametrize("path", ["direct", "gather"])
def test_a_bucket_larger_than_the_live_rows(backend: Backend, path: str) -> None:
    """Lengths [17, 1, 32] in a bucket of 4 out of 6 rows of state: canaries in the padded row and behind it are not followed."""
    s = Attention(backend, bucket=4, rows=6, path=path)
    backend.run(s.segment)
    trace = backend.capture(s.segment)
    table = np.full((6, 3), 10**6, np.int32)
    table[:, 1:] = s.pool.geometry.num_blocks + 7
    table[0, :2], table[1, 0], table[2, :2] = [1, 2], 3, [4, 5]
    backend.upload(s.table, table)
    backend.upload(s.visible, int32(17, 1, 32, 0, 10**6, 10**6))
    backend.upload(
        s.q,
        np.array([0, 0, 0, np.nan, np.nan, np.nan], np.float32)[:, None, None] * np.ones((6, 1, HEAD_DIM), np.float32),
    )
    ran, replayed = copies(backend.run(s.segment)), copies(backend.replay(trace))
    same_emits(ran, replayed)
    np.testing.assert_allclose(replayed["out"][:, 0, 0], [8.0, 32.0, 63.5, 0.0], rtol=1e-6)
    assert not replayed["out"][3].view(np.uint32).any()
    assert s.pool.invalid == 0
    backend.release(trace)
    s.close()


@pytest.mark.clause("C7", "D1")
@pytest.mark.refuses("D1")
@pytest.mark.case("A04")
def test_a_bucket_larger_than_its_state_is_refused(backend: Backend) -> None:
    s = Attention(backend, bucket=4, rows=3)
    for act in (backend.run, backend.capture):
        with unchanged(backend, s.pool), pytest.raises(InvalidInput, match=r"4.*3"):
            act(s.segment)
    s.close()
    x = backend.buffer("x", np.zeros(3, np.float32))
    wide = backend.buffer("wide", np.zeros(4, np.float32))
    over = Segment("over", lambda b: ({x: wide.get()}, {}), reads=(wide,), updates=(x,))
    for act in (backend.run, backend.capture):
        with (
            unchanged(backend, x, wide),
            pytest.raises(InvalidInput, match=r"by shape \[4\], expected its shape or its first rows"),
        ):
            act(over)
    backend.run(Segment("fits", lambda _: ({wide: x.get() + 1}, {}), reads=(x,), updates=(wide,)))
    assert backend.fetch(wide).tolist() == [1, 1, 1, 0]
    backend.release(x)
    backend.release(wide)


@pytest.mark.clause("D3", "C3", "L3")
@pytest.mark.case("A05")
@pytest.mark.parametrize("path", ["direct", "gather"])
def test_rows_that_become_empty_are_written(backend: Backend, path: str) -> None:
    """Outputs that held full rows, then NaN, hold exact zeros once their rows are empty; the maximum is row 0's."""
    s = Attention(backend, bucket=4, rows=4, path=path)
    backend.upload(s.table, int32([1, 2, 3], [4, 5, 6], [3, 2, 1], [7, 1, 2]))
    backend.run(s.segment)
    trace = backend.capture(s.segment)
    for q, visible in ((0, int32(17, 33, 48, 3)), (np.nan, int32(17, 17, 17, 17))):
        backend.upload(s.q, np.full((4, 1, HEAD_DIM), q, np.float32))
        backend.upload(s.visible, visible)
        backend.replay(trace)
    backend.upload(s.q, np.zeros((4, 1, HEAD_DIM), np.float32))
    backend.upload(s.visible, int32(3, 0, 0, 0))
    first, again = copies(backend.replay(trace)), copies(backend.replay(trace))
    same_emits(first, again)
    assert not first["out"][1:].view(np.uint32).any()
    assert np.isneginf(first["lse"][1:]).all()
    assert np.abs(first["out"]).max() == first["out"][0, 0, 0] == pytest.approx(1.0, rel=1e-6)
    backend.release(trace)
    s.close()


@pytest.mark.clause("C3", "C4")
@pytest.mark.case("A07")
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize(("start", "steps", "block_size"), [(16, 40, 16), (1, 40, 16), (508, 10, 16), (1022, 6, 32)])
def test_no_length_is_baked_at_capture(backend: Backend, start: int, steps: int, block_size: int, path: str) -> None:
    """V of token t is t and keys are equal: the output is (n-1)/2 at every length, whatever the length at capture."""
    blocks = -(-(start + steps) // block_size)
    pool = backend.create_pool(geometry(num_blocks=blocks + 1, block_size=block_size, num_kv_heads=1))
    put_values(backend, pool, [slot(pool, t // block_size, t % block_size) for t in range(start)], range(start))
    table = backend.buffer("table", np.arange(1, blocks + 1, dtype=np.int32)[None])
    position = backend.buffer("position", int32(start))
    q = backend.buffer("q", np.zeros((1, 1, HEAD_DIM), np.float32))

    def step(b: Backend) -> Any:
        p = position.get()
        v = b.xp.reshape(b.xp.repeat(b.xp.reshape(b.xp.astype(p, "float32"), (1, 1)), HEAD_DIM), (1, 1, HEAD_DIM))
        pool.write(0, WriteLoc.paged(table.get(), p, table_len=blocks), q.get(), v)
        out = b.paged_decode(q.get(), pool, 0, table.get(), p + 1, table_len=blocks, path=path)
        return {position: p + 1}, {"out": out, "n": p + 1}

    segment = Segment("grow", step, reads=(table, q), updates=(position,), pools=(pool,))
    backend.run(segment)
    trace = backend.capture(segment)
    backend.upload(position, int32(start))
    for n in range(start + 1, start + steps + 1):
        got = backend.replay(trace).get()
        assert got["n"][0] == n
        np.testing.assert_allclose(got["out"], (n - 1) / 2, rtol=1e-6)
    backend.release(trace)
    for thing in (pool, table, position, q):
        backend.release(thing)
