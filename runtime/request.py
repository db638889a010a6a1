"""Requests and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from forebay.specs.errors import ForebayError

from .models.tokenizer import Tokenizer
from .sampler import TokenLogprobs
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
        seed: of its draws; with it and the same parameters the same tokens come again.
        logprobs: log-probabilities of each token made, where they were asked for.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: ForebayError | None = None
    seed: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(eq=False)
class Request:
    """One request on its way through the engine.

    Attributes:
        index: order of arrival.
        stop: token ids that end it.
        seed: of its draws.
        token_ids: tokens released so far.
        slot: the row it decodes in, None while it waits or once it ended.
        blocks: KV blocks it holds, in order.
        reseeds: receipts in a row that did not match.
    """

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stop: tuple[int, ...]
    seed: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
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

    def take(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Add a released token; sets ``finish_reason`` where it is the last."""
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
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
            self.seed,
            None if self.params.logprobs is None else tuple(self.logprobs),
        )
