"""Device truth: a row damaged on the device never becomes a token, is re-seeded and counted, and never harms a neighbour."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.runtime import Engine, Model, Request, SamplingParams
from forebay.runtime.core import MAX_RESEEDS
from forebay.runtime.decoder import Decoder
from forebay.runtime.state import SlotState
from forebay.specs import Backend
from forebay.specs.errors import DeviceLost, StaleTrace
from tests.runtime.harness import prompt
from tests.runtime.scene import BLOCK, Scene, assert_all_back, scene_engine, writes_checked

# -- rows damaged in the middle of a request ---------------------------------------------------------------------------


def damage(engine: Engine, slot: int, kind: str) -> None:
    """Change what the device holds of a running row."""
    device, backend, state = engine._parts.device, engine.backend, engine._core.decoder.ledger.state(slot)
    position = engine._core.decoder.ledger.next_position(slot)
    neighbours = [r for s, r in engine._core.running.items() if s != slot]

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
    tiny_model: Model, backend: Backend, scene_tokens: dict[str, tuple[int, ...]], kind: str, read_behind: int
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
        assert scene.tokens() == {name: scene_tokens[name] for name in "CBZAD"}
        assert engine.report()["engine"]["reseeds"] >= 1
        assert [r.finish_reason for r in scene.requests.values()] == ["length"] * 5
        assert_all_back(engine)


@pytest.mark.clause("C5")
def test_a_row_damaged_again_and_again_is_given_up_and_no_other(
    tiny_model: Model, backend: Backend, monkeypatch: pytest.MonkeyPatch, scene_tokens: dict[str, tuple[int, ...]]
) -> None:
    with scene_engine(tiny_model, backend) as engine:
        scene = Scene(engine)
        scene.add("C", "B", "Z")
        for _ in range(4):
            engine.step()
        b, attempts = scene.requests["B"], 1
        damage(engine, 1, "token")
        whole = Decoder.seed

        def seed(decoder: Decoder, request: Request) -> None:
            nonlocal attempts
            whole(decoder, request)
            if request is b:
                damage(engine, 1, "token")
                attempts += 1

        monkeypatch.setattr(Decoder, "seed", seed)
        while b.finish_reason is None:
            engine.step()
        assert (attempts, b.finish_reason) == (MAX_RESEEDS + 1, "error")
        assert isinstance(b.error, DeviceLost)
        assert tuple(b.token_ids) == scene_tokens["B"][: len(b.token_ids)]
        scene.end()
        assert {n: t for n, t in scene.tokens().items() if n != "B"} == {n: scene_tokens[n] for n in "CZ"}
        assert_all_back(engine)


@pytest.mark.clause("C5", "C8")
def test_damage_now_and_then_is_borne_for_ever(
    tiny_model: Model, backend: Backend, scene_tokens: dict[str, tuple[int, ...]]
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
            engine.step()
            count += 1
        scene.end()
        assert count > 2 * MAX_RESEEDS
        assert engine.report()["engine"]["reseeds"] == count
        assert scene.tokens() == {name: scene_tokens[name] for name in "CB"}


# -- idle rows ---------------------------------------------------------------------------------------------------------


def wake(engine: Engine, slot: int, block: int) -> None:
    """Make an idle row look like a request that writes into ``block``."""
    state = SlotState(token=30, position=1, epoch=77, limit=40, seed=0, blocks=(block,), stop=())
    engine._parts.device.seed(slot, state)


@pytest.mark.clause("C5")
@pytest.mark.parametrize("read_behind", [0, 2])
def test_an_idle_row_that_the_device_runs_is_an_error_and_no_wrong_token_comes_out(
    tiny_model: Model, backend: Backend, scene_tokens: dict[str, tuple[int, ...]], read_behind: int
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
        assert tuple(a.token_ids) == scene_tokens["A"]
        assert tuple(c.token_ids) == scene_tokens["C"][: len(c.token_ids)]
        assert (c.finish_reason, type(c.error)) == ("error", StaleTrace)
        scene.add("B", "Z", "D")
        scene.end()
        assert {n: t for n, t in scene.tokens().items() if n in "BZD"} == {n: scene_tokens[n] for n in "BZD"}
        assert_all_back(engine)


@pytest.mark.clause("C5", "C6")
def test_a_row_beyond_the_bucket_does_no_harm_and_its_next_request_is_right(
    tiny_model: Model, backend: Backend, monkeypatch: pytest.MonkeyPatch, scene_tokens: dict[str, tuple[int, ...]]
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
        assert scene.tokens() == {name: scene_tokens[name] for name in "CBZ"}
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
            rows = {name: int(backend.fetch(engine._parts.device.scalars[name])[0]) for name in ("position", "visible")}
            assert rows == {"position": -1, "visible": 0}
