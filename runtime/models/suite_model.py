"""The model that the shared suite decodes: small, with random weights, in sizes every backend has to decode (D 64, G 4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from .config import ModelConfig
from .json_fields import Fields
from .llama_tensors import expected_tensors

SPECIAL: Final = ("<|end|>", "<|start|>")
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(SPECIAL) + 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 0,
}


def write_suite_model(folder: Path, seed: int = 0) -> Path:
    """Write the model into ``folder``, which is made, and return it. The same seed gives the same bytes.

    The weights are so wide that the best token is ahead of the second by far more than rounding.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    random = np.random.default_rng(seed)
    config = ModelConfig.from_fields(Fields("config.json", CONFIG), Fields("generation_config.json", {}))
    tensors = {
        name: (random.normal(1.0, 0.1, shape) if len(shape) == 1 else random.normal(0.0, 0.3, shape)).astype(np.float32)
        for name, shape in expected_tensors(config).items()
    }
    save_file(tensors, folder / "model.safetensors")
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *sorted(ByteLevel.alphabet())))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
