"""Tokenizers of GGUF files: the ids transformers gives for the same metadata, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from forebay.runtime.models.gguf_tokenizer import tokenizer_from_gguf
from forebay.runtime.models.json_fields import Fields
from forebay.runtime.models.sentencepiece_merges import merges_of_scores
from forebay.specs.errors import InvalidModel, Unsupported
from tests.models import tiny

TEXTS = (
    "hello world",
    "  hello  world  ",
    "We'll see: 1234567 + 89 = ?",
    "ÄÖ ß é e\u0301 ﬁ 漢字 🙂 \t\n\r\n x",
    "<|start|>hello<|end|> <|stop|>",
    "def f(x):\n    return x**2\n\n\n# done",
    "",
)


def sentencepiece_metadata(**changes: Any) -> Fields:
    """The tiny SentencePiece vocabulary as it is read from a file."""
    arrays = {"token_type": np.int32, "scores": np.float32}
    given = tiny.sentencepiece_metadata(**changes)
    own = {key: np.array(given[key], kind) for name, kind in arrays.items() for key in [f"tokenizer.ggml.{name}"]}
    return Fields("tiny.gguf", {key: value for key, value in (given | own).items() if value is not ...})


def reference(metadata: Fields, architecture: str) -> tokenizers.Tokenizer:
    """What transformers makes of the same metadata."""
    names = {
        "tokenizer_type": "model",
        "pre_tokenizer_type": "pre",
        "tokens": "tokens",
        "scores": "scores",
        "token_type": "token_type",
        "merges": "merges",
    }
    given = {name: metadata.raw(f"tokenizer.ggml.{key}") for name, key in names.items()}
    plain = {name: np.asarray(value).tolist() for name, value in given.items() if value is not None}
    backend, _ = convert_gguf_tokenizer(architecture, plain)
    return backend


def ids(backend: tokenizers.Tokenizer, text: str) -> Sequence[int]:
    return list(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "tekken"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_ids_are_those_of_transformers(pre: str, text: str) -> None:
    metadata = tiny.tokenizer_metadata(pre=pre, bos_token_id=1)
    composed = text.replace("e\u0301", "é") if "qwen" in pre else text  # only this family composes characters
    assert ids(tokenizer_from_gguf(metadata), text) == ids(reference(metadata, "llama"), composed)


@given(st.text(alphabet=st.sampled_from("a1 '\n\tslé.,🙂漢"), max_size=40))
@settings(max_examples=100, deadline=None)
def test_words_are_cut_as_transformers_cuts_them(text: str) -> None:
    for pre in ("llama-bpe", "qwen2"):
        metadata = tiny.tokenizer_metadata(pre=pre, bos_token_id=1)
        ours, theirs = tokenizer_from_gguf(metadata).pre_tokenizer, reference(metadata, "llama").pre_tokenizer
        assert ours is not None
        assert theirs is not None
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@pytest.mark.parametrize("text", [text for text in TEXTS if "<|" not in text])
def test_sentencepiece_ids_are_those_of_transformers(text: str) -> None:
    metadata = sentencepiece_metadata()
    # Phi-3's form has the plain prefix that SentencePiece and llama.cpp put before every text.
    assert ids(tokenizer_from_gguf(metadata), text) == ids(reference(metadata, "phi3"), text)


@given(st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back_from_sentencepiece(text: str) -> None:
    backend = tokenizer_from_gguf(sentencepiece_metadata())
    assert backend.decode(ids(backend, text)) == text.replace("▁", " ")


def test_sentencepiece_without_a_prefix() -> None:
    backend = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False))
    assert [backend.id_to_token(i) for i in ids(backend, "hello hello")] == ["hello", "▁hello"]
    assert backend.decode(ids(backend, " hello")) == " hello"


@pytest.mark.parametrize(
    ("metadata", "begins"),
    [
        (sentencepiece_metadata(), True),
        (sentencepiece_metadata(add_bos_token=False), False),
        (tiny.tokenizer_metadata(pre="llama-bpe", bos_token_id=1), True),
        (tiny.tokenizer_metadata(pre="smollm", bos_token_id=1), False),
        (tiny.tokenizer_metadata(pre="smollm", bos_token_id=1, add_bos_token=True), True),
    ],
)
def test_text_begins_with_the_token_the_file_asks_for(metadata: Fields, begins: bool) -> None:
    backend = tokenizer_from_gguf(metadata)
    assert (backend.encode("hello").ids[0] == 1) is begins
    assert backend.encode("hello").ids[begins:] == ids(backend, "hello")


@pytest.mark.parametrize("token", ["$A", "$0", "a:b", "x:1", "a b", "BOS", ""])
def test_the_first_token_may_have_any_text(token: str) -> None:
    tokens = [tiny.TOKENS[0], token, *tiny.TOKENS[2:]]
    backend = tokenizer_from_gguf(tiny.tokenizer_metadata(tokens=tokens, add_bos_token=True, bos_token_id=1))
    assert backend.encode("hello").ids == [1, *ids(backend, "hello")]
    assert backend.encode("hello").tokens[0] == token


def test_what_the_library_cannot_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(tokenizers.models, "BPE", fail)
    with pytest.raises(InvalidModel, match=r"tiny.gguf: no valid tokenizer \(no such thing\); fetch the file again"):
        tokenizer_from_gguf(tiny.tokenizer_metadata())


def test_the_best_score_joins_first() -> None:
    vocabulary = {"a": 0, "b": 1, "c": 2, "bc": 3, "ab": 4, "abc": 5}
    merges = merges_of_scores(vocabulary, [-9.0, -9.0, -9.0, -1.0, -2.0, -3.0], source="tiny.gguf")
    assert merges == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (tiny.tokenizer_metadata(tokens=[*tiny.TOKENS[:-1], tiny.TOKENS[0]]), "267 tokens, 266 different ones"),
        (tiny.tokenizer_metadata(token_type=np.array([1])), "267 tokens, 267 different ones, 1 token types"),
        (tiny.tokenizer_metadata(tokens=[], token_type=[]), "0 tokens"),
        (tiny.tokenizer_metadata(tokens="abc"), "tokens is 'abc'; expected a list of str"),
        (tiny.tokenizer_metadata(tokens=np.arange(4)), "tokens is .*; expected a list of str"),
        (tiny.tokenizer_metadata(token_type=["a"] * 267), "token_type is .*; expected a list of int"),
        (tiny.tokenizer_metadata(merges=["h e", "zz y"]), "merge 'zz y' has parts that are no tokens"),
        (tiny.tokenizer_metadata(merges=["he"]), "merge 'he' has parts that are no tokens"),
        (tiny.tokenizer_metadata(merges=7), "merges is 7; expected a list of str"),
        (tiny.tokenizer_metadata(model=None), "tokenizer.ggml.model is None; expected a string"),
        (tiny.tokenizer_metadata(add_bos_token=True), "bos_token_id is missing; expected an integer from 0 to 266"),
        (tiny.tokenizer_metadata(add_bos_token=True, bos_token_id=999), "bos_token_id is 999; expected"),
        (sentencepiece_metadata(scores=np.zeros(3, np.float32)), "3 scores and 1 unknown tokens for 278 tokens"),
        (sentencepiece_metadata(scores=np.full(278, np.nan, np.float32)), "a token has the score NaN"),
        (
            sentencepiece_metadata(tokens=[*sentencepiece_metadata().raw("tokenizer.ggml.tokens")[:-1], "a" * 2**15]),
            "tokens are up to 32768 characters long; expected pieces of words",
        ),
    ],
)
def test_inconsistent_metadata_is_refused(metadata: Fields, message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (tiny.tokenizer_metadata(model="bert"), "tokenizer 'bert'; supported: 'gpt2' and 'llama'"),
        (tiny.tokenizer_metadata(pre="jais"), "tokenizer 'gpt2' with pre-tokenizer 'jais'; supported: gpt-2, smollm,"),
        (tiny.tokenizer_metadata(pre=None), "pre-tokenizer 'default'"),
        (tiny.tokenizer_metadata(add_eos_token=True), "tokenizer.ggml.add_eos_token is true"),
        (tiny.tokenizer_metadata(add_space_prefix=True), "tokenizer.ggml.add_space_prefix is true"),
        (tiny.tokenizer_metadata(token_type=[6] * len(tiny.TOKENS)), r"token types \[6\]; supported: \[1, 3, 4, 5\]"),
        (sentencepiece_metadata(remove_extra_whitespaces=True), "remove_extra_whitespaces is true; supported: false"),
    ],
)
def test_other_kinds_of_tokenizer_are_refused_by_name(metadata: Fields, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        tokenizer_from_gguf(metadata)
