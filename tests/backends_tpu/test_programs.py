"""Programs of steps: what is compiled when, what a replay may be given, and whose memory it uses (clauses C2, C3, C7)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from forebay.runtime import open_backend
from forebay.specs import Backend, CaptureViolation, Segment
from forebay.specs.suite.kv import geometry, new_pool
from forebay.specs.suite.steps import decoder, everything, warm_trace

JaxValue = Any


@pytest.fixture(params=["tpu:xla", "tpu:interpret"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with open_backend(request.param) as opened:
        yield opened


def test_a_replay_compiles_nothing_and_uploads_nothing(backend: Backend) -> None:
    """Steps through block boundaries: JAX reports no compilation, and its guard lets no host value through."""
    d = decoder(backend)
    trace = warm_trace(d)
    d.seat(0, 3, [1, 2, 3, 4, 5])
    backend.replay(trace).get()
    before = backend.info["compiles"]
    with jax.transfer_guard_host_to_device("disallow"):
        tickets = [backend.replay(trace) for _ in range(20)]
    assert {len(ticket.get()["token"]) for ticket in tickets} == {4}
    assert backend.info["compiles"] == before
    d.seat(1, 5, [6, 7, 8, 9, 10])
    backend.replay(trace).get()
    assert backend.info["compiles"] <= before + 2, "a re-seed compiles its uploads once, no step"
    backend.release(trace)
    d.close()


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (np.zeros(4, np.float32), "host ndarray"),
        (1.0, "host float"),
        ("shape", r"float32\[5\]"),
        ("dtype", r"int32\[4\]"),
    ],
)
def test_what_is_no_device_array_of_a_buffer_is_not_replayed(backend: Backend, held: object, says: str) -> None:
    """An executable would upload it without a word; refused by the Buffer's name, and nothing runs."""
    a = backend.buffer("a", np.arange(4, dtype=np.float32))
    b = backend.buffer("b", np.arange(4, dtype=np.float32))
    segment = Segment("sum", lambda _: ({a: a.get() + b.get()}, {}), reads=(b,), updates=(a,))
    backend.run(segment)
    trace = backend.capture(segment)
    backend.replay(trace)
    good = b.handle
    made = {"shape": np.zeros(5, np.float32), "dtype": np.zeros(4, np.int32)}
    b.handle = backend.to_device(made[held]).value if isinstance(held, str) else held
    with pytest.raises(CaptureViolation, match=rf"Buffer 'b' holds .*{says}"):
        backend.replay(trace)
    b.handle = good
    assert backend.fetch(a).tolist() == [0, 3, 6, 9]
    backend.replay(trace)
    assert backend.fetch(a).tolist() == [0, 4, 8, 12]


def test_a_step_reuses_the_memory_of_what_it_changes(backend: Backend) -> None:
    """A pool is donated: its memory is where it was after each step, and nothing of its size is made besides."""
    d = decoder(backend)
    trace = warm_trace(d)
    d.seat(0, 3, [1, 2, 3, 4, 5])
    pages = d.pool.storage(0)[0]
    place = pages.handle.unsafe_buffer_pointer()
    for _ in range(3):
        backend.replay(trace).get()
        assert pages.handle.unsafe_buffer_pointer() == place
    size = pages.handle.nbytes
    assert trace.payload.executable.memory_analysis().alias_size_in_bytes >= size
    backend.release(trace)
    d.close()


def test_an_emit_outlives_the_steps_behind_it(backend: Backend) -> None:
    """What is emitted is what the Buffer held before, or holds now, and neither is touched by later steps."""
    a = backend.buffer("a", np.zeros(4, np.float32))

    def fn(_: Backend) -> Any:
        after = a.get() + 1
        return {a: after}, {"before": a.get(), "after": after}

    segment = Segment("count", fn, updates=(a,))
    tickets = [backend.run(segment)]
    trace = backend.capture(segment)
    tickets += [backend.replay(trace) for _ in range(4)]
    assert [(t.get()["before"][0], t.get()["after"][0]) for t in tickets] == [(i, i + 1) for i in range(5)]


def test_segments_of_the_same_operations_share_an_executable(backend: Backend) -> None:
    """Twins, a run and its capture are compiled once; a number that differs makes another program, and so does what is read."""
    a, b = (backend.buffer(name, np.arange(4, dtype=np.float32)) for name in "ab")

    def plus(n: float, read: Any) -> Segment:
        return Segment(f"plus {n}", lambda _: ({a: read.get() + n}, {}), updates=(a, b))

    first = plus(1.0, b)
    backend.run(first)
    before = backend.info["compiles"]
    trace = backend.capture(first)
    backend.run(plus(1.0, b))
    assert backend.info["compiles"] == before
    backend.run(plus(2.0, b))
    assert backend.info["compiles"] == before + 1
    backend.upload(a, np.zeros(4, np.float32))
    backend.run(plus(1.0, a))
    assert backend.fetch(a).tolist() == [1, 1, 1, 1]
    backend.replay(trace)
    assert backend.fetch(a).tolist() == [1, 2, 3, 4]


def test_a_step_with_attention_and_its_twin_are_compiled_once(backend: Backend) -> None:
    """Through doors and the decode kernel as well: what is traced anew is known again."""
    one, twin = decoder(backend), decoder(backend)
    warm_trace(one)
    before = backend.info["compiles"]
    for _ in range(2):
        backend.capture(one.segment)
    warm_trace(twin)
    assert backend.info["compiles"] == before


def test_an_array_made_by_jax_inside_a_segment_is_refused(backend: Backend) -> None:
    """A constant that JAX or numpy makes would be baked into the program."""
    a = backend.buffer("a", np.zeros(4, np.float32))
    made = jax.numpy.arange(4.0) + 1

    def fn(_: Backend) -> Any:
        array = a.get()
        return {a: type(array)(array.scope, array.value + made)}, {}

    with pytest.raises(CaptureViolation, match="no declared Buffer holds"):
        backend.run(Segment("baked", fn, updates=(a,)))
    assert backend.fetch(a).tolist() == [0] * 4


def test_float16_pools_are_refused_as_a_tpu_would(backend: Backend) -> None:
    assert "float16" not in backend.capabilities.kv_dtypes


def test_a_process_maps_no_more_than_it_may(backend: Backend) -> None:
    """Hundreds of programs of one backend: what JAX keeps of them is dropped before the process runs out of mappings."""
    from forebay.backends.tpu import calls

    with new_pool(backend, geometry(num_blocks=4)) as pool:
        q = backend.to_device(np.ones((1, 4, 64), np.float32))
        for width in range(1, 6):
            backend.paged_decode(q, pool, 0, np.ones((1, width), np.int32), np.array([1], np.int32), table_len=width)
        driver: Any = backend._driver
        assert len(driver._compiled._kept._values) <= calls.KEPT


def test_a_run_and_its_replay_hold_the_same_bits(backend: Backend) -> None:
    one, other = decoder(backend, dtype="bfloat16"), decoder(backend, dtype="bfloat16")
    trace = warm_trace(other)
    backend.run(one.segment)
    for d in (one, other):
        d.seat(2, 3, [1, 2, 3, 4, 5])
    for _ in range(18):
        ran, replayed = backend.run(one.segment).get(), backend.replay(trace).get()
        assert {name: x.tobytes() for name, x in ran.items()} == {name: x.tobytes() for name, x in replayed.items()}
    for x, y in zip(everything(one), everything(other), strict=True):
        assert x.tobytes() == y.tobytes()
    backend.release(trace)
    one.close()
    other.close()


def test_released_memory_goes_although_programs_ran_on_it(backend: Backend) -> None:
    """A Segment that lives on, and its trace, keep no released Buffer's array alive."""
    a, b = (backend.buffer(name, np.arange(4, dtype=np.float32)) for name in "ab")
    segment = Segment("copy", lambda _: ({a: b.get()}, {}), reads=(b,), updates=(a,))
    backend.run(segment)
    backend.run(Segment("inc", lambda _: ({a: a.get() + 1}, {}), updates=(a,)))
    assert backend.fetch(b).tolist() == [0, 1, 2, 3], "what was copied is memory of its own"
    held = [a.handle, b.handle]
    for buffer in (a, b):
        backend.release(buffer)
    assert [array.is_deleted() for array in held] == [True, True]
