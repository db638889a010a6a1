"""Device truth at request boundaries: an input that was not re-seeded costs a re-seed and no token.

A fault is made the way a bug would make it: an upload that did not happen, so that the row keeps what it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations

import pytest

from forebay.runtime import Model, Request
from forebay.runtime.core import MAX_RESEEDS
from forebay.runtime.state import DeviceState, SlotState
from forebay.specs import Backend
from forebay.specs.errors import DeviceLost
from tests.runtime.scene import Scene, assert_all_back, row_buffer, scene_engine, writes_checked

INPUTS = ("token", "position", "visible", "epoch", "limit", "seed", "table", "stop")
"""Every per-slot input, each uploaded by itself."""


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


def test_the_scene_sets_every_input_of_the_slot_to_something_new(
    tiny_model: Model, backend: Backend, scene_tokens: dict[str, tuple[int, ...]]
) -> None:
    """Otherwise an input that was not re-seeded would be right by luck, and the tests below would prove nothing."""
    with scene_engine(tiny_model, backend) as engine:
        scene = Scene(engine)
        scene.before_b()
        device = engine._parts.device
        stale = {name: backend.fetch(row_buffer(device, name))[0].tolist() for name in INPUTS}
        scene.until(lambda: scene.requests["B"].slot == 0)
        fresh = {name: backend.fetch(row_buffer(device, name))[0].tolist() for name in INPUTS}
        assert [name for name in INPUTS if stale[name] == fresh[name]] == []
        assert scene.stale_block in scene.requests["E"].blocks
        assert stale["limit"] > len(Scene.B[0]), "the stale limit alone would let the row act"
        scene.add("D")
        scene.end()
        assert scene.tokens() == scene_tokens
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
    scene_tokens: dict[str, tuple[int, ...]],
    arm: str,
    skipped: tuple[str, ...],
) -> None:
    with scene_engine(tiny_model, backend, arm) as engine:
        scene = Scene(engine)
        scene.before_b()
        first = engine._core.decoder.epoch + 1
        skipping = Skipping(skipped, lambda slot, state: state.epoch == first)

        def refused(r: Request) -> bool:
            state = None if r.slot is None else engine._core.decoder.ledger.state(r.slot)
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
            assert tuple(released) == scene_tokens["C"][: len(released)]
            assert engine.report()["engine"]["reseeds"] >= 1
            scene.add("D")
            scene.end()
        assert scene.tokens() == scene_tokens
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
    scene_tokens: dict[str, tuple[int, ...]],
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
        assert (result.finish_reason, result.token_ids) == ("error", scene_tokens["B"][:1])
        assert isinstance(result.error, DeviceLost)
        assert f"receipts did not match {MAX_RESEEDS + 1} times in a row (slot 0: " in str(result.error)
        assert sum(faulty for _, _, faulty in skipping.seeds) == MAX_RESEEDS + 1
        assert {name: t for name, t in scene.tokens().items() if name != "B"} == {
            name: t for name, t in scene_tokens.items() if name != "B"
        }
        assert all(r.finish_reason == "length" for name, r in scene.requests.items() if name != "B")
        assert_all_back(engine)
