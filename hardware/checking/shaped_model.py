"""A model of SmolLM2-135M's shape with seeded random weights; the checkout carries no real ones, and the machine has no network."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

SEED: Final = 20_26
NEEDED: Final = ("safetensors", "tokenizers", "jinja2", "filelock")
"""What the runtime opens a model with."""
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
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "max_position_embeddings": 2_048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def absent() -> list[str]:
    """Packages without which no model can be opened here."""
    return [name for name in NEEDED if find_spec(name) is None]


def shape(*, dry: bool) -> dict[str, Any]:
    """The configuration's fields that differ between a device and a dry run."""
    return dict(TINY if dry else DEVICE)


def write_model(folder: Path, *, dry: bool) -> Path:
    """Write it into ``folder``, which is made, as transformers and the runtime read it; the same seed gives the same bytes."""
    from safetensors.numpy import save_file

    from forebay.runtime.models.config import ModelConfig
    from forebay.runtime.models.json_fields import Fields
    from forebay.runtime.models.llama_tensors import expected_tensors
    from forebay.runtime.models.safetensors_folder import WEIGHTS_FILE
    from forebay.runtime.models.suite_model import write_suite_model

    fields = _COMMON | shape(dry=dry)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    config = ModelConfig.from_fields(Fields("config.json", fields), Fields("generation_config.json", {}))
    random = np.random.default_rng(SEED)
    wide = np.float32(shape(dry=dry)["initializer_range"])
    tensors = {}
    for name, size in expected_tensors(config).items():
        drawn = random.standard_normal(size, dtype=np.float32)
        # Norms lie around one, not at one: a forgotten one would not show.
        tensors[name] = np.float32(1.0) + np.float32(0.1) * drawn if len(size) == 1 else wide * drawn
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
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
