"""The life of a shadow: under capture, invalidated, staged again; never an old row (clauses S5, S6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, CaptureViolation, Pool, Segment, Shadow, StaleShadow, Unsupported, WriteLoc
from forebay.specs.suite.kv import int32, mean_of_values, poison, refused, same_bits, unchanged
from forebay.specs.suite.staging import G, host_kv, stage

WHERE = [pytest.param("host", marks=pytest.mark.refuses("S6")), "device"]
"""Where ids come from: those of the host are refused where they name no row, those of the device read zeros and are counted."""

# -- S5 --------------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("S5", "C2", "C12")
@pytest.mark.smoke("S5")
@pytest.mark.refuses("S5", "C2")
def test_no_host_write_under_capture_but_a_zero_fill(backend: Backend, shadow: Shadow) -> None:
    """A declared Buffer, a reserved one, the shadow's own storage: filled by the replay, not by the capture."""
    k, v = host_kv()
    stage(backend, k, v, shadow, [0], [1], 16)
    kept = backend.buffer("kept", np.ones(3, np.float32))
    spare = backend.reserve("spare", (2, 3), "float32")
    for attempt in (
        lambda b: stage(b, k, v, shadow, [1], [2], 16),
        lambda b: b.upload(kept, np.zeros(3, np.float32)),
        lambda b: shadow.invalidate(),
    ):

        def writes(b: Backend, attempt: Any = attempt) -> Any:
            attempt(b)
            return {}, {}

        version = shadow.version
        for act in (backend.run, backend.capture):
            with unchanged(backend, shadow, kept), pytest.raises(CaptureViolation, match=r"host write|invalidat"):
                act(Segment("writes", writes, updates=(kept,), pools=(shadow,)))
        assert shadow.version == version
        shadow.read(0, WriteLoc.slots(int32(16)))

    def fills(b: Backend) -> Any:
        b.zero(spare)
        b.zero(kept)
        for buffer in shadow.storage(1):
            b.zero(buffer)
        return {}, {"spare": spare.get() + 1}

    segment = Segment("fills", fills, updates=(kept,), pools=(shadow,))
    backend.run(segment)
    backend.upload(kept, np.full(3, 7, np.float32))
    backend.upload(spare, np.full((2, 3), 7, np.float32))
    poison(backend, shadow)
    with unchanged(backend, shadow, kept, spare):
        trace = backend.capture(segment)
    got = backend.replay(trace).get()["spare"]
    assert (got == 1).all()
    assert not backend.fetch(kept).any()
    assert not backend.fetch(spare).any()
    assert not any(backend.fetch(buffer).any() for buffer in shadow.storage(1))
    assert not any(np.isfinite(backend.fetch(buffer)).any() for buffer in shadow.storage(0))
    backend.release(trace)
    for buffer in (kept, spare):
        backend.release(buffer)


@pytest.mark.clause("S5")
@pytest.mark.parametrize("how", ["run", "capture"])
def test_a_tickets_zeros_stay_when_the_reserve_is_used_again(backend: Backend, how: str) -> None:
    spare = backend.reserve("spare", (4,), "int32")

    def fills(b: Backend) -> Any:
        b.zero(spare)
        return {}, {"zeros": spare.get(), "view": spare.get()[1:3]}

    segment = Segment("fills", fills)
    ticket = backend.run(segment)
    trace = backend.capture(segment)
    if how == "capture":
        ticket = backend.replay(trace)
    backend.upload(spare, int32(7, 7, 7, 7))
    got = ticket.get()
    assert got["zeros"].tolist() == [0, 0, 0, 0]
    assert got["view"].tolist() == [0, 0]
    assert backend.fetch(spare).tolist() == [7, 7, 7, 7]
    backend.release(trace)
    backend.release(spare)


# -- S6 --------------------------------------------------------------------------------------------------------------------


def attend(b: Backend, shadow: Pool, table: Any, visible: int, path: str = "direct") -> float:
    """What a row sees of ``visible`` tokens: the mean of their values."""
    return float(mean_of_values(b, shadow, table, [visible], table_len=2, path=path)[0])


@pytest.mark.clause("S6", "D2")
@pytest.mark.smoke("S6")
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("where", WHERE)
def test_old_rows_of_a_recycled_slot_are_never_read(backend: Backend, where: str, path: str) -> None:
    """Staged, invalidated, staged anew in part: what is not of the present version is an invalid block or raises."""
    shadow = backend.create_shadow(G)
    put = backend.to_device if where == "device" else (lambda x: x)
    ones = np.ones((2, G.block_size, 2, G.head_dim), np.float32)
    table = put(int32([1, 2]))
    assert attend(backend, shadow, table, 32, path) == 0.0
    assert shadow.invalid == 2
    stage(backend, ones, 6 * ones, shadow, [0, 1], [1, 2], 32)
    assert attend(backend, shadow, table, 32, path) == 6.0
    assert shadow.invalid == 2
    version = shadow.version
    shadow.invalidate()
    assert shadow.version > version
    assert attend(backend, shadow, table, 32, path) == 0.0
    assert shadow.invalid == 4
    stage(backend, ones, 4 * ones, shadow, [0], [2], 16)
    assert attend(backend, shadow, table, 32, path) == 2.0
    assert shadow.invalid == 5
    slots = WriteLoc.slots(put(int32(16, 32)))
    paged = WriteLoc.paged(table, put(int32([0, 16]).reshape(1, 2)), table_len=2)
    for loc in (slots, paged):
        if where == "host":
            with refused(backend, StaleShadow, r"slots \[16\] hold no row of version", shadow):
                shadow.read(0, loc)
        else:
            dropped = shadow.dropped
            got = backend.to_host(shadow.read(0, loc)[1])
            assert (got[0] == 0).all()
            assert (got[1] == 4).all()
            assert shadow.dropped == dropped + 1
    other = WriteLoc.slots(put(int32(-1, -1)))
    assert not backend.to_host(shadow.read(0, other)[0]).any()
    backend.release(shadow)


@pytest.mark.clause("S6")
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("where", WHERE)
def test_old_rows_behind_a_shorter_prefix_are_never_read(backend: Backend, where: str, path: str) -> None:
    """One row staged into a block that held sixteen of an earlier version, or of an earlier owner: the others are gone."""
    put = backend.to_device if where == "device" else (lambda x: x)
    ones = np.ones((1, G.block_size, 2, G.head_dim), np.float32)
    table = put(int32([1, 0]))
    for invalidate in (True, False):
        shadow = backend.create_shadow(G)
        stage(backend, ones, 6 * ones, shadow, [0], [1], 16)
        if invalidate:
            shadow.invalidate()
        stage(backend, ones, 4 * ones, shadow, [0], [1], 1)
        assert attend(backend, shadow, table, 1, path) == 4.0
        assert shadow.invalid == 0
        assert attend(backend, shadow, table, 16, path) == 0.0
        assert shadow.invalid == 1
        rows = WriteLoc.slots(put(int32(16, 17, 31)))
        if where == "host":
            with refused(backend, StaleShadow, r"slots \[17, 31\] hold no row of version", shadow):
                shadow.read(0, rows)
        else:
            assert backend.to_host(shadow.read(0, rows)[1])[:, 0, 0].tolist() == [4.0, 0.0, 0.0]
            assert shadow.dropped == 2
        backend.release(shadow)


@pytest.mark.clause("S6")
@pytest.mark.refuses("S6")
def test_layers_are_staged_apart(backend: Backend, shadow: Shadow) -> None:
    k, v = host_kv()
    stage(backend, k, v, shadow, [0], [1], 16, layer=1)
    with refused(backend, StaleShadow, "slots .16. hold no row of version", shadow):
        shadow.read(0, WriteLoc.slots(int32(16)))
    same_bits(backend.to_host(shadow.read(1, WriteLoc.slots(int32(16)))[0])[0], k[0, 0])


@pytest.mark.clause("S6", "C3")
def test_a_replay_sees_the_present_version(backend: Backend) -> None:
    """Invalidate and stage between replays of one trace: each sees what is staged when it runs."""
    shadow = backend.create_shadow(G)
    table = backend.buffer("table", int32([1]))
    visible = backend.buffer("visible", int32(16))
    q = backend.buffer("q", np.zeros((1, 2, G.head_dim), np.float32))

    def step(b: Backend) -> Any:
        return {}, {"out": b.paged_decode(q.get(), shadow, 0, table.get(), visible.get(), table_len=1)}

    segment = Segment("shadow", step, reads=(table, visible, q), pools=(shadow,))
    backend.run(segment)
    trace = backend.capture(segment)
    ones = np.ones((1, G.block_size, 2, G.head_dim), np.float32)
    seen = []
    for value in (3.0, None, 5.0):
        if value is None:
            shadow.invalidate()
        else:
            stage(backend, ones, value * ones, shadow, [0], [1], 16)
        seen.append(float(backend.replay(trace).get()["out"][0, 0, 0]))
    assert seen == [3.0, 0.0, 5.0]
    backend.release(trace)
    backend.release(shadow)


@pytest.mark.refuses("S6")
def test_a_shadow_is_changed_by_staging_alone(backend: Backend, shadow: Shadow) -> None:
    rows = backend.to_device(np.zeros((1, 2, G.head_dim), np.float32))
    loc = WriteLoc.slots(int32(16))
    with refused(backend, Unsupported, "change it with backend.stage", shadow):
        shadow.write(0, loc, rows, rows)
    with refused(backend, Unsupported, "change it with backend.stage", shadow):
        shadow.copy(loc, loc)
