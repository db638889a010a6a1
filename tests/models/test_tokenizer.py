"""Tokenizer: round trips, streaming, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.runtime.models import ModelConfig, Tokenizer
from forebay.runtime.models.gguf_tokenizer import tokenizer_from_gguf
from forebay.specs.errors import InvalidInput, InvalidModel
from tests.models import tiny


@pytest.fixture
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder, ModelConfig.from_folder(tiny_folder))


def in_memory() -> Tokenizer:
    return Tokenizer(tokenizer_from_gguf(tiny.tokenizer_metadata()), vocab_size=len(tiny.TOKENS))


def test_merges_digits_and_special_tokens(tokenizer: Tokenizer) -> None:
    def ids(*tokens: str) -> list[int]:
        return [tiny.TOKENS.index(token) for token in tokens]

    assert tokenizer.encode("hello wor") == ids("hello", "Ġwor")
    assert tokenizer.encode("<|start|>12<|end|>") == ids("<|start|>", "1", "2", "<|end|>")
    assert tokenizer.encode("") == []
    assert tokenizer.decode(tokenizer.encode("<|start|>hello 12\n")) == "<|start|>hello 12\n"
    assert tokenizer.eos_token_ids == (2, 0)


def test_stored_truncation_and_padding_do_not_act(tiny_folder: Path) -> None:
    file = tiny_folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    values["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|end|>",
    }
    file.write_text(json.dumps(values))
    tokenizer = Tokenizer.from_folder(tiny_folder, ModelConfig.from_folder(tiny_folder))
    assert len(tokenizer.encode("abcdefgh")) == 8


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokenizer = in_memory()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, len(tiny.TOKENS) - 1)))
def test_streamed_pieces_join_to_the_whole(ids: list[int]) -> None:
    tokenizer = in_memory()
    stream = tokenizer.stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == tokenizer.decode(ids)


def test_a_character_is_streamed_when_it_is_whole() -> None:
    tokenizer = in_memory()
    ids = tokenizer.encode("a€𝄞b")
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids] == ["a", "", "", "€", "", "", "", "𝄞", "b"]
    assert stream.finish() == ""
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids[:3]] == ["a", "", ""]
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("token", [-1, len(tiny.TOKENS), 2**40])
def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(InvalidInput, match=f"token id {token} to decode; expected 0 to 266"):
        tokenizer.decode([5, token])


@pytest.mark.parametrize("text", ["lone \ud800 surrogate", 7, None])
def test_what_is_no_text_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidInput, match="expected a string of valid Unicode"):
        tokenizer.encode(text)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"model": {"type": "BPE"}}', b"\xff\xfe", b'{"version": "9.9"}']
)
def test_a_corrupt_file_is_refused(tiny_folder: Path, content: bytes) -> None:
    (tiny_folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(InvalidModel, match=r"tokenizer.json: not a valid tokenizer"):
        Tokenizer.from_folder(tiny_folder, tiny.config())


def test_a_file_the_library_panics_on_is_refused(tiny_folder: Path) -> None:
    file = tiny_folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["continuing_subword_prefix"] = "far longer than any token"
    file.write_text(json.dumps(values))
    with pytest.raises(InvalidModel, match=r"tokenizer.json: not a valid tokenizer \(panic: range"):
        Tokenizer.from_folder(tiny_folder, tiny.config())


def test_a_missing_file_is_refused(tiny_folder: Path) -> None:
    (tiny_folder / "tokenizer.json").unlink()
    with pytest.raises(InvalidModel, match=r"tokenizer.json: no such file"):
        Tokenizer.from_folder(tiny_folder, tiny.config())


def test_a_tokenizer_larger_than_the_model_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(
        InvalidModel, match="token ids go up to 266; the configuration's vocab_size 100 expects 0 to 99"
    ):
        Tokenizer.from_folder(tiny_folder, tiny.config(vocab_size=100))
