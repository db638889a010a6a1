"""The tensors of a Llama-family model: their names in a safetensors folder and their shapes."""

from __future__ import annotations

from typing import Final

from .config import ModelConfig

EMBEDDING: Final = "model.embed_tokens.weight"
FINAL_NORM: Final = "model.norm.weight"
OUTPUT: Final = "lm_head.weight"


def layer_tensor(layer: int, part: str) -> str:
    """The full name of ``part`` (``self_attn.q_proj``, ``mlp.up_proj``, …) of ``layer``."""
    return f"model.layers.{layer}.{part}.weight"


def layer_bias(layer: int, part: str) -> str:
    """The full name of the bias of the product ``part`` of ``layer``."""
    return f"model.layers.{layer}.{part}.bias"


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor a model of ``config`` has, in the order of use.

    Products are [out, in], biases [out], norms [hidden], norms of query and key heads [D]. With tied embeddings the output
    product is the embedding itself and has no tensor of its own.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= _layer_shapes(config, layer)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[OUTPUT] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {}

    def norm(part: str, size: int) -> None:
        shapes[layer_tensor(layer, part)] = (size,)

    def product(part: str, size: int, width: int, bias: bool) -> None:
        shapes[layer_tensor(layer, part)] = (size, width)
        if bias:
            shapes[layer_bias(layer, part)] = (size,)

    norm("input_layernorm", hidden)
    product("self_attn.q_proj", config.query_size, hidden, config.qkv_bias)
    product("self_attn.k_proj", config.kv_size, hidden, config.qkv_bias)
    product("self_attn.v_proj", config.kv_size, hidden, config.qkv_bias)
    if config.qk_norm:
        norm("self_attn.q_norm", config.head_dim)
        norm("self_attn.k_norm", config.head_dim)
    product("self_attn.o_proj", hidden, config.query_size, config.output_bias)
    norm("post_attention_layernorm", hidden)
    product("mlp.gate_proj", inner, hidden, config.mlp_bias)
    product("mlp.up_proj", inner, hidden, config.mlp_bias)
    product("mlp.down_proj", hidden, inner, config.mlp_bias)
    return shapes


def is_redundant(config: ModelConfig, name: str) -> bool:
    """Whether a tensor that is not expected can be passed over, because the model computes or shares its values."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == OUTPUT)
