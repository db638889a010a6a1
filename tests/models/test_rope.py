"""Rotary embeddings: cos and sin of every kind are those of transformers' own module."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forebay.runtime.models.rope import Rope
from tests.models import tiny

HEAD_DIM = 16
ORIGINAL = 64
LENGTHS = (1, 17, 63, 64, 65, 200, 511)

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn attention_factor": {"factor": 8.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 0.8},
    "yarn mscale": {"factor": 8.0, "original_max_position_embeddings": ORIGINAL, "mscale": 1.2, "mscale_all_dim": 0.7},
    "yarn one mscale": {"factor": 8.0, "original_max_position_embeddings": ORIGINAL, "mscale": 1.2},
    "yarn betas": {
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn null factor": {"factor": None, "original_max_position_embeddings": ORIGINAL},
    "yarn one-sided ramp": {"factor": 2.0, "original_max_position_embeddings": 4},
    "longrope": {
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + i for i in range(HEAD_DIM // 2)],
    },
    "longrope factor": {
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0] * (HEAD_DIM // 2),
        "long_factor": [4.0] * (HEAD_DIM // 2),
        "factor": 16.0,
    },
    "longrope attention_factor": {
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0] * (HEAD_DIM // 2),
        "long_factor": [4.0] * (HEAD_DIM // 2),
        "attention_factor": 1.5,
    },
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.55},
    "proportional none": {"partial_rotary_factor": 0.0},
    "proportional all": {"partial_rotary_factor": 1.0},
}
"""Variant, its kind first, and the parameters."""


def parameters(variant: str, theta: float) -> dict[str, Any]:
    return {"rope_type": variant.split()[0], "rope_theta": theta, **KINDS[variant]}


def rope_of(variant: str, theta: float, **changes: Any) -> Rope:
    positions = ORIGINAL if variant.startswith("dynamic") else 512
    rope = parameters(variant, theta)
    return tiny.config(rope_parameters=rope, max_position_embeddings=positions, **changes).rope


def transformers_rope(variant: str, theta: float) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=ORIGINAL if variant.startswith("dynamic") else 512,
        rope_parameters=parameters(variant, theta),
    )
    return LlamaRotaryEmbedding(config)


def test_every_kind_of_transformers_is_here() -> None:
    assert {variant.split()[0] for variant in KINDS} == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 123.5])
@pytest.mark.parametrize("variant", KINDS)
def test_cos_and_sin_are_those_of_transformers(variant: str, theta: float) -> None:
    """A pass over the first n positions, for lengths around the one before scaling."""
    rope = rope_of(variant, theta)
    for length in LENGTHS:
        expected = transformers_rope(variant, theta)(torch.zeros(1), torch.arange(length)[None])
        positions = np.arange(length, dtype=np.int32)
        made = rope.cos_sin(HEAD_DIM, positions, np.full(length, length))
        for ours, theirs in zip(made, expected, strict=True):
            assert ours.dtype == np.float32
            # Powers may be rounded apart in their last bit, which the position then multiplies.
            tolerance = 1e-7 * length + 2e-7
            np.testing.assert_allclose(ours, theirs[0, :, : HEAD_DIM // 2].numpy(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("variant", KINDS)
def test_each_row_has_its_own_length(variant: str) -> None:
    """Rows of unlike lengths in one call are what each is alone."""
    rope = rope_of(variant, 10_000.0)
    positions, lengths = np.array([5, 63, 64, 199, 0]), np.array([64, 64, 65, 300, 1])
    together = rope.cos_sin(HEAD_DIM, positions, lengths)
    for row in range(len(positions)):
        alone = rope.cos_sin(HEAD_DIM, positions[row : row + 1], lengths[row : row + 1])
        for many, one in zip(together, alone, strict=True):
            np.testing.assert_array_equal(many[row], one[0])


@pytest.mark.parametrize("variant", KINDS)
def test_lengths_share_a_regime_exactly_if_they_share_their_angles(variant: str) -> None:
    rope = rope_of(variant, 10_000.0)
    lengths = np.array([*range(1, 80), 400, 511])
    _, angles = rope.cos_sin(HEAD_DIM, np.full(len(lengths), 40), lengths)
    regimes = [rope.regime(int(length)) for length in lengths]
    assert regimes == sorted(regimes)
    for row in range(1, len(lengths)):
        assert (angles[row] == angles[row - 1]).all() == (regimes[row] == regimes[row - 1]), lengths[row]
    assert (len(set(regimes)) > 1) == (variant.split()[0] in ("dynamic", "longrope"))


@pytest.mark.parametrize(
    ("variant", "positions"),
    [("default", 512), ("linear", 512), ("dynamic", 4 * ORIGINAL), ("yarn", 512), ("longrope", 512), ("llama3", 512)],
)
def test_positions_a_kind_is_made_for(variant: str, positions: int) -> None:
    assert rope_of(variant, 10_000.0).positions(ORIGINAL if variant == "dynamic" else 512) == positions


def test_yarn_reaches_its_factor_times_the_length_before_scaling() -> None:
    rope = parameters("yarn", 10_000.0)
    assert tiny.config(rope_parameters=rope, max_position_embeddings=ORIGINAL).max_positions == 4 * ORIGINAL
    assert tiny.config(rope_parameters=rope, max_position_embeddings=1000).max_positions == 1000
