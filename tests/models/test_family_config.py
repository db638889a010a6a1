"""What each model type reads from its configuration: defaults, biases, norms, windows, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from forebay.runtime.models import ModelConfig, expected_tensors
from forebay.runtime.models.families import FAMILIES
from forebay.runtime.models.json_fields import Fields
from forebay.runtime.models.rope import DefaultRope, Llama3Rope, Rope, YarnRope, yarn_scale
from forebay.specs.errors import InvalidModel, Unsupported
from tests.models import tiny

QWENS = ("qwen2", "qwen3")
SLIDING, FULL = "sliding_attention", "full_attention"
SWITCHED_ON = {"use_sliding_window": True, "sliding_window": 7}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_keys_mean_what_they_mean_to_transformers(model_type: str) -> None:
    """Every optional key left out, against the attributes of transformers' configuration."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    given = {"model_type": model_type, "vocab_size": 300, **sizes}
    config = ModelConfig.from_fields(Fields("config.json", given), Fields("generation_config.json", {}))
    theirs = AutoConfig.for_model(vocab_size=300, **sizes, model_type=model_type)
    dim = getattr(theirs, "head_dim", None) or 32
    assert (config.num_kv_heads, config.head_dim) == (theirs.num_key_value_heads, dim)
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert (config.rms_norm_eps, config.rope.theta) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])
    assert (config.hidden_act, config.tie_word_embeddings) == (theirs.hidden_act, theirs.tie_word_embeddings)
    slides = model_type == "mistral"
    assert config.windows == ((theirs.sliding_window if slides else None),) * 2


@pytest.mark.parametrize("model_type", FAMILIES)
def test_null_heads_are_as_many_as_query_heads(model_type: str) -> None:
    assert tiny.config(model_type=model_type, num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("model_type", "changes", "biases"),
    [
        ("llama", {}, (False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("mistral", {}, (False, False, False)),
        ("qwen2", {}, (True, False, False)),
        ("qwen2", {"attention_bias": True}, (True, False, False)),
        ("qwen3", {}, (False, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_and_norms_are_those_of_the_family(
    model_type: str, changes: dict[str, Any], biases: tuple[bool, bool, bool]
) -> None:
    config = tiny.config(model_type=model_type, **changes)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == biases
    assert config.qk_norm == (model_type == "qwen3")
    names = set(expected_tensors(config))
    for part, has in zip(("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"), biases, strict=True):
        assert (f"model.layers.1.{part}.bias" in names) == has
    assert ("model.layers.0.self_attn.q_norm.weight" in names) == config.qk_norm


def test_biases_and_norms_have_shapes() -> None:
    shapes = expected_tensors(tiny.config(model_type="qwen3", attention_bias=True))
    layer = {name.removeprefix("model.layers.1."): shape for name, shape in shapes.items() if ".1." in name}
    assert layer["self_attn.q_proj.bias"] == layer["self_attn.o_proj.bias"] == (64,)
    assert layer["self_attn.k_proj.bias"] == layer["self_attn.v_proj.bias"] == (32,)
    assert layer["self_attn.q_norm.weight"] == layer["self_attn.k_norm.weight"] == (16,)
    feed_forward = expected_tensors(tiny.config(mlp_bias=True))
    assert feed_forward["model.layers.0.mlp.gate_proj.bias"] == feed_forward["model.layers.0.mlp.up_proj.bias"] == (96,)
    assert feed_forward["model.layers.0.mlp.down_proj.bias"] == (64,)


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("llama", {"sliding_window": None}, (None, None)),
        ("llama", {"sliding_window": 9, "use_sliding_window": False}, (None, None)),
        ("llama", {"layer_types": [FULL, FULL]}, (None, None)),
        ("mistral", {"sliding_window": 9}, (9, 9)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("mistral", {"sliding_window": 9, "layer_types": [SLIDING, SLIDING]}, (9, 9)),
        *[
            (model_type, changes, windows)
            for model_type in QWENS
            for changes, windows in (
                ({}, (None, None)),
                ({"sliding_window": 7}, (None, None)),
                ({"sliding_window": 7, "use_sliding_window": False, "max_window_layers": 0}, (None, None)),
                (SWITCHED_ON, (None, None)),
                (SWITCHED_ON | {"max_window_layers": 0}, (7, 7)),
                (SWITCHED_ON | {"max_window_layers": 1}, (None, 7)),
                ({"use_sliding_window": True, "max_window_layers": 1}, (None, 4096)),
                (SWITCHED_ON | {"max_window_layers": 2}, (None, None)),
                (SWITCHED_ON | {"layer_types": [SLIDING, FULL]}, (7, None)),
                (SWITCHED_ON | {"layer_types": [FULL, FULL], "max_window_layers": 0}, (None, None)),
                ({"layer_types": [FULL, FULL]}, (None, None)),
            )
        ],
    ],
)
def test_windows_are_read_layer_by_layer(
    model_type: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert tiny.config(model_type=model_type, **changes).windows == windows


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "llama",
            {"sliding_window": 4096},
            "sliding_window is 4096; supported for llama: attention to the whole context",
        ),
        (
            "llama",
            {"layer_types": [FULL, SLIDING]},
            "supported for llama with this sliding_window: full_attention in every",
        ),
        (
            "mistral",
            {"sliding_window": 9, "layer_types": [SLIDING, FULL]},
            "supported for mistral .*: sliding_attention",
        ),
        (
            "mistral",
            {"sliding_window": None, "layer_types": [SLIDING, FULL]},
            "supported for mistral .*: full_attention",
        ),
        (
            "mistral",
            {"attention_bias": True},
            "attention_bias is true; supported for mistral: products without this bias",
        ),
        ("mistral", {"mlp_bias": True}, "mlp_bias is true; supported for mistral: products without this bias"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias is true; supported for qwen2"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias is true; supported for qwen3"),
        ("qwen2", {"layer_types": [FULL, "chunked_attention"]}, "layer_types has 'chunked_attention'; supported: full"),
        ("qwen3", {"layer_types": [FULL, None]}, "layer_types has None; supported: full_attention, sliding_attention"),
        *[(model_type, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'") for model_type in FAMILIES],
    ],
)
def test_what_is_not_implemented_is_refused_by_name(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=f"config.json: .*{message}"):
        tiny.config(model_type=model_type, **changes)


@pytest.mark.parametrize("model_type", QWENS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [SLIDING, FULL]}, "layer_types has sliding_attention and use_sliding_window is not true"),
        (
            {"layer_types": [SLIDING, FULL], "sliding_window": 7, "use_sliding_window": False},
            "layer_types has sliding_attention and use_sliding_window is not true; expected both or neither",
        ),
        (
            {"use_sliding_window": True, "sliding_window": None},
            "sliding_window is None; expected a number of tokens, as use_sliding_window is true",
        ),
        (SWITCHED_ON | {"sliding_window": 0}, "sliding_window is 0; expected an integer from 1"),
        (SWITCHED_ON | {"sliding_window": -7}, "sliding_window is -7; expected an integer from 1"),
        (SWITCHED_ON | {"sliding_window": 7.0}, "sliding_window is 7.0; expected an integer from 1"),
        (SWITCHED_ON | {"sliding_window": 2**31}, "sliding_window is 2147483648; expected an integer from 1"),
        (SWITCHED_ON | {"max_window_layers": -1}, "max_window_layers is -1; expected an integer from 0"),
        ({"use_sliding_window": 1}, "use_sliding_window is 1; expected true or false"),
        (SWITCHED_ON | {"layer_types": [FULL]}, "layer_types is .*; expected a list of 2 names, one a layer"),
        (SWITCHED_ON | {"layer_types": FULL}, "layer_types is 'full_attention'; expected a list of 2 names"),
    ],
)
def test_contradictory_and_damaged_windows_are_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=f"config.json: {message}"):
        tiny.config(model_type=model_type, **changes)


PUBLISHED: dict[str, tuple[dict[str, Any], Rope, tuple[int | None, ...]]] = {
    "Llama 3.1": (
        {
            "model_type": "llama",
            "attention_bias": False,
            "eos_token_id": [1, 2],
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_key_value_heads": 2,
            "pretraining_tp": 1,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
        },
        Llama3Rope(500_000.0, 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        (None, None),
    ),
    "Mistral 0.1": (
        {"model_type": "mistral", "num_key_value_heads": 2, "rope_theta": 10000.0, "sliding_window": 4096},
        DefaultRope(10_000.0),
        (4096, 4096),
    ),
    "Mistral 0.3": (
        {"model_type": "mistral", "num_key_value_heads": 2, "rope_theta": 1000000.0, "sliding_window": None},
        DefaultRope(1_000_000.0),
        (None, None),
    ),
    "Qwen 2.5 for long contexts": (
        {
            "model_type": "qwen2",
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "num_key_value_heads": 2,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "use_sliding_window": False,
        },
        YarnRope(1e6, 4.0, 32768, yarn_scale(4.0), beta_fast=32.0, beta_slow=1.0, truncate=True),
        (None, None),
    ),
    "Qwen 3": (
        {
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": 128,
            "max_window_layers": 28,
            "num_key_value_heads": 2,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        DefaultRope(1_000_000.0),
        (None, None),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_are_read_as_their_authors_write_them(name: str) -> None:
    """The keys of published configurations, their sizes made small."""
    values, rope, windows = PUBLISHED[name]
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    given = Fields("config.json", {"hidden_act": "silu", "num_attention_heads": 4, **sizes, **values})
    config = ModelConfig.from_fields(given, Fields("generation_config.json", {}))
    assert (config.rope, config.windows) == (rope, windows)
