"""What a Segment of the violation tests works on, declared and not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.specs import Backend, Buffer, Pool, Segment, Shadow, Ticket, Trace, WriteLoc
from forebay.specs.suite.kv import HEAD_DIM, geometry, int32, poison

G = geometry()
HOST = np.arange(4, dtype=np.float32)


@dataclass
class Desk:
    """What a Segment declares (``x``, ``ids``, ``rows``, ``table``, ``seen`` read, ``y`` updated, ``pool``), and what it does not.

    Attributes:
        x, y: float32 ``[4]``, 0 to 3 and zeros.
        ids: int32 ``[2]``, physical slots 16 and 17.
        rows: float32 ``[2, 2, HEAD_DIM]``, ones: K, V or q of two rows.
        table: int32 ``[2, 1]``, block 1 in both rows; ``seen`` int32 ``[2]``, 1 and 2 visible tokens.
        pool, other_pool, shadow: of the geometry ``G``, full of poison.
        other, spare: float32 ``[4]``, undeclared; ``spare`` was reserved and zeroed, never filled.
        closed, closed_*: device arrays made outside of any Segment, which one may not close over: ``closed`` float32 ``[4]``,
            ``closed_ids`` int32 ``[2]``, ``closed_rows`` and ``closed_table`` as ``rows`` and ``table``, ``closed_matrix`` float32
            ``[8, 8]``, ``closed_vector`` ``[8]``, ``closed_angles`` ``[2, 4]``, and ``closed_get``, the content of ``other``.
        ticket, read_ticket: of two runs of ``quiet``; the second has been read.
        quiet: a Segment that reads ``x`` and emits a copy; ``trace`` is its capture.
    """

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
        """The Buffers to declare as read."""
        return (self.x, self.ids, self.rows, self.table, self.seen)

    @property
    def everything(self) -> tuple[Pool | Buffer, ...]:
        """All Buffers and pools, declared or not: what a refused act must leave as it was."""
        return (*self.reads, self.y, self.other, self.spare, self.pool, self.other_pool, self.shadow)

    def decode(self, b: Backend, **changes: Any) -> Any:
        """Attention ``[2, 2, HEAD_DIM]`` of ``rows`` as q over layer 0 of ``pool``; ``changes`` replace arguments of ``paged_decode``.

        Raises: what ``paged_decode`` raises.
        """
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
        """Write ``rows`` as K and V to ``ids`` in layer 0 of ``pool``; ``changes`` replace ``loc``, ``k`` or ``v``.

        Raises: what the door raises.
        """
        arguments: dict[str, Any] = {"loc": WriteLoc.slots(self.ids.get()), "k": self.rows.get(), "v": self.rows.get()}
        self.pool.write(0, **(arguments | changes))


@contextmanager
def open_desk(backend: Backend) -> Iterator[Desk]:
    """A desk of its own Buffers and pools, released at the end unless the test failed.

    It runs ``quiet`` twice and captures it; nothing of what the desk holds is changed by that.
    """
    buffers = {
        "x": HOST,
        "y": np.zeros(4, np.float32),
        "ids": int32(16, 17),
        "rows": np.ones((2, 2, HEAD_DIM), np.float32),
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
        "closed_ids": backend.to_device(int32(16, 17)),
        "closed_rows": backend.to_device(np.ones((2, 2, HEAD_DIM), np.float32)),
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
