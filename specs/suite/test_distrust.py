"""A row that acted where it must not: nothing that it may have written over is used again (clauses C5, L6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from forebay.specs import Backend, StaleTrace
from forebay.specs.suite.stepping import finish, step_to, step_until

MakeEngine = Callable[..., Any]
LIVE, FAMILY, LONG = [*range(3, 15)], [*range(20, 44)], [*range(50, 160)]
BUDGET = 14
"""Tokens a step: the prompt ``LONG`` is computed over some steps beside two rows that decode."""
READ_BEHIND = 3


@dataclass
class Scene:
    """An engine of three slots: ``live`` decodes in the last, ``root`` in the first, ``long`` computes its prompt between them.

    Attributes:
        parked: a second sample of the root's prompt: it waits for a slot and holds the prompt's blocks.
        right: the tokens of each alone.
    """

    engine: Any
    live: Any
    root: Any
    long: Any
    parked: Any
    right: dict[str, list[int]]

    def tokens(self) -> dict[str, list[int]]:
        """What each has made."""
        return {name: list(getattr(self, name).token_ids) for name in self.right}


@pytest.fixture
def scene(backend: Backend, make_engine: MakeEngine, runtime: ModuleType) -> Scene:
    """Every kind of request there is, with three steps in flight."""
    live_params, long_params = (runtime.SamplingParams(max_tokens=n, ignore_eos=True) for n in (30, 6))
    drawn = {"max_tokens": 18, "ignore_eos": True, "temperature": 1.0}
    options = {"max_step_tokens": BUDGET, "read_behind": READ_BEHIND, "num_blocks": 60, "max_len": 144}
    engine = make_engine(backend, **options)
    for _ in range(2):
        engine.add(LIVE, runtime.SamplingParams(max_tokens=1, ignore_eos=True))
    live = engine.add(LIVE, live_params)
    step_to(engine, live, 1)
    root = engine.add(FAMILY, runtime.SamplingParams(**drawn, seed=9, n=2))
    long = engine.add(LONG, long_params)
    step_until(engine, lambda: long.computed)
    (parked,) = root.siblings
    assert (root.slot, long.slot, live.slot, parked.slot) == (0, 1, 2, None)
    assert parked.blocks[0] == root.blocks[0]
    assert root.token_ids
    assert long.computed < len(LONG) - BUDGET
    alone = make_engine(backend, arm="eager", slots=1, max_len=144)
    wanted = {
        "live": (LIVE, live_params),
        "long": (LONG, long_params),
        "root": (FAMILY, runtime.SamplingParams(**drawn, seed=root.seed)),
        "parked": (FAMILY, runtime.SamplingParams(**drawn, seed=parked.seed)),
    }
    right = {name: list(alone.generate([ids], params)[0].token_ids) for name, (ids, params) in wanted.items()}
    return Scene(engine, live, root, long, parked, right)


@pytest.mark.clause("C5", "L6")
@pytest.mark.parametrize("whose", ["long", "parked"])
def test_what_an_astray_row_may_have_written_over_is_computed_anew(
    backend: Backend, internals: ModuleType, scene: Scene, whose: str
) -> None:
    """The row of one request names the first block of another, which has no row: a prompt half computed, or a sample that waits."""
    engine, device = scene.engine, internals.parts_of(scene.engine).device
    victim = getattr(scene, whose)
    row = backend.fetch(device.table)[2:3].copy()
    row[0, :-1] = victim.blocks[0]
    backend.upload(device.table, row, 2)
    step_until(engine, lambda: engine.report()["engine"]["reseeds"])
    assert len(scene.long.prompt) > scene.long.computed
    anew = sum(r.to_compute for r in (scene.live, scene.root, scene.long, scene.parked))
    before = engine.report()["engine"]["prefill_tokens"]
    finish(engine)
    assert scene.tokens() == scene.right
    assert engine.report()["engine"]["prefill_tokens"] - before == anew, "nobody's KV is used again"


@pytest.mark.clause("C5", "L6")
def test_what_a_stale_row_may_have_written_over_is_computed_anew(
    backend: Backend, internals: ModuleType, scene: Scene
) -> None:
    """The device runs a row that the ledger holds idle: what runs ends with the error, and a sample that waits begins anew."""
    engine, device = scene.engine, internals.parts_of(scene.engine).device
    stale = internals.SlotState(7, 2, 1000, 60, 5, tuple(scene.parked.blocks[:1]), ())
    device.seed(1, stale)
    with pytest.raises(StaleTrace, match="slot 1 is idle"):
        finish(engine)
    assert [type(r.error) for r in (scene.live, scene.root, scene.long)] == [StaleTrace] * 3
    assert not scene.parked.finished
    finish(engine)
    assert scene.tokens()["parked"] == scene.right["parked"]
    assert engine.report()["memory"]["blocks_allocated"] == 0
