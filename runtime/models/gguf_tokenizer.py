"""``tokenizer.json`` from the metadata of a GGUF file: byte-level BPE, and SentencePiece's BPE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from forebay.specs.errors import ForebayError, InvalidModel, Unsupported

from .json_fields import Fields, show
from .panics import panics_as_errors
from .sentencepiece_merges import merges_of_scores

# Token types of the GGUF specification.
_NORMAL: Final = 1
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5
_BYTE: Final = 6

_SPACE: Final = "▁"


@dataclass(frozen=True, slots=True)
class _ByteLevel:
    """How a byte-level BPE cuts text into words. ``ignore_merges``: a word that is a token is one, whatever the merges."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Every digit is a word of its own, then GPT-2's pattern over byte characters."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _by_pattern(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def make() -> pre_tokenizers.PreTokenizer:
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


# The patterns of the models' own tokenizer.json; they differ in how many digits make a word.
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_WORDS: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3: Final = _ByteLevel(_by_pattern(_WORDS % r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_QWEN2: Final = _ByteLevel(_by_pattern(_WORDS % r"\p{N}"), normalizers.NFC)

_BYTE_LEVEL: Final[Mapping[str, _ByteLevel]] = MappingProxyType(
    {
        "gpt-2": _ByteLevel(_gpt2),
        "smollm": _ByteLevel(_smollm),
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "tekken": _ByteLevel(_by_pattern(_TEKKEN_WORDS), ignore_merges=True),
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
    }
)
"""How text is cut into words, by the GGUF's name for it."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The lists of a file, which are known to be of one length. ``ids``: the token of each text."""

    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]

    def of(self, kind: int) -> list[str]:
        return [token for token, own in zip(self.tokens, self.types, strict=True) if own == kind]


def tokenizer_from_gguf(metadata: Fields) -> tokenizers.Tokenizer:
    """Build the tokenizer that the ``tokenizer.ggml.*`` keys of ``metadata`` describe.

    Raises:
        InvalidModel: the lists do not go together.
        Unsupported: another kind of tokenizer.
    """
    try:
        with panics_as_errors():
            return _build(metadata)
    except ForebayError:
        raise
    # Whatever else the library has to say about lists that it was given.
    except Exception as error:
        raise InvalidModel(f"{metadata.source}: no valid tokenizer ({error}); fetch the file again") from error


def _build(metadata: Fields) -> tokenizers.Tokenizer:
    kind = metadata.text("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(metadata)
    elif kind == "llama":
        backend, add_bos = _sentencepiece_bpe(metadata), True
    else:
        raise Unsupported(f"{metadata.source}: tokenizer {show(kind)}; supported: 'gpt2' and 'llama'")
    vocabulary = _vocabulary(metadata)
    backend.add_tokens([_added(token) for token in vocabulary.of(_USER_DEFINED)])
    backend.add_special_tokens([_added(token) for token in (*vocabulary.of(_UNKNOWN), *vocabulary.of(_CONTROL))])
    if metadata.flag("tokenizer.ggml.add_eos_token", default=False):
        raise Unsupported(f"{metadata.source}: tokenizer.ggml.add_eos_token is true; supported: text without an end")
    if metadata.flag("tokenizer.ggml.add_bos_token", default=add_bos):
        backend.post_processor = _begin_with(metadata, vocabulary)
    return backend


def _vocabulary(metadata: Fields) -> _Vocabulary:
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int) or [_NORMAL] * len(tokens)
    ids = {token: i for i, token in enumerate(tokens)}
    if not tokens or len(ids) != len(tokens) or len(types) != len(tokens):
        raise InvalidModel(
            f"{metadata.source}: {len(tokens)} tokens, {len(ids)} different ones, {len(types)} token types; "
            "expected the same number of each"
        )
    return _Vocabulary(tokens, types, ids)


def _list(metadata: Fields, name: str, kind: type) -> list[Any]:
    key = f"tokenizer.ggml.{name}"
    given = metadata.raw(key)
    values = [] if given is None else list(given) if isinstance(given, list) else _plain(given)
    if values is None or not all(isinstance(value, kind) for value in values):
        raise metadata.invalid(key, f"a list of {kind.__name__}")
    return values


def _plain(array: Any) -> list[Any] | None:
    """The Python numbers of a numpy array, None where it is something else."""
    values: object = array.tolist() if hasattr(array, "tolist") else None
    return values if isinstance(values, list) else None


def _byte_level_bpe(metadata: Fields) -> tuple[tokenizers.Tokenizer, bool]:
    name = metadata.text("tokenizer.ggml.pre", default="default")
    words = _BYTE_LEVEL.get(name)
    if words is None:
        raise Unsupported(
            f"{metadata.source}: tokenizer 'gpt2' with pre-tokenizer {show(name)}; supported: {', '.join(_BYTE_LEVEL)}"
        )
    vocabulary = _vocabulary(metadata)
    _refuse_types(metadata, vocabulary, {_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED})
    if metadata.flag("tokenizer.ggml.add_space_prefix", default=False):
        raise Unsupported(f"{metadata.source}: tokenizer.ggml.add_space_prefix is true; supported: text as it is")
    model = models.BPE(
        vocab=dict(vocabulary.ids), merges=_merges(metadata, vocabulary), ignore_merges=words.ignore_merges
    )
    backend = tokenizers.Tokenizer(model)
    if words.normalizer is not None:
        backend.normalizer = words.normalizer()
    backend.pre_tokenizer = words.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, words.add_bos


def _sentencepiece_bpe(metadata: Fields) -> tokenizers.Tokenizer:
    """Words are not cut; a space is ▁, and bytes that have no token of their own are ``<0xAB>``."""
    vocabulary = _vocabulary(metadata)
    _refuse_types(metadata, vocabulary, {_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE})
    if metadata.flag("tokenizer.ggml.remove_extra_whitespaces", default=False):
        raise Unsupported(f"{metadata.source}: tokenizer.ggml.remove_extra_whitespaces is true; supported: false")
    scores = _list(metadata, "scores", float)
    unknown = vocabulary.of(_UNKNOWN)
    if len(scores) != len(vocabulary.tokens) or len(unknown) > 1:
        raise InvalidModel(
            f"{metadata.source}: {len(scores)} scores and {len(unknown)} unknown tokens for {len(vocabulary.tokens)} "
            "tokens; expected a score for each, and at most one unknown"
        )
    model = models.BPE(
        vocab=dict(vocabulary.ids),
        merges=merges_of_scores(vocabulary.ids, scores, source=metadata.source),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", default=True)
    to_mark = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_mark]) if prefix else to_mark
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _refuse_types(metadata: Fields, vocabulary: _Vocabulary, supported: set[int]) -> None:
    others = sorted(set(vocabulary.types) - supported)
    if others:
        raise Unsupported(f"{metadata.source}: token types {show(others)}; supported: {sorted(supported)}")


def _merges(metadata: Fields, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in _list(metadata, "merges", str):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= vocabulary.ids.keys():
            raise InvalidModel(f"{metadata.source}: merge {show(line)} has parts that are no tokens")
        merges.append((left, right))
    return merges


def _begin_with(metadata: Fields, vocabulary: _Vocabulary) -> processors.TemplateProcessing:
    """Put the begin-of-text token before every text."""
    last = len(vocabulary.tokens) - 1
    token = vocabulary.tokens[metadata.integer("tokenizer.ggml.bos_token_id", minimum=0, maximum=last)]
    # Under a name of ours: the token's own text may mean something in a template ("$A", "a:1").
    named: Any = {"id": "BOS", "ids": [vocabulary.ids[token]], "tokens": [token]}
    return processors.TemplateProcessing(single=["BOS", "$A"], pair=["BOS", "$A", "$B"], special_tokens=[named])


def _added(token: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(token, normalized=False)
