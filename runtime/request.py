"""Requests and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from forebay.specs.errors import ForebayError

from .host_kv import HostKV
from .models.tokenizer import Tokenizer
from .sampler import TokenLogprobs
from .sampling import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class GenerationResult:
    """What one prompt became.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        token_ids: the tokens made, the ending one included.
        text: their text, without the token or the string that stopped it.
        finish_reason: ``stop`` (a stop token or string), ``length`` (max_tokens), ``cancelled``, ``deadline`` (not ended in time; the
            tokens made until then are kept), ``error`` (see ``error``).
        seed: what its draws were keyed by; the same seed gives the same tokens.
        error: the reason where the request could not be finished.
        logprobs: log-probabilities of each token made, where they were asked for.
        others: with ``n > 1`` the further samples of the same prompt.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int = 0
    error: ForebayError | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    others: tuple[GenerationResult, ...] = ()

    @property
    def samples(self) -> tuple[GenerationResult, ...]:
        """Every sample of the prompt, this one first."""
        return (self, *self.others)


@dataclass(eq=False)
class Request:
    """One request on its way through the engine.

    Attributes:
        index: order of arrival.
        stop: token ids that end it.
        seed: keys its draws.
        priority: higher is served earlier.
        order: its place in the queue: smaller first, ties by ``index``.
        salt: prompts share cached KV only under one salt; where the rotary embedding depends on the prompt's length, it is part of it.
        deadline: time of the engine's clock at which it is ended, None for never.
        token_ids: tokens released so far.
        logprobs: of each of them, where they were asked for.
        slot: the row it decodes in, None while it waits or once it ended.
        blocks: KV blocks it holds, in order.
        computed: positions whose KV is in its blocks (or in ``saved``).
        saved: its KV in host memory while it is offloaded.
        siblings: further samples of its prompt, which begin as forks of it once its prompt is computed.
        reseeds: receipts in a row that did not match.
        text_end: length of its text where a stop string cut it.
        arrived_at, waiting_at, waiting_step, admitted, last_token_at: for latencies: seconds of the engine's clock, the engine's step.
        owner: the engine that checked it.
    """

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stop: tuple[int, ...]
    seed: int = 0
    priority: int = 0
    order: int = 0
    salt: str = ""
    deadline: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    saved: HostKV | None = None
    siblings: list[Request] = field(default_factory=list)
    reseeds: int = 0
    finish_reason: FinishReason | None = None
    error: ForebayError | None = None
    text_end: int | None = None
    arrived_at: float = 0.0
    waiting_at: float = 0.0
    waiting_step: int = 0
    admitted: bool = False
    last_token_at: float | None = None
    owner: object = None

    @property
    def place(self) -> tuple[int, int]:
        """Key by which requests are served: earlier first."""
        return self.order, self.index

    @property
    def finished(self) -> bool:
        """True once it has ended, for whatever reason."""
        return self.finish_reason is not None

    @property
    def final_position(self) -> int:
        """The limit: the last token is never consumed, so no row reaches this position."""
        return len(self.prompt) + self.params.max_tokens - 1

    @property
    def to_compute(self) -> int:
        """Positions whose KV must be there before the next token can be made by a decode step; all of them but the last token's."""
        return len(self.prompt) + max(len(self.token_ids) - 1, 0)

    @property
    def first_room(self) -> int:
        """Positions it needs blocks for when it gets a slot: what it has to compute, and the token behind that."""
        return min(self.to_compute + 1, self.final_position)

    @property
    def known(self) -> tuple[int, ...]:
        """Prompt and released tokens."""
        return (*self.prompt, *self.token_ids)

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

    @property
    def stopped_by_token(self) -> bool:
        """True if its last token ended it: that token is among the ids, not in the text."""
        return self.finish_reason == "stop" and self.text_end is None

    def text(self, tokenizer: Tokenizer) -> str:
        """The text of the tokens released so far, without the token or the string that stopped it."""
        return tokenizer.decode(self.token_ids[:-1] if self.stopped_by_token else self.token_ids)[: self.text_end]

    def result(self, tokenizer: Tokenizer) -> GenerationResult:
        """The finished request as its caller sees it; what stopped it is among the ids, not in the text."""
        return GenerationResult(
            self.prompt,
            tuple(self.token_ids),
            self.text(tokenizer),
            self.finish_reason or "error",
            self.seed,
            self.error,
            None if self.params.logprobs is None else tuple(self.logprobs),
            tuple(sibling.result(tokenizer) for sibling in self.siblings),
        )
