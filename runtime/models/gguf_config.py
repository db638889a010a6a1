"""The metadata of a GGUF file in the terms of a model folder: what its ``config.json`` would say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from forebay.specs.errors import InvalidModel, Unsupported

from .json_fields import Fields, show

_MAX: Final = 2**31 - 1
_ROPE_TYPES: Final = ("none", "linear", "yarn", "longrope")

_LLAMA3_LOW: Final = 1.0
_LLAMA3_HIGH: Final = 4.0
_LLAMA3_CONTEXT: Final = 8192


@dataclass(frozen=True, slots=True)
class RopeFactors:
    """The divisors of the rotary frequencies a file stores as tensors, float32 ``[D/2]``; None where it has none."""

    every: Sequence[float] | None = None
    short: Sequence[float] | None = None
    long: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """What of a configuration only the tensors show. ``vocab_size``: rows of the embedding."""

    vocab_size: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeFactors


def config_of(metadata: Fields, stored: Stored) -> dict[str, Any]:
    """``config.json`` in transformers' terms.

    Raises:
        InvalidModel: a value is missing, mistyped or out of range.
        Unsupported: an architecture, or something about it, that would be computed wrongly.
    """
    architecture = metadata.text("general.architecture")
    family = _FAMILIES.get(architecture)
    if family is None:
        raise Unsupported(
            f"{metadata.source}: architecture {show(architecture)}; supported: {', '.join(sorted(_FAMILIES))}"
        )
    keys = _Keys(metadata, architecture)
    _refuse_unsupported(keys)
    return _shape(keys, stored) | _rope(keys, stored.rope) | special_ids(metadata) | family(keys, stored)


class _Keys:
    """Look-ups below the architecture's own prefix."""

    def __init__(self, metadata: Fields, architecture: str) -> None:
        self.metadata = metadata
        self.prefix = f"{architecture}."

    def has(self, key: str) -> bool:
        return self.metadata.has(self.prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        return self.metadata.integer(self.prefix + key, maximum=_MAX, default=default)

    def number(self, key: str, above: float, below: float, default: float | None = None) -> float:
        return shortest(self.metadata.number(self.prefix + key, above=above, below=below, default=default))

    def text(self, key: str, default: str) -> str:
        return self.metadata.text(self.prefix + key, default=default)

    def unsupported(self, key: str, supported: str) -> Unsupported:
        given = show(self.metadata.raw(self.prefix + key))
        return Unsupported(f"{self.metadata.source}: {self.prefix}{key} is {given}; supported: {supported}")


def _refuse_unsupported(keys: _Keys) -> None:
    """Refuse what would be computed wrongly if it were ignored."""
    neutral = {
        "expert_count": 0,
        "attention.causal": True,
        "attention.scale": 1.0,
        "attention.clamp_kqv": 0.0,
        "attention.max_alibi_bias": 0.0,
        "logit_scale": 1.0,
        "residual_scale": 1.0,
        "embedding_scale": 1.0,
        "rope.scaling.yarn_ext_factor": 1.0,
        "rope.scaling.yarn_log_multiplier": 0.0,
        "use_parallel_residual": False,
    }
    for key, value in neutral.items():
        if keys.has(key) and keys.metadata.raw(keys.prefix + key) != value:
            raise keys.unsupported(key, str(value))


def _shape(keys: _Keys, stored: Stored) -> dict[str, Any]:
    hidden_size, num_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", default=max(1, hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, default=head_dim) != head_dim:
            raise keys.unsupported(key, f"{head_dim}, the size of a key head")
    return {
        "dtype": "float32",
        "torch_dtype": "float32",
        "vocab_size": stored.vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", above=0.0, below=1.0),
        "tie_word_embeddings": stored.tied,
    }


def _llama(keys: _Keys, stored: Stored) -> dict[str, Any]:
    """Llama, and Mistral, whose files name the same architecture: only a sliding window tells them apart."""
    if not keys.has("attention.sliding_window"):
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": stored.attention_bias,
            "mlp_bias": stored.mlp_bias,
        }
    if stored.attention_bias or stored.mlp_bias:
        raise keys.unsupported("attention.sliding_window", "a window in models without biases")
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": keys.integer("attention.sliding_window"),
    }


def _qwen(model_type: str, architecture: str) -> Callable[[_Keys, Stored], dict[str, Any]]:
    def read(keys: _Keys, stored: Stored) -> dict[str, Any]:
        if keys.has("attention.sliding_window"):
            # Which layers have it is not in the file.
            raise keys.unsupported("attention.sliding_window", "attention to the whole context")
        own: dict[str, Any] = {"attention_bias": stored.attention_bias} if model_type == "qwen3" else {}
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "use_sliding_window": False,
            "sliding_window": None,
        } | own

    return read


_FAMILIES: Final[Mapping[str, Callable[[_Keys, Stored], dict[str, Any]]]] = MappingProxyType(
    {"llama": _llama, "qwen2": _qwen("qwen2", "Qwen2ForCausalLM"), "qwen3": _qwen("qwen3", "Qwen3ForCausalLM")}
)
"""GGUF's name of an architecture and what it adds to the configuration."""


def _rope(keys: _Keys, factors: RopeFactors) -> dict[str, Any]:
    theta = keys.number("rope.freq_base", above=1.0, below=1e15, default=10_000.0)
    kind = keys.text("rope.scaling.type", default="linear" if keys.has("rope.scale_linear") else "none")
    if kind not in _ROPE_TYPES:
        raise keys.unsupported("rope.scaling.type", ", ".join(_ROPE_TYPES))
    if factors.every is not None:
        if kind != "none":
            raise keys.unsupported("rope.scaling.type", "'none' beside the tensor rope_freqs.weight")
        parameters = _from_divisors(keys, factors.every, theta)
    elif kind == "linear":
        old = keys.number("rope.scale_linear", above=0.0, below=1e6, default=1.0)
        factor = keys.number("rope.scaling.factor", above=0.0, below=1e6, default=old)
        parameters = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        parameters = _yarn(keys)
    elif kind == "longrope":
        parameters = _longrope(keys, factors)
    else:
        parameters = {"rope_type": "default"}
    return {"rope_theta": theta, "rope_parameters": parameters | {"rope_theta": theta}}


def _from_divisors(keys: _Keys, divisors: Sequence[float], theta: float) -> dict[str, Any]:
    """Files of Llama 3.1 and later keep the divisors alone. Where they are those of its published constants, name these."""
    factor = max(divisors)
    published = llama3_divisors(factor, theta, 2 * len(divisors))
    if len(divisors) and np.allclose(divisors, published, rtol=1e-5, atol=0.0):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
        }
    # Any other divisors: LongRoPE with the same ones at every length and no factor on the attention is that, exactly.
    return {
        "rope_type": "longrope",
        "short_factor": list(divisors),
        "long_factor": list(divisors),
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": keys.integer("context_length"),
    }


def llama3_divisors(factor: float, theta: float, head_dim: int) -> list[float]:
    """What Llama 3.1 divides the rotary frequencies by: 1 for short wavelengths, ``factor`` for long ones, between them a ramp.

    Source: transformers' ``_compute_llama3_parameters``, as a divisor, with the constants of the published models.
    """
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    ramp = (_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    share = np.clip(ramp, 0.0, 1.0)
    divisors: list[float] = (1.0 / ((1.0 - share) / factor + share)).tolist()
    return divisors


def _yarn(keys: _Keys) -> dict[str, Any]:
    factor = keys.number("rope.scaling.factor", above=0.0, below=1e6)
    own = keys.number("rope.scaling.attn_factor", above=0.0, below=1e6, default=1.0)
    own = keys.number("rope.scaling.yarn_attn_factor", above=0.0, below=1e6, default=own)
    parameters: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.integer(
            "rope.scaling.original_context_length", default=keys.integer("context_length")
        ),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", above=0.0, below=1e6, default=32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", above=0.0, below=1e6, default=1.0),
    }
    if own != 1.0:
        # GGUF's factor multiplies YaRN's own, 0.1 ln(factor) + 1; transformers' replaces it.
        parameters["attention_factor"] = own * (0.1 * float(np.log(max(factor, 1.0))) + 1.0)
    return parameters


def _longrope(keys: _Keys, factors: RopeFactors) -> dict[str, Any]:
    if factors.short is None or factors.long is None:
        raise InvalidModel(
            f"{keys.metadata.source}: rope scaling 'longrope' without the tensors rope_factors_short.weight and "
            "rope_factors_long.weight; fetch the file again"
        )
    return {
        "rope_type": "longrope",
        "short_factor": list(factors.short),
        "long_factor": list(factors.long),
        "factor": keys.number("rope.scaling.factor", above=0.0, below=1e6, default=1.0),
        "attention_factor": keys.number("rope.scaling.attn_factor", above=0.0, below=1e6, default=1.0),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
    }


def shortest(value: float) -> float:
    """The shortest decimal of a value stored as float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def special_ids(metadata: Fields) -> dict[str, Any]:
    """The ids of special tokens under the names of ``config.json``; all that end a text or a turn together."""
    ids = {key: metadata.raw(f"tokenizer.ggml.{name}_token_id") for key, name in _SPECIAL.items()}
    ends = [metadata.raw(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    different = list(dict.fromkeys(end for end in ends if end is not None))
    end = different[0] if len(different) == 1 else different or None
    return {key: value for key, value in ids.items() if value is not None} | (
        {"eos_token_id": end} if different else {}
    )


_SPECIAL: Final = {"bos_token_id": "bos", "pad_token_id": "padding"}
