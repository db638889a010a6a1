"""A model of SmolLM2-135M's shape with seeded random weights; the checkout carries no real ones, and the machine has no network."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np

from forebay.runtime.models.suite_model import write_suite_model

SEED: Final = 20_26
DEVICE: Final = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "initializer_range": 0.13,
}
"""SmolLM2-135M's shape. The weights are so wide that layers, not the token's own embedding, decide what comes next."""
TINY: Final = DEVICE | {
    "vocab_size": 288,
    "hidden_size": 192,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "initializer_range": 0.25,
}
_COMMON: Final = {
    "max_position_embeddings": 2_048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def shape(*, dry: bool) -> dict[str, Any]:
    """The configuration's fields that differ between a device and a dry run."""
    return dict(TINY if dry else DEVICE)


def write_model(folder: Path, *, dry: bool) -> Path:
    """Write it as a folder, by transformers' own ``save_pretrained``; call it once a backend is open, for it imports torch."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **_COMMON, **shape(dry=dry)))
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.endswith("norm.weight"):  # transformers starts them at one: a forgotten one would not show
                values.normal_(1.0, 0.1)
    model.to(torch.float32).save_pretrained(folder)
    other = write_suite_model(folder / "suite")
    shutil.copyfile(other / "tokenizer.json", folder / "tokenizer.json")  # prompts are ids; a folder has to have one
    shutil.rmtree(other)
    return folder


def prompts(count: int, *, dry: bool) -> list[list[int]]:
    """``count`` seeded prompts of different lengths."""
    random = np.random.default_rng(SEED)
    longest = 9 if dry else 120
    vocabulary = int(shape(dry=dry)["vocab_size"])
    lengths = random.integers(2, longest, count)
    return [[int(token) for token in random.integers(2, vocabulary, length)] for length in lengths]
