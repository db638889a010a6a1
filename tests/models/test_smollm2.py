"""The real model: its tokenizer and weights give the reference ids and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.runtime.models import ModelFolder, open_model_folder

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model(smollm2_folder: Path) -> ModelFolder:
    return open_model_folder(smollm2_folder)


def test_the_configuration_is_smollm2s(model: ModelFolder) -> None:
    config = model.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size) == (
        30,
        576,
        1536,
        49152,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope.theta, config.rms_norm_eps, config.tie_word_embeddings) == (100_000.0, 1e-5, True)
    assert config.eos_token_ids == (2,)


def test_prompts_encode_to_the_reference_ids(model: ModelFolder, golden: list[dict[str, Any]]) -> None:
    assert len(golden) == 8
    for item in golden:
        assert model.tokenizer.encode(item["prompt"]) == item["prompt_ids"]


def test_outputs_decode_to_the_reference_text_whole_and_streamed(
    model: ModelFolder, golden: list[dict[str, Any]]
) -> None:
    for item in golden:
        assert model.tokenizer.decode(item["output_ids"]) == item["text"]
        stream = model.tokenizer.stream()
        assert "".join([*map(stream.push, item["output_ids"]), stream.finish()]) == item["text"]


def test_transformers_reads_the_folder_and_gives_the_reference_tokens(
    smollm2_folder: Path, golden: list[dict[str, Any]]
) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    item, count = golden[0], 8
    reference = LlamaForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    ids = torch.tensor([item["prompt_ids"]])
    with torch.inference_mode():
        output = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
        )
    assert output[0, ids.shape[1] :].tolist() == item["output_ids"][:count]
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    assert [tokenizer(entry["prompt"])["input_ids"] for entry in golden] == [entry["prompt_ids"] for entry in golden]


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_its_chat_template_gives_the_text_and_ids_of_transformers(
    model: ModelFolder, smollm2_folder: Path, add_generation_prompt: bool
) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2_folder)
    user, answer = {"role": "user", "content": "What is 2 + 2?\n"}, {"role": "assistant", "content": "4"}
    for messages in ([user], [{"role": "system", "content": "Be brief."}, user], [user, answer, user]):
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        text = model.tokenizer.apply_chat_template(messages, **options)
        assert text == reference.apply_chat_template(messages, tokenize=False, **options)
        ids = model.tokenizer.apply_chat_template(messages, tokenize=True, **options)
        assert ids == reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
