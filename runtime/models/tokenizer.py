"""Text to token ids and back, by the ``tokenizers`` library and the folder's ``tokenizer.json``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, overload

import tokenizers

from forebay.specs.errors import InvalidInput, InvalidModel

from .chat_template import ChatTemplates, Message
from .config import ModelConfig
from .json_fields import show
from .json_size import check_json_size
from .panics import Panic, panics_as_errors

TOKENIZER_FILE: Final = "tokenizer.json"
INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"
"""What a decoder makes of bytes that are no whole character (yet)."""

_BYTE: Final = re.compile("<0x[0-9A-F]{2}>")
"""A token of one byte, in vocabularies that fall back to bytes."""

_MAX_FILE_BYTES: Final = 128 * 2**20
_MAX_VALUES: Final = 2**20
_BYTES_A_VALUE: Final = 8


class Tokenizer:
    """The tokenizer of one model."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        chat: ChatTemplates | None = None,
    ) -> None:
        """Wrap ``backend``; ``vocab_size`` is the model's, which may exceed the tokenizer's (padded embeddings)."""
        self._backend = backend
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.chat = chat if chat is not None else ChatTemplates({}, {}, "Tokenizer")
        # Both may be stored in tokenizer.json, and would cut a long prompt or lengthen a short one without a word.
        backend.no_truncation()
        backend.no_padding()

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig) -> Tokenizer:
        """Read ``tokenizer.json`` of ``folder`` for the model of ``config``, and its chat templates where it has some.

        Raises :class:`InvalidModel` where a file is missing or corrupt, or has ids the model has no embedding for.
        """
        file = folder / TOKENIZER_FILE
        content = _read_bounded(file)
        try:
            with panics_as_errors():
                backend = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:
            raise InvalidModel(f"{file}: not a valid tokenizer ({error}); copy or fetch the folder again") from error
        return cls.checked(backend, config, ChatTemplates.from_folder(folder), source=str(file))

    @classmethod
    def checked(
        cls, backend: tokenizers.Tokenizer, config: ModelConfig, chat: ChatTemplates, *, source: str
    ) -> Tokenizer:
        """The tokenizer ``backend`` for the model of ``config``; raises :class:`InvalidModel` where they do not belong together."""
        largest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if not 0 <= largest < config.vocab_size:
            raise InvalidModel(
                f"{source}: token ids go up to {largest}; the configuration's vocab_size {config.vocab_size} expects 0 "
                f"to {config.vocab_size - 1}; tokenizer and weights do not belong together"
            )
        return cls(backend, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids, chat=chat)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of ``text``; special tokens written in it count as such. Raises InvalidInput where it is no valid text.

        ``add_special_tokens``: put those around it that the tokenizer puts around every text (a begin-of-text token).
        """
        try:
            with panics_as_errors():
                return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidInput(f"text to encode is {show(text)}; expected a string of valid Unicode") from error
        except Panic as error:
            raise InvalidInput(f"the model's tokenizer fails on the text {show(text)} ({error})") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included; bytes that are no valid UTF-8 come as U+FFFD.

        Raises :class:`InvalidInput` where an id is not below ``vocab_size``.
        """
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidInput(f"token id {token} to decode; expected 0 to {self.vocab_size - 1}")
        try:
            with panics_as_errors():
                return str(self._backend.decode([int(token) for token in ids], skip_special_tokens=False))
        except Panic as error:
            raise InvalidInput(f"the model's tokenizer fails on the ids {show(list(ids))} ({error})") from error

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: Literal[False] = ...,
        add_generation_prompt: bool = ...,
        chat_template: str | None = ...,
        **variables: Any,
    ) -> str: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: Literal[True],
        add_generation_prompt: bool = ...,
        chat_template: str | None = ...,
        **variables: Any,
    ) -> list[int]: ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str | list[int]:
        """A conversation as the model's own template writes it: its text, or its token ids where ``tokenize`` is true.

        The template writes every special token itself, so none is added to the ids. ``messages``: mappings with ``role``
        and ``content``. ``chat_template``: the name of one of several. ``variables``: what else the template may ask for.

        Raises :class:`InvalidInput` as :meth:`ChatTemplates.render`.
        """
        text = self.chat.render(
            messages, add_generation_prompt=add_generation_prompt, name=chat_template, variables=variables
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def ends_text(self, token: int) -> bool:
        """True if no later token changes the text up to ``token``, whole characters given.

        Bytes that tokens fall back to are decoded a run at a time: one bad byte at its end undoes the characters before it.
        """
        content = self._backend.id_to_token(token)
        return content is not None and not _BYTE.fullmatch(content)

    def stream(self) -> TextStream:
        """A decoder for one request's tokens as they come."""
        return TextStream(self)


def _read_bounded(file: Path) -> bytes:
    """The content of ``file``, refused where the library would make very much more of it."""
    try:
        size = file.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise InvalidModel(f"{file}: {size} bytes; expected a tokenizer of at most {_MAX_FILE_BYTES} bytes")
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise InvalidModel(f"{file}: no such file; a model folder needs it, copy or fetch the folder again") from error
    except OSError as error:
        raise InvalidModel(f"{file}: cannot be read ({error.strerror or error})") from error
    # Vocabularies of 256,000 tokens have more values than configurations, and several bytes to each.
    check_json_size(content, source=str(file), allowed=_MAX_VALUES + size // _BYTES_A_VALUE)
    return content


class TextStream:
    """Decodes one request token by token: the pieces, and the rest from :meth:`finish`, join to ``decode`` of all tokens.

    A character whose bytes are spread over several tokens is held back until it is whole. Each piece is decoded behind
    the tokens of the piece before it, since decoders may treat the first token of a text differently. (The stream of the
    ``tokenizers`` library raises where a byte undoes characters it gave out, and cannot give out what it holds at the end.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that ``token`` completes, ``""`` where it completes none."""
        self._held.append(token)
        if not self._tokenizer.ends_text(token):
            return ""
        piece = self.held
        if not piece or piece.endswith(INCOMPLETE):
            return ""
        self._context, self._held = self._held, []
        return piece

    @property
    def held(self) -> str:
        """The text of the tokens that are held back, as it would be if none came behind them."""
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._held)[len(before) :]

    def finish(self) -> str:
        """The text of what is held back, U+FFFD for what never became a character."""
        piece = self.held
        self._context, self._held = self._held, []
        return piece
