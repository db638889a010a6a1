"""Which requests an engine takes: everything the host can know about one is checked before any device work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from forebay.specs.errors import InvalidInput
from forebay.specs.geometry import KVGeometry

from .model import Model
from .models.config import ModelConfig
from .models.tokenizer import Tokenizer
from .request import Prompt, Request
from .sampling import SamplingParams, check_vocabulary, fork_seed, seed_of

MAX_STOP_TOKENS: Final = 8
"""Stop tokens a slot has room for on the device."""

MAX_PRIORITY: Final = 1000

MAX_DEADLINE: Final = 1e9
"""Seconds; about 30 years."""


def pair_with_params(
    prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its parameters: one for all, or one a prompt; a single text is one prompt.

    Raises:
        InvalidInput: prompts that cannot be listed, or another number of parameters than of prompts.
    """
    if not isinstance(prompts, Iterable):
        raise InvalidInput(f"generate: got {type(prompts).__name__}, expected prompts: texts or lists of token ids")
    wanted: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
    one = SamplingParams() if params is None else params
    each = list(one) if isinstance(one, Sequence) else [one] * len(wanted)
    if len(each) != len(wanted):
        raise InvalidInput(f"generate: {len(wanted)} prompts and {len(each)} SamplingParams; give one, or one a prompt")
    return list(zip(wanted, each, strict=True))


@dataclass(frozen=True)
class RequestOptions:
    """How a request is served, apart from what it asks for.

    Attributes:
        priority: higher is served earlier.
        deadline: seconds from its arrival after which it is ended, None for never.
        cache_salt: prompts share cached KV only under one salt.
    """

    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""

    @classmethod
    def checked(cls, options: Mapping[str, Any], what: str) -> RequestOptions:
        """Options by name, checked.

        Raises:
            InvalidInput: an unknown name, or a value that cannot be.
        """
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise InvalidInput(f"{what}: unknown option {name!r}; known: {', '.join(known)}")
        made = cls(**options)
        if isinstance(made.priority, bool) or not isinstance(made.priority, int) or abs(made.priority) > MAX_PRIORITY:
            raise InvalidInput(
                f"{what}: priority is {made.priority!r}; expected an int from -{MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        seconds = made.deadline
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_DEADLINE
        ):
            raise InvalidInput(
                f"{what}: deadline is {seconds!r}; expected seconds above 0, {MAX_DEADLINE:g} at most, or None"
            )
        if not isinstance(made.cache_salt, str):
            raise InvalidInput(f"{what}: cache_salt is a {type(made.cache_salt).__name__}; expected text")
        return made


def checked_requests(
    prompt: Prompt,
    params: SamplingParams,
    what: str,
    options: RequestOptions,
    *,
    index: int,
    model: Model,
    max_len: int,
    geometry: KVGeometry,
    base_seed: int,
    now: float,
) -> list[Request]:
    """The ``n`` requests of a prompt, the first with the others as siblings, each of which can be finished: valid tokens, within
    ``max_len``, no larger than the pool of ``geometry``.

    Raises:
        InvalidInput: it cannot, with the numbers; ``what`` names the prompt.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidInput(f"{what}: got {type(params).__name__}, expected SamplingParams")
    ids = prompt_token_ids(prompt, model.tokenizer, model.config, what)
    stop = _stop_tokens(params, model.config, what)
    check_vocabulary(params, model.config.vocab_size, what)
    seed = seed_of(params, base_seed, index)
    family = [
        Request(
            index + sample,
            ids,
            params,
            stop,
            seed=fork_seed(seed, sample),
            priority=options.priority,
            salt=f"{model.config.rope.regime(len(ids))}:{options.cache_salt}",
            deadline=None if options.deadline is None else now + options.deadline,
        )
        for sample in range(params.n)
    ]
    family[0].siblings = family[1:]
    total = len(ids) + params.max_tokens
    size = f"{what}: {len(ids)} prompt tokens and max_tokens={params.max_tokens}"
    if total > max_len:
        raise InvalidInput(f"{size} are {total} tokens; max_len is {max_len}; shorten the prompt or lower max_tokens")
    needed, there = family[0].blocks_needed(geometry.block_size), geometry.num_blocks - 1
    if needed > there:
        raise InvalidInput(
            f"{size} need {needed} blocks of {geometry.block_size} tokens; the pool has {there} "
            f"({there * geometry.block_size} tokens); raise num_blocks or lower max_tokens"
        )
    return family


def _stop_tokens(params: SamplingParams, config: ModelConfig, what: str) -> tuple[int, ...]:
    own = () if params.ignore_eos else config.eos_token_ids
    stop = tuple(dict.fromkeys((*own, *params.stop_token_ids)))
    if len(stop) > MAX_STOP_TOKENS:
        raise InvalidInput(f"{what}: {len(stop)} stop tokens, at most {MAX_STOP_TOKENS}")
    for token in stop:
        if token >= config.vocab_size:
            raise InvalidInput(f"{what}: stop token {token} is not in the vocabulary (0 to {config.vocab_size - 1})")
    return stop


def prompt_token_ids(prompt: Prompt, tokenizer: Tokenizer, config: ModelConfig, what: str) -> tuple[int, ...]:
    """A prompt as token ids.

    Raises:
        InvalidInput: empty, not text or ints, or an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        ids: Sequence[int] = tokenizer.encode(prompt)
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        for t in prompt:
            if isinstance(t, bool) or not isinstance(t, int | np.integer):
                raise InvalidInput(f"{what}: got the {type(t).__name__} {t!r} among the token ids, expected ints")
        ids = [int(t) for t in prompt]
    else:
        raise InvalidInput(f"{what}: got {type(prompt).__name__}, expected text or a list of token ids")
    if not ids:
        raise InvalidInput(f"{what}: an empty prompt; give at least one token")
    bad = [t for t in ids if not 0 <= t < config.vocab_size]
    if bad:
        raise InvalidInput(f"{what}: token id {bad[0]} is not in the vocabulary (0 to {config.vocab_size - 1})")
    return tuple(ids)
