"""Device truth of sampling: options, bitmap and seed that are stale or damaged never become a token (clauses C5, C6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from forebay.runtime import Engine, Model, SamplingParams
from forebay.runtime.lanes import Lanes
from forebay.runtime.ledger import Ledger, Mismatch, Release
from forebay.runtime.sampling_rows import (
    BIAS_IDS,
    BIAS_VALUES,
    NUMBERS,
    SAMPLING_FIELDS,
    TOP_K,
    Seen,
    expected_sampling,
    options_row,
)
from forebay.runtime.state import RECEIPT_FIELDS, DeviceState, SlotState
from forebay.runtime.variants import GREEDY, Variant
from forebay.specs import Backend, Buffer, Ticket
from forebay.specs.dtypes import HostArray
from tests.runtime.harness import make_engine, prompt, tokens_of

SAMPLED = SamplingParams(
    max_tokens=24,
    ignore_eos=True,
    temperature=0.9,
    top_k=60,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    logit_bias={30: 2.0, 31: -3.0},
    seed=77,
)
REQUESTS = [
    (prompt(5, seed=41), SAMPLED),
    (prompt(4, seed=42), SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.1, seed=5, logprobs=2)),
    (prompt(7, seed=43), SamplingParams(max_tokens=26, ignore_eos=True, seed=6)),
]


def engine_of(model: Model, backend: Backend, read_behind: int = 0) -> Engine:
    return make_engine(model, backend, slots=3, block_size=4, max_len=64, read_behind=read_behind)


@pytest.fixture(scope="module")
def expected(tiny_model: Model, backend: Backend) -> list[tuple[int, ...]]:
    """Tokens of each request alone, in the eager arm: the host itself says what is consumed."""
    with make_engine(tiny_model, backend, arm="eager", slots=1, block_size=4, max_len=64) as engine:
        return [engine.generate([p], s)[0].token_ids for p, s in REQUESTS]


# -- rows damaged in the middle of a request ---------------------------------------------------------------------------
def change(backend: Backend, buffer: Buffer, slot: int, edit: Callable[[HostArray], None]) -> None:
    """Edit one row of a Buffer on the device."""
    row = backend.fetch(buffer)[slot : slot + 1]
    edit(row[0])
    backend.upload(buffer, row, slot)


def flip(column: int, bit: int) -> Callable[[HostArray], None]:
    def edit(row: HostArray) -> None:
        row.view(np.uint32)[column] ^= np.uint32(1 << bit)

    return edit


def replaced(column: int, value: int) -> Callable[[HostArray], None]:
    def edit(row: HostArray) -> None:
        row[column] = value

    return edit


OPTION_DAMAGE = {
    **{f"{name}, lowest bit": flip(i, 0) for i, name in enumerate(NUMBERS)},
    **{f"{name}, exponent": flip(i, 24) for i, name in enumerate(NUMBERS)},
    "temperature 0": replaced(NUMBERS.index("temperature"), 0),
    "temperature NaN": replaced(NUMBERS.index("temperature"), 0x7FC00000),
    "penalty off": replaced(NUMBERS.index("repetition_penalty"), 0x3F800000),
    "top_k": replaced(TOP_K, 59),
    "top_k negative": replaced(TOP_K, -(2**31)),
    "another biased token": replaced(BIAS_IDS.start, 29),
    "biased token far outside": replaced(BIAS_IDS.start + 1, 2**31 - 1),
    "biased token negative": replaced(BIAS_IDS.start + 1, -(2**31)),
    "one bias more": replaced(BIAS_IDS.start + 2, 100),
    "bias, lowest bit": flip(BIAS_VALUES.start, 0),
    "bias infinite": replaced(BIAS_VALUES.start, 0x7F800000),
    "last bias": flip(BIAS_VALUES.stop - 1, 31),
}
SEEN_DAMAGE = {
    "seen: one bit more or less": flip(0, 7),
    "seen: the sign": flip(1, 31),
    "seen: the last word": flip(8, 10),
    "seen: a bit beyond the vocabulary": flip(8, 30),
    "seen: nothing": lambda row: row.fill(0),
}
KINDS = (*OPTION_DAMAGE, *SEEN_DAMAGE, "seed")


def damage(engine: Engine, slot: int, kind: str) -> None:
    device, backend = engine._parts.device, engine.backend
    if kind == "seed":
        backend.upload(device.scalars["seed"], np.array([SAMPLED.seed ^ 1 if SAMPLED.seed else 1], np.int32), slot)
    elif kind in SEEN_DAMAGE:
        change(backend, device.sampling.seen, slot, SEEN_DAMAGE[kind])
    else:
        change(backend, device.sampling.options, slot, OPTION_DAMAGE[kind])


@pytest.mark.clause("C5")
@pytest.mark.parametrize("read_behind", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_row_costs_a_reseed_and_no_token(
    tiny_model: Model, backend: Backend, expected: list[tuple[int, ...]], kind: str, read_behind: int
) -> None:
    with engine_of(tiny_model, backend, read_behind) as engine:
        requests = [engine.add(*r) for r in REQUESTS]
        for _ in range(6):
            engine.step()
        slot, released = requests[0].slot, len(requests[0].token_ids)
        assert slot is not None
        damage(engine, slot, kind)
        engine.step()
        assert len(requests[0].token_ids) <= released + min(read_behind, 1), "what the damaged step made is not out"
        while engine.has_work:
            engine.step()
        assert tokens_of(requests) == expected
        assert engine.report()["engine"]["reseeds"] == 1


@pytest.mark.clause("C5")
def test_a_greedy_row_among_drawn_ones_is_checked_too(
    tiny_model: Model, backend: Backend, expected: list[tuple[int, ...]]
) -> None:
    """A temperature where there was none: the token would be another's choice, and the receipt says so."""
    with engine_of(tiny_model, backend) as engine:
        requests = [engine.add(*r) for r in REQUESTS]
        for _ in range(4):
            engine.step()
        slot = requests[2].slot
        assert slot is not None
        change(backend, engine._parts.device.sampling.options, slot, replaced(0, 0x40000000))
        while engine.has_work:
            engine.step()
        assert tokens_of(requests) == expected
        assert engine.report()["engine"]["reseeds"] == 1


# -- seeding that skips an input ---------------------------------------------------------------------------------------
@pytest.mark.clause("C5", "C6")
@pytest.mark.parametrize("skipped", ["options", "seen"])
def test_an_input_that_was_not_reseeded_costs_one_reseed_and_no_token(
    tiny_model: Model,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[tuple[int, ...]],
    skipped: str,
) -> None:
    """The slot's last request was sampled too, so that its row holds something; the first seed of the next one leaves that there."""
    whole, faults = DeviceState.seed, 1

    def seed(device: DeviceState, slot: int, state: SlotState) -> None:
        nonlocal faults
        buffer = getattr(device.sampling, skipped)
        stale = backend.fetch(buffer)[slot : slot + 1]
        whole(device, slot, state)
        if faults:
            faults -= 1
            assert (stale != backend.fetch(buffer)[slot : slot + 1]).any(), "a stale row that is right proves nothing"
            backend.upload(buffer, stale, slot)

    with make_engine(tiny_model, backend, slots=1, block_size=4, max_len=64) as engine:
        engine.generate([prompt(9, seed=44)], replace(SAMPLED, temperature=1.3, max_tokens=9))
        monkeypatch.setattr(DeviceState, "seed", seed)
        result = engine.generate([REQUESTS[0][0]], SAMPLED)[0]
        assert result.token_ids == expected[0]
        assert engine.report()["engine"]["reseeds"] == 1


@pytest.mark.clause("C6")
def test_an_idle_slot_holds_the_options_of_plain_greedy_decoding(backend: Backend) -> None:
    device = DeviceState(backend, 2, 4, 2, 70)
    seen = Seen.of(SAMPLED, [3, 69])
    device.seed(1, SlotState(1, 2, 3, 9, 4, (1,), (), SAMPLED, seen))
    sampling = device.sampling
    np.testing.assert_array_equal(backend.fetch(sampling.options)[1], options_row(SAMPLED))
    np.testing.assert_array_equal(backend.fetch(sampling.seen)[1], seen.words(3))
    device.idle(1)
    for row in (0, 1):
        np.testing.assert_array_equal(backend.fetch(sampling.options)[row], options_row(SamplingParams()))
        assert not backend.fetch(sampling.seen)[row].any()
    for buffer in device.buffers:
        backend.release(buffer)


# -- a step of the wrong variant ---------------------------------------------------------------------------------------
@pytest.mark.clause("C5")
@pytest.mark.parametrize("made", [GREEDY, Variant(sampled=True), Variant(sampled=True, logprobs=1)], ids=str)
def test_a_step_that_does_less_than_its_rows_ask_for_releases_nothing(
    tiny_model: Model,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[tuple[int, ...]],
    made: Variant,
) -> None:
    whole, faults = Lanes.step, 2

    def step(lanes: Lanes, bucket: int, variant: Variant) -> Ticket:
        nonlocal faults
        faults -= 1
        return whole(lanes, bucket, made if faults >= 0 else variant)

    monkeypatch.setattr(Lanes, "step", step)
    with engine_of(tiny_model, backend) as engine:
        assert tokens_of(engine.generate(*map(list, zip(*REQUESTS, strict=True)))) == expected
        fewer = sum(not made.serves(p) for _, p in REQUESTS)
        assert engine.report()["engine"]["reseeds"] == 2 * fewer > 0


# -- the ledger by itself ----------------------------------------------------------------------------------------------
VOCABULARY = 70
STATE = SlotState(11, 4, 3, 9, -7, (5, 2), (2, 40), replace(SAMPLED, logprobs=2), Seen.of(SAMPLED, [1, 11, 69]))


def emits(device: DeviceState, state: SlotState, token: int, **wrong: int) -> dict[str, HostArray]:
    """What an honest sampled step of one row emits, with some fields of its receipt of sampling changed."""
    receipt = {**device.expected_receipt(state), "accepted": 1, "next_token": token}
    sampling = expected_sampling(state.params, state.seen) | wrong
    return {
        "receipt": np.array([[receipt[n] for n in RECEIPT_FIELDS]], np.int32),
        "sampling": np.array([[sampling[n] for n in SAMPLING_FIELDS]], np.int32),
        "top_ids": np.array([[9, 8, 7, 6, 5]], np.int32),
        "logprobs": np.array([[-3.0, -0.5, -1.0, -1.5, -2.0, -2.5]], np.float32),
    }


def checked(ledger: Ledger, made: dict[str, HostArray]) -> Release | Mismatch:
    ledger.dispatched(Ticket(1, lambda: made, lambda: None), bucket=1)
    ((_, (result,)),) = ledger.read(0)
    return result


@pytest.fixture
def device(backend: Backend) -> DeviceState:
    return DeviceState(backend, 1, 6, 4, VOCABULARY)


@pytest.mark.clause("C5")
def test_a_release_has_the_logprobs_that_were_asked_for(device: DeviceState) -> None:
    ledger = Ledger(device)
    ledger.seed(0, STATE)
    result = checked(ledger, emits(device, STATE, 20))
    assert isinstance(result, Release)
    assert result.logprobs is not None
    assert (result.token, result.logprobs.chosen, result.logprobs.top) == (20, -3.0, ((9, -0.5), (8, -1.0)))
    after = ledger.state(0)
    assert after.seen == Seen.of(SAMPLED, [1, 11, 20, 69])
    assert isinstance(checked(ledger, emits(device, after, 11)), Release)
    assert ledger.state(0).seen == after.seen, "11 had been seen"


@pytest.mark.clause("C5")
@pytest.mark.parametrize("field", SAMPLING_FIELDS)
def test_a_receipt_of_other_options_or_another_bitmap_releases_nothing(device: DeviceState, field: str) -> None:
    ledger = Ledger(device)
    ledger.seed(0, STATE)
    expected = expected_sampling(STATE.params, STATE.seen)[field]
    result = checked(ledger, emits(device, STATE, 20, **{field: expected ^ 1}))
    assert result == Mismatch(0, f"slot 0: {field} {expected ^ 1} instead of {expected}")
    assert ledger.state(0) == STATE


@pytest.mark.clause("C5")
@pytest.mark.parametrize(
    ("left_out", "made"),
    [(("sampling", "top_ids", "logprobs"), "greedy"), (("top_ids", "logprobs"), "sampled")],
    ids=["greedy", "sampled"],
)
def test_a_step_without_what_a_row_needs_is_a_mismatch(
    device: DeviceState, left_out: tuple[str, ...], made: str
) -> None:
    ledger = Ledger(device)
    ledger.seed(0, STATE)
    result = checked(ledger, {k: v for k, v in emits(device, STATE, 20).items() if k not in left_out})
    assert result == Mismatch(0, f"slot 0: the step was {made}, which is not enough for its parameters")
    ledger = Ledger(device)
    plain = replace(STATE, params=SamplingParams(), seen=Seen())
    ledger.seed(0, plain)
    receipt = {"receipt": emits(device, plain, 20)["receipt"]}
    assert checked(ledger, receipt) == Release(0, 20, ended=False)
