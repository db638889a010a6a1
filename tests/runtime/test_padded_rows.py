"""Rows that are not there, or that do not check, write nothing: the decode Segment on Buffers filled by hand (clauses C5, W6)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from forebay.runtime import Model
from forebay.runtime.decode_step import decode_segment
from forebay.runtime.digests import digest
from forebay.runtime.state import RECEIPT_FIELDS, DeviceState, SlotState
from forebay.specs import Backend, KVGeometry, Trace
from forebay.specs.dtypes import HostArray
from tests.runtime.harness import bits, changed_blocks, contents, poison

BLOCK = 4


class Rig:
    """The decode Segment on master Buffers filled by hand; every slot may hold a request with KV of its own."""

    SLOTS = 8
    TABLE = 4

    def __init__(self, backend: Backend, model: Model) -> None:
        self.backend = backend
        self.llama = model.bind(backend, max_len=64)
        config = model.config
        geometry = KVGeometry(
            num_blocks=1 + self.SLOTS * self.TABLE,
            block_size=BLOCK,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_layers=config.num_layers,
        )
        self.pool = backend.create_pool(geometry)
        self.device = DeviceState(backend, self.SLOTS, self.TABLE, 2, config.vocab_size)
        self.segments = {b: decode_segment(self.llama, self.pool, self.device, b, "direct") for b in (1, 2, 4, 8)}
        self.traces: dict[int, Trace] = {}

    def state(self, slot: int, position: int) -> SlotState:
        """A request in ``slot`` that has come to ``position``, in blocks of its own."""
        blocks = tuple(1 + slot * self.TABLE + i for i in range(self.TABLE))
        return SlotState(20 + slot, position, 100 + slot, 16, slot, blocks, (2,))

    def fill(self, active: dict[int, int]) -> None:
        """Rows of ``active`` (slot: position) are seeded; all others are as an ended request leaves them, table row and all."""
        poison(self.backend, self.pool)
        for slot in range(self.SLOTS):
            self.device.seed(slot, self.state(slot, active.get(slot, 5)))
            if slot not in active:
                for name, value in (("position", -1), ("visible", 0)):
                    self.backend.upload(self.device.scalars[name], np.array([value], np.int32), slot)

    def step(self, bucket: int, *, replay: bool) -> HostArray:
        """Receipts of one step, run or replayed."""
        segment = self.segments[bucket]
        if not replay:
            return self.backend.run(segment).get()["receipt"]
        if bucket not in self.traces:
            kept = [self.backend.fetch(b) for b in self.device.buffers]
            self.backend.run(segment)
            for buffer, values in zip(self.device.buffers, kept, strict=True):
                self.backend.upload(buffer, values)
            poison(self.backend, self.pool)
            self.traces[bucket] = self.backend.capture(segment)
        return self.backend.replay(self.traces[bucket]).get()["receipt"]

    def close(self) -> None:
        for trace in self.traces.values():
            self.backend.release(trace)
        self.backend.release(self.pool)
        for buffer in (*self.llama.buffers, *self.device.buffers):
            self.backend.release(buffer)


@pytest.fixture(scope="module")
def rig(backend: Backend, tiny_model: Model) -> Iterator[Rig]:
    made = Rig(backend, tiny_model)
    yield made
    made.close()


ACTIVE = [
    {},
    {0: 0},
    {1: 3},
    {0: 4, 1: 9},
    {2: 7},
    {0: 1, 3: 15},
    {5: 8},
    {1: 0, 4: 4, 7: 11},
    {slot: slot + 3 for slot in range(8)},
]


@pytest.mark.clause("C3", "C4", "C5", "W6")
@pytest.mark.case("A03")
@pytest.mark.parametrize("replay", [False, True], ids=["run", "replay"])
@pytest.mark.parametrize("active", ACTIVE, ids=lambda active: "-".join(map(str, active)) or "none")
def test_padded_rows_write_nothing_at_all(rig: Rig, active: dict[int, int], replay: bool) -> None:
    """Of all blocks only those change in which an active row has its position: not the sink, not what padded rows once held."""
    for bucket in (1, 2, 4, 8):
        rig.fill(active)
        before = contents(rig.backend, rig.pool)
        receipts = rig.step(bucket, replay=replay)
        written = {rig.state(s, p).blocks[p // BLOCK] for s, p in active.items() if s < bucket}
        assert changed_blocks(before, contents(rig.backend, rig.pool)) == written
        assert receipts[:, RECEIPT_FIELDS.index("accepted")].tolist() == [int(s in active) for s in range(bucket)]
        for name in ("token", "position", "visible"):
            rows = rig.backend.fetch(rig.device.scalars[name])
            idle = {"token": 20, "position": -1, "visible": 0}[name]
            for slot in set(range(rig.SLOTS)) - set(active):
                assert rows[slot] == idle + (slot if name == "token" else 0)


WRONG: dict[str, dict[str, int]] = {
    "visible ahead": {"visible": 11},
    "visible behind": {"visible": 9},
    "visible 0": {"visible": 0},
    "epoch": {"epoch": 101},
    "stamp": {"stamp": 103},
    "limit reached": {"limit": 9},
    "limit passed": {"limit": 3},
    "limit negative": {"limit": -1},
    "position negative": {"position": -2, "visible": -1},
    "position beyond the table": {"position": 16, "visible": 17, "limit": 40},
    "position far beyond the table": {"position": 2**30, "visible": 2**30 + 1, "limit": 2**31 - 1},
    "page is the sink": {"page": 0},
    "page negative": {"page": -1},
    "page just outside the pool": {"page": 33},
    "page far outside the pool": {"page": 2**31 - 1},
}
"""What is wrong with the row in slot 2, whose position is 9 and whose epoch is 102."""


@pytest.mark.clause("C5", "W6")
@pytest.mark.parametrize("replay", [False, True], ids=["run", "replay"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_row_that_does_not_check_is_not_accepted_and_writes_nothing(rig: Rig, wrong: str, replay: bool) -> None:
    """The device itself refuses it, before any receipt is read; its neighbour goes on, and the row stays where it is."""
    rig.step(4, replay=replay)
    rig.fill({0: 5, 2: 9})
    table = rig.backend.fetch(rig.device.table)[2:3]
    for name, value in WRONG[wrong].items():
        if name in ("page", "stamp"):
            table[0, 9 // BLOCK if name == "page" else -1] = value
            rig.backend.upload(rig.device.table, table, 2)
        else:
            rig.backend.upload(rig.device.scalars[name], np.array([value], np.int32), 2)
    before, dropped = contents(rig.backend, rig.pool), rig.pool.dropped
    held = {name: rig.backend.fetch(rig.device.scalars[name])[2] for name in rig.device.scalars}
    tables, stops = rig.backend.fetch(rig.device.table), rig.backend.fetch(rig.device.stop)
    receipts = rig.step(4, replay=replay)
    consumed = dict(zip(RECEIPT_FIELDS, receipts[2].tolist(), strict=True))
    assert {name: consumed[name] for name in held} == held, "each field of the receipt is read from its own Buffer"
    assert (consumed["table"], consumed["stop"]) == (digest(tables[2, :-1]), digest(stops[2]))
    assert receipts[:, RECEIPT_FIELDS.index("accepted")].tolist() == [1, 0, 0, 0]
    assert changed_blocks(before, contents(rig.backend, rig.pool)) == {rig.state(0, 5).blocks[5 // BLOCK]}
    assert rig.pool.dropped == dropped, "it does not even ask the door"
    assert {name: rig.backend.fetch(rig.device.scalars[name])[2] for name in rig.device.scalars} == held


@pytest.mark.clause("C3", "D5")
def test_a_row_is_right_wherever_it_stands(rig: Rig) -> None:
    """The same request in every slot and bucket that has it: the same token."""
    tokens = set()
    for slot in range(rig.SLOTS):
        for bucket in (b for b in (1, 2, 4, 8) if b > slot):
            rig.fill({slot: 0})
            rig.backend.upload(rig.device.scalars["token"], np.array([77], np.int32), slot)
            receipt = rig.step(bucket, replay=True)[slot]
            tokens.add(int(receipt[RECEIPT_FIELDS.index("next_token")]))
    assert len(tokens) == 1


@pytest.mark.clause("C12")
def test_capturing_changes_no_buffer(rig: Rig) -> None:
    rig.fill({0: 3, 2: 6})
    segment = rig.segments[4]
    rig.backend.run(segment)
    rig.fill({0: 3, 2: 6})
    before = [bits(rig.backend.fetch(b)) for b in segment.buffers]
    trace = rig.backend.capture(segment)
    assert [bits(rig.backend.fetch(b)) for b in segment.buffers] == before
    rig.backend.release(trace)
