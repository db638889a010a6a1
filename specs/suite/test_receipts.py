"""Device truth in the small: what a damaged row does, what its receipt says, what the ledger makes of it (clauses C5, C4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, StaleTrace, Ticket
from forebay.specs.dtypes import HostArray
from forebay.specs.suite.kv import unchanged
from forebay.specs.suite.stepping import finish

MakeEngine = Callable[..., Any]
PROMPT, LONG = [*range(21, 27)], [*range(21, 45)]
PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11, 12, 13, 14, 15], [20]]
STEPS = 14
SLOTS = 3


def params(runtime: ModuleType, **options: Any) -> Any:
    return runtime.SamplingParams(**{"max_tokens": STEPS, "ignore_eos": True, **options})


def damage_row(backend: Backend, device: Any, slot: int, name: str, change: Callable[[HostArray], Any]) -> None:
    """Let ``change`` alter row ``slot`` of one of the device's Buffers in place, or give the new value."""
    buffer = {"table": device.table, "stop": device.stop}.get(name) or device.scalars[name]
    row = backend.fetch(buffer)[slot : slot + 1].copy()
    value = change(row[0])
    if value is not None:
        row[0] = value
    backend.upload(buffer, row, slot)


def set_at(column: int, value: int) -> Callable[[HostArray], None]:
    def change(row: HostArray) -> None:
        row[column] = value

    return change


UNCHECKED: dict[str, tuple[str, Callable[[HostArray], Any]]] = {
    "visible ahead": ("visible", lambda row: row + 1),
    "visible behind": ("visible", lambda row: row - 1),
    "limit reached": ("limit", lambda _: 3),
    "epoch": ("epoch", lambda row: row + 1),
    "stamp": ("table", lambda row: set_at(-1, row[-1] - 1)(row)),
    "page is the sink": ("table", set_at(0, 0)),
    "page out of the pool": ("table", set_at(0, 2**31 - 1)),
}
"""What is wrong with a row at a position between 4 and 31, in its first block of 32."""


@pytest.mark.clause("C5")
@pytest.mark.refuses("C5")
@pytest.mark.parametrize("wrong", UNCHECKED)
def test_a_row_that_does_not_check_says_what_it_consumed_and_asks_no_door(
    backend: Backend,
    make_engine: MakeEngine,
    runtime: ModuleType,
    internals: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    wrong: str,
) -> None:
    """Each field of its receipt is what its own Buffer held; it is not accepted, writes nothing, and no door drops a row of it."""
    engine = make_engine(backend, slots=1, block_size=32)
    tickets: list[Ticket] = []
    whole = internals.Lanes.step

    def step(lanes: Any, *args: Any) -> Ticket:
        tickets.append(whole(lanes, *args))
        return tickets[-1]

    monkeypatch.setattr(internals.Lanes, "step", step)
    engine.add(PROMPT, params(runtime))
    for _ in range(4):
        engine.step()
    device, pool = internals.parts_of(engine).device, internals.parts_of(engine).pool
    damage_row(backend, device, 0, *UNCHECKED[wrong])
    held = {name: int(backend.fetch(buffer)[0]) for name, buffer in device.scalars.items()}
    assert held["position"] > 3
    dropped = pool.dropped
    with unchanged(backend, pool):
        assert engine.step() == []
    assert pool.dropped == dropped
    receipt = dict(zip(internals.RECEIPT_FIELDS, tickets[-1].get()["receipt"][0].tolist(), strict=True))
    assert {name: receipt[name] for name in held} == held
    assert receipt["accepted"] == 0


def swap(row: HostArray) -> None:
    row[[0, 1]] = row[[1, 0]]


DAMAGE: dict[str, tuple[str, Callable[[HostArray], Any]]] = {
    "token": ("token", lambda row: row ^ 1),
    "limit put off": ("limit", lambda row: row + 9),
    "seed": ("seed", lambda row: row ^ 1),
    "two blocks changed places": ("table", swap),
    "stop tokens": ("stop", lambda row: row * 0 + 7),
}


@pytest.mark.clause("C5")
@pytest.mark.refuses("C5")
@pytest.mark.parametrize("read_behind", [0, 2])
@pytest.mark.parametrize("wrong", DAMAGE)
def test_a_row_that_consumed_something_else_costs_a_reseed_and_no_token(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, internals: ModuleType, wrong: str, read_behind: int
) -> None:
    """The device accepts the row, for nothing shows there; its receipt does not match what the ledger has."""
    right = list(make_engine(backend, slots=1, arm="eager").generate([LONG], params(runtime))[0].token_ids)
    engine = make_engine(backend, slots=1, read_behind=read_behind)
    request = engine.add(LONG, params(runtime))
    for _ in range(7):
        engine.step()
    damage_row(backend, internals.parts_of(engine).device, 0, *DAMAGE[wrong])
    while engine.has_work:
        engine.step()
    assert list(request.token_ids) == right
    assert engine.report()["engine"]["reseeds"] == 1


@pytest.mark.clause("C5")
@pytest.mark.parametrize("buffer", ["options", "seen"])
def test_a_sampled_row_is_held_against_its_parameters(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, internals: ModuleType, buffer: str
) -> None:
    """Options of another request, or tokens seen that it never saw: the draw is made anew from its own."""
    wanted = params(runtime, temperature=0.9, seed=3, repetition_penalty=1.3)
    right = list(make_engine(backend, slots=1, arm="eager").generate([PROMPT], wanted)[0].token_ids)
    engine = make_engine(backend, slots=1, block_size=32)
    request = engine.add(PROMPT, wanted)
    for _ in range(5):
        engine.step()
    held = getattr(internals.parts_of(engine).device.sampling, buffer)
    row = backend.fetch(held)[:1].copy()
    row.view(np.int32)[...] ^= 1
    backend.upload(held, row, 0)
    while engine.has_work:
        engine.step()
    assert list(request.token_ids) == right
    assert engine.report()["engine"]["reseeds"] == 1


@pytest.mark.clause("C5")
def test_a_seeds_first_step_is_read_at_once_and_later_ones_behind(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, internals: ModuleType
) -> None:
    engine = make_engine(backend, slots=2, read_behind=3)
    decoder = internals.parts_of(engine).core.decoder
    engine.add(PROMPTS[0], params(runtime))
    in_flight = []
    for step in range(10):
        if step == 6:
            engine.add(PROMPTS[1], params(runtime))
        engine.step()
        in_flight.append(decoder.in_flight)
    assert in_flight == [0, 1, 2, 3, 3, 3, 0, 1, 2, 3]


@pytest.mark.clause("C4")
def test_a_stop_token_retires_its_row_on_the_device(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, internals: ModuleType
) -> None:
    """Nobody tells the device that the request has ended: no upload, and the row stands at position -1 all the same."""
    tokens = list(make_engine(backend, slots=1, arm="eager").generate([PROMPT], params(runtime))[0].token_ids)
    last = next(i for i in range(3, STEPS - 1) if tokens[i] not in tokens[:i])
    engine = make_engine(backend, slots=1, block_size=32)
    request = engine.add(PROMPT, params(runtime, stop_token_ids=(tokens[last],)))
    engine.step()
    before = backend.counters.uploads
    while engine.has_work:
        engine.step()
    assert backend.counters.uploads == before
    assert list(request.token_ids)[:last] == tokens[:last]
    assert request.finish_reason == "stop"
    assert backend.fetch(internals.parts_of(engine).device.scalars["position"]).tolist() == [-1]


@pytest.mark.clause("C4")
def test_each_stop_token_of_a_slot_retires_its_row_on_the_device(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, internals: ModuleType
) -> None:
    """One prompt in as many slots as a row has room for stop tokens; in each the one that comes up stands at another place."""
    tokens = list(make_engine(backend, slots=1, arm="eager").generate([PROMPT], params(runtime))[0].token_ids)
    last = next(i for i in range(3, STEPS - 1) if tokens[i] not in tokens[:i])
    room = internals.parts_of(make_engine(backend, slots=1)).device.max_stop
    others = [t for t in range(200, 258) if t not in tokens][: room - 1]
    stops = [(*others[:place], tokens[last], *others[place:]) for place in range(room)]
    for number in (2, room):
        engine = make_engine(backend, slots=number, block_size=32, num_blocks=2 * room, read_behind=0)
        requests = [engine.add(PROMPT, params(runtime, stop_token_ids=stop[-number:])) for stop in stops[-number:]]
        finish(engine)
        assert backend.fetch(internals.parts_of(engine).device.scalars["position"]).tolist() == [-1] * number
        assert [(list(r.token_ids), r.finish_reason) for r in requests] == [(tokens[: last + 1], "stop")] * number


@pytest.mark.clause("C4")
def test_a_limit_retires_its_row_on_the_device(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, internals: ModuleType
) -> None:
    """After the step of the last token, and not one later, the row stands at position -1; nobody uploaded anything for it."""
    engine = make_engine(backend, slots=1, block_size=32, read_behind=0)
    request = engine.add(PROMPT, params(runtime, max_tokens=4))
    engine.step()
    before = backend.counters.uploads
    finish(engine)
    assert backend.counters.uploads == before
    assert (len(request.token_ids), request.finish_reason) == (4, "length")
    device = internals.parts_of(engine).device.scalars
    assert [backend.fetch(device[name]).tolist() for name in ("position", "visible")] == [[-1], [0]]


# -- the ledger by itself ------------------------------------------------------------------------------------------------


class Books:
    """The ledger of an engine's slots, fed with receipts made by hand."""

    def __init__(self, engine: Any, internals: ModuleType) -> None:
        self.device = internals.parts_of(engine).device
        self.ledger = internals.Ledger(self.device)
        self.fields = internals.RECEIPT_FIELDS
        self.states = [internals.SlotState(11 + slot, 4, 3 + slot, 9, -7, (5, 2), (2, 40)) for slot in range(SLOTS)]
        self.serial = 0

    def honest(self, slot: int, **other: int) -> dict[str, int]:
        """What an honest step of a slot says, but for ``other``."""
        return {**self.device.expected_receipt(self.states[slot]), "accepted": 1, "next_token": 20 + slot, **other}

    def check_seeded(self, backend: Backend) -> None:
        """The device holds what it is seeded with."""
        for slot in range(2):
            self.device.seed(slot, self.states[slot])
        for name, buffer in self.device.scalars.items():
            wanted = [self.device.expected_receipt(self.states[slot])[name] for slot in range(2)]
            assert backend.fetch(buffer)[:2].tolist() == wanted, name

    def dispatched(self, rows: dict[int, dict[str, int]], bucket: int = SLOTS) -> None:
        self.serial += 1
        idle = dict.fromkeys(self.fields, 0) | {"position": -1}
        receipts = np.array([[rows.get(s, idle)[name] for name in self.fields] for s in range(bucket)], np.int32)
        self.ledger.dispatched(Ticket(self.serial, lambda: {"receipt": receipts}, lambda: None), bucket)

    def read(self) -> dict[int, int | str]:
        """By slot the token released, or why there is none."""
        return {r.slot: getattr(r, "token", None) or str(r.why) for _, results in self.ledger.read(0) for r in results}


@pytest.fixture
def books(backend: Backend, make_engine: MakeEngine, internals: ModuleType) -> Books:
    made = Books(make_engine(backend, slots=SLOTS), internals)
    for slot in range(2):
        made.ledger.seed(slot, made.states[slot])
    return made


@pytest.mark.refuses("C5")
@pytest.mark.parametrize(
    "wrong", ["token", "position", "visible", "epoch", "limit", "seed", "table", "stop", "accepted"]
)
def test_nothing_is_released_from_a_receipt_that_is_wrong_in_one_field(books: Books, wrong: str) -> None:
    right = books.honest(0)
    books.dispatched({0: right | {wrong: 0 if wrong == "accepted" else right[wrong] + 1}, 1: books.honest(1)})
    said = books.read()
    assert ("did not accept" if wrong == "accepted" else f"{wrong} {right[wrong] + 1} instead of") in str(said[0])
    assert books.ledger.state(0) == books.states[0]
    assert (said[1] == 21) is (wrong not in ("position", "table"))


@pytest.mark.clause("C5")
@pytest.mark.parametrize("field", ["position", "table"])
def test_a_row_that_acted_out_of_its_place_holds_back_every_slot(backend: Backend, books: Books, field: str) -> None:
    """What its neighbours computed from may be written over, those outside the bucket included."""
    books.check_seeded(backend)
    books.ledger.seed(2, books.states[2])
    books.dispatched({0: books.honest(0), 1: books.honest(1, **{field: 77})}, bucket=2)
    said = books.read()
    assert [type(said[slot]) for slot in range(SLOTS)] == [str] * SLOTS
    assert [books.ledger.state(slot) for slot in range(SLOTS)] == books.states


@pytest.mark.refuses("C5")
def test_an_idle_row_that_acted_is_an_error(books: Books) -> None:
    books.dispatched({0: books.honest(0), 2: books.honest(2)})
    with pytest.raises(StaleTrace, match="slot 2 is idle"):
        books.read()


@pytest.mark.clause("C5")
def test_a_step_of_the_slots_last_request_no_longer_concerns_it(backend: Backend, books: Books) -> None:
    books.check_seeded(backend)
    books.dispatched({0: books.honest(0), 1: books.honest(1)})
    books.states[0] = replace(books.states[0], epoch=9, token=50)
    books.ledger.seed(0, books.states[0])
    books.dispatched({0: books.honest(0, next_token=60)}, bucket=1)
    assert books.read() == {0: 60, 1: 21}


@pytest.mark.clause("C5")
def test_a_receipt_is_held_against_the_table_its_step_was_sent_with(backend: Backend, books: Books) -> None:
    """A block that is added while the step is on its way is none of its business."""
    books.check_seeded(backend)
    books.dispatched({0: books.honest(0), 1: books.honest(1)})
    books.ledger.grow(0, (5, 2, 6))
    assert books.read() == {0: 20, 1: 21}
