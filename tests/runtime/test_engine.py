"""The engine: what it refuses, what it counts, what it gives back, and the same tokens however it is run."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from forebay.runtime import BlockAllocator, Engine, Model, SamplingParams, open_backend
from forebay.specs import Backend
from forebay.specs.errors import (
    Cancelled,
)
from tests.runtime.harness import ARMS, PARAMS, PROMPTS, count_lines, make_engine, prompt, tokens_of


# -- the same tokens, however it is run --------------------------------------------------------------------------------
@pytest.mark.clause("C11")
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_the_arms_agree_whatever_runs_beside(
    tiny_model: Model, backend: Backend, expected: list[tuple[int, ...]], arm: str, kv_dtype: str
) -> None:
    with make_engine(tiny_model, backend, arm=arm, kv_dtype=kv_dtype, slots=3, block_size=4, max_len=64) as engine:
        together = tokens_of(engine.generate(PROMPTS, PARAMS))
        assert tokens_of(engine.generate(PROMPTS, PARAMS)) == together
        if kv_dtype == "float32":
            assert together == expected
            return
        alone = [engine.generate([p], s)[0].token_ids for p, s in zip(PROMPTS, PARAMS, strict=True)]
        assert together == alone


@pytest.mark.clause("C11")
@pytest.mark.parametrize(
    ("options", "arm", "captures"),
    [
        ({"capture": "off"}, "hostfree", False),
        ({"capture": "auto"}, "captured", True),
        ({"capture": "required"}, "captured", True),
        ({"capture": "off", "arm": "captured"}, "captured", True),
        ({"capture": "required", "arm": "hostfree"}, "hostfree", False),
        ({"capture": "required", "arm": "eager"}, "eager", False),
    ],
    ids=str,
)
def test_the_capture_switch_is_honoured_and_arm_overrides_it(
    tiny_model: Model, backend: Backend, expected: list[tuple[int, ...]], options: Any, arm: str, captures: bool
) -> None:
    before = count_lines(backend)
    with make_engine(tiny_model, backend, slots=1, max_len=64, **options) as engine:
        assert engine.generate([PROMPTS[0]], PARAMS[0])[0].token_ids == expected[0]
        assert engine.report()["arm"] == arm
    done = count_lines(backend) - before
    assert (done["capture"] > 0, done["replay"] > 0, done["run"] > 0) == (captures, captures, arm != "eager")


@pytest.mark.clause("C5")
@pytest.mark.parametrize("read_behind", [0, 1, 3])
@pytest.mark.parametrize("arm", ["hostfree", "captured"])
def test_reading_behind_changes_no_token_and_a_seeds_first_step_is_read_at_once(
    tiny_model: Model,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[tuple[int, ...]],
    arm: str,
    read_behind: int,
) -> None:
    with make_engine(
        tiny_model, backend, arm=arm, slots=2, block_size=4, max_len=64, read_behind=read_behind
    ) as engine:
        requests = [engine.add(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
        depths = []
        while engine.has_work:
            epoch, started = engine._core.decoder.epoch, engine._core.counts["prefills"]
            engine.step()
            seeded = engine._core.decoder.epoch != epoch
            if seeded:
                assert engine._core.decoder.ledger.in_flight == 0, "the first step of a seed was read at once"
            assert seeded <= (engine._core.counts["prefills"] > started)
            depths.append(engine._core.decoder.ledger.in_flight)
        assert tokens_of(requests) == expected
        assert max(depths) == read_behind
        assert engine.report()["engine"]["reseeds"] == 0


@pytest.mark.clause("D5", "C3")
def test_the_number_of_threads_changes_no_token(tiny_model: Model, expected: list[tuple[int, ...]]) -> None:
    threads = torch.get_num_threads()
    try:
        with (
            open_backend("cpu", threads=2) as two,
            make_engine(tiny_model, two, slots=3, block_size=4, max_len=64) as engine,
        ):
            assert tokens_of(engine.generate(PROMPTS, PARAMS)) == expected
    finally:
        torch.set_num_threads(threads)


def test_tokens_are_told_as_they_come_and_add_up_to_the_results(engine: Engine) -> None:
    told: dict[int, list[int]] = {}
    prompts = [prompt(4, seed=i) for i in range(3)]
    results = engine.generate(
        prompts,
        SamplingParams(max_tokens=6, ignore_eos=True),
        on_token=lambda request, token: told.setdefault(request.index, []).append(token),
    )
    assert [tuple(t) for _, t in sorted(told.items())] == tokens_of(results)
    assert [list(r.prompt_token_ids) for r in results] == prompts
    assert engine.generate([]) == []


@pytest.mark.clause("C4")
def test_a_request_ends_at_the_models_end_token_at_its_own_and_not_when_told_to_ignore(
    tiny_model: Model, backend: Backend
) -> None:
    """A stop token ends it wherever it comes up: as the prompt's own first token, at the first step, later."""
    with make_engine(tiny_model, backend, slots=2, block_size=4, max_len=64) as engine:
        whole = engine.generate([prompt(8)], SamplingParams(max_tokens=20, ignore_eos=True))[0].token_ids
        assert len(whole) == 20
        for at in (0, 1, 2, 7):
            assert whole.index(whole[at]) == at
            result = engine.generate([prompt(8)], SamplingParams(max_tokens=20, stop_token_ids=(whole[at],)))[0]
            assert (result.token_ids, result.finish_reason) == (whole[: at + 1], "stop")
        eos = dataclasses.replace(tiny_model.config, eos_token_ids=(whole[5],))
        opened = copy.copy(tiny_model.folder)
        object.__setattr__(opened, "config", eos)
        model = dataclasses.replace(tiny_model, folder=opened)
    with make_engine(model, backend, slots=2, block_size=4, max_len=64) as engine:
        ended, ignoring = (
            engine.generate([prompt(8)], SamplingParams(max_tokens=20, ignore_eos=ignore))[0]
            for ignore in (False, True)
        )
    assert (ended.token_ids, ended.finish_reason) == (whole[:6], "stop")
    assert (ignoring.token_ids, ignoring.finish_reason) == (whole, "length")


# -- more requests than room -------------------------------------------------------------------------------------------
@pytest.mark.clause("L5")
@pytest.mark.parametrize("read_behind", [0, 3])
def test_requests_wait_for_blocks_in_order_and_none_runs_out_of_them(
    tiny_model: Model, backend: Backend, read_behind: int
) -> None:
    """A growing request that finds the pool empty has the youngest one give way: first tokens come in the order of arrival."""
    with make_engine(
        tiny_model, backend, slots=4, block_size=2, num_blocks=12, max_len=22, read_behind=read_behind
    ) as engine:
        prompts, params = (
            [prompt(1 + i % 7, seed=i) for i in range(14)],
            [SamplingParams(max_tokens=1 + (5 * i) % 15, ignore_eos=True) for i in range(14)],
        )
        started: list[int] = []
        requests = [engine.add(p, s) for p, s in zip(prompts, params, strict=True)]
        while engine.has_work:
            engine.step()
            started += [r.index for r in requests if r.token_ids and r.index not in started]
            held = [b for r in requests for b in r.blocks]
            assert len(held) == len(set(held)) == engine.report()["memory"]["blocks_allocated"]
        assert engine.report()["engine"]["preemptions"] > 0
        assert started == sorted(started) == list(range(14))
        assert [len(r.token_ids) for r in requests] == [s.max_tokens for s in params]
    with make_engine(tiny_model, backend, arm="eager", slots=1, block_size=16, max_len=22) as alone:
        assert tokens_of(requests) == [
            alone.generate([p], s)[0].token_ids for p, s in zip(prompts, params, strict=True)
        ]


@pytest.mark.clause("L5", "C5")
@pytest.mark.case("C03")
@pytest.mark.parametrize("leaves_by", ["stop", "error"])
def test_no_block_is_handed_out_while_a_step_in_flight_may_write_it(
    tiny_model: Model, backend: Backend, monkeypatch: pytest.MonkeyPatch, leaves_by: str
) -> None:
    """A request's end is known while later steps, in which its row is still among the rows, are on their way.

    R and T hold the pool between them; R leaves, and S waits for R's slot and blocks while T goes on.
    """
    with make_engine(tiny_model, backend, slots=2, block_size=2, num_blocks=29, max_len=32, read_behind=3) as engine:
        whole = engine.generate([prompt(4)], SamplingParams(max_tokens=24, ignore_eos=True))[0].token_ids
        stop = (whole[9],) if leaves_by == "stop" else ()
        r = engine.add(prompt(4), SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=stop))
        t = engine.add(prompt(2), SamplingParams(max_tokens=27, ignore_eos=True))
        s = engine.add(prompt(5), SamplingParams(max_tokens=20, ignore_eos=True))
        blocks_of_r: set[int] = set()
        reused = waited = False
        allocate_any = BlockAllocator.allocate

        def allocate(allocator: BlockAllocator, n: int) -> list[int]:
            nonlocal reused
            blocks = allocate_any(allocator, n)
            in_flight = {
                b for step in engine._core.decoder.ledger._pending for _, held in step.slots.values() for b in held
            }
            assert in_flight.isdisjoint(blocks)
            reused |= not blocks_of_r.isdisjoint(blocks)
            return blocks

        monkeypatch.setattr(BlockAllocator, "allocate", allocate)
        for _ in range(8):
            engine.step()
            blocks_of_r |= set(r.blocks)
        if leaves_by == "error":
            assert engine._core.decoder.ledger.in_flight == 3
            engine._core.end(r, "error", Cancelled("given up"))
        while engine.has_work:
            if r.finish_reason is not None and s.slot is None and s.finish_reason is None:
                waited |= engine.report()["memory"]["blocks_in_flight"] > 0
            engine.step()
        assert waited, "S had to wait for the last step that could still write R's blocks"
        assert reused, "and then had some of them"
        assert (len(s.token_ids), len(t.token_ids), r.finish_reason) == (20, 27, leaves_by)
        memory = engine.report()["memory"]
        assert (memory["blocks_free"], memory["blocks_in_flight"]) == (28, 0)
