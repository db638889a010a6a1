"""What a captured step may not do: each act is refused by name, changes nothing and leaves the backend usable (clause C2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from forebay.specs import (
    AttentionParams,
    Backend,
    Buffer,
    CaptureViolation,
    ColdCapture,
    KVGeometry,
    Pool,
    Segment,
    Shadow,
    Ticket,
    Trace,
    WriteLoc,
)
from tests.contract.kv import bytes_of, int32, poison, unchanged

G = KVGeometry(4, 4, 2, 8)
HOST = np.arange(4, dtype=np.float32)


@dataclass
class Desk:
    """What a Segment declares (``x``, ``ids``, ``rows``, ``table``, ``seen`` read, ``y`` updated, ``pool``), and what it does not."""

    backend: Backend
    x: Buffer
    y: Buffer
    ids: Buffer
    rows: Buffer
    table: Buffer
    seen: Buffer
    pool: Pool
    other: Buffer
    other_pool: Pool
    spare: Buffer
    shadow: Shadow
    closed: Any
    closed_ids: Any
    closed_rows: Any
    closed_table: Any
    closed_matrix: Any
    closed_vector: Any
    closed_angles: Any
    closed_get: Any
    ticket: Ticket
    read_ticket: Ticket
    quiet: Segment
    trace: Trace

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return (self.x, self.ids, self.rows, self.table, self.seen)

    @property
    def everything(self) -> tuple[Pool | Buffer, ...]:
        return (*self.reads, self.y, self.other, self.spare, self.pool, self.other_pool, self.shadow)

    def decode(self, b: Backend, **changes: Any) -> Any:
        arguments: dict[str, Any] = {
            "q": self.rows.get(),
            "pool": self.pool,
            "layer": 0,
            "table": self.table.get(),
            "visible": self.seen.get(),
            "table_len": 1,
        }
        return b.paged_decode(**(arguments | changes))

    def write(self, b: Backend, **changes: Any) -> None:
        arguments: dict[str, Any] = {"loc": WriteLoc.slots(self.ids.get()), "k": self.rows.get(), "v": self.rows.get()}
        self.pool.write(0, **(arguments | changes))


@pytest.fixture(scope="module")
def desk(backend: Backend) -> Iterator[Desk]:
    buffers = {
        "x": HOST,
        "y": np.zeros(4, np.float32),
        "ids": int32(4, 5),
        "rows": np.ones((2, 2, 8), np.float32),
        "table": int32([1], [1]),
        "seen": int32(1, 2),
        "other": HOST + 1,
    }
    made = {name: backend.buffer(name, host) for name, host in buffers.items()}
    pool, other_pool = backend.create_pool(G), backend.create_pool(G)
    shadow = backend.create_shadow(G)
    spare = backend.reserve("spare", (4,), "float32")
    backend.zero(spare)
    for each in (pool, other_pool, shadow):
        poison(backend, each)
    quiet = Segment("quiet", lambda b: ({}, {"x": made["x"].get() + 0}), reads=(made["x"],))
    tickets = [backend.run(quiet), backend.run(quiet)]
    tickets[1].get()
    closed = {
        "closed": backend.to_device(HOST),
        "closed_ids": backend.to_device(int32(4, 5)),
        "closed_rows": backend.to_device(np.ones((2, 2, 8), np.float32)),
        "closed_table": backend.to_device(int32([1], [1])),
        "closed_matrix": backend.to_device(np.ones((8, 8), np.float32)),
        "closed_vector": backend.to_device(np.ones(8, np.float32)),
        "closed_angles": backend.to_device(np.ones((2, 4), np.float32)),
        "closed_get": made["other"].get(),
    }
    trace = backend.capture(quiet)
    yield Desk(
        backend,
        x=made["x"],
        y=made["y"],
        ids=made["ids"],
        rows=made["rows"],
        table=made["table"],
        seen=made["seen"],
        other=made["other"],
        pool=pool,
        other_pool=other_pool,
        **closed,
        spare=spare,
        shadow=shadow,
        ticket=tickets[0],
        read_ticket=tickets[1],
        quiet=quiet,
        trace=trace,
    )
    backend.release(trace)
    things: tuple[Buffer | Pool, ...] = (*made.values(), pool, other_pool, shadow, spare)
    for thing in things:
        backend.release(thing)


Act = Callable[[Backend, Desk], Any]
"""Does the forbidden thing; what it returns, if anything, is what the Segment returns."""


def branches(b: Backend, d: Desk) -> None:
    if d.x.get()[0] > 0:
        d.write(b)


def loops(b: Backend, d: Desk) -> None:
    total = d.x.get()
    while total[0] < 3:
        total = total + 1


def counts(b: Backend, d: Desk) -> None:
    for _ in range(d.ids.get()[0]):
        d.write(b)


def adds_in_place(b: Backend, d: Desk) -> None:
    y = d.y.get()
    y += 1


def sets_an_item(b: Backend, d: Desk) -> None:
    d.y.get()[0] = 5.0


def sets_a_slice(b: Backend, d: Desk) -> None:
    d.y.get()[1:3] = d.x.get()[:2]


def multiplies_a_pool_in_place(b: Backend, d: Desk) -> None:
    kv = d.pool.storage(0)[0].get()
    kv *= 2


HOST_API: dict[str, tuple[Act, str]] = {
    "upload": (lambda b, d: b.upload(d.x, HOST), "upload to 'x' .a host write"),
    "upload a row": (lambda b, d: b.upload(d.x, np.float32(3), 1), "upload to 'x' .a host write"),
    "upload to an undeclared Buffer": (lambda b, d: b.upload(d.other, HOST), "upload to 'other' .a host write"),
    "fetch": (lambda b, d: b.fetch(d.x), "fetch of 'x' .a host read"),
    "to_host": (lambda b, d: b.to_host(d.x.get()), "to_host .a host read"),
    "to_device": (lambda b, d: b.to_device(HOST), "to_device .a host write"),
    "synchronize": (lambda b, d: b.synchronize(), "synchronize"),
    "ticket.get": (lambda b, d: d.ticket.get(), "reading the Ticket of Segment quiet"),
    "ticket.get again": (lambda b, d: d.read_ticket.get(), "reading the Ticket of Segment quiet"),
    "pool.dropped": (lambda b, d: d.pool.dropped, "fetch of 'pool.dropped' .a host read"),
    "pool.invalid": (lambda b, d: d.pool.invalid, "fetch of 'pool.invalid' .a host read"),
    "counters.dropped": (lambda b, d: b.counters.dropped, "dropped and invalid counts .a host read"),
    "counters.as_dict": (lambda b, d: b.counters.as_dict(), "dropped and invalid counts .a host read"),
    "buffer": (lambda b, d: b.buffer("new", HOST), "creating Buffer 'new'"),
    "reserve": (lambda b, d: b.reserve("new", (4,), "float32"), "reserving Buffer 'new'"),
    "create_pool": (lambda b, d: b.create_pool(G), "create_pool"),
    "create_shadow": (lambda b, d: b.create_shadow(G), "create_shadow"),
    "wrap_pool": (lambda b, d: b.wrap_pool(np.zeros((4, 2, 4, 2, 8)), layout="KV2", geometry=G), "wrap_pool"),
    "stage": (
        lambda b, d: b.stage(
            np.zeros((1, 4, 2, 8), np.float32),
            np.zeros((1, 4, 2, 8), np.float32),
            d.shadow,
            0,
            src_blocks=[0],
            dst_blocks=[1],
            tokens=4,
            dtype="float32",
        ),
        "stage .a host write",
    ),
    "invalidate": (lambda b, d: d.shadow.invalidate(), "invalidating a shadow .a host write"),
    "release a read": (lambda b, d: b.release(d.x), "release of Buffer"),
    "release an update": (lambda b, d: b.release(d.y), "release of Buffer"),
    "release a pool": (lambda b, d: b.release(d.pool), "release of Pool"),
    "release a trace": (lambda b, d: b.release(d.trace), "release of Trace"),
    "run": (lambda b, d: b.run(d.quiet), "run inside Segment"),
    "capture": (lambda b, d: b.capture(d.quiet), "capture inside Segment"),
    "replay": (lambda b, d: b.replay(d.trace), "replay inside Segment"),
    "numpy slots to write": (lambda b, d: d.write(b, loc=WriteLoc.slots(int32(4, 5))), "numpy slot ids"),
    "numpy slots to read": (lambda b, d: d.pool.read(0, WriteLoc.slots(int32(4, 5))), "numpy slot ids"),
    "numpy slots to copy": (
        lambda b, d: d.pool.copy(WriteLoc.slots(d.ids.get()), WriteLoc.slots(int32(4, 5))),
        "numpy slot ids",
    ),
    "numpy table to write": (
        lambda b, d: d.write(b, loc=WriteLoc.paged(int32([1], [1]), d.ids.get(), table_len=1)),
        "numpy table or positions",
    ),
    "numpy positions to write": (
        lambda b, d: d.write(b, loc=WriteLoc.paged(d.table.get(), int32(0, 1), table_len=1)),
        "numpy table or positions",
    ),
    "numpy table": (lambda b, d: d.decode(b, table=int32([1], [1])), "numpy table or visible"),
    "numpy visible": (lambda b, d: d.decode(b, visible=int32(1, 1)), "numpy table or visible"),
    "undeclared Buffer": (lambda b, d: d.other.get(), "uses Buffer 'other', which it does not declare"),
    "reserved Buffer nobody filled": (lambda b, d: d.spare.get(), "uses Buffer 'spare', which it does not declare"),
    "undeclared Buffer of a pool": (lambda b, d: d.other_pool.storage(0)[0].get(), "which it does not declare"),
    "zero of an undeclared Buffer": (lambda b, d: b.zero(d.other), "uses Buffer 'other', which it does not declare"),
    "zero of a read": (lambda b, d: b.zero(d.x), "zero of 'x', which it declares as read only"),
    "zero of an undeclared pool": (lambda b, d: b.zero(d.other_pool.storage(0)[0]), "which it does not declare"),
    "write to an undeclared pool": (
        lambda b, d: d.other_pool.write(0, WriteLoc.slots(d.ids.get()), d.rows.get(), d.rows.get()),
        "uses a pool it does not declare",
    ),
    "read of an undeclared pool": (
        lambda b, d: d.other_pool.read(0, WriteLoc.slots(d.ids.get())),
        "uses a pool it does not declare",
    ),
    "copy in an undeclared pool": (
        lambda b, d: d.other_pool.copy(WriteLoc.slots(d.ids.get()), WriteLoc.slots(d.ids.get())),
        "uses a pool it does not declare",
    ),
    "decode over an undeclared pool": (lambda b, d: d.decode(b, pool=d.other_pool), "uses a pool it does not declare"),
    "decode over an undeclared shadow": (lambda b, d: d.decode(b, pool=d.shadow), "uses a pool it does not declare"),
    "update of an undeclared Buffer": (
        lambda b, d: ({d.other: d.x.get()}, {}),
        "update of Buffer.'other'.*not declared",
    ),
    "update of a read": (lambda b, d: ({d.x: d.y.get()}, {}), "update of Buffer.'x'.*not declared in updates"),
    "numpy update": (lambda b, d: ({d.y: HOST}, {}), "update of 'y' by a host ndarray"),
    "numpy emit": (lambda b, d: ({}, {"e": HOST}), "emit 'e' is a host ndarray"),
    "a number as emit": (lambda b, d: ({}, {"e": 1.0}), "emit 'e' is a host float"),
}
"""Acts of the public API: refused while a Segment is evaluated, in ``run`` as in ``capture``."""

READ = r"(?i)host read|host value|concret"
CLOSED = r"no declared Buffer holds|closed over"
ARRAY_ACTS: dict[str, tuple[Act, str]] = {
    "bool": (lambda b, d: bool(d.x.get()[0]), READ),
    "int": (lambda b, d: int(d.ids.get()[0]), READ),
    "float": (lambda b, d: float(d.x.get()[0]), READ),
    "item": (lambda b, d: d.x.get()[0].item(), READ),
    "tolist": (lambda b, d: d.x.get().tolist(), READ),
    "numpy.asarray": (lambda b, d: np.asarray(d.x.get()), READ),
    "numpy.asarray of a sum": (lambda b, d: np.asarray(d.x.get() + 1), READ),
    "numpy function": (lambda b, d: np.exp(d.x.get()), READ),
    "format": (lambda b, d: f"{d.x.get()[0]:.2f}", READ),
    "branch": (branches, READ),
    "while": (loops, READ),
    "range": (counts, READ),
    "any": (lambda b, d: any(d.x.get() > 1), READ),
    "max": (lambda b, d: max(d.x.get()), READ),
    "in": (lambda b, d: 1.0 in d.x.get(), READ),
    "and": (lambda b, d: d.x.get()[0] > 0 and d.x.get()[1] > 0, READ),
    "mask": (lambda b, d: ({}, {"e": d.x.get()[d.x.get() > 1]}), r"(?i)mask|boolean"),
    "+=": (adds_in_place, r"(?i)in place|immutable"),
    "an item set": (sets_an_item, r"(?i)in place|immutable|item assignment"),
    "a slice set": (sets_a_slice, r"(?i)in place|immutable|item assignment"),
    "*= on a pool": (multiplies_a_pool_in_place, r"(?i)in place|immutable"),
    "closed-over operand": (lambda b, d: ({d.y: d.x.get() + d.closed}, {}), CLOSED),
    "closed-over operand of a product": (lambda b, d: b.xp.matmul(d.x.get(), d.closed), CLOSED),
    "closed-over indices": (lambda b, d: b.xp.take(d.x.get(), d.closed_ids), CLOSED),
    "closed-over content of another Buffer": (lambda b, d: ({d.y: d.x.get() * d.closed_get}, {}), CLOSED),
    "closed-over content as emit": (lambda b, d: ({}, {"e": d.closed_get}), CLOSED),
    "closed-over weight of a layer": (lambda b, d: b.xp.linear(d.rows.get(), d.closed_matrix), CLOSED),
    "closed-over input of a layer": (lambda b, d: b.xp.linear(d.closed_rows, d.closed_matrix), CLOSED),
    "closed-over bias": (lambda b, d: b.xp.linear(d.rows.get(), d.closed_matrix, d.closed_vector), CLOSED),
    "closed-over norm": (lambda b, d: b.xp.rms_norm(d.rows.get(), d.closed_vector, 1e-5), CLOSED),
    "closed-over angles": (lambda b, d: b.xp.rope(d.rows.get(), d.closed_angles, d.closed_angles), CLOSED),
    "closed-over gate": (lambda b, d: b.xp.silu_mul(d.rows.get(), d.closed_rows), CLOSED),
    "closed-over argmax": (lambda b, d: ({}, {"e": b.xp.argmax(d.closed_rows)}), CLOSED),
    "closed-over emit": (lambda b, d: ({}, {"e": d.closed}), CLOSED),
    "closed-over view as emit": (lambda b, d: ({}, {"e": d.closed[1:3]}), CLOSED),
    "closed-over update": (lambda b, d: ({d.y: d.closed}, {}), CLOSED),
    "closed-over ids to write": (lambda b, d: d.write(b, loc=WriteLoc.slots(d.closed_ids)), CLOSED),
    "closed-over ids to read": (lambda b, d: d.pool.read(0, WriteLoc.slots(d.closed_ids)), CLOSED),
    "closed-over source of a copy": (
        lambda b, d: d.pool.copy(WriteLoc.slots(d.closed_ids), WriteLoc.slots(d.ids.get())),
        CLOSED,
    ),
    "closed-over target of a copy": (
        lambda b, d: d.pool.copy(WriteLoc.slots(d.ids.get()), WriteLoc.slots(d.closed_ids)),
        CLOSED,
    ),
    "closed-over k": (lambda b, d: d.write(b, k=d.closed_rows), CLOSED),
    "closed-over v": (lambda b, d: d.write(b, v=d.closed_rows), CLOSED),
    "closed-over table to write": (
        lambda b, d: d.write(b, loc=WriteLoc.paged(d.closed_table, d.seen.get(), table_len=1)),
        CLOSED,
    ),
    "closed-over positions": (
        lambda b, d: d.write(b, loc=WriteLoc.paged(d.table.get(), d.closed_ids, table_len=1)),
        CLOSED,
    ),
    "closed-over q": (lambda b, d: d.decode(b, q=d.closed_rows), CLOSED),
    "closed-over table": (lambda b, d: d.decode(b, table=d.closed_table), CLOSED),
    "closed-over visible": (lambda b, d: d.decode(b, visible=d.closed_ids), CLOSED),
    "closed-over sinks": (lambda b, d: d.decode(b, params=AttentionParams(sinks=d.closed[:2])), CLOSED),
    "closed-over partial result": (
        lambda b, d: b.merge_partials([d.rows.get(), d.closed_rows], [d.rows.get()[..., 0]] * 2),
        CLOSED,
    ),
    "numpy operand": (lambda b, d: ({d.y: d.x.get() + HOST}, {}), r"(?i)numpy|host"),
    "numpy operand on the left": (lambda b, d: ({d.y: HOST + d.x.get()}, {}), r"(?i)numpy|host"),
    "numpy indices": (lambda b, d: b.xp.take(d.x.get(), int32(0, 1)), r"(?i)numpy|host"),
    "numpy choice": (lambda b, d: b.xp.where(d.x.get() > 1, HOST, 0.0), r"(?i)numpy|host"),
}
"""Acts on arrays: refused at capture at the latest; a backend that computes eagerly lets some pass in ``run``."""

ACTS = HOST_API | ARRAY_ACTS


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
    assert states[0] == states[1]
    assert bytes_of(b, *d.everything) == before


@pytest.mark.clause("C2", "S5", "D1", "C12")
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
    assert bytes_of(b, *desk.everything) == before
    assert desk.shadow.version == version
    if not warm:
        armed.clear()
        with pytest.raises(ColdCapture):
            b.capture(forbidden)
    still_works(desk, before)


@pytest.mark.clause("C2")
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
