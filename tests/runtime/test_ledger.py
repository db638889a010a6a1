"""The ledger: no token without a receipt that matches, and digests that see every change."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.runtime.digests import digest
from forebay.runtime.ledger import Ledger, Mismatch, Release
from forebay.runtime.state import CONSUMED, RECEIPT_FIELDS, DeviceState, SlotState
from forebay.specs import Backend, Ticket
from forebay.specs.dtypes import HostArray
from forebay.specs.errors import StaleTrace

pytestmark = pytest.mark.clause("C5")

SLOTS, TABLE_LEN, MAX_STOP, VOCABULARY = 3, 6, 4, 70
STATE = SlotState(token=11, position=4, epoch=3, limit=9, seed=-7, blocks=(5, 2), stop=(2, 40))


@pytest.fixture
def device(backend: Backend) -> DeviceState:
    return DeviceState(backend, SLOTS, TABLE_LEN, MAX_STOP, VOCABULARY)


@pytest.fixture
def ledger(device: DeviceState) -> Ledger:
    return Ledger(device)


def honest(device: DeviceState, state: SlotState, next_token: int) -> dict[str, int]:
    return {**device.expected_receipt(state), "accepted": 1, "next_token": next_token}


def idle() -> dict[str, int]:
    return dict.fromkeys(RECEIPT_FIELDS, 0) | {"position": -1}


class Device:
    """Hands the ledger tickets with receipts made by hand."""

    def __init__(self) -> None:
        self.serial = 0
        self.read: list[int] = []

    def step(self, *rows: dict[str, int]) -> Ticket:
        self.serial += 1
        serial = self.serial
        filled = [*rows, *[idle()] * (SLOTS - len(rows))]
        receipts: HostArray = np.array([[row[name] for name in RECEIPT_FIELDS] for row in filled], np.int32)
        return Ticket(serial, lambda: {"receipt": receipts}, lambda: self.read.append(serial))


def results(ledger: Ledger, lag: int = 0) -> list[Release | Mismatch]:
    return [result for _, step in ledger.read(lag) for result in step]


# -- receipts ----------------------------------------------------------------------------------------------------------
def test_matching_receipts_release_tokens_in_order(ledger: Ledger, device: DeviceState) -> None:
    ledger.seed(1, STATE)
    steps, state = Device(), STATE
    for token in (20, 21, 22):
        ledger.dispatched(steps.step(idle(), honest(device, state, token)), bucket=SLOTS)
        state = state.advanced(token)
    assert results(ledger) == [Release(1, t, ended=False) for t in (20, 21, 22)]
    assert ledger.state(1) == replace(STATE, token=22, position=7)


@pytest.mark.parametrize("wrong", [*CONSUMED, "accepted"])
def test_a_receipt_wrong_in_any_field_releases_nothing(ledger: Ledger, device: DeviceState, wrong: str) -> None:
    ledger.seed(0, STATE)
    ledger.seed(1, replace(STATE, epoch=4))
    receipt = honest(device, STATE, 20)
    receipt[wrong] = 0 if wrong == "accepted" else receipt[wrong] + 1
    ledger.dispatched(Device().step(receipt, honest(device, replace(STATE, epoch=4), 30)), bucket=SLOTS)
    found = {r.slot: r for r in results(ledger)}
    assert isinstance(found[0], Mismatch)
    assert found[0].at_fault
    says = "the device did not accept the row" if wrong == "accepted" else f"{wrong} {receipt[wrong]} instead of "
    assert re.search(rf"slot 0: .*{says}", found[0].why)
    assert ledger.state(0) == STATE, "the ledger moves on only with a receipt that matches"


@pytest.mark.parametrize(
    ("wrong", "accepted"), [("position", 1), ("table", 1), ("position", 0), ("table", 0), ("seed", 1)]
)
def test_a_row_that_wrote_out_of_its_place_holds_back_every_slot(
    ledger: Ledger, device: DeviceState, wrong: str, accepted: int
) -> None:
    """Its neighbours' receipts match, but the KV they computed from may be gone; slots outside the step's bucket are no safer."""
    states = [replace(STATE, epoch=epoch) for epoch in (3, 4, 5)]
    for slot, state in enumerate(states):
        ledger.seed(slot, state)
    rows = [honest(device, state, 20 + slot) for slot, state in enumerate(states)]
    rows[1] |= {wrong: rows[1][wrong] + 1, "accepted": accepted}
    ledger.dispatched(Device().step(rows[0], rows[1], idle()), bucket=2)
    found = results(ledger)
    if wrong == "seed" or not accepted:
        assert found[0] == Release(0, 20, ended=False)
        assert isinstance(found[1], Mismatch)
        assert (found[1].slot, found[1].astray, found[1].at_fault, len(found)) == (1, False, True, 2)
        return
    assert [(r.slot, r.astray, r.at_fault) for r in found if isinstance(r, Mismatch)] == [
        (0, False, False),
        (1, True, True),
        (2, False, False),
    ]
    assert [ledger.state(slot) for slot in range(3)] == states


def test_an_idle_row_that_acted_leaves_the_ledger_where_it_was(ledger: Ledger, device: DeviceState) -> None:
    ledger.seed(0, STATE)
    ledger.dispatched(Device().step(honest(device, STATE, 20), honest(device, STATE, 21)), bucket=SLOTS)
    with pytest.raises(StaleTrace, match="slot 1 is idle"):
        results(ledger)
    assert ledger.state(0) == STATE


def test_all_wrong_fields_are_named(ledger: Ledger, device: DeviceState) -> None:
    ledger.seed(0, STATE)
    receipt = honest(device, STATE, 20) | {"token": 99, "seed": 0}
    ledger.dispatched(Device().step(receipt), bucket=SLOTS)
    assert results(ledger) == [Mismatch(0, "slot 0: token 99 instead of 11, seed 0 instead of -7")]


@pytest.mark.clause("C6")
def test_receipts_of_an_older_epoch_no_longer_concern_the_slot(ledger: Ledger, device: DeviceState) -> None:
    ledger.seed(0, STATE)
    steps = Device()
    ledger.dispatched(steps.step(honest(device, STATE, 20)), bucket=SLOTS)
    new = replace(STATE, epoch=8, token=50, position=6)
    ledger.seed(0, new)
    ledger.dispatched(steps.step(honest(device, new, 60)), bucket=SLOTS)
    assert results(ledger) == [Release(0, 60, ended=False)]


def test_a_receipt_of_another_epoch_is_a_mismatch_for_a_step_sent_in_this_one(
    ledger: Ledger, device: DeviceState
) -> None:
    ledger.seed(0, STATE)
    ledger.dispatched(Device().step(honest(device, replace(STATE, epoch=2), 20)), bucket=SLOTS)
    assert results(ledger) == [Mismatch(0, "slot 0: epoch 2 instead of 3")]


@pytest.mark.parametrize(
    ("token", "position", "ended"), [(20, 4, False), (20, 8, True), (40, 4, True), (2, 4, True), (41, 4, False)]
)
def test_a_row_ends_at_its_limit_and_at_each_stop_token(
    ledger: Ledger, device: DeviceState, token: int, position: int, ended: bool
) -> None:
    state = replace(STATE, position=position)
    ledger.seed(0, state)
    ledger.dispatched(Device().step(honest(device, state, token)), bucket=SLOTS)
    assert results(ledger) == [Release(0, token, ended)]
    assert ledger.active == ([] if ended else [0])


def test_steps_dispatched_before_a_row_was_known_to_have_ended_release_nothing(
    ledger: Ledger, device: DeviceState
) -> None:
    ledger.seed(0, STATE)
    steps = Device()
    ledger.dispatched(steps.step(honest(device, STATE, 40)), bucket=SLOTS)
    ledger.dispatched(steps.step(idle()), bucket=SLOTS)
    ledger.dispatched(steps.step(idle()), bucket=SLOTS)
    assert results(ledger) == [Release(0, 40, ended=True)]


@pytest.mark.parametrize("kind", ["never seeded", "ended", "outside the bucket when sent"])
def test_an_idle_row_that_the_device_ran_is_an_error(ledger: Ledger, device: DeviceState, kind: str) -> None:
    steps = Device()
    if kind == "ended":
        ledger.seed(0, STATE)
        ledger.dispatched(steps.step(honest(device, STATE, 40)), bucket=SLOTS)
        ledger.dispatched(steps.step(honest(device, STATE.advanced(40), 41)), bucket=SLOTS)
    else:
        if kind != "never seeded":
            ledger.seed(0, STATE)
        ledger.dispatched(steps.step(honest(device, STATE, 40)), bucket=0 if kind != "never seeded" else SLOTS)
    with pytest.raises(StaleTrace, match=r"slot 0 is idle and the device ran it at position [45]"):
        results(ledger)


def asks(ledger: Ledger) -> bool:
    """A call, for the type checker takes a property to be what it was a line before."""
    return ledger.must_read_now


# -- reading behind ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_steps_are_read_in_order_and_no_earlier_than_the_lag_asks(
    ledger: Ledger, device: DeviceState, lag: int
) -> None:
    ledger.seed(0, STATE)
    steps, state = Device(), STATE
    for token in (20, 21, 22, 23):
        ledger.dispatched(steps.step(honest(device, state, token)), bucket=SLOTS)
        state = state.advanced(token)
    found = results(ledger, lag)
    assert found == [Release(0, t, ended=False) for t in (20, 21, 22, 23)[: 4 - lag]]
    assert (steps.read, ledger.in_flight) == ([1, 2, 3, 4][: 4 - lag], lag)


def test_a_seeds_first_step_asks_to_be_read_at_once(ledger: Ledger, device: DeviceState) -> None:
    ledger.seed(0, STATE)
    assert not asks(ledger), "nothing was dispatched yet"
    steps = Device()
    ledger.dispatched(steps.step(honest(device, STATE, 20)), bucket=SLOTS)
    assert asks(ledger)
    results(ledger)
    ledger.dispatched(steps.step(honest(device, STATE.advanced(20), 21)), bucket=SLOTS)
    assert not asks(ledger)
    ledger.seed(1, replace(STATE, epoch=5))
    ledger.dispatched(steps.step(idle()), bucket=1)
    assert not asks(ledger), "slot 1 is outside that bucket"
    ledger.dispatched(steps.step(idle()), bucket=2)
    assert asks(ledger)


def test_a_slot_is_not_dispatched_past_its_limit(ledger: Ledger, device: DeviceState) -> None:
    ledger.seed(0, replace(STATE, limit=STATE.position + 2))
    steps = Device()
    for count in (1, 2):
        assert ledger.active == [0]
        assert ledger.next_position(0) == STATE.position + count - 1
        ledger.dispatched(steps.step(idle()), bucket=1)
    assert ledger.active == []


def test_a_receipt_is_held_against_the_table_row_its_step_was_sent_with(ledger: Ledger, device: DeviceState) -> None:
    ledger.seed(0, STATE)
    steps = Device()
    ledger.dispatched(steps.step(honest(device, STATE, 20)), bucket=SLOTS)
    ledger.grow(0, (5, 2, 9))
    grown = replace(STATE.advanced(20), blocks=(5, 2, 9))
    ledger.dispatched(steps.step(honest(device, grown, 21)), bucket=SLOTS)
    ledger.dispatched(steps.step(honest(device, replace(grown.advanced(21), blocks=(5, 2)), 22)), bucket=SLOTS)
    found = results(ledger)
    assert found[:2] == [Release(0, 20, ended=False), Release(0, 21, ended=False)]
    assert isinstance(found[2], Mismatch)
    assert "table" in found[2].why


# -- digests -----------------------------------------------------------------------------------------------------------
INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32, min_size=1, max_size=40), st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_digest_sees_a_change_of_any_one_column(row: list[int], data: st.DataObject) -> None:
    column = data.draw(st.integers(0, len(row) - 1))
    other = data.draw(INT32.filter(lambda x: x != row[column]))
    changed = [*row[:column], other, *row[column + 1 :]]
    assert digest(np.array(row, np.int32)) != digest(np.array(changed, np.int32))


@given(st.lists(st.integers(0, 2**20), min_size=2, max_size=40, unique=True), st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_digest_sees_two_blocks_that_changed_places(row: list[int], data: st.DataObject) -> None:
    a, b = data.draw(st.lists(st.integers(0, len(row) - 1), min_size=2, max_size=2, unique=True))
    swapped = list(row)
    swapped[a], swapped[b] = row[b], row[a]
    assert digest(np.array(row, np.int32)) != digest(np.array(swapped, np.int32))


@given(st.lists(INT32, min_size=1, max_size=40))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_host_computes_the_digest_of_wrapping_int32_arithmetic(row: list[int]) -> None:
    """Against Python's exact integers, reduced once at the end."""
    weights = [(((i + 1) * 0x9E3779B1) % 2**32) | 1 for i in range(len(row))]
    exact = sum(x * w for x, w in zip(row, weights, strict=True)) % 2**32
    assert digest(np.array(row, np.int32)) == (exact - 2**32 if exact >= 2**31 else exact)
