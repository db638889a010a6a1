"""Virtual ids, a map on the device, and the doors behind it, eager and captured (clauses W3, W4, W9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from forebay.specs import (
    Backend,
    Batch,
    BlockTable,
    Buffer,
    CaptureViolation,
    Pool,
    Segment,
    UnmarkedWriteLoc,
    WriteLoc,
)
from forebay.specs.suite.attention import Array
from forebay.specs.suite.kv import (
    changed_slots,
    device_rows,
    geometry,
    held,
    int32,
    new_pool,
    put_values,
    refused,
    row_bits,
    same_bits,
)
from forebay.specs.suite.mapped import Mapped
from forebay.specs.suite.staging import host_kv, stage
from forebay.specs.suite.steps import copies

NB, BS = 8, geometry().block_size
MAPS = ((0, 3, 1, 2, 7, 4, 6, 5), (0, 6, 5, 1, 2, 3, 4, 7), (0, 1, 2, 3, 4, 5, 6, 7))
"""Where each virtual page is: two permutations, then every page in its own place."""
IDS, OTHERS = int32(BS, 2 * BS + 1, 4 * BS + 2, 4 * BS - 1), int32(5 * BS + 1, 6 * BS + 2, 2 * BS - 1, 7 * BS + 2)
"""Virtual slots that are read or written, and those that they are copied to."""
TABLE, POSITIONS = int32([1, 5, 2, 10**6]), int32([BS - 1, BS, 2 * BS + 1])
"""Virtual pages of one sequence, with a stamp behind them, and positions of it; VISIBLE of its tokens are there."""
VISIBLE = 2 * BS + 2


def of_positions(positions: Any) -> Array:
    """Virtual slots of positions of the sequence."""
    return np.asarray(TABLE[0, np.asarray(positions) // BS] * BS + np.asarray(positions) % BS)


Give = Callable[[Any], Any]


def marked(ids: Any) -> WriteLoc:
    return WriteLoc.slots(ids, physical=True)


def marked_table(pages: Any) -> BlockTable:
    return BlockTable(pages, physical=True)


class Doors:
    """A pool whose every slot holds its own physical number, and each door as an act on virtual ids that lie in Buffers.

    ``slots`` and ``table`` make of translated ids what a door is given; by default they mark them.
    """

    def __init__(self, backend: Backend, pool: Pool, slots: Give = marked, table: Give = marked_table) -> None:
        self.backend, self.pool, self.mapped = backend, pool, Mapped(backend, pool)
        self.slots, self.table = slots, table
        k, v = (backend.to_host(x) for x in device_rows(backend, pool.geometry, [100.0, 101.0, 102.0, 103.0]))
        g = pool.geometry
        host = {"ids": IDS, "others": OTHERS, "table": TABLE, "positions": POSITIONS, "visible": int32(VISIBLE)}
        host |= {"k": k, "v": v, "q": np.zeros((1, g.num_kv_heads, g.head_dim), np.float32)}
        self.buffers: dict[str, Buffer] = {name: backend.buffer(name, x) for name, x in host.items()}

    def fill(self) -> None:
        """Every slot of a block that is no sink holds its number."""
        put_values(self.backend, self.pool, range(BS, NB * BS), range(BS, NB * BS))

    def get(self, name: str) -> Any:
        return self.buffers[name].get()

    def loc(self, name: str) -> Any:
        return self.slots(self.mapped.translate(self.get(name)))

    def paged(self) -> WriteLoc:
        table = self.table(self.mapped.table(self.get("table")).array)
        return WriteLoc.paged(table, self.get("positions"), table_len=3)

    def act(self, door: str) -> dict[str, Any]:
        """Go through a door; what it gives back, by name."""
        b, pool, xp = self.backend, self.pool, self.backend.xp
        if door == "write":
            pool.write(0, self.loc("ids"), self.get("k"), self.get("v"))
        elif door == "write paged":
            pool.write(0, self.paged(), *(xp.head(self.get(name), 3) for name in "kv"))
        elif door == "read":
            return {"v": pool.read(0, self.loc("ids"))[1]}
        elif door == "read paged":
            return {"v": pool.read(0, self.paged())[1]}
        elif door == "copy":
            pool.copy(self.loc("ids"), self.loc("others"))
        elif door == "copy src":
            pool.copy(self.loc("ids"), marked(self.get("others")))
        elif door == "copy dst":
            pool.copy(marked(self.get("ids")), self.loc("others"))
        else:
            path = door.removeprefix("decode ")
            table = self.table(self.mapped.table(self.get("table")).array)
            q, visible = self.get("q"), self.get("visible")
            return {"out": b.paged_decode(q, pool, 0, table, visible, table_len=3, path=path)}
        return {}

    def segment(self, door: str) -> Segment:
        reads = (self.mapped.map, *self.buffers.values())
        return Segment("door", lambda _: ({}, self.act(door)), key=(door,), reads=reads, pools=(self.pool,))

    def close(self) -> None:
        for buffer in (self.mapped.map, *self.buffers.values()):
            self.backend.release(buffer)


ACTS = ("write", "write paged", "read", "read paged", "copy", "decode direct", "decode gather")


@pytest.mark.clause("W3", "W4")
@pytest.mark.case("B10", "B12")
@pytest.mark.parametrize(
    "how",
    ["eager", "run", pytest.param("replay", marks=[pytest.mark.clause("W9"), pytest.mark.smoke("W3", "W4", "W9")])],
)
@pytest.mark.parametrize("door", ACTS)
def test_every_door_follows_the_map_of_the_moment(backend: Backend, door: str, how: str) -> None:
    """The same virtual ids under one map after the other: what is read, written and attended to is at their physical places."""
    with new_pool(backend, geometry(num_blocks=NB), requires_physical_write_loc=True) as pool:
        doors = Doors(backend, pool)
        doors.fill()
        segment = doors.segment(door)
        trace = None
        if how == "replay":
            backend.run(segment)
            trace = backend.capture(segment)
        for pages in MAPS:
            doors.mapped.remap(pages)
            doors.fill()
            before = row_bits(backend, pool)
            if how == "eager":
                got = {name: backend.to_host(x) for name, x in doors.act(door).items()}
            else:
                got = copies(backend.replay(trace) if trace is not None else backend.run(segment))
            ids, others, positions = (doors.mapped.physical(x) for x in (IDS, OTHERS, of_positions(POSITIONS[0])))
            after, changed = row_bits(backend, pool), []
            if door.startswith("write"):
                target = positions if door.endswith("paged") else ids
                changed = sorted(target)
                np.testing.assert_array_equal(held(backend, pool, target), 100.0 + np.arange(len(target)))
            elif door.startswith("read"):
                where = positions if door.endswith("paged") else ids
                np.testing.assert_array_equal(got["v"], np.broadcast_to(where[:, None, None], got["v"].shape))
            elif door == "copy":
                changed = sorted(others)
                same_bits(after[others], before[ids])
            else:
                mean = doors.mapped.physical(of_positions(range(VISIBLE))).mean()
                np.testing.assert_allclose(got["out"], mean, rtol=1e-6)
            assert changed_slots(before, after) == changed
        assert (pool.dropped, pool.invalid) == (0, 0)
        if trace is not None:
            backend.release(trace)
        doors.close()


@pytest.mark.clause("W3", "W4", "S1")
@pytest.mark.case("B12", "G05")
def test_what_a_request_has_is_sent_from_where_it_was_moved(backend: Backend, internals: ModuleType) -> None:
    """Staged under one map, moved by a compaction, its old pages filled by somebody else: what is sent is its own, bit for bit."""
    g = geometry(num_blocks=NB)
    with new_pool(backend, g, requires_physical_write_loc=True) as pool:
        mapped, pages = Mapped(backend, pool, MAPS[0]), int32(1, 5, 2)
        k, v = host_kv(g, blocks=3)
        stage(backend, k, v, pool, [0, 1, 2], BlockTable(mapped.pages[pages], physical=True), VISIBLE)
        ids = backend.to_device(of_positions(range(VISIBLE)))
        mapped.compact(MAPS[1])
        left = np.setdiff1d(np.array(MAPS[0])[pages], mapped.pages[pages]).astype(np.int32)
        assert len(left)
        others = mapped.slots_of(left)
        pool.write(0, WriteLoc.slots(others, physical=True), *device_rows(backend, g, [99] * len(others)))
        assert backend.to_host(mapped.translate(ids)).tolist() == mapped.physical(of_positions(range(VISIBLE))).tolist()
        right = [x.reshape(-1, *x.shape[2:])[:VISIBLE] for x in (k, v)]
        sent = internals.HostKV.read(backend, pool, mapped.pages[pages].tolist(), VISIBLE).layers[0]
        for part, read in enumerate(pool.read(0, mapped.loc(ids))):
            same_bits(backend.to_host(read), right[part])
            rows = np.ascontiguousarray(sent[:, part]).reshape(-1, *right[part].shape[1:])
            np.testing.assert_array_equal(rows[:VISIBLE].view(np.float32), right[part])
        backend.release(mapped.map)


# -- marks that are lost, or that nobody set -------------------------------------------------------------------------------

LOST_SLOTS: dict[str, Give] = {
    "bare": lambda ids: ids,
    "unmarked": WriteLoc.slots,
    "rebuilt from its ids": lambda ids: WriteLoc.slots(marked(ids).ids),
    "of a batch built by hand": lambda ids: WriteLoc.for_batch(Batch(ids)),
    "of a batch whose window alone is marked": lambda ids: WriteLoc.for_batch(Batch(ids), window_loc=marked(ids)),
}
LOST_TABLES: dict[str, Give] = {
    "bare table": lambda pages: pages,
    "unmarked table": BlockTable,
    "table rebuilt from its array": lambda pages: BlockTable(marked_table(pages).array),
}
SLOT_DOORS, TABLE_DOORS = ("write", "read", "copy src", "copy dst"), ("write paged", "read paged", "decode direct")


@pytest.mark.refuses("W3", "W4", "W9")
@pytest.mark.parametrize(
    ("door", "lost"),
    [(d, x) for d in SLOT_DOORS for x in LOST_SLOTS] + [(d, x) for d in TABLE_DOORS for x in LOST_TABLES],
)
def test_ids_that_lost_their_mark_are_refused_eager_and_captured(backend: Backend, door: str, lost: str) -> None:
    """The ids are the right ones; without the mark no door takes them, and no byte changes."""
    give = {"slots": LOST_SLOTS[lost]} if lost in LOST_SLOTS else {"table": LOST_TABLES[lost]}
    with new_pool(backend, geometry(num_blocks=NB), requires_physical_write_loc=True) as pool:
        doors = Doors(backend, pool, **give)
        doors.fill()
        segment = doors.segment(door)
        acts: tuple[Callable[[], Any], ...] = (
            lambda: doors.act(door),
            lambda: backend.run(segment),
            lambda: backend.capture(segment),
        )
        for act in acts:
            with refused(backend, UnmarkedWriteLoc, "an unmarked WriteLoc|a bare |BlockTable without", pool):
                act()
        doors.slots, doors.table = marked, marked_table
        backend.run(segment).get()
        doors.close()


@pytest.mark.refuses("W9", "C2")
@pytest.mark.parametrize("door", ACTS)
def test_a_step_that_goes_through_a_door_declares_its_pool(backend: Backend, door: str) -> None:
    """Run or captured, marked ids do not make up for a pool that was not declared: no byte changes."""
    with new_pool(backend, geometry(num_blocks=NB), requires_physical_write_loc=True) as pool:
        doors = Doors(backend, pool)
        segment = replace(doors.segment(door), pools=())
        for act in (backend.run, backend.capture):
            with refused(backend, CaptureViolation, "a pool it does not declare", pool):
                act(segment)
        doors.close()
