"""Device truth: stale or damaged device state never becomes a token, is re-seeded and counted, and never harms a neighbour.

A fault is made the way a bug would make it: an upload that did not happen (the row keeps what it had), or bytes that changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import pytest

from forebay.runtime import Engine, Model, Request, SamplingParams
from forebay.runtime.engine import MAX_RESEEDS
from forebay.runtime.lanes import Lanes
from forebay.runtime.state import DeviceState, SlotState
from forebay.runtime.variants import Variant
from forebay.specs import Backend, Buffer, Ticket
from forebay.specs.errors import DeviceLost, StaleTrace
from tests.runtime.harness import changed_blocks, contents, make_engine, poison, prompt

BLOCK = 4
INPUTS = ("token", "position", "visible", "epoch", "limit", "seed", "table", "stop")
"""Every per-slot input, each uploaded by itself."""


def row_buffer(device: DeviceState, name: str) -> Buffer:
    return {"table": device.table, "stop": device.stop}.get(name) or device.scalars[name]


# -- seeding that skips inputs -----------------------------------------------------------------------------------------
@dataclass
class Skipping:
    """Seeding of chosen requests that leaves some inputs as they were.

    Attributes:
        inputs: what is not uploaded.
        applies: of the seeds so far (epochs from 1), which are faulty.
        seeds: every (slot, epoch) seeded, and whether it was faulty.
    """

    inputs: tuple[str, ...]
    applies: Callable[[int, SlotState], bool]
    seeds: list[tuple[int, int, bool]] = field(default_factory=list)

    @contextmanager
    def patched(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        whole = DeviceState.seed

        def seed(device: DeviceState, slot: int, state: SlotState) -> None:
            faulty = self.applies(slot, state)
            self.seeds.append((slot, state.epoch, faulty))
            buffers = [row_buffer(device, name) for name in (self.inputs if faulty else ())]
            stale = [device._backend.fetch(buffer)[slot : slot + 1] for buffer in buffers]
            whole(device, slot, state)
            for buffer, row in zip(buffers, stale, strict=True):
                device._backend.upload(buffer, row, slot)

        with monkeypatch.context() as patch:
            patch.setattr(DeviceState, "seed", seed)
            yield


@contextmanager
def writes_checked(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, refused: Callable[[Request], bool] = lambda _: False
) -> Iterator[None]:
    """At each step only the block at a running row's position may change; nothing for rows the device must refuse."""
    whole = Lanes.step

    def step(lanes: Lanes, bucket: int, variant: Variant) -> Ticket:
        allowed = {
            r.blocks[engine._ledger.next_position(slot) // BLOCK]
            for slot, r in engine._running.items()
            if slot < bucket and not refused(r)
        }
        before = contents(engine.backend, engine._pool)
        ticket = whole(lanes, bucket, variant)
        assert changed_blocks(before, contents(engine.backend, engine._pool)) <= allowed
        return ticket

    with monkeypatch.context() as patch:
        patch.setattr(Lanes, "step", step)
        yield


class Scene:
    """Three slots. A leaves slot 0 and Z slot 2, C goes on in slot 1; then B comes to slot 0 and E, with A's blocks, to slot 2.

    So B's slot still has A's token, table and the rest, and the block A's table has for B's first position is now E's.
    """

    A = prompt(5, seed=1), SamplingParams(max_tokens=8, ignore_eos=True, seed=11, stop_token_ids=(250, 251))
    C = prompt(2, seed=2), SamplingParams(max_tokens=26, ignore_eos=True, seed=22)
    Z = prompt(30, seed=3), SamplingParams(max_tokens=16, ignore_eos=True, seed=33, stop_token_ids=(252,))
    B = prompt(6, seed=4), SamplingParams(max_tokens=21, ignore_eos=True, seed=44, stop_token_ids=(253,))
    E = prompt(10, seed=6), SamplingParams(max_tokens=15, ignore_eos=True, seed=66)
    D = prompt(9, seed=5), SamplingParams(max_tokens=12, ignore_eos=True, seed=55)

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        poison(engine.backend, engine._pool)
        self.requests: dict[str, Request] = {}

    def add(self, *names: str) -> None:
        for name in names:
            self.requests[name] = self.engine.add(*getattr(self, name))

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(200):
            if done():
                return
            self.engine.step()
        raise AssertionError("the scene does not get there")

    def before_b(self) -> None:
        """Play up to the moment in which B waits for slot 0 and E for slot 2."""
        self.add("A", "C", "Z")
        a, c, z = (self.requests[name] for name in "ACZ")
        self.engine.step()
        assert (a.slot, c.slot, z.slot) == (0, 1, 2)
        self.blocks_of_a = tuple(a.blocks)
        while a.finish_reason is None:
            self.blocks_of_a = tuple(a.blocks)
            self.engine.step()
        self.until(lambda: z.finish_reason is not None)
        assert c.finish_reason is None
        self.add("B", "E")

    @property
    def stale_block(self) -> int:
        """The block that B's first position has in A's table row."""
        return self.blocks_of_a[len(self.B[0]) // BLOCK]

    def end(self) -> None:
        self.until(lambda: not self.engine.has_work)

    def tokens(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(r.token_ids) for name, r in self.requests.items()}


def scene_engine(model: Model, backend: Backend, arm: str = "captured", **options: int) -> Engine:
    return make_engine(model, backend, arm=arm, slots=3, block_size=BLOCK, num_blocks=23, max_len=52, **options)


def assert_all_back(engine: Engine) -> None:
    memory = engine.report()["memory"]
    assert (memory["blocks_free"], memory["blocks_allocated"], memory["blocks_in_flight"]) == (22, 0, 0)


@pytest.fixture(scope="module")
def expected(tiny_model: Model, backend: Backend) -> dict[str, tuple[int, ...]]:
    """Tokens of each request of the scene, alone on an engine of its own, in the eager arm."""
    with scene_engine(tiny_model, backend, "eager") as engine:
        return {
            name: engine.generate([getattr(Scene, name)[0]], getattr(Scene, name)[1])[0].token_ids for name in "ABCDEZ"
        }


def test_the_scene_sets_every_input_of_the_slot_to_something_new(
    tiny_model: Model, backend: Backend, expected: dict[str, tuple[int, ...]]
) -> None:
    """Otherwise an input that was not re-seeded would be right by luck, and the tests below would prove nothing."""
    with scene_engine(tiny_model, backend) as engine:
        scene = Scene(engine)
        scene.before_b()
        device = engine._device
        stale = {name: backend.fetch(row_buffer(device, name))[0].tolist() for name in INPUTS}
        scene.until(lambda: scene.requests["B"].slot == 0)
        fresh = {name: backend.fetch(row_buffer(device, name))[0].tolist() for name in INPUTS}
        assert [name for name in INPUTS if stale[name] == fresh[name]] == []
        assert scene.stale_block in scene.requests["E"].blocks
        assert stale["limit"] > len(Scene.B[0]), "the stale limit alone would let the row act"
        scene.add("D")
        scene.end()
        assert scene.tokens() == expected
        assert engine.report()["engine"]["reseeds"] == 0
        assert_all_back(engine)


SINGLES = [(name,) for name in INPUTS]
PAIRS = list(combinations(INPUTS, 2))


def device_can_tell(skipped: tuple[str, ...]) -> bool:
    """A retired row has position -1 and visible 0; of epoch and table a row holds two halves of one stamp."""
    return "position" in skipped or "visible" in skipped or ("epoch" in skipped) != ("table" in skipped)


@pytest.mark.clause("C5", "C6")
@pytest.mark.parametrize(
    ("arm", "skipped"),
    [("captured", skipped) for skipped in (*SINGLES, *PAIRS, INPUTS)] + [("hostfree", s) for s in SINGLES],
    ids=lambda x: x if isinstance(x, str) else "+".join(x),
)
def test_an_input_that_was_not_reseeded_costs_one_reseed_and_no_token(
    tiny_model: Model,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, tuple[int, ...]],
    arm: str,
    skipped: tuple[str, ...],
) -> None:
    with scene_engine(tiny_model, backend, arm) as engine:
        scene = Scene(engine)
        scene.before_b()
        first = engine._epoch + 1
        skipping = Skipping(skipped, lambda slot, state: state.epoch == first)

        def refused(r: Request) -> bool:
            state = None if r.slot is None else engine._ledger.state(r.slot)
            return state is not None and state.epoch == first and device_can_tell(skipped)

        with skipping.patched(monkeypatch):
            released = scene.requests["C"].token_ids
            if device_can_tell(skipped) or not {"epoch", "table"} <= set(skipped):
                with writes_checked(monkeypatch, engine, refused):
                    engine.step()
            else:
                engine.step()
            assert skipping.seeds[0] == (0, first, True)
            assert len(scene.requests["B"].token_ids) == 1, "only the prompt's own token is out"
            assert tuple(released) == expected["C"][: len(released)]
            assert engine.report()["engine"]["reseeds"] >= 1
            scene.add("D")
            scene.end()
        assert scene.tokens() == expected
        assert engine.report()["engine"]["reseeds"] == len(skipping.seeds) - 3, "B, E and D once each, the rest again"
        if {"epoch", "table"} - set(skipped) or device_can_tell(skipped):
            assert engine.report()["engine"]["reseeds"] == 1
        assert_all_back(engine)


@pytest.mark.clause("C5", "C8")
@pytest.mark.parametrize("read_behind", [0, 2])
@pytest.mark.parametrize("skipped", [*SINGLES, ("position", "visible"), ("epoch", "table")], ids="+".join)
def test_a_seed_that_never_works_ends_its_request_and_no_other(
    tiny_model: Model,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, tuple[int, ...]],
    skipped: tuple[str, ...],
    read_behind: int,
) -> None:
    with scene_engine(tiny_model, backend, read_behind=read_behind) as engine:
        scene = Scene(engine)
        scene.before_b()
        b = scene.requests["B"]
        skipping = Skipping(skipped, lambda slot, state: state.seed == b.params.seed)
        with skipping.patched(monkeypatch):
            scene.until(lambda: b.finish_reason is not None)
            scene.add("D")
            scene.end()
        result = b.result(tiny_model.tokenizer)
        assert (result.finish_reason, result.token_ids) == ("error", expected["B"][:1])
        assert isinstance(result.error, DeviceLost)
        assert f"receipts did not match {MAX_RESEEDS + 1} times in a row (slot 0: " in str(result.error)
        assert sum(faulty for _, _, faulty in skipping.seeds) == MAX_RESEEDS + 1
        assert {name: t for name, t in scene.tokens().items() if name != "B"} == {
            name: t for name, t in expected.items() if name != "B"
        }
        assert all(r.finish_reason == "length" for name, r in scene.requests.items() if name != "B")
        assert_all_back(engine)


# -- rows damaged in the middle of a request ---------------------------------------------------------------------------
def damage(engine: Engine, slot: int, kind: str) -> None:
    """Change what the device holds of a running row."""
    device, backend, state = engine._device, engine.backend, engine._ledger.state(slot)
    position = engine._ledger.next_position(slot)
    neighbours = [r for s, r in engine._running.items() if s != slot]

    def scalar(name: str, value: int) -> None:
        backend.upload(device.scalars[name], np.array([value], np.int32), slot)

    def table(column: int, value: int) -> None:
        row = backend.fetch(device.table)[slot : slot + 1]
        row[0, column] = value
        backend.upload(device.table, row, slot)

    match kind:
        case "token":
            scalar("token", (state.token + 1) % 256)
        case "position back":
            scalar("position", position - 1)
        case "position and visible back":
            scalar("position", position - 1)
            scalar("visible", position)
        case "position and visible ahead":
            scalar("position", position + 1)
            scalar("visible", position + 2)
        case "position idle":
            scalar("position", -1)
        case "visible":
            scalar("visible", position + 2)
        case "epoch":
            scalar("epoch", state.epoch + 1)
        case "limit reached":
            scalar("limit", position)
        case "limit":
            scalar("limit", state.limit + 9)
        case "seed":
            scalar("seed", state.seed ^ 1)
        case "table: an earlier block":
            table(0, neighbours[0].blocks[0])
        case "table: the present block is another request's":
            table(position // BLOCK, neighbours[0].blocks[-1])
        case "table: the present block is out of the pool":
            table(position // BLOCK, 2**31 - 1)
        case "table: the present block is the sink":
            table(position // BLOCK, 0)
        case "stamp":
            table(-1, state.epoch - 1)
        case "stop":
            backend.upload(device.stop, np.full((1, device.max_stop), 7, np.int32), slot)
        case _:
            raise AssertionError(kind)


DAMAGE = (
    "token",
    "position back",
    "position and visible back",
    "position and visible ahead",
    "position idle",
    "visible",
    "epoch",
    "limit reached",
    "limit",
    "seed",
    "table: an earlier block",
    "table: the present block is another request's",
    "table: the present block is out of the pool",
    "table: the present block is the sink",
    "stamp",
    "stop",
)


@pytest.mark.clause("C5")
@pytest.mark.parametrize("read_behind", [0, 2])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_row_damaged_in_the_middle_of_a_request_is_reseeded_and_every_token_is_right(
    tiny_model: Model, backend: Backend, expected: dict[str, tuple[int, ...]], kind: str, read_behind: int
) -> None:
    with scene_engine(tiny_model, backend, read_behind=read_behind) as engine:
        scene = Scene(engine)
        scene.add("C", "B", "Z")
        for _ in range(7):
            engine.step()
        damage(engine, 1, kind)
        engine.step()
        scene.add("A", "D")
        scene.end()
        assert scene.tokens() == {name: expected[name] for name in "CBZAD"}
        assert engine.report()["engine"]["reseeds"] >= 1
        assert [r.finish_reason for r in scene.requests.values()] == ["length"] * 5
        assert_all_back(engine)


@pytest.mark.clause("C5")
def test_a_row_damaged_again_and_again_is_given_up_and_no_other(
    tiny_model: Model, backend: Backend, expected: dict[str, tuple[int, ...]]
) -> None:
    with scene_engine(tiny_model, backend) as engine:
        scene = Scene(engine)
        scene.add("C", "B", "Z")
        for _ in range(4):
            engine.step()
        b, attempts = scene.requests["B"], 0
        while b.finish_reason is None:
            damage(engine, 1, "token")
            engine.step()
            attempts += 1
        assert (attempts, b.finish_reason) == (MAX_RESEEDS + 1, "error")
        assert isinstance(b.error, DeviceLost)
        assert tuple(b.token_ids) == expected["B"][: len(b.token_ids)]
        scene.end()
        assert {n: t for n, t in scene.tokens().items() if n != "B"} == {n: expected[n] for n in "CZ"}
        assert_all_back(engine)


@pytest.mark.clause("C5", "C8")
def test_damage_now_and_then_is_borne_for_ever(
    tiny_model: Model, backend: Backend, expected: dict[str, tuple[int, ...]]
) -> None:
    """The bound is on mismatches in a row: a token in between starts the count anew."""
    with scene_engine(tiny_model, backend) as engine:
        scene = Scene(engine)
        scene.add("C", "B")
        engine.step()
        count = 0
        while scene.requests["B"].finish_reason is None:
            damage(engine, 1, "visible")
            engine.step()
            engine.step()
            count += 1
        scene.end()
        assert count > 2 * MAX_RESEEDS
        assert engine.report()["engine"]["reseeds"] == count
        assert scene.tokens() == {name: expected[name] for name in "CB"}


# -- idle rows ---------------------------------------------------------------------------------------------------------
def wake(engine: Engine, slot: int, block: int) -> None:
    """Make an idle row look like a request that writes into ``block``."""
    state = SlotState(token=30, position=1, epoch=77, limit=40, seed=0, blocks=(block,), stop=())
    engine._device.seed(slot, state)


@pytest.mark.clause("C5")
@pytest.mark.parametrize("read_behind", [0, 2])
def test_an_idle_row_that_the_device_runs_is_an_error_and_no_wrong_token_comes_out(
    tiny_model: Model, backend: Backend, expected: dict[str, tuple[int, ...]], read_behind: int
) -> None:
    """What it wrote may be another request's, so those that run end with the error; the engine is good for new ones."""
    with scene_engine(tiny_model, backend, read_behind=read_behind) as engine:
        scene = Scene(engine)
        scene.add("A", "C")
        a, c = scene.requests["A"], scene.requests["C"]
        scene.until(lambda: a.finish_reason is not None)
        wake(engine, 0, c.blocks[0])
        with pytest.raises(StaleTrace, match="slot 0 is idle and the device ran it at position 1"):
            for _ in range(read_behind + 1):
                engine.step()
        assert tuple(a.token_ids) == expected["A"]
        assert tuple(c.token_ids) == expected["C"][: len(c.token_ids)]
        assert (c.finish_reason, type(c.error)) == ("error", StaleTrace)
        scene.add("B", "Z", "D")
        scene.end()
        assert {n: t for n, t in scene.tokens().items() if n in "BZD"} == {n: expected[n] for n in "BZD"}
        assert_all_back(engine)


@pytest.mark.clause("C5", "C6")
def test_a_row_beyond_the_bucket_does_no_harm_and_its_next_request_is_right(
    tiny_model: Model, backend: Backend, monkeypatch: pytest.MonkeyPatch, expected: dict[str, tuple[int, ...]]
) -> None:
    with scene_engine(tiny_model, backend) as engine:
        scene = Scene(engine)
        scene.add("C")
        for _ in range(3):
            engine.step()
        wake(engine, 1, scene.requests["C"].blocks[0])
        with writes_checked(monkeypatch, engine):
            for _ in range(3):
                engine.step()
            scene.add("B", "Z")
            scene.end()
        assert scene.tokens() == {name: expected[name] for name in "CBZ"}
        assert engine.report()["engine"]["reseeds"] == 0


@pytest.mark.clause("C4", "C5")
def test_a_request_that_ends_leaves_its_row_idle_on_the_device(tiny_model: Model, backend: Backend) -> None:
    """At its limit and at a stop token the step itself retires the row: position -1, visible 0, nothing uploaded."""
    with scene_engine(tiny_model, backend) as engine:
        tokens = engine.generate([prompt(6)], SamplingParams(max_tokens=20, ignore_eos=True))[0].token_ids
        for params in (
            SamplingParams(max_tokens=6, ignore_eos=True),
            SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(tokens[5],)),
        ):
            result = engine.generate([prompt(6)], params)[0]
            assert result.token_ids == tokens[:6]
            rows = {name: int(backend.fetch(engine._device.scalars[name])[0]) for name in ("position", "visible")}
            assert rows == {"position": -1, "visible": 0}
