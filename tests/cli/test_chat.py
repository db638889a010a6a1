"""``forebay generate --chat``: prompts written as the model's chat template has them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.running import Run
from tests.models import tiny

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
)
SMALL = ("--max-tokens", "4", "--ignore-eos", "--max-len", "64", "--json")


def test_each_prompt_becomes_a_conversation(run: Run, tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "tiny")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    code, out, err = run("generate", "hello", "wor", "--chat", "--model", str(folder), *SMALL)
    assert (code, err) == (0, "")
    chats = json.loads(out)["results"]
    assert [chat["prompt"] for chat in chats] == ["hello", "wor"]
    written = ["<|start|>user hello!", "<|start|>user wor!"]
    plain = json.loads(run("generate", *written, "--model", str(folder), *SMALL).out)["results"]
    for chat, text in zip(chats, plain, strict=True):
        assert chat["prompt_token_ids"] == text["prompt_token_ids"]
        assert chat["token_ids"] == text["token_ids"]


def test_a_model_without_a_template_is_one_line(run: Run, tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "tiny")
    code, out, err = run("generate", "hello", "--chat", "--model", str(folder), *SMALL)
    assert (code, out) == (2, "")
    assert (
        err == f"error: {folder / 'tokenizer_config.json'}: the model has no chat template; give the prompt as text\n"
    )


def test_a_gguf_file_is_a_model(run: Run, tmp_path: Path) -> None:
    template = {"tokenizer.chat_template": TEMPLATE}
    file = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.gguf_tensors(tiny.weights()), metadata=template)
    code, out, err = run("generate", "hello", "--chat", "--model", str(file), *SMALL)
    assert (code, err) == (0, "")
    assert len(json.loads(out)["results"][0]["token_ids"]) == 4
