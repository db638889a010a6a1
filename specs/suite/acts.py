"""Acts that a Segment may not do, each with the words of its refusal (clause C2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from forebay.specs import AttentionParams, Backend, WriteLoc
from forebay.specs.geometry import storage_shapes
from forebay.specs.suite.desk import HOST, Desk, G
from forebay.specs.suite.kv import int32

Act = Callable[[Backend, Desk], Any]
"""``act(backend, desk)`` does the forbidden thing; what it returns, if anything, is what the Segment returns.

It is called while the Segment is evaluated: a backend that holds the contract raises CaptureViolation out of it, at capture at the
latest, and nothing of the desk changes. On another backend anything of :attr:`.Desk.everything` may.
"""


def branches(b: Backend, d: Desk) -> None:
    """Branch on an element of ``x``, which is a host read; where it is read all the same, rows go into ``pool``."""
    if d.x.get()[0] > 0:
        d.write(b)


def loops(b: Backend, d: Desk) -> None:
    """Loop as long as an element computed from ``x`` is small, which is a host read in every turn; 8 turns at most."""
    total, turns = d.x.get(), 0
    while turns < 8 and total[0] < 3:  # a device that neither refuses nor adds must not hang the suite
        total, turns = total + 1, turns + 1


def counts(b: Backend, d: Desk) -> None:
    """Take an element of ``ids`` for the length of a Python loop, which is a host read; each turn would write rows into ``pool``."""
    for _ in range(d.ids.get()[0]):
        d.write(b)


def adds_in_place(b: Backend, d: Desk) -> None:
    """``+=`` on the content of ``y``: it is declared as updated, and still only an update that is returned may change it."""
    y = d.y.get()
    y += 1


def sets_an_item(b: Backend, d: Desk) -> None:
    """Assign to one element of the content of ``y``."""
    d.y.get()[0] = 5.0


def sets_a_slice(b: Backend, d: Desk) -> None:
    """Assign elements of ``x`` to a slice of the content of ``y``."""
    d.y.get()[1:3] = d.x.get()[:2]


def multiplies_a_pool_in_place(b: Backend, d: Desk) -> None:
    """``*=`` on the K of layer 0 of ``pool``, by its storage and not through a door."""
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
    "wrap_pool": (
        lambda b, d: b.wrap_pool(np.zeros(storage_shapes("KV2", G)[0]), layout="KV2", geometry=G),
        "wrap_pool",
    ),
    "stage": (
        lambda b, d: b.stage(
            np.zeros((1, 16, 2, 64), np.float32),
            np.zeros((1, 16, 2, 64), np.float32),
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
    "numpy slots to write": (lambda b, d: d.write(b, loc=WriteLoc.slots(int32(16, 17))), "numpy slot ids"),
    "numpy slots to read": (lambda b, d: d.pool.read(0, WriteLoc.slots(int32(16, 17))), "numpy slot ids"),
    "numpy slots to copy": (
        lambda b, d: d.pool.copy(WriteLoc.slots(d.ids.get()), WriteLoc.slots(int32(16, 17))),
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
