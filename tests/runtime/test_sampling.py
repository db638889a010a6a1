"""Sampling through the engine: the same tokens in any company, bucket and arm; transformers' tokens; nothing but the device at work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from forebay.runtime import Model, SamplingParams
from forebay.specs import Backend
from forebay.specs.errors import InvalidInput
from tests.runtime.harness import ARMS, bits, count_lines, make_engine, prompt, recorded, tokens_of

MADE = 14
KINDS = {
    "hot": SamplingParams(temperature=1.0, seed=1),
    "cut": SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.02, seed=2),
    "penalised": SamplingParams(temperature=0.8, repetition_penalty=1.3, seed=3),
    "penalised greedy": SamplingParams(repetition_penalty=1.3, seed=6),
    "biased": SamplingParams(temperature=1.0, logit_bias={30: 6.0, 31: 5.0, 40: -100.0}, seed=4),
    "informed": SamplingParams(temperature=1.0, logprobs=3, seed=5),
    "greedy": SamplingParams(seed=7),
    "greedy informed": SamplingParams(logprobs=1, seed=8),
}
"""Requests that differ in every way a row of a step can."""


def lasting(params: SamplingParams, max_tokens: int = MADE) -> SamplingParams:
    return replace(params, max_tokens=max_tokens, ignore_eos=True)


PARAMS = [lasting(p, MADE + i) for i, p in enumerate(KINDS.values())]
PROMPTS = [prompt(3 + 2 * i, seed=20 + i) for i in range(len(PARAMS))]


@pytest.fixture(scope="module")
def alone(tiny_model: Model, backend: Backend) -> list[tuple[int, ...]]:
    """Tokens of each request by itself, in the eager arm."""
    with make_engine(tiny_model, backend, arm="eager", slots=1, max_len=64) as engine:
        return [engine.generate([p], s)[0].token_ids for p, s in zip(PROMPTS, PARAMS, strict=True)]


# -- the same tokens, however it is run --------------------------------------------------------------------------------
@pytest.mark.clause("C4", "C11", "D5")
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_the_same_seed_gives_the_same_tokens_in_any_company_and_arm(
    tiny_model: Model, backend: Backend, alone: list[tuple[int, ...]], arm: str, slots: int
) -> None:
    """In 1, 3 and 8 slots and in two orders, so that neighbours, buckets and variants change from step to step."""
    with make_engine(tiny_model, backend, arm=arm, slots=slots, block_size=4, max_len=64) as engine:
        assert tokens_of(engine.generate(PROMPTS, PARAMS)) == alone
        backwards = engine.generate(PROMPTS[::-1], PARAMS[::-1])
        assert tokens_of(backwards) == alone[::-1]
        assert engine.report()["engine"]["reseeds"] == 0
        lanes = {(lane["bucket"], lane["variant"]) for lane in engine.report()["lanes"]}
        if arm != "eager" and slots == 1:
            wanted = {"greedy", "sampled", "sampled+logprobs5", "sampled+logprobs1"}
            assert {variant for _, variant in lanes} == wanted


@pytest.mark.clause("C3", "C11")
def test_captured_steps_have_the_bits_of_hostfree_ones(
    tiny_model: Model, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for arm in ("hostfree", "captured"):
        with (
            make_engine(tiny_model, backend, arm=arm, slots=4, block_size=4, max_len=64, capture="required") as engine,
            recorded(monkeypatch, engine) as steps,
        ):
            results = engine.generate(PROMPTS, PARAMS)
        runs.append((steps, [(r.token_ids, r.logprobs) for r in results]))
    (ran, told), (replayed, again) = runs
    assert told == again
    assert len(ran) == len(replayed)
    for a, b in zip(ran, replayed, strict=True):
        assert (a.bucket, a.variant, a.emits.keys()) == (b.bucket, b.variant, b.emits.keys())
        assert all(bits(a.emits[name]) == bits(b.emits[name]) for name in a.emits)
    assert {step.counters["replay"] for step in replayed} == {0, 1}
    assert sum(a.variant != b.variant for a, b in pairwise(ran)) >= 2, "the variant changed in the middle of requests"


@pytest.mark.clause("C3", "D5")
def test_a_penalised_request_keeps_count_while_its_bucket_changes_its_variant(
    tiny_model: Model, backend: Backend
) -> None:
    """Neighbours with log-probabilities, drawn and greedy ones come and go; it always sees its own tokens and no others."""
    one = lasting(SamplingParams(repetition_penalty=1.6, temperature=0.7, seed=9), 40)
    with make_engine(tiny_model, backend, arm="hostfree", slots=1, max_len=64) as engine:
        want = engine.generate([prompt(6)], one)[0].token_ids
    with make_engine(tiny_model, backend, slots=3, block_size=4, max_len=64) as engine:
        request = engine.add(prompt(6), one)
        for params in (lasting(SamplingParams(logprobs=n, temperature=1.0), 3) for n in (20, 1, 5)):
            for _ in range(3):
                engine.step()
            engine.add(prompt(4), params)
            engine.add(prompt(5), lasting(SamplingParams(), 2))
        while engine.has_work:
            engine.step()
        assert tuple(request.token_ids) == want
        variants = {lane["variant"] for lane in engine.report()["lanes"]}
        assert variants == {"sampled", "sampled+logprobs20", "sampled+logprobs1", "sampled+logprobs5"}
        assert engine.report()["engine"]["reseeds"] == 0


@pytest.mark.clause("C4")
def test_plain_greedy_traffic_runs_the_plain_step(
    tiny_model: Model, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = lasting(SamplingParams(top_k=5, top_p=0.5, seed=3), 8)
    with (
        make_engine(tiny_model, backend, slots=2, block_size=4, max_len=64) as engine,
        recorded(monkeypatch, engine) as steps,
    ):
        engine.generate([prompt(3), prompt(4)], greedy)
        assert {tuple(step.emits) for step in steps} == {("receipt",)}
        assert {lane["variant"] for lane in engine.report()["lanes"]} == {"greedy"}


@pytest.mark.clause("C4")
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(
    "params", [p for p in PARAMS if p.logprobs is None], ids=[n for n in KINDS if "informed" not in n]
)
def test_a_sequence_goes_on_as_it_would_have_from_wherever_it_is_taken_up(
    tiny_model: Model, backend: Backend, arm: str, params: SamplingParams
) -> None:
    """A draw depends on seed and position: what was made may be a prompt as well, so recomputing a sequence changes nothing."""
    with make_engine(tiny_model, backend, arm=arm, slots=4, block_size=4, max_len=64) as engine:
        whole = engine.generate([prompt(5)], replace(params, max_tokens=14))[0].token_ids
        cuts = [1, 2, 7, 13]
        parts = [replace(params, max_tokens=14 - cut) for cut in cuts]
        found = tokens_of(engine.generate([[*prompt(5), *whole[:cut]] for cut in cuts], parts))
    assert found == [whole[cut:] for cut in cuts]


def test_other_seeds_give_other_tokens_and_the_seed_chosen_for_one_is_told(tiny_model: Model, backend: Backend) -> None:
    with make_engine(tiny_model, backend, slots=4, block_size=4, max_len=64) as engine:

        def generate(seeds: Sequence[int | None]) -> list[tuple[int, tuple[int, ...]]]:
            params = [lasting(SamplingParams(temperature=1.0, seed=s)) for s in seeds]
            return [(r.seed, r.token_ids) for r in engine.generate([prompt(5)] * len(seeds), params)]

        given = generate(range(-3, 4))
        assert [seed for seed, _ in given] == list(range(-3, 4))
        assert len({tokens for _, tokens in given}) == 7
        free = generate([None] * 4)
        assert len({seed for seed, _ in free}) == 4
        assert generate([seed for seed, _ in free]) == free


# -- transformers ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> torch.nn.Module:
    from transformers import LlamaForCausalLM

    model: torch.nn.Module = LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    return model


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("penalty", [1.3, 2.5, 0.8])
def test_a_repetition_penalty_gives_the_tokens_of_transformers(
    tiny_model: Model, backend: Backend, reference: torch.nn.Module, arm: str, penalty: float
) -> None:
    prompts = [prompt(n, seed=31) for n in (1, 5, 17)]
    with make_engine(tiny_model, backend, arm=arm, slots=2, block_size=4, max_len=96) as engine:
        found = engine.generate(prompts, lasting(SamplingParams(repetition_penalty=penalty), 40))
    for ids, result in zip(prompts, found, strict=True):
        inputs = torch.tensor([ids])
        with torch.inference_mode():
            output = reference.generate(  # type: ignore[operator]  # a module's attributes are anything
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                repetition_penalty=penalty,
                max_new_tokens=40,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert list(result.token_ids) == output[0, len(ids) :].tolist()


@pytest.mark.parametrize("arm", ARMS)
def test_logprobs_are_those_of_transformers(
    tiny_model: Model, backend: Backend, reference: torch.nn.Module, arm: str
) -> None:
    """Of the raw logits, whatever the draw was made from; one for every token, the prompt's first one too."""
    kinds = [
        SamplingParams(logprobs=0),
        SamplingParams(temperature=1.2, top_k=30, repetition_penalty=1.2, logit_bias={9: 2.0}, logprobs=4, seed=8),
        SamplingParams(temperature=1.0, logprobs=20, seed=9),
        SamplingParams(temperature=1.0, seed=10),
    ]
    params, prompts = [lasting(p, 12) for p in kinds], [prompt(3 + i, seed=32) for i in range(4)]
    with make_engine(tiny_model, backend, arm=arm, slots=4, block_size=4, max_len=64) as engine:
        found = engine.generate(prompts, params)
    assert found[3].logprobs is None
    for asked, result in zip((0, 4, 20), found, strict=False):
        ids = torch.tensor([[*result.prompt_token_ids, *result.token_ids]])
        with torch.inference_mode():
            want = torch.log_softmax(reference(ids).logits[0, len(result.prompt_token_ids) - 1 : -1].double(), -1)
        assert result.logprobs is not None
        assert len(result.logprobs) == len(result.token_ids) == 12
        for token, row, made in zip(result.token_ids, want, result.logprobs, strict=True):
            assert abs(made.chosen - float(row[token])) < 1e-4
            top = torch.topk(row, asked) if asked else None
            assert [t for t, _ in made.top] == ([] if top is None else top.indices.tolist())
            assert [v for _, v in made.top] == pytest.approx([] if top is None else top.values.tolist(), abs=1e-4)


# -- stops -------------------------------------------------------------------------------------------------------------
@pytest.mark.clause("C4")
@pytest.mark.parametrize("arm", ARMS)
def test_a_drawn_token_stops_its_request_on_the_device(
    tiny_model: Model, backend: Backend, alone: list[tuple[int, ...]], arm: str
) -> None:
    whole = alone[0]
    at = next(i for i in range(3, len(whole)) if whole.index(whole[i]) == i)
    params = replace(PARAMS[0], stop_token_ids=(whole[at],))
    with make_engine(tiny_model, backend, arm=arm, slots=2, block_size=4, max_len=64, read_behind=2) as engine:
        stopped, other = engine.generate([PROMPTS[0], PROMPTS[2]], [params, PARAMS[2]])
    assert (stopped.token_ids, stopped.finish_reason) == (whole[: at + 1], "stop")
    assert other.token_ids == alone[2]


# -- host-free ---------------------------------------------------------------------------------------------------------
@pytest.mark.clause("C4", "C9")
@pytest.mark.parametrize("name", KINDS)
def test_a_captured_sampled_step_uploads_nothing_and_reads_its_ticket_only(
    tiny_model: Model, backend: Backend, name: str
) -> None:
    with make_engine(tiny_model, backend, slots=2, block_size=32, max_len=64, capture="required") as engine:
        request = engine.add(prompt(5), lasting(KINDS[name], 24))
        for _ in range(3):
            engine.step()
        before = count_lines(backend)
        steps = 0
        while engine.has_work:
            engine.step()
            steps += 1
        done = count_lines(backend) - before
        assert len(request.token_ids) == 24
        assert steps == 20
        assert done == {"replay": steps, "downloads": steps, **{k: 0 for k in done if k not in ("replay", "downloads")}}


# -- what an engine refuses --------------------------------------------------------------------------------------------
def test_a_biased_token_beyond_the_vocabulary_is_refused(tiny_model: Model, backend: Backend) -> None:
    with make_engine(tiny_model, backend, slots=2, block_size=4, max_len=64) as engine:
        says = r"prompt 1: biased token 267 is not in the vocabulary \(0 to 266\)"
        with pytest.raises(InvalidInput, match=says):
            engine.generate([prompt(3)], SamplingParams(logit_bias={266: 1.0, 267: 1.0}))
        assert not engine.has_work
