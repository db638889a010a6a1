"""``tokenizer.json`` from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from forebay.specs.errors import InvalidModel, Unsupported

from .json_fields import Fields, show

# Token types of the GGUF specification.
_NORMAL: Final = 1
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5


def _smollm_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """SmolLM: every digit is a word of its own, then GPT-2's pattern over byte characters."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


_PRE_TOKENIZERS: Final[Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]]] = MappingProxyType(
    {"smollm": _smollm_pre_tokenizer}
)
"""How text is cut into words, by the GGUF's name for it."""


def tokenizer_from_gguf(metadata: Fields) -> tokenizers.Tokenizer:
    """Build the byte-level BPE tokenizer that the ``tokenizer.ggml.*`` keys of ``metadata`` describe.

    Raises:
        InvalidModel: the lists do not go together.
        Unsupported: another kind of tokenizer.
    """
    pre_tokenizer = _pre_tokenizer(metadata)
    tokens: list[str] = metadata.raw("tokenizer.ggml.tokens") or []
    types: list[int] = metadata.raw("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise InvalidModel(
            f"{metadata.source}: {len(tokens)} tokens, {len(vocabulary)} different ones, {len(types)} token types; "
            "expected the same number of each"
        )
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(metadata, vocabulary)))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([_added(token) for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED])
    backend.add_special_tokens([_added(token) for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL])
    return backend


def _pre_tokenizer(metadata: Fields) -> pre_tokenizers.PreTokenizer:
    kind, name = metadata.text("tokenizer.ggml.model"), metadata.text("tokenizer.ggml.pre", default="default")
    if kind != "gpt2" or name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise Unsupported(
            f"{metadata.source}: tokenizer {show(kind)} with pre-tokenizer {show(name)}; supported: 'gpt2' with {known}"
        )
    for key in ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix"):
        if metadata.flag(key, default=False):
            raise Unsupported(f"{metadata.source}: {key} is true; supported: text is encoded as it is")
    kinds = set(metadata.raw("tokenizer.ggml.token_type") or ())
    if kinds - {_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED}:
        raise Unsupported(f"{metadata.source}: token types {sorted(kinds)}; supported: 1, 3, 4 and 5")
    return _PRE_TOKENIZERS[name]()


def _merges(metadata: Fields, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    lines: list[Any] = metadata.raw("tokenizer.ggml.merges") or []
    for line in lines:
        left, _, right = str(line).partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise InvalidModel(f"{metadata.source}: merge {show(line)} has parts that are no tokens")
        merges.append((left, right))
    return merges


def _added(token: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(token, normalized=False)
