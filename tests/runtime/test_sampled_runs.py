"""Sampled requests give the same tokens however they are scheduled: chunked, preempted, offloaded, forked, with cached prefixes."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.runtime import Model, SamplingParams
from forebay.specs import Backend
from tests.runtime.harness import ARMS, make_engine, prompt

SHARED = prompt(24, seed=77)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 12, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.02, "logit_bias": {40: 2.0}},
    {},
    {"temperature": 0.9, "logprobs": 3},
    {"repetition_penalty": 1.4},
)
REQUESTS = [
    (
        SHARED[: (0, 8, 13, 24)[i % 4]] + prompt(1 + (7 * i) % 20, seed=i),
        SamplingParams(max_tokens=3 + (11 * i) % 22, ignore_eos=True, seed=i, **KINDS[i % len(KINDS)]),
    )
    for i in range(18)
]

RUNS: dict[str, dict[str, Any]] = {
    "chunked": {"max_step_tokens": 5},
    "read behind": {"read_behind": 2},
    "preempted and recomputed": {"num_blocks": 26},
    "preempted and offloaded": {"num_blocks": 26, "preempt": "offload"},
    "with cached prefixes": {"prefix_reuse": True, "num_blocks": 40},
    "prefilled on the host": {"prefill_on": "cpu", "num_blocks": 26, "preempt": "offload"},
}


@pytest.fixture(scope="module")
def alone(tiny_model: Model, backend: Backend) -> list[tuple[int, ...]]:
    """Each request by itself."""
    with make_engine(tiny_model, backend, slots=1, max_len=96) as engine:
        return [engine.generate([p], s)[0].token_ids for p, s in REQUESTS]


@pytest.mark.clause("C11", "L5", "L6", "S1")
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("run", RUNS)
def test_the_schedule_changes_no_draw(
    tiny_model: Model, backend: Backend, alone: list[tuple[int, ...]], run: str, arm: str
) -> None:
    with make_engine(tiny_model, backend, arm=arm, slots=5, block_size=4, max_len=96, **RUNS[run]) as engine:
        results = engine.generate([p for p, _ in REQUESTS], [s for _, s in REQUESTS])
        assert [r.token_ids for r in results] == alone
        done = engine.report()["engine"]
    if "preempted" in run:
        assert done["preemptions"] > 0
        assert (done["offloaded"] > 0) == ("offloaded" in run)
    if "cached" in run:
        assert done["reused_tokens"] > 0
    assert [r.logprobs is not None for r in results] == [s.logprobs is not None for _, s in REQUESTS]
    assert all(len(r.logprobs) == len(r.token_ids) for r in results if r.logprobs is not None)
