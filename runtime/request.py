"""Requests and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from forebay.specs.errors import ForebayError

from .models.tokenizer import Tokenizer
from .sampling import SamplingParams

FinishReason = Literal["stop", "length", "error"]
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class GenerationResult:
    """What one prompt became.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        token_ids: the tokens made, the ending one included.
        text: their text, without the token that stopped it.
        finish_reason: ``stop`` (a stop token), ``length`` (max_tokens), ``error`` (see ``error``).
        error: the reason where the request could not be finished.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: ForebayError | None = None


@dataclass(eq=False)
class Request:
    """One request on its way through the engine.

    Attributes:
        index: order of arrival.
        stop: token ids that end it.
        token_ids: tokens released so far.
        slot: the row it decodes in, None while it waits or once it ended.
        blocks: KV blocks it holds, in order.
        reseeds: receipts in a row that did not match.
    """

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stop: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    reseeds: int = 0
    finish_reason: FinishReason | None = None
    error: ForebayError | None = None

    @property
    def final_position(self) -> int:
        """The limit: the last token is never consumed, so no row reaches this position."""
        return len(self.prompt) + self.params.max_tokens - 1

    def blocks_needed(self, block_size: int) -> int:
        """Blocks that hold the KV of every token it will consume."""
        return -(-self.final_position // block_size)

    def take(self, token: int) -> None:
        """Add a released token; sets ``finish_reason`` where it is the last."""
        self.token_ids.append(token)
        if token in self.stop:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.params.max_tokens:
            self.finish_reason = "length"

    def result(self, tokenizer: Tokenizer) -> GenerationResult:
        """The finished request as its caller sees it; the token that stopped it is among the ids, not in the text."""
        shown = self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids
        return GenerationResult(
            self.prompt,
            tuple(self.token_ids),
            tokenizer.decode(shown),
            self.finish_reason or "error",
            self.error,
        )
