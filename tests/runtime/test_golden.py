"""Right tokens: SmolLM2 against its reference, and the tiny model against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.runtime import Engine, Model, SamplingParams
from forebay.specs import Backend
from tests.runtime.harness import (
    ARMS,
    FloatArray,
    count_lines,
    make_engine,
    prompt,
    recorded,
    tokens_of,
    with_logits,
)

ALL = SamplingParams(max_tokens=64, ignore_eos=True)


def expected(items: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    return [tuple(item["output_ids"]) for item in items]


# -- the real model ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=ARMS)
def engine(request: pytest.FixtureRequest, smollm2: Model, backend: Backend) -> Iterator[Engine]:
    """SmolLM2 with 8 slots in one arm; capture may not be declined."""
    capture = "required" if request.param == "captured" else "auto"
    with make_engine(smollm2, backend, arm=request.param, capture=capture, max_len=128) as made:
        yield made


@pytest.mark.model
@pytest.mark.clause("C11")
def test_the_reference_is_the_eight_prompts_with_all_512_tokens(golden: list[dict[str, Any]]) -> None:
    assert [len(item["output_ids"]) for item in golden] == [64] * 8


@pytest.mark.model
@pytest.mark.clause("C3", "C11")
def test_every_token_is_right_one_prompt_at_a_time(engine: Engine, golden: list[dict[str, Any]]) -> None:
    results = [engine.generate([item["prompt"]], ALL)[0] for item in golden]
    assert tokens_of(results) == expected(golden)
    assert [r.text for r in results] == [item["text"] for item in golden]
    assert [r.prompt_token_ids for r in results] == [tuple(item["prompt_ids"]) for item in golden]


@pytest.mark.model
@pytest.mark.clause("C3", "C11")
def test_every_token_is_right_with_all_prompts_at_once_in_another_order(
    engine: Engine, golden: list[dict[str, Any]]
) -> None:
    shuffled = [golden[i] for i in np.random.default_rng(5).permutation(8)]
    before = count_lines(engine.backend)
    results = engine.generate([item["prompt_ids"] for item in shuffled], ALL)
    assert tokens_of(results) == expected(shuffled)
    done = count_lines(engine.backend) - before
    assert (done["run"], done["capture"], done["replay"]) == {
        "eager": (0, 0, 0),
        "hostfree": (63, 0, 0),
        "captured": (1, 1, 62),
    }[engine.arm]


@pytest.mark.model
@pytest.mark.clause("C3", "C6", "C11")
def test_every_token_is_right_when_prompts_arrive_while_others_run(
    engine: Engine, golden: list[dict[str, Any]]
) -> None:
    order = [int(i) for i in np.random.default_rng(6).permutation(8)]
    arrives = list(zip((0, 1, 2, 5, 9, 9, 12, 15), order, strict=True))
    some = SamplingParams(max_tokens=24, ignore_eos=True)
    requests, at = {}, 0
    while at <= 15 or engine.has_work:
        for when, i in arrives:
            if when == at:
                requests[i] = engine.add(golden[i]["prompt_ids"], some)
        engine.step()
        at += 1
    assert tokens_of([requests[i] for i in range(8)]) == [tokens[:24] for tokens in expected(golden)]
    assert [requests[i].finish_reason for i in range(8)] == ["length"] * 8


@pytest.mark.model
@pytest.mark.clause("C9")
def test_nothing_fell_back_silently_in_all_of_that(engine: Engine) -> None:
    report = engine.report()
    assert report["counters"]["delegated"] == {}
    assert (report["counters"]["declined"], report["counters"]["dropped"], report["counters"]["invalid"]) == (0, 0, 0)
    assert report["engine"]["reseeds"] == 0
    assert report["memory"]["blocks_allocated"] == report["memory"]["blocks_in_flight"] == 0
    lanes = report["lanes"]
    if engine.arm == "captured":
        assert [lane["eager_reason"] for lane in lanes] == [""] * 4
        assert [lane["bucket"] for lane in lanes] == [1, 2, 4, 8]
        assert [lane["run"] for lane in lanes] == [1] * 4, "a bucket's first step runs, every other is a replay"
        assert all(lane["capture"] == (lane["replay"] > 0) for lane in lanes)
    else:
        assert all(lane["replay"] == 0 for lane in lanes)


@pytest.mark.model
@pytest.mark.clause("C4")
@pytest.mark.parametrize("engine", ["captured"], indirect=True)
def test_text_ends_at_the_models_own_end_token(engine: Engine, golden: list[dict[str, Any]]) -> None:
    """Prompts whose reference has the end token (2) stop there, on the device; the one that has none is not disturbed."""
    items = [golden[0], golden[7], golden[1]]
    cuts = [item["output_ids"].index(2) + 1 if 2 in item["output_ids"] else 40 for item in items]
    results = engine.generate([item["prompt"] for item in items], [SamplingParams(max_tokens=max(c, 40)) for c in cuts])
    assert tokens_of(results) == [tuple(item["output_ids"][:cut]) for item, cut in zip(items, cuts, strict=True)]
    assert [r.finish_reason for r in results] == ["stop", "stop", "length"]


# -- the tiny model against transformers -------------------------------------------------------------------------------
LENGTHS = (1, 15, 16, 17, 100)
NEW = 24


@pytest.fixture(scope="module")
def oracle(tiny_folder: Path) -> list[tuple[tuple[int, ...], FloatArray]]:
    """For each prompt: greedy tokens, and the logits ``[NEW, vocab]`` they were chosen by."""
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for length in LENGTHS:
        ids, rows = prompt(length), []
        for _ in range(NEW):
            with torch.inference_mode():
                rows.append(reference(torch.tensor([ids])).logits[0, -1].numpy())
            ids = [*ids, int(rows[-1].argmax())]
        found.append((tuple(ids[length:]), np.stack(rows)))
    return found


def test_the_tiny_models_choices_are_clear(oracle: list[tuple[tuple[int, ...], FloatArray]]) -> None:
    """Its tokens vary, and the best is ahead of the second by far more than rounding: equal tokens mean something."""
    for tokens, logits in oracle:
        assert len(set(tokens)) > NEW // 2
        second, best = np.sort(logits, axis=1)[:, -2:].T
        assert (best - second).min() > 100 * np.abs(logits).max() * np.finfo(np.float32).eps


@pytest.mark.clause("C3", "C4", "D6")
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("attention", ["direct", "gather"])
def test_tokens_and_logits_are_those_of_transformers(
    oracle: list[tuple[tuple[int, ...], FloatArray]],
    tiny_model: Model,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    block_size: int,
    attention: str,
) -> None:
    with_logits(monkeypatch)
    options = {"block_size": block_size, "attention": attention, "slots": len(LENGTHS), "max_len": 128}
    for arm in ARMS:
        with (
            make_engine(tiny_model, backend, arm=arm, **options) as engine,
            recorded(monkeypatch, engine) as steps,
        ):
            results = engine.generate([prompt(n) for n in LENGTHS], SamplingParams(max_tokens=NEW, ignore_eos=True))
            assert tokens_of(results) == [tokens for tokens, _ in oracle]
        for slot, (_, logits) in enumerate(oracle if arm != "eager" else []):
            got = np.stack([step.emits["logits"][slot] for step in steps])
            np.testing.assert_allclose(got, logits[1:], rtol=0, atol=2e-5 * np.abs(logits).max())
