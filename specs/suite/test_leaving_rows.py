"""Rows whose request has left: however it left, and in whichever slot, the next step does not act on them (clauses C6, L5)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend
from forebay.specs.suite.kv import block_contents, same_arrays
from forebay.specs.suite.stepping import Clock, finish, step_to

MakeEngine = Callable[..., Any]
SLOTS = 4
"""Buckets of 1, 2 and 4 rows: the last slots are in the largest alone."""
PROMPTS = [[*range(3 + 20 * i, 12 + 20 * i)] for i in range(SLOTS)]
URGENT = [*range(60, 92)]
BUDGET = 8
"""Tokens a step: while three rows decode, the prompt of the urgent request takes its slot for some steps before it has a row."""
LATE = 5.0
LEAVING: dict[str, dict[str, Any]] = {"preempted": {"priority": -1}, "deadline": {"deadline": LATE}}
"""Options of the request that is to leave, by the way it leaves."""


def text_that_comes_up(model: Any, tokens: list[int]) -> tuple[int, str]:
    """How many tokens there are when a string of one letter first comes up, all requests running by then, and the string."""
    decode = model.tokenizer.decode
    for end in range(12, 26):
        text, before = decode(tokens[:end]), decode(tokens[: end - 1])
        if text[-1].isascii() and text.startswith(before) and text[-1] not in before:
            return end, text[-1]
    raise AssertionError("no such text")


@pytest.mark.clause("C6", "L5")
@pytest.mark.parametrize("leaves", ["cancelled", "deadline", "stop string", "preempted"])
def test_whoever_leaves_a_slot_leaves_its_row_idle(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, internals: ModuleType, model: Any, leaves: str
) -> None:
    """In the lowest slot and in the highest, cancelled in each: from the next step on its row stands at position -1, also while the
    slot's next request computes its prompt."""
    plainly = {"max_tokens": 26, "ignore_eos": True}
    alone = make_engine(backend, slots=1, arm="eager")
    right = [list(r.token_ids) for r in alone.generate([*PROMPTS, URGENT], runtime.SamplingParams(**plainly))]
    for slot in range(SLOTS) if leaves == "cancelled" else (0, SLOTS - 1):
        clock = Clock()
        options = {"slots": SLOTS, "max_step_tokens": BUDGET, "read_behind": 2, "num_blocks": 40}
        engine = make_engine(backend, clock=clock, **options)
        position = internals.parts_of(engine).device.scalars["position"]
        end, text = text_that_comes_up(model, right[slot]) if leaves == "stop string" else (12, "")
        requests = []
        for i, prompt in enumerate(PROMPTS):
            leaving = LEAVING.get(leaves, {}) if i == slot else {}
            wanted = runtime.SamplingParams(**plainly, stop=(text,) if text and i == slot else ())
            requests.append(engine.add(prompt, wanted, **leaving))
            step_to(engine, requests[-1], 1)
        assert [r.slot for r in requests] == list(range(SLOTS))
        gone = requests[slot]
        step_to(engine, gone, end)
        clock.now = LATE
        if leaves == "cancelled":
            engine.cancel(gone)
        urgent = engine.add(URGENT, runtime.SamplingParams(max_tokens=4, ignore_eos=True))
        engine.step()
        assert gone.slot is None
        assert urgent.slot == slot
        steps = 0
        while not urgent.token_ids:
            assert backend.fetch(position)[slot] == -1
            assert not urgent.finished
            engine.step()
            steps += 1
        assert steps > 1
        step_to(engine, urgent, 4)
        if leaves == "preempted":
            step_to(engine, gone, end + 2)
        told = {"preempted": None, "stop string": "stop"}.get(leaves, leaves)
        assert gone.finish_reason == told
        assert list(urgent.token_ids) == right[-1][:4]
        for i, request in enumerate(requests):
            assert list(request.token_ids) == right[i][: len(request.token_ids)]
            assert i == slot or len(request.token_ids) > end
        counts = engine.report()["engine"]
        assert (counts["reseeds"], counts["preemptions"]) == (0, leaves == "preempted")


@pytest.mark.clause("C6", "L5")
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_a_row_whose_seed_was_cut_off_does_not_act(
    backend: Backend,
    make_engine: MakeEngine,
    runtime: ModuleType,
    internals: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    behind: bool,
) -> None:
    """An interrupt before or behind each upload of a seed in turn, then the request is cancelled: the device had got some of its row,
    or all."""
    engine = make_engine(backend, slots=2, read_behind=2, block_size=32)
    parts = internals.parts_of(engine)
    params = runtime.SamplingParams(max_tokens=80, ignore_eos=True)
    first = engine.add(PROMPTS[0], runtime.SamplingParams(max_tokens=2, ignore_eos=True))
    stays = engine.add(PROMPTS[1], params)
    step_to(engine, first, 2)
    assert stays.slot == 1
    seed, upload = internals.DeviceState.seed, backend.upload
    left: list[int] = []

    def cut(*arguments: Any) -> None:
        if not left:
            return upload(*arguments)
        left[0] -= 1
        if left[0] or behind:
            upload(*arguments)
        if not left[0]:
            left.clear()
            raise KeyboardInterrupt
        return None

    cuts = 0

    def seeded(device: Any, slot: int, state: Any) -> None:
        left[:] = [cuts + 1]
        try:
            seed(device, slot, state)
        finally:
            monkeypatch.undo()

    while True:
        monkeypatch.setattr(backend, "upload", cut)
        monkeypatch.setattr(internals.DeviceState, "seed", seeded)
        gone = engine.add(PROMPTS[2], params)
        try:
            engine.step()
        except KeyboardInterrupt:
            cuts += 1
        else:
            break
        blocks = list(gone.blocks)
        assert gone.slot == 0
        engine.cancel(gone)
        before = block_contents(backend, parts.pool, blocks)
        for _ in range(2):
            engine.step()
            assert backend.fetch(parts.device.scalars["position"])[0] == -1
        same_arrays(block_contents(backend, parts.pool, blocks), before)
    assert cuts > len(parts.device.scalars), "every input is an upload of its own"
    engine.cancel(gone)
    finish(engine)
    alone = make_engine(backend, slots=1, arm="eager").generate([PROMPTS[1]], params)[0]
    np.testing.assert_array_equal(stays.token_ids, alone.token_ids)
    assert engine.report()["engine"]["reseeds"] == 0
