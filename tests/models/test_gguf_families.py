"""GGUF files of every family generate the tokens transformers generates with the model they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.runtime import Engine, SamplingParams, load_model, open_backend
from tests.models import gguf_families, tiny
from tests.models.test_gguf_config import llama_cpp_divisors

PROMPT, LENGTH = list(range(5, 25)), 24
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN_KEYS = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}
LINEAR_KEYS = {"scaling.type": "linear", "scaling.factor": 2.0}


@pytest.mark.parametrize(
    ("family", "architecture", "config", "rope", "divisors"),
    [
        ("llama", "llama", {}, {}, None),
        ("llama", "llama", {"attention_bias": True, "tie_word_embeddings": True}, {}, None),
        ("llama", "llama", {"rope_parameters": YARN}, YARN_KEYS, None),
        ("llama", "llama", {"rope_parameters": LLAMA3}, {}, llama_cpp_divisors(8.0, 500_000.0, 16)),
        ("mistral", "llama", {"sliding_window": 12}, {}, None),
        ("qwen2", "qwen2", {"tie_word_embeddings": True}, {}, None),
        ("qwen2", "qwen2", {"rope_parameters": LINEAR}, LINEAR_KEYS, None),
        ("qwen3", "qwen3", {"head_dim": 32}, {}, None),
    ],
)
def test_tokens_are_those_of_transformers(
    tmp_path: Path,
    family: str,
    architecture: str,
    config: dict[str, Any],
    rope: dict[str, Any],
    divisors: list[float] | None,
) -> None:
    made = gguf_families.random_model(family, **config)
    metadata = tiny.gguf_metadata(architecture, made.config.to_dict() | {"head_dim": made.config.head_dim})
    metadata |= {f"{architecture}.rope.{key}": value for key, value in rope.items()}
    if "sliding_window" in config:
        metadata[f"{architecture}.attention.sliding_window"] = config["sliding_window"]
    tensors = gguf_families.tensors(made, architecture)
    if divisors is not None:
        tensors["rope_freqs.weight"] = np.array(divisors, np.float32)
    file = tiny.write_gguf(tmp_path / "x.gguf", tensors, architecture=architecture, metadata=metadata)
    with open_backend("cpu") as backend, Engine(load_model(file, dtype="float32"), backend, max_len=64) as engine:
        (result,) = engine.generate([PROMPT], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    ids = torch.tensor([PROMPT])
    options: dict[str, Any] = {
        "min_new_tokens": LENGTH,
        "max_new_tokens": LENGTH,
        "do_sample": False,
        "pad_token_id": 0,
    }
    with torch.inference_mode():
        expected = made.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    assert list(result.token_ids) == expected[0, len(PROMPT) :].tolist()
