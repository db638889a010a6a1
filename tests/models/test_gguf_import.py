"""The GGUF import: the same numbers, names and order of rows, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from forebay.runtime import Engine, SamplingParams, load_model, open_backend
from forebay.runtime.models import ModelConfig, ModelFolder, expected_tensors, open_model, open_model_folder
from forebay.runtime.models.gguf_import import convert_gguf
from forebay.runtime.models.progress import no_progress
from forebay.specs.errors import InvalidModel
from tests.models import tiny


def convert(tmp_path: Path, tensors: tiny.Weights, **options: Any) -> Path:
    source = tiny.write_gguf(tmp_path / "tiny.gguf", tensors, **options)
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(source, folder, no_progress)
    return folder


def test_the_folder_holds_the_model_the_file_was_made_of(tmp_path: Path) -> None:
    folder = convert(tmp_path, tiny.gguf_tensors(tiny.weights()))
    model = open_model_folder(folder)
    for name, values in tiny.weights().items():
        np.testing.assert_array_equal(model.weights.tensor(name, values.shape), values)
    original = tiny.write_folder(tmp_path / "original")
    expected = ModelConfig.from_folder(original)
    assert {**_fields(model.config), "source": "", "eos_token_ids": ()} == {
        **_fields(expected),
        "source": "",
        "eos_token_ids": (),
    }
    assert model.config.eos_token_ids == (2,)
    assert model.tokenizer.encode("<|start|>hello 42") == open_model_folder(original).tokenizer.encode(
        "<|start|>hello 42"
    )
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (tokenizer_config["eos_token"], tokenizer_config["chat_template"]) == ("<|stop|>", "{{ messages }}")


def _fields(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ModelConfig.__dataclass_fields__}


def test_quantised_tensors_come_as_float32_within_their_step(tmp_path: Path) -> None:
    folder = convert(
        tmp_path, tiny.gguf_tensors(tiny.weights()), kinds={"blk.0.ffn_up.weight": GGMLQuantizationType.Q8_0}
    )
    name = "model.layers.0.mlp.up_proj.weight"
    values = tiny.weights()[name]
    read = open_model_folder(folder).weights.tensor(name, values.shape)
    error = float(np.abs(read - values).max())
    assert 0 < error <= 0.5 / 127 + 1e-3


def test_an_output_product_of_its_own_is_untied(tmp_path: Path) -> None:
    output = np.random.default_rng(1).uniform(-1, 1, (len(tiny.TOKENS), 64)).astype(np.float32)
    folder = convert(tmp_path, tiny.gguf_tensors(tiny.weights()) | {"output.weight": output})
    model = open_model_folder(folder)
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(model.weights.tensor("lm_head.weight", output.shape), output)


def test_a_file_generates_the_tokens_of_its_folder(tmp_path: Path) -> None:
    file = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.gguf_tensors(tiny.weights()))
    prompts: list[str | list[int]] = ["hello world", [5, 6, 7, 8, 9]]
    with open_backend("cpu") as backend:
        results = [
            Engine(load_model(path, dtype="float32"), backend).generate(
                prompts, SamplingParams(max_tokens=20, ignore_eos=True)
            )
            for path in (file, tiny.write_folder(tmp_path / "folder"))
        ]
    of_file, of_folder = ([result.token_ids for result in each] for each in results)
    assert of_file == of_folder
    assert [len(ids) for ids in of_file] == [20, 20]


def test_a_model_of_shards_is_the_model_of_one_file(tmp_path: Path) -> None:
    file = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.gguf_tensors(tiny.weights()), shards=3)
    assert file.name == "tiny-00001-of-00003.gguf"
    model = open_model(file)
    for name, values in tiny.weights().items():
        np.testing.assert_array_equal(model.weights.tensor(name, values.shape), values)
    file.with_name("tiny-00003-of-00003.gguf").unlink()
    with pytest.raises(InvalidModel, match=r"tiny-00003-of-00003.gguf: no such file"):
        open_model(file)


def test_a_file_has_the_chat_templates_of_its_metadata(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools",
    }
    file = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.gguf_tensors(tiny.weights()), metadata=metadata)
    for tokenizer in (open_model(file).tokenizer, _converted(tmp_path, file).tokenizer):
        messages = [{"role": "user", "content": "hello"}]
        assert tokenizer.apply_chat_template(messages) == "<|start|>hello"
        assert tokenizer.apply_chat_template(messages, chat_template="tool_use") == "tools"


def _converted(tmp_path: Path, file: Path) -> ModelFolder:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(file, folder, no_progress)
    return open_model(folder)


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    source = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.gguf_tensors(tiny.weights()))
    seen: list[tuple[int, int | None]] = []
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(source, folder, lambda done, total, phase: seen.append((done, total)))
    total = sum(4 * int(np.prod(shape)) for shape in expected_tensors(tiny.config()).values())
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_tensors_that_do_not_fit_the_metadata_are_refused(tmp_path: Path) -> None:
    tensors = tiny.gguf_tensors(tiny.weights())
    missing = {name: values for name, values in tensors.items() if name != "blk.1.attn_q.weight"}
    with pytest.raises(InvalidModel, match=r"1 of 20 expected tensors are missing: model.layers.1.self_attn.q_proj"):
        convert(tmp_path, missing)


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_rot_embd.weight": np.ones(8, np.float32)}
    with pytest.raises(InvalidModel, match=r"1 stored tensors have no place .* first is 'blk.0.attn_rot_embd.weight'"):
        convert(tmp_path, tiny.gguf_tensors(tiny.weights()) | extra)


def test_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    wrong = {"output_norm.weight": np.ones(32, np.float32)}
    with pytest.raises(InvalidModel, match=r"'model.norm.weight' has shape \[32\]; the metadata expects \[64\]"):
        convert(tmp_path, tiny.gguf_tensors(tiny.weights()) | wrong)


@pytest.mark.parametrize("length", [0, 3, 20, 200])
def test_a_file_cut_short_is_refused(tmp_path: Path, length: int) -> None:
    source = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.gguf_tensors(tiny.weights()))
    source.write_bytes(source.read_bytes()[:length])
    with pytest.raises(InvalidModel, match=r"tiny.gguf: not a readable GGUF file"):
        convert_gguf(source, tmp_path, no_progress)
