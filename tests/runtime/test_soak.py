"""A thousand requests that come and go at random in a small pool: all end, nobody starves, and memory returns to the start."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from forebay.runtime import Model, Request, SamplingParams
from forebay.specs import Backend
from tests.runtime.books import check_books, check_empty
from tests.runtime.harness import make_engine, prompt
from tests.runtime.plain import Plain

STEMS = [prompt(24, seed=s) for s in range(4)]
MOST = 24 + 2 + 24 - 1

SOAKS: list[tuple[int, dict[str, Any]]] = [
    (120, {"arm": "eager", "block_size": 4, "num_blocks": 20, "slots": 4, "prefix_reuse": True}),
    (120, {"arm": "hostfree", "block_size": 2, "num_blocks": 34, "slots": 4, "read_behind": 2, "preempt": "offload"}),
    (1000, {"arm": "captured", "block_size": 4, "num_blocks": 18, "slots": 4, "read_behind": 2, "prefix_reuse": True}),
    (
        120,
        {"arm": "captured", "block_size": 1, "num_blocks": 60, "slots": 3, "prefix_reuse": True, "preempt": "offload"},
    ),
    (
        120,
        {"arm": "captured", "block_size": 4, "num_blocks": 18, "slots": 4, "prefill_on": "cpu", "preempt": "offload"},
    ),
]
"""Requests and engine: a thousand through one engine, and fewer through others: every arm, both ways to preempt."""


@pytest.mark.clause("L5", "L6", "C5", "C11", "S1")
@pytest.mark.parametrize(("number", "options"), SOAKS, ids=lambda x: x["arm"] if isinstance(x, dict) else str(x))
def test_all_of_many_requests_end_and_memory_returns_to_the_start(
    tiny_model: Model, backend: Backend, plain: Plain, number: int, options: dict[str, Any]
) -> None:
    """Requests come in bursts; one in eight is cancelled at some time; some bring forks, some are more urgent than others."""
    chance = random.Random(number + len(str(options)))  # noqa: S311 - a draw of test cases
    settings = {"max_len": MOST + 1, "max_step_tokens": 16, "max_waiting": 12, "priority_steps": 20, **options}
    made: list[Request] = []
    roots: list[Request] = []
    deepest = 0
    with make_engine(tiny_model, backend, **settings) as engine:
        for _ in range(20_000):
            live = [r for r in roots if not r.finished]
            while len(roots) < number and engine._core.waiting.has_room and chance.random() < 0.35:
                roots.append(engine.add(*request(chance), priority=chance.choice([0, 0, 0, 1]), cache_salt=""))
                made += [roots[-1], *roots[-1].siblings]
            if live and chance.random() < 0.02:
                engine.cancel(chance.choice(live))
            if not engine.has_work and len(roots) >= number:
                break
            engine.step()
            deepest = max(deepest, len(engine._core.waiting))
            if engine._core.steps % 50 == 0:
                check_books(engine, [r for r in made if not r.finished])
        assert len(roots) == number
        assert not engine.has_work
        report = engine.report()
        counts, worst = report["engine"], report["latencies"]["worst_wait_steps"]
        ends = Counter(r.finish_reason for r in made)
        assert set(ends) <= {"stop", "length", "cancelled"}
        assert ends["cancelled"] == counts["cancelled"] > 0
        assert counts["finished"] == len(made) - ends["cancelled"]
        assert counts["preemptions"] > 5
        assert counts["offloaded"] >= counts["restored"]
        assert (counts["restored"] > 0) == (options.get("preempt") == "offload")
        # At most the queue, forks and those more urgent by one step of priority stand before it, each for MOST steps or so.
        assert 0 < worst <= (deepest + settings["slots"]) * MOST + 20
        assert worst < engine._core.steps / 2, "the bound means something"
        check_sample(chance, made, plain)
        check_empty(engine)


def request(chance: random.Random) -> tuple[list[int], SamplingParams]:
    """A prompt of mixed length that often begins as others do, and how much is to be made of it."""
    ids = chance.choice(STEMS)[: chance.choice([1, 2, 5, 9, 16, 24])] + (
        [chance.randrange(3, 200)] * chance.randrange(3)
    )
    count = chance.choice([1, 1, 1, 1, 2, 3])
    return ids, SamplingParams(max_tokens=chance.choice([1, 3, 8, 8, 24]), n=count, ignore_eos=chance.random() < 0.7)


def check_sample(chance: random.Random, made: list[Request], plain: Plain) -> None:
    """Forty of the requests have the tokens of each alone, as far as they came."""
    for r in chance.sample(made, 40):
        right = plain.tokens(r)
        assert tuple(r.token_ids) == right[: len(r.token_ids)]
        assert len(r.token_ids) == len(right) or r.finish_reason == "cancelled"
