"""Every family and every rope kind decodes the tokens of transformers.

Run here: :func:`covering_cases`, each with every prompt length and block size, arms and ways of attention in turn.
``python -m tests.families.full`` runs the cross product of all of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forebay.runtime import Engine, SamplingParams, Settings, load_model
from forebay.runtime.models.families import FAMILIES as READ
from forebay.specs import Backend
from tests.families.comparison import ALLOWED_GAP, ALLOWED_SHARE, ARMS, BLOCK_SIZES, PATHS, Plan, decode, plans_in_turn
from tests.families.conftest import Outcomes
from tests.families.zoo import (
    FAMILIES,
    MAX_LEN,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    Case,
    build,
    covering_cases,
    prompts,
    references,
)

CASES = covering_cases()


@pytest.mark.clause("C3", "C4", "D6")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_those_of_transformers(case: Case, outcomes: Outcomes) -> None:
    assert [str(found) for found in outcomes.divergences(case) if found.gap >= ALLOWED_GAP] == []


def test_at_most_one_sequence_in_a_hundred_diverges(outcomes: Outcomes) -> None:
    sequences = len(CASES) * len(BLOCK_SIZES) * len(PROMPT_LENGTHS)
    assert sum(len(outcomes.divergences(case)) for case in CASES) <= ALLOWED_SHARE * sequences


def test_the_cases_cover_every_family_rope_kind_arm_and_way_of_attention() -> None:
    families = {FAMILIES[case.family][0] for case in CASES}
    kinds = {case.rope.split()[0] for case in CASES}
    plans = {(plan.block_size, plan.arm, plan.path) for turn in range(len(CASES)) for plan in plans_in_turn(turn)}
    assert families == set(READ)
    assert kinds == {"default", *ROPE_INIT_FUNCTIONS}
    assert {case.family for case in CASES} == set(FAMILIES)
    assert plans == {(size, arm, path) for size in BLOCK_SIZES for arm in ARMS for path in PATHS}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_models_choices_are_clear(case: Case, outcomes: Outcomes) -> None:
    """Tokens vary, and the best is mostly far ahead of the second: equal tokens mean something."""
    for reference in outcomes.references(case):
        assert len(set(reference.tokens)) > NEW_TOKENS // 4
        assert np.median(reference.gaps) > 100 * ALLOWED_GAP
        assert np.mean(np.array(reference.gaps) < ALLOWED_GAP) < 0.05


@pytest.mark.parametrize(
    ("case", "plain"),
    [(case, Case(case.family, "default")) for case in CASES if case.rope != "default"]
    + [(Case("mistral", "default"), Case("mistral full", "default"))],
    ids=str,
)
def test_what_a_case_adds_changes_the_tokens(case: Case, plain: Case, outcomes: Outcomes) -> None:
    """The same weights without the scaling, or without the window, decode other tokens: ignoring it would show."""
    pairs = zip(outcomes.references(case), outcomes.references(plain), strict=True)
    assert any(one.tokens != other.tokens for one, other in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama bias", "qwen3"])
def test_weights_of_half_the_width_are_widened_exactly(
    family: str, dtype: torch.dtype, backend: Backend, tmp_path: Path
) -> None:
    folder = build(Case(family, "default"), tmp_path / "model", dtype=dtype)
    expected = [reference.tokens for reference in references(folder, prompts())]
    assert decode(load_model(folder, dtype="float32"), Plan(16, "captured", "direct"), backend) == expected


@pytest.mark.parametrize("apart", [False, True])
def test_a_stored_head_counts_also_where_the_configuration_ties_it(
    apart: bool, outcomes: Outcomes, backend: Backend, tmp_path: Path
) -> None:
    """A head stored beside a tied embedding is the model's own where it differs, as transformers has it; else it is shared."""
    case = Case("llama tied", "default")
    folder = build(case, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(
        tensors | {"lm_head.weight": embedding[::-1].copy() if apart else embedding},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    expected = [reference.tokens for reference in references(folder, prompts())]
    assert (expected != [reference.tokens for reference in outcomes.references(case)]) == apart
    model = load_model(folder, dtype="float32")
    assert decode(model, Plan(16, "captured", "direct"), backend) == expected
    llama = model.bind(backend, max_len=MAX_LEN)
    assert (llama.head is not llama.embedding) == apart
    for buffer in llama.buffers:
        backend.release(buffer)


@pytest.mark.parametrize("case", [case for case in CASES if case.rope in ("default", "dynamic")], ids=str)
def test_a_bfloat16_engine_decodes_every_family(case: Case, outcomes: Outcomes, backend: Backend) -> None:
    """All parts of a family take the engine's dtype; the arms agree although rounding differs from transformers'."""
    model = load_model(outcomes.model(case).folder.path, dtype="bfloat16")
    made = [decode(model, Plan(16, arm, "direct"), backend) for arm in ARMS]
    assert made[0] == made[1] == made[2]
    same = [one[0] == reference.tokens[0] for one, reference in zip(made[0], outcomes.references(case), strict=True)]
    assert sum(same) >= len(same) // 2


def test_a_sequence_alone_and_in_a_batch_are_the_same(outcomes: Outcomes, backend: Backend) -> None:
    """Length is that of a row's own sequence, never of the longest in the batch."""
    case = Case("llama", "dynamic")
    for prompt, reference in zip(prompts(), outcomes.references(case), strict=True):
        with Engine(outcomes.model(case), backend, settings=Settings(), slots=1, block_size=16) as engine:
            (result,) = engine.generate([prompt], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
        assert result.token_ids == reference.tokens
