"""GGUF metadata as config.json: what transformers makes of it, every kind of rope, and refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forebay.runtime.models.gguf_config import RopeFactors, Stored, config_of, llama3_divisors
from forebay.runtime.models.gguf_import import open_gguf
from forebay.runtime.models.json_fields import Fields
from forebay.specs.errors import InvalidModel, Unsupported
from tests.models import gguf_families, tiny

STORED = Stored(vocab_size=267, tied=True, attention_bias=False, mlp_bias=False, rope=RopeFactors())


def config(changes: Mapping[str, Any] | None = None, *, architecture: str = "llama", **stored: Any) -> dict[str, Any]:
    """The configuration of the tiny model's metadata with some keys changed."""
    metadata = {"general.architecture": architecture, **tiny.gguf_metadata(architecture), **(changes or {})}
    given = {field: getattr(STORED, field) for field in Stored.__dataclass_fields__} | stored
    return config_of(Fields("tiny.gguf", metadata), Stored(**given))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_configuration_is_that_of_the_model(tmp_path: Path, family: str) -> None:
    made = gguf_families.random_model(
        family, rms_norm_eps=3e-6, rope_parameters={"rope_type": "default", "rope_theta": 12345.0}
    )
    file = gguf_families.write(tmp_path / "x.gguf", made, family)
    (tmp_path / "config.json").write_text(json.dumps(dict(open_gguf(file).config)))
    read, original = AutoConfig.from_pretrained(tmp_path), made.config
    own = {"dtype", "architectures", "_name_or_path", "transformers_version", "max_window_layers", "layer_types"}
    ours, theirs = read.to_dict(), original.to_dict()
    assert {k: v for k, v in ours.items() if k in theirs.keys() - own} == {
        k: v for k, v in theirs.items() if k in ours.keys() - own
    }
    assert read.architectures == [type(made).__name__]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_sizes_are_those_transformers_reads_from_the_same_file(tmp_path: Path, family: str) -> None:
    file = gguf_families.write(tmp_path / "x.gguf", gguf_families.random_model(family), family)
    theirs = load_gguf_checkpoint(file)["config"]
    ours = open_gguf(file).config
    shared = {key for key in theirs.keys() & ours.keys() if theirs[key] is not None and key != "architectures"}
    assert len(shared) >= 10
    for key in shared:
        assert ours[key] == (pytest.approx(theirs[key]) if isinstance(theirs[key], float) else theirs[key]), key


def test_a_sliding_window_makes_it_mistral() -> None:
    read = config({"llama.attention.sliding_window": 4096})
    assert (read["model_type"], read["architectures"], read["sliding_window"]) == (
        "mistral",
        ["MistralForCausalLM"],
        4096,
    )
    assert config()["model_type"] == "llama"


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ({}, 2),
        ({"eot": 5}, [2, 5]),
        ({"eot": 2, "eom": 2}, 2),
        ({"eos": None, "eot": 5}, 5),
        ({"eos": 7, "eot": 5, "eom": 6}, [7, 5, 6]),
    ],
)
def test_every_token_that_ends_a_turn_ends_the_text(ids: dict[str, Any], expected: object) -> None:
    read = config({f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()})
    assert read["eos_token_id"] == expected


def test_absent_keys_take_the_defaults_of_the_format() -> None:
    absent = ("attention.key_length", "attention.head_count_kv", "rope.freq_base")
    read = config(dict.fromkeys(f"llama.{key}" for key in absent))
    assert (read["head_dim"], read["num_key_value_heads"], read["rope_theta"]) == (16, 4, 10_000.0)


# Rotary embedding.


def frequencies(read: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """What transformers computes for the configuration: the frequencies and the factor on cos and sin."""
    keys = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_parameters")
    rotary = LlamaRotaryEmbedding(LlamaConfig(**{key: read[key] for key in keys}))
    return rotary.inv_freq, rotary.attention_scaling


def plain(theta: float = 5000.0, head_dim: int = 16) -> torch.Tensor:
    return torch.tensor(1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim), dtype=torch.float32)


def test_no_scaling_and_linear_scaling() -> None:
    inverse, scale = frequencies(config())
    torch.testing.assert_close(inverse, plain())
    assert scale == 1.0
    for keys in ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}):
        read = config({f"llama.{key}": value for key, value in keys.items()})
        assert read["rope_parameters"] == {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
        torch.testing.assert_close(frequencies(read)[0], plain() / 4)


def test_yarn_is_that_of_the_original_configuration() -> None:
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    read = config({f"llama.{key}": value for key, value in scaling.items()})
    original = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    ours, theirs = frequencies(read), frequencies({**read, "rope_parameters": original})
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0)
    assert ours[1] == theirs[1] == pytest.approx(0.1 * np.log(4.0) + 1.0)
    scaled = config({f"llama.{key}": value for key, value in (scaling | {"rope.scaling.attn_factor": 0.5}).items()})
    assert frequencies(scaled)[1] == pytest.approx(0.5 * theirs[1])


def llama_cpp_divisors(factor: float, theta: float, head_dim: int) -> list[float]:
    """The values of rope_freqs.weight, written as the converter of llama.cpp computes them."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    rounded: list[float] = np.array(divisors, np.float32).tolist()
    return rounded


@pytest.mark.parametrize(
    ("factor", "theta", "head_dim"), [(8.0, 500_000.0, 128), (32.0, 500_000.0, 64), (8.0, 5000.0, 16)]
)
def test_the_divisors_of_llama_3_are_named_by_their_constants(factor: float, theta: float, head_dim: int) -> None:
    divisors = llama_cpp_divisors(factor, theta, head_dim)
    np.testing.assert_allclose(divisors, llama3_divisors(max(divisors), theta, head_dim), rtol=1e-6)
    changes = {"llama.rope.freq_base": theta, "llama.attention.key_length": head_dim}
    read = config(changes, rope=RopeFactors(every=divisors))
    torch.testing.assert_close(frequencies(read)[0], plain(theta, head_dim) / torch.tensor(divisors), rtol=1e-5, atol=0)
    assert read["rope_parameters"] == {
        "rope_type": "llama3",
        "factor": max(divisors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": theta,
    }


def test_any_other_divisors_are_kept_as_they_are() -> None:
    divisors = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 7.0, 9.0]
    read = config(rope=RopeFactors(every=divisors))
    inverse, scale = frequencies(read)
    torch.testing.assert_close(inverse, plain() / torch.tensor(divisors))
    assert (scale, read["rope_parameters"]["rope_type"]) == (1.0, "longrope")


def test_longrope_takes_both_lists_from_the_tensors(tmp_path: Path) -> None:
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(1, 8, 8, dtype=np.float32)
    scaling = {"type": "longrope", "original_context_length": 64, "attn_factor": 1.25}
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    metadata = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    file = tiny.write_gguf(tmp_path / "x.gguf", tiny.gguf_tensors(tiny.weights()) | tensors, metadata=metadata)
    model = open_gguf(file)
    parameters = model.config["rope_parameters"]
    assert (parameters["short_factor"], parameters["long_factor"]) == (short.tolist(), long.tolist())
    assert (parameters["original_max_position_embeddings"], parameters["attention_factor"]) == (64, 1.25)
    assert not set(tensors) & set(model.weights.names)
    torch.testing.assert_close(frequencies(model.config)[0], plain() / torch.from_numpy(short))


@pytest.mark.parametrize(
    "values", [np.array([1.0, 0.0], np.float32), np.array([1.0, np.nan], np.float32), np.ones((2, 2), np.float32)]
)
def test_divisors_that_are_none_are_refused(tmp_path: Path, values: np.ndarray[Any, Any]) -> None:
    tensors = tiny.gguf_tensors(tiny.weights()) | {"rope_freqs.weight": values}
    file = tiny.write_gguf(tmp_path / "x.gguf", tensors)
    with pytest.raises(InvalidModel, match=r"rope_freqs.weight (has values that are not positive|is F32)"):
        open_gguf(file)


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is 8; supported: 0"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False; supported: True"),
        ({"llama.attention.value_length": 32}, "value_length is 32; supported: 16, the size of a key head"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8; supported: 16"),
        ({"llama.rope.scaling.type": "dynamic"}, "scaling.type is 'dynamic'; supported: none, linear, yarn, longrope"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1; supported: 0.0"),
        ({"general.architecture": "gemma3"}, "architecture 'gemma3'; supported: llama, qwen2, qwen3"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        config(changes)


def test_combinations_that_are_not_implemented_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"qwen2.attention.sliding_window is 64; supported: attention to the whole"):
        config({"qwen2.attention.sliding_window": 64}, architecture="qwen2")
    with pytest.raises(Unsupported, match="a window in models without biases"):
        config({"llama.attention.sliding_window": 64}, attention_bias=True)
    with pytest.raises(Unsupported, match=r"scaling.type is 'yarn'; supported: 'none' beside the tensor rope_freqs"):
        config({"llama.rope.scaling.type": "yarn"}, rope=RopeFactors(every=[1.0] * 8))
    with pytest.raises(InvalidModel, match=r"'longrope' without the tensors rope_factors_short.weight and"):
        config({"llama.rope.scaling.type": "longrope"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": None}, "general.architecture is None; expected a string"),
        ({"llama.embedding_length": 0}, "llama.embedding_length is 0; expected an integer from 1"),
        ({"llama.block_count": 2**31}, "llama.block_count is 2147483648; expected an integer"),
        ({"llama.attention.head_count": np.array([4, 4])}, r"head_count is array\(\[4, 4\]\); expected an integer"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan; expected a number above 0"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "epsilon is None; expected a number above 0"),
        ({"llama.rope.freq_base": float("inf")}, "freq_base is inf; expected a number"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "factor is 0.0; expected a number"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.factor is missing; expected a number"),
        ({"llama.context_length": "long"}, "context_length is 'long'; expected an integer"),
    ],
)
def test_a_wrong_value_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=rf"tiny.gguf: .*{message}"):
        config(changes)
