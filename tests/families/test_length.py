"""Rope kinds that depend on length: a prompt is turned as one pass, however it reaches the cache; later rows as they come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.runtime import Engine, Model, SamplingParams, Settings
from forebay.runtime.models.llama import Llama
from forebay.specs import Backend
from forebay.specs.errors import InvalidInput
from tests.families.conftest import Outcomes
from tests.families.zoo import MAX_LEN, NEW_TOKENS, ORIGINAL, PROMPT_LENGTHS, Case, prompts

DEPENDENT = [Case("llama", "dynamic"), Case("llama", "longrope")]
FIXED = [Case("llama", "default"), Case("qwen2", "yarn")]


def tokens_of(outcomes: Outcomes, case: Case) -> list[tuple[int, ...]]:
    return [reference.tokens for reference in outcomes.references(case)]


def bound(model: Model, backend: Backend) -> Llama:
    return model.bind(backend, max_len=MAX_LEN)


def release(llama: Llama, backend: Backend) -> None:
    for buffer in llama.buffers:
        backend.release(buffer)


def test_the_prompts_lie_below_cross_and_lie_above_the_length_before_scaling() -> None:
    assert min(PROMPT_LENGTHS) + NEW_TOKENS > ORIGINAL > sorted(PROMPT_LENGTHS)[-2]
    assert max(PROMPT_LENGTHS) > ORIGINAL


@pytest.mark.parametrize("case", DEPENDENT, ids=str)
@pytest.mark.parametrize(
    "schedule",
    [
        {"max_step_tokens": 7},
        {"max_step_tokens": 64},
        {"num_blocks": 30},
        {"num_blocks": 30, "preempt": "offload"},
        {"prefill_on": "cpu"},
    ],
    ids=str,
)
def test_the_schedule_changes_no_token(
    case: Case, schedule: dict[str, Any], outcomes: Outcomes, backend: Backend
) -> None:
    options = {"slots": len(PROMPT_LENGTHS), "block_size": 16, "max_len": MAX_LEN, **schedule}
    with Engine(outcomes.model(case), backend, settings=Settings().override(**options)) as engine:
        results = engine.generate(prompts(), SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
        assert (engine.report()["engine"]["preemptions"] > 0) == ("num_blocks" in schedule)
    assert [result.token_ids for result in results] == tokens_of(outcomes, case)


@pytest.mark.clause("L6")
@pytest.mark.parametrize("case", [*DEPENDENT, *FIXED], ids=str)
def test_a_cached_prefix_is_shared_only_where_its_angles_are_the_same(
    case: Case, outcomes: Outcomes, backend: Backend
) -> None:
    longest = max(prompts(), key=len)
    cuts = [longest, longest[: len(longest) - 20], longest[: ORIGINAL - 10], longest[: ORIGINAL + 3], longest]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    found = {}
    for reuse in (False, True):
        options = {"slots": 1, "block_size": 16, "max_len": MAX_LEN, "num_blocks": 80, "prefix_reuse": reuse}
        with Engine(outcomes.model(case), backend, settings=Settings().override(**options)) as engine:
            found[reuse] = [engine.generate([cut], params)[0].token_ids for cut in cuts]
            assert (engine.report()["engine"]["reused_tokens"] > 0) == reuse
    assert found[True] == found[False]


@pytest.mark.clause("C5")
@pytest.mark.parametrize("case", DEPENDENT, ids=str)
@pytest.mark.parametrize("steps", [10, 50])
def test_a_recomputed_request_goes_on_as_if_nothing_had_happened(
    case: Case, steps: int, outcomes: Outcomes, backend: Backend
) -> None:
    """A damaged row has its KV recomputed from prompt and tokens: the prompt as one pass, each token as it was decoded."""
    options = {"slots": len(PROMPT_LENGTHS), "block_size": 16, "arm": "captured"}
    with Engine(outcomes.model(case), backend, settings=Settings().override(**options)) as engine:
        requests = [engine.add(prompt, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)) for prompt in prompts()]
        for _ in range(steps):
            engine.step()
        for slot in range(len(requests)):
            backend.upload(engine._parts.device.scalars["token"], np.array([1], np.int32), slot)
        while engine.has_work:
            engine.step()
        assert engine.report()["engine"]["reseeds"] >= len(requests)
        assert [tuple(request.token_ids) for request in requests] == tokens_of(outcomes, case)


@pytest.mark.parametrize("case", DEPENDENT, ids=str)
@pytest.mark.parametrize("prompt_len", [ORIGINAL + 1, 200])
def test_angles_of_a_row_are_those_of_its_pass(
    case: Case, prompt_len: int, outcomes: Outcomes, backend: Backend
) -> None:
    """Rows of the prompt take its length, any later row its own position's: the row of the table."""
    llama = bound(outcomes.model(case), backend)
    positions = np.arange(MAX_LEN, dtype=np.int32)
    whole, part = (llama.prompt_rope(rows, prompt_len) for rows in (positions, positions[5:9]))
    assert whole is not None
    assert part is not None
    for made, cut, table in zip(whole, part, (llama.cos, llama.sin), strict=True):
        rows = backend.fetch(table)
        assert made.dtype == np.float32
        np.testing.assert_array_equal(made[prompt_len - 1 :], rows[prompt_len - 1 :])
        assert np.any(made[: ORIGINAL - 1] != rows[: ORIGINAL - 1])
        np.testing.assert_array_equal(made[5:9], cut)
    release(llama, backend)


@pytest.mark.parametrize("case", DEPENDENT + FIXED, ids=str)
@pytest.mark.parametrize("prompt_len", [1, ORIGINAL, ORIGINAL + 1])
def test_the_tables_serve_where_they_hold_the_same_angles(
    case: Case, prompt_len: int, outcomes: Outcomes, backend: Backend
) -> None:
    llama = bound(outcomes.model(case), backend)
    rope = llama.prompt_rope(np.arange(MAX_LEN, dtype=np.int32), prompt_len)
    assert (rope is None) == (case in FIXED or prompt_len <= ORIGINAL)
    release(llama, backend)


def test_a_sequence_may_be_as_long_as_the_scaling_allows(outcomes: Outcomes, backend: Backend) -> None:
    """``max_position_embeddings`` of a dynamic kind is the length before scaling."""
    model = outcomes.model(Case("llama", "dynamic"))
    with Engine(model, backend, settings=Settings()) as engine:
        assert engine.report()["model"]["max_len"] == 6 * ORIGINAL
    with pytest.raises(InvalidInput, match=r"max_len: got 289, the model '.*' has 288 positions"):
        Engine(model, backend, settings=Settings(), max_len=6 * ORIGINAL + 1)
