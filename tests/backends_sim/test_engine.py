"""The engine on the simulated device: the tokens of the cpu backend in every arm, read behind and re-captured (clauses C3 to C11)."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.runtime import Model, SamplingParams, Settings, open_backend
from tests.backends_sim.opened import launched, open_sim
from tests.runtime.harness import ARMS, PARAMS, PROMPTS, make_engine, poison, tokens_of

Tokens = list[tuple[int, ...]]


def generate(model: Model, device: dict[str, Any], **options: Any) -> tuple[Tokens, dict[str, Any]]:
    """Tokens of all prompts together over a poisoned pool, and the report; nothing is left behind."""
    with open_sim(**device) as b:
        with make_engine(model, b, slots=3, max_len=64, **options) as engine:
            poison(b, engine._parts.pool)
            results = engine.generate(PROMPTS, PARAMS)
            report = engine.report()
        assert (report["memory"]["blocks_allocated"], report["memory"]["blocks_in_flight"]) == (0, 0)
        driver = b._driver
    assert driver.info["live_bytes"] == 0
    return tokens_of(results), report


@pytest.mark.clause("C11", "C3", "C4")
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_gives_the_tokens_of_the_cpu(model: Model, expected: Tokens, arm: str) -> None:
    tokens, report = generate(model, {}, arm=arm)
    assert tokens == expected
    counters = report["counters"]
    assert counters["delegated"] == {}
    assert (counters["replay"] > 0) is (arm == "captured")
    assert counters["dropped"] == counters["invalid"] == 0


@pytest.mark.clause("C5", "C6", "C8")
@pytest.mark.parametrize("recapture", [False, True])
@pytest.mark.parametrize("read_behind", [1, 3])
def test_steps_are_read_behind(model: Model, expected: Tokens, read_behind: int, recapture: bool) -> None:
    tokens, report = generate(
        model, {"recapture_at_boundary": recapture}, arm="captured", read_behind=read_behind, capture="required"
    )
    assert tokens == expected
    lanes = report["lanes"]
    released = sum(lane["released"] for lane in lanes)
    assert (released > 0) is recapture
    assert (report["counters"]["recapture"] > 0) is recapture
    assert report["counters"]["replay"] > 0
    assert not [lane for lane in lanes if lane["eager_reason"]]


@pytest.mark.clause("C5", "C9")
def test_a_steady_step_is_done_when_it_is_read(model: Model) -> None:
    """While steps are dispatched ahead, the device has done none of those that are not read yet."""
    with (
        open_sim() as b,
        make_engine(model, b, slots=1, max_len=64, arm="captured", read_behind=4, block_size=64) as engine,
    ):
        engine.add(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
        for _ in range(8):
            engine.step()
        decoder = engine._core.decoder
        assert decoder.in_flight == 4
        queued, done = b.info["queued"], launched(b)
        uploads = b.counters.uploads
        per_step = queued // 4
        assert queued == 4 * per_step > 100
        assert len(engine.step()) == 1
        assert (b.info["queued"], decoder.in_flight) == (queued, 4)
        assert launched(b) - done == per_step - 1, "one step's kernels; the readback is none"
        assert b.counters.uploads == uploads


@pytest.mark.clause("C6", "L5")
def test_preempted_kv_is_offloaded_and_staged_back(model: Model, expected: Tokens) -> None:
    tokens, report = generate(model, {}, arm="captured", preempt="offload", block_size=4, num_blocks=12, read_behind=2)
    assert tokens == expected
    assert report["engine"]["restored"] > 0
    assert report["counters"]["launches"]["stage"] > 0


@pytest.mark.clause("S1", "C6")
@pytest.mark.parametrize("arm", ["eager", "captured"])
def test_prompts_computed_on_the_host_are_staged(model: Model, expected: Tokens, arm: str) -> None:
    tokens, report = generate(model, {}, arm=arm, prefill_on="cpu")
    assert tokens == expected
    assert report["counters"]["launches"]["stage"] > 0


@pytest.mark.clause("C11")
def test_sampled_tokens_are_those_of_the_cpu(model: Model) -> None:
    """Draws, penalties, biases and log-probabilities: the integers of the hash are the same on every device."""
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, top_k=20, top_p=0.9, seed=3),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.3, min_p=0.02, repetition_penalty=1.2, seed=4),
        SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3, logit_bias={5: 2.0}),
    ]
    answers = []
    for opened in (open_backend("cpu", settings=Settings(), threads=1), open_sim()):
        with (
            opened as b,
            make_engine(model, b, slots=3, max_len=64, arm="captured", read_behind=2) as engine,
        ):
            results = engine.generate(PROMPTS[:3], params)
            answers.append((tokens_of(results), [len(r.logprobs or ()) for r in results]))
    assert answers[0] == answers[1]


@pytest.mark.clause("C11")
def test_a_bfloat16_pool_gives_the_same_tokens_in_every_arm(model: Model) -> None:
    tokens = [generate(model, {}, arm=arm, kv_dtype="bfloat16")[0] for arm in ARMS]
    assert tokens[0] == tokens[1] == tokens[2]
