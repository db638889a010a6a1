"""Tiny random models of each family as GGUF files, made of transformers' models with the gguf package's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from tests.models import tiny

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
"""GGUF's name of an architecture and the package's."""

_CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def random_model(family: str, **changes: Any) -> PreTrainedModel:
    """A tiny model of ``family``; ``changes`` are keys of its configuration. Biases are random too."""
    values = {key: value for key, value in tiny.CONFIG.items() if key not in {"architectures", "model_type"}}
    torch.manual_seed(3)
    made = Auto.from_config(_CONFIGS[family](**(values | {"tie_word_embeddings": False} | changes)))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.uniform_(-0.5, 0.5)
    model: PreTrainedModel = made.eval()
    return model


def tensors(made: PreTrainedModel, architecture: str) -> tiny.Weights:
    """The model's tensors under GGUF's names; in the llama architecture rows of queries and keys in pairs."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], made.config.num_hidden_layers)
    result: tiny.Weights = {}
    for name, parameter in made.state_dict().items():
        if made.config.tie_word_embeddings and name == "lm_head.weight":
            continue
        values = parameter.float().numpy()
        heads = {"q_proj": made.config.num_attention_heads, "k_proj": made.config.num_key_value_heads}
        own = heads.get(name.split(".")[-2]) if architecture == "llama" else None
        base = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert base is not None
        result[base] = tiny.rotate_pairs(values, own) if own else values
    return result


def write(file: Path, made: PreTrainedModel, architecture: str, **options: Any) -> Path:
    """Write ``made`` as a GGUF file; ``options`` as of :func:`tiny.write_gguf`."""
    metadata = tiny.gguf_metadata(architecture, made.config.to_dict() | {"head_dim": made.config.head_dim})
    metadata |= options.pop("metadata", {})
    return tiny.write_gguf(file, tensors(made, architecture), architecture=architecture, metadata=metadata, **options)
