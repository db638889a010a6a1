"""ModelConfig: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime.models import ModelConfig, expected_tensors
from forebay.runtime.models.json_fields import read_json_object
from forebay.runtime.models.rope import DefaultRope
from forebay.specs.errors import InvalidModel, Unsupported
from tests.models import tiny


def test_every_value_is_read(tiny_folder: Path) -> None:
    config = ModelConfig.from_folder(tiny_folder)
    assert config == ModelConfig(
        model_type="llama",
        vocab_size=len(tiny.TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope=DefaultRope(5000.0),
        windows=(None, None),
        tie_word_embeddings=True,
        hidden_act="silu",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        bos_token_id=1,
        eos_token_ids=(2, 0),
        source=str(tiny_folder / "config.json"),
    )
    assert (config.group_size, config.query_size, config.kv_size) == (2, 64, 32)


def test_absent_keys_take_the_defaults_of_the_format(edit_config: Callable[..., Path]) -> None:
    absent = (
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
    )
    folder = edit_config(
        **dict.fromkeys((*absent, "tie_word_embeddings", "attention_bias", "bos_token_id", "eos_token_id"), ...)
    )
    (folder / "generation_config.json").unlink()
    config = ModelConfig.from_folder(folder)
    assert (config.num_kv_heads, config.head_dim, config.hidden_act) == (4, 16, "silu")
    assert (config.max_position_embeddings, config.rms_norm_eps, config.rope.theta) == (2048, 1e-6, 10_000.0)
    assert (config.tie_word_embeddings, config.bos_token_id, config.eos_token_ids) == (False, None, ())


@pytest.mark.parametrize(
    ("generation", "expected"),
    [({"eos_token_id": 1}, (1,)), ({"eos_token_id": [1, 2, 1]}, (1, 2)), ({"eos_token_id": None}, (2,)), ({}, (2,))],
)
def test_end_ids_come_from_the_generation_config_first(
    tiny_folder: Path, generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    (tiny_folder / "generation_config.json").write_text(json.dumps(generation))
    assert ModelConfig.from_folder(tiny_folder).eos_token_ids == expected


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2**62, 10**30, "64", 64.0, True, [64], {"a": 1}])
def test_a_size_that_is_none_is_refused(edit_config: Callable[..., Path], key: str, value: object) -> None:
    with pytest.raises(InvalidModel, match=rf"config\.json: {key} is .*; expected an integer from 1 to \d+"):
        ModelConfig.from_folder(edit_config(**{key: value}))


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_missing_size_is_refused(edit_config: Callable[..., Path], key: str) -> None:
    with pytest.raises(InvalidModel, match=rf"config\.json: {key} is missing; expected"):
        ModelConfig.from_folder(edit_config(**{key: ...}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads do not divide into 3 key/value heads"),
        ({"num_key_value_heads": 8}, "4 attention heads do not divide into 8 key/value heads"),
        ({"head_dim": 15}, "head_dim is 15; expected an even number"),
        ({"head_dim": ..., "hidden_size": 66}, "hidden_size 66 does not divide by num_attention_heads 4"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0; expected a number above 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; expected a number"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True; expected a number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*; expected a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
        ({"attention_bias": 1}, "attention_bias is 1; expected true or false"),
        ({"hidden_act": 3}, "hidden_act is 3; expected a string"),
        ({"model_type": ...}, "model_type is missing; expected a string"),
        ({"eos_token_id": 10**6, "bos_token_id": None}, "eos_token_id is 1000000; expected a token id"),
        ({"eos_token_id": [True]}, r"eos_token_id is \[True\]; expected a token id"),
        ({"bos_token_id": -1}, "bos_token_id is -1; expected a token id"),
    ],
)
def test_a_wrong_value_is_refused_by_key_value_and_expectation(
    edit_config: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    folder = edit_config(**changes)
    (folder / "generation_config.json").unlink()
    with pytest.raises(InvalidModel, match=f"config.json: {message}"):
        ModelConfig.from_folder(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model_type is 'gemma'; supported: llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is given"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    edit_config: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        ModelConfig.from_folder(edit_config(**changes))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"model_type": "llama"', "not valid JSON"),
        (b"[1, 2]", "holds a JSON list; expected an object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": 1, "a": 2}', "'a' is given more than once"),
        (b'{"a": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_damaged_json_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(InvalidModel, match=f"config.json: .*{message}"):
        read_json_object(file)


def test_a_missing_a_huge_and_an_unreadable_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(InvalidModel, match="no such file"):
        read_json_object(file)
    with file.open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(InvalidModel, match="expected a JSON file of at most"):
        read_json_object(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(InvalidModel, match="cannot be read"):
        read_json_object(file)


def test_expected_tensors_follow_the_configuration() -> None:
    shapes = expected_tensors(tiny.config())
    assert len(shapes) == 2 * 9 + 2
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (32, 64)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (64, 64)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (64, 96)
    assert "lm_head.weight" not in shapes
    untied = expected_tensors(tiny.config(tie_word_embeddings=False))
    assert untied["lm_head.weight"] == untied["model.embed_tokens.weight"] == (len(tiny.TOKENS), 64)
