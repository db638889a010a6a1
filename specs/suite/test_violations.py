"""What a captured step may not do: each act is refused by name, changes nothing and leaves the backend usable (clause C2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, CaptureViolation, ColdCapture, Segment
from forebay.specs.suite.acts import ACTS, HOST_API, Act
from forebay.specs.suite.desk import Desk, open_desk
from forebay.specs.suite.kv import bytes_of, changes, unchanged


@pytest.fixture(scope="module")
def desk(backend: Backend) -> Iterator[Desk]:
    with open_desk(backend) as made:
        yield made


def segment(d: Desk, act: Act, armed: list[bool]) -> Segment:
    """Writes KV and attends first, then does the act if it is armed."""

    def fn(b: Backend) -> Any:
        d.write(b)
        out = d.decode(b)
        done = act(b, d) if armed else None
        return done if isinstance(done, tuple) else ({d.y: d.x.get() + d.y.get()}, {"out": out})

    return Segment("forbidden", fn, reads=d.reads, updates=(d.y,), pools=(d.pool,))


def still_works(d: Desk, before: list[tuple[str, bytes]]) -> None:
    """An honest Segment runs, is captured and replays to the same state, which is then put back."""
    b = d.backend
    honest = segment(d, lambda _b, _d: None, [])
    held = [b.fetch(buffer) for buffer in (*d.pool.buffers, d.y)]
    states = []
    for how in ("run", "replay"):
        if how == "run":
            out = b.run(honest).get()["out"]
        else:
            trace = b.capture(honest)
            out = b.replay(trace).get()["out"]
            b.release(trace)
        np.testing.assert_allclose(out[0], 1.0, rtol=1e-6)
        states.append(bytes_of(b, d.pool, d.y))
        for buffer, values in zip((*d.pool.buffers, d.y), held, strict=True):
            b.upload(buffer, values)
    assert changes(*states) == {}
    assert changes(before, bytes_of(b, *d.everything)) == {}


@pytest.mark.clause("C2", "S5", "D1", "C12")
@pytest.mark.refuses("C2", "S5")
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", ACTS)
def test_a_forbidden_act_is_a_violation_that_changes_nothing(desk: Desk, name: str, warm: bool) -> None:
    """Named, at capture at the latest, before the coldness of the Segment is: and the backend works on."""
    act, says = ACTS[name]
    b, armed = desk.backend, [] if warm else [True]
    forbidden = segment(desk, act, armed)
    if warm:
        held = [b.fetch(buffer) for buffer in (*desk.pool.buffers, desk.y)]
        b.run(forbidden)
        for buffer, values in zip((*desk.pool.buffers, desk.y), held, strict=True):
            b.upload(buffer, values)
        armed.append(True)
    before = bytes_of(b, *desk.everything)
    counts_before = (b.counters.capture, b.counters.recapture, b.counters.declined, dict(b.counters.launches))
    version = desk.shadow.version
    with pytest.raises(CaptureViolation, match=says) as caught:
        b.capture(forbidden)
    assert "forbidden[]" in str(caught.value)
    assert (b.counters.capture, b.counters.recapture, b.counters.declined, dict(b.counters.launches)) == counts_before
    assert changes(before, bytes_of(b, *desk.everything)) == {}
    assert desk.shadow.version == version
    if not warm:
        armed.clear()
        with pytest.raises(ColdCapture):
            b.capture(forbidden)
    still_works(desk, before)


@pytest.mark.refuses("C2")
@pytest.mark.parametrize("name", HOST_API)
def test_the_host_api_is_refused_in_run_as_well(desk: Desk, name: str) -> None:
    """Doors that acted before the violation stay (an eager step has no way back); Buffers, other pools and counts do not change."""
    act, says = HOST_API[name]
    b = desk.backend
    held = [b.fetch(buffer) for buffer in desk.pool.buffers]
    kept = tuple(thing for thing in desk.everything if thing is not desk.pool)
    runs = b.counters.run
    with unchanged(b, *kept), pytest.raises(CaptureViolation, match=says):
        b.run(segment(desk, act, [True]))
    assert b.counters.run == runs
    for buffer, values in zip(desk.pool.buffers, held, strict=True):
        b.upload(buffer, values)


@pytest.mark.clause("C2")
def test_the_namespace_creates_no_arrays(backend: Backend) -> None:
    creators = {
        "zeros",
        "ones",
        "empty",
        "full",
        "arange",
        "linspace",
        "eye",
        "array",
        "asarray",
        "tensor",
        "frombuffer",
    }
    assert [name for name in creators if hasattr(backend.xp, name)] == []
    x = backend.to_device(np.arange(6, dtype=np.int32))
    assert backend.to_host(backend.xp.reshape(x, (2, 3))).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.clause("C2", "C13")
def test_what_a_captured_step_may_do(desk: Desk) -> None:
    """Numbers, numpy scalars and static shapes are part of the program; iteration over rows and slicing are static."""
    b = desk.backend

    def fn(be: Backend) -> Any:
        x = desk.x.get()
        total = x[0:1] * 0
        for row in x:
            total = total + row * np.float32(2)
        n = len(desk.x.shape) + be.xp.shape(x)[0]
        return {desk.y: x + n}, {"total": total, "half": x[::2] if n > 3 else x}

    allowed = Segment("allowed", fn, reads=desk.reads, updates=(desk.y,))
    ran = b.run(allowed).get()
    trace = b.capture(allowed)
    replayed = b.replay(trace).get()
    assert ran["total"][0] == replayed["total"][0] == 12
    assert ran["half"].tolist() == replayed["half"].tolist() == [0, 2]
    b.upload(desk.y, np.zeros(4, np.float32))
    b.release(trace)
