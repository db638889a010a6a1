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


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor a model of ``config`` has, in the order of use. Products are [out, in], norms [hidden].

    With tied embeddings the output product is the embedding itself and has no tensor of its own.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    layer_shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (config.query_size, hidden),
        "self_attn.k_proj": (config.kv_size, hidden),
        "self_attn.v_proj": (config.kv_size, hidden),
        "self_attn.o_proj": (hidden, config.query_size),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= {layer_tensor(layer, part): shape for part, shape in layer_shapes.items()}
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[OUTPUT] = (config.vocab_size, hidden)
    return shapes


def is_redundant(config: ModelConfig, name: str) -> bool:
    """Whether a tensor that is not expected can be passed over, because the model computes or shares its values."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == OUTPUT)
