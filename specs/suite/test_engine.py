"""The engine over the judged backend: arms, boundaries and counts (clauses D8, S6, C3 to C11)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from forebay.specs import Backend
from forebay.specs.errors import InvalidLayout
from forebay.specs.suite.kv import block_contents, refused, same_arrays, unchanged
from forebay.specs.suite.stepping import step_to
from forebay.specs.testing import claiming

MakeEngine = Callable[..., Any]
PROMPTS = [[*range(3, 17)], [*range(7, 37)], [20], [*range(21, 43)], [*range(30, 38)]]
LENGTHS = (20, 12, 30, 14, 18)
"""Requests for three slots, each of two or three blocks: the last two begin where others have ended."""
INPUTS = ("token", "position", "visible", "epoch", "limit", "seed", "table", "stop")


def params(runtime: ModuleType, **options: Any) -> list[Any]:
    """Of each request, with a stop token of its own."""
    return [runtime.SamplingParams(max_tokens=n, stop_token_ids=(n,), ignore_eos=True, **options) for n in LENGTHS]


def generate(engine: Any, runtime: ModuleType, **options: Any) -> list[list[int]]:
    return [list(r.token_ids) for r in engine.generate(PROMPTS, params(runtime, **options))]


@pytest.fixture
def alone(backend: Backend, make_engine: MakeEngine, runtime: ModuleType) -> list[list[int]]:
    """Tokens of each prompt by itself, the host supplying every id."""
    engine = make_engine(backend, arm="eager", slots=1)
    tokens = [list(engine.generate([p], s)[0].token_ids) for p, s in zip(PROMPTS, params(runtime), strict=True)]
    assert len(set(map(tuple, tokens))) == len(PROMPTS), "different prompts have the same answer"
    return tokens


@pytest.mark.clause("C11", "C3", "C4", "C6")
def test_every_arm_gives_the_same_tokens(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, alone: list[list[int]]
) -> None:
    for options in ({"arm": "eager"}, {"capture": "off"}, {"capture": "auto"}, {"capture": "auto", "read_behind": 3}):
        engine = make_engine(backend, **options)
        before = backend.counters.replay
        assert generate(engine, runtime) == alone, options
        assert (backend.counters.replay > before) is (options.get("capture") == "auto")
        assert engine.report()["engine"]["reseeds"] == 0


@pytest.mark.clause("C11", "C4", "C6")
def test_draws_are_the_same_in_every_arm_and_batch(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType
) -> None:
    options = {"temperature": 0.8, "top_k": 50, "seed": 5, "repetition_penalty": 1.1}
    engines = [make_engine(backend, arm="eager"), make_engine(backend), make_engine(backend, slots=1)]
    answers = [generate(engine, runtime, **options) for engine in engines]
    assert answers[0] == answers[1] == answers[2]
    assert [engine.report()["engine"]["reseeds"] for engine in engines] == [0, 0, 0]
    assert answers[0] != generate(make_engine(backend), runtime, **{**options, "seed": 6})


@pytest.mark.clause("C4", "C9")
def test_a_steady_step_uploads_nothing(backend: Backend, make_engine: MakeEngine, runtime: ModuleType) -> None:
    """One block is enough for the whole request: from the third step on nothing goes up, and every step is a replay."""
    engine = make_engine(backend, slots=1, block_size=32)
    engine.add(PROMPTS[2], runtime.SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(4):
        engine.step()
    c = backend.counters
    before = (c.uploads, c.run, c.capture, c.syncs, c.replay)
    for _ in range(8):
        assert len(engine.step()) == 1
    assert (c.uploads, c.run, c.capture, c.syncs, c.replay - 8) == before


@pytest.mark.clause("C4", "W9")
def test_a_table_row_goes_up_when_a_block_is_added_and_only_then(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, alone: list[list[int]]
) -> None:
    engine = make_engine(backend, slots=1)
    request = engine.add(PROMPTS[2], runtime.SamplingParams(max_tokens=LENGTHS[2], ignore_eos=True))
    for _ in range(4):
        engine.step()
    uploads = []
    while engine.has_work:
        before = backend.counters.uploads
        engine.step()
        uploads.append(backend.counters.uploads - before)
    assert list(request.token_ids) == alone[2]
    assert engine.report()["engine"]["reseeds"] == 0
    assert set(uploads) == {0, 1}
    assert 1 <= sum(uploads) <= 3


def skip_input(monkeypatch: pytest.MonkeyPatch, internals: ModuleType, backend: Backend, name: str) -> list[int]:
    """From the second seed of slot 0 on, once, leave one input of it as it was; returns the epochs for which it happened."""
    state = internals.DeviceState
    whole, skipped, seeds = state.seed, list[int](), list[int]()

    def seed(device: Any, slot: int, fresh: Any) -> None:
        buffer = {"table": device.table, "stop": device.stop}.get(name) or device.scalars[name]
        stale = backend.fetch(buffer)[slot : slot + 1]
        whole(device, slot, fresh)
        seeds.append(slot)
        if slot == 0 and seeds.count(0) == 2:
            backend.upload(buffer, stale, slot)
            skipped.append(fresh.epoch)

    monkeypatch.setattr(state, "seed", seed)
    return skipped


@pytest.mark.clause("C5", "C6")
@pytest.mark.refuses("C5")
@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_was_not_seeded_costs_a_reseed_and_no_token(
    backend: Backend,
    make_engine: MakeEngine,
    runtime: ModuleType,
    internals: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The second request of a slot finds one input as the first left it: nothing is released from it, and its tokens are right."""
    requests = (([*range(3, 15)], 24, 1, (9,)), ([*range(40, 64)], 20, 2, (11,)))
    settings = [
        runtime.SamplingParams(max_tokens=n, seed=seed, stop_token_ids=stop, ignore_eos=True)
        for _, n, seed, stop in requests
    ]
    prompts = [p for p, *_ in requests]
    right = [
        list(make_engine(backend, slots=1, arm="eager").generate([p], s)[0].token_ids)
        for p, s in zip(prompts, settings, strict=True)
    ]
    skipped = skip_input(monkeypatch, internals, backend, name)
    engine = make_engine(backend, slots=1, num_blocks=30)
    got = [list(engine.generate([p], s)[0].token_ids) for p, s in zip(prompts, settings, strict=True)]
    assert skipped
    assert got == right
    assert engine.report()["engine"]["reseeds"] == 1


@pytest.mark.clause("C5")
@pytest.mark.refuses("C5")
@pytest.mark.parametrize("damage", ["stamp", "page", "visible", "limit", "epoch"])
def test_a_row_that_does_not_check_writes_nothing(
    backend: Backend,
    make_engine: MakeEngine,
    runtime: ModuleType,
    internals: ModuleType,
    alone: list[list[int]],
    damage: str,
) -> None:
    """Damage to a live row: the step changes no byte of the pool and releases nothing; the tokens are right in the end."""
    engine = make_engine(backend, slots=1, block_size=32, read_behind=0)
    request = engine.add(PROMPTS[2], runtime.SamplingParams(max_tokens=LENGTHS[2], ignore_eos=True))
    for _ in range(4):
        engine.step()
    device, known = internals.parts_of(engine).device, list(request.token_ids)
    buffer = device.table if damage in ("stamp", "page") else device.scalars[damage]
    row = backend.fetch(buffer)[:1].copy()
    if damage in ("stamp", "page"):
        row[0, -1 if damage == "stamp" else 0] = 0
    else:
        row[0] = {"visible": row[0] + 1, "limit": 0, "epoch": row[0] + 1}[damage]
    backend.upload(buffer, row, 0)
    with unchanged(backend, internals.parts_of(engine).pool):
        assert engine.step() == []
    assert list(request.token_ids) == known
    while engine.has_work:
        engine.step()
    assert list(request.token_ids) == alone[2]
    counts = engine.report()["engine"]
    assert (counts["reseeds"], counts["prefills"]) == (1, 2)


@pytest.mark.clause("C6")
@pytest.mark.parametrize("claims", [{}, {"recapture_at_boundary": True}], ids=["declared", "recapture"])
def test_a_boundary_goes_on_replaying_or_captures_anew(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, claims: dict[str, bool]
) -> None:
    """Where a backend declares it, a boundary releases the trace, runs once and captures on the next step; else nothing of it."""
    with claiming(backend, **claims):
        declared = backend.capabilities.recapture_at_boundary
        engine = make_engine(backend, slots=1, block_size=32)
        once = runtime.SamplingParams(max_tokens=8, ignore_eos=True)
        first, other = (engine.generate([prompt], once)[0].token_ids for prompt in (PROMPTS[0], PROMPTS[1]))
        assert first != other
        c = backend.counters
        runs, captures, recaptures = c.run, c.capture, c.recapture
        assert engine.generate([PROMPTS[0]], once)[0].token_ids == first
        assert (c.run - runs, c.capture - captures, c.recapture - recaptures) == ((1, 1, 1) if declared else (0, 0, 0))
        engine.close()


@pytest.mark.clause("C6")
@pytest.mark.parametrize("capture", ["off", "auto"])
def test_a_cancelled_request_writes_nothing_any_more(
    backend: Backend,
    make_engine: MakeEngine,
    runtime: ModuleType,
    internals: ModuleType,
    alone: list[list[int]],
    capture: str,
) -> None:
    """The other rows of its bucket go on, and its blocks keep their bytes: they may be somebody else's by now."""
    engine = make_engine(backend, slots=2, block_size=32, capture=capture)
    gone = engine.add(PROMPTS[1], runtime.SamplingParams(max_tokens=60, ignore_eos=True))
    stays = engine.add(PROMPTS[2], runtime.SamplingParams(max_tokens=LENGTHS[2], ignore_eos=True))
    for _ in range(6):
        engine.step()
    assert len(gone.token_ids) > 3
    pool, blocks = internals.parts_of(engine).pool, list(gone.blocks)
    engine.cancel(gone)
    before = block_contents(backend, pool, blocks)
    while engine.has_work:
        engine.step()
    same_arrays(block_contents(backend, pool, blocks), before)
    assert list(stays.token_ids) == alone[2]


@pytest.mark.clause("S6", "S1", "C6")
def test_offloaded_requests_come_back_with_their_own_rows(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, alone: list[list[int]]
) -> None:
    """Too few blocks for all: requests give way, their KV is staged back into blocks that others had, partial ones too."""
    for num_blocks in (4, 5, 6):
        engine = make_engine(backend, num_blocks=num_blocks, preempt="offload")
        staged = backend.counters.launches["stage"]
        assert generate(engine, runtime) == alone
        assert engine.report()["engine"]["restored"] > 0
        assert backend.counters.launches["stage"] > staged
        assert engine.report()["memory"]["blocks_allocated"] == 0


@pytest.mark.clause("L5", "C6")
@pytest.mark.parametrize("read_behind", [0, 3])
def test_preempted_requests_are_computed_anew(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, alone: list[list[int]], read_behind: int
) -> None:
    engine = make_engine(backend, num_blocks=6, read_behind=read_behind)
    assert generate(engine, runtime) == alone
    assert engine.report()["engine"]["preemptions"] > 0
    assert engine.report()["memory"]["blocks_allocated"] == 0


@pytest.mark.clause("C6", "C11")
@pytest.mark.parametrize(
    ("temperature", "penalty", "preempt"),
    [(0.0, 1.6, "recompute"), (0.0, 100.0, "offload"), (0.8, 1.6, "offload"), (0.8, 100.0, "recompute")],
)
def test_a_preempted_request_is_penalised_for_its_own_tokens_too(
    backend: Backend,
    make_engine: MakeEngine,
    runtime: ModuleType,
    internals: ModuleType,
    temperature: float,
    penalty: float,
    preempt: str,
) -> None:
    """It has made tokens before it gave way: they are seen as those of the prompt are. The highest penalty lets no token come twice."""
    drawn = {"temperature": temperature, "seed": 4, "repetition_penalty": penalty}
    wanted = runtime.SamplingParams(max_tokens=16, ignore_eos=True, **drawn)
    prompt = [*range(40, 48)]
    right = list(make_engine(backend, slots=1, arm="eager").generate([prompt], wanted)[0].token_ids)
    if penalty == 100:
        assert len({*prompt, *right}) == len(prompt) + len(right)
    engine = make_engine(backend, slots=2, preempt=preempt)
    for number in (1, 9):
        requests = [engine.add(prompt, wanted), engine.add(prompt, wanted)]
        step_to(engine, requests[0], number)
        internals.drain(engine)
        internals.preempt(engine, requests[0])
        while engine.has_work:
            engine.step()
        assert [list(r.token_ids) for r in requests] == [right, right], number
    counts = engine.report()["engine"]
    assert (counts["preemptions"], counts["reseeds"], counts["restored"]) == (2, 0, 2 * (preempt == "offload"))


@pytest.mark.refuses("D8")
def test_an_engine_refuses_heads_that_do_not_divide_before_it_puts_anything_on_the_device(
    backend: Backend, runtime: ModuleType, model: Any
) -> None:
    """However the model was loaded: this one's configuration was never checked by a loader."""
    config = copy.copy(model.config)
    object.__setattr__(config, "num_kv_heads", 3)
    unchecked = replace(model, folder=replace(model.folder, config=config))
    with refused(backend, InvalidLayout, "4 query heads are not a multiple of 3 KV heads"):
        runtime.Engine(unchecked, backend, settings=runtime.Settings(), slots=1, max_len=16)
