"""How the tokens of a request are chosen, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from forebay.specs.errors import InvalidInput

from .digests import wrapped

MAX_LOGIT_BIAS: Final = 64
"""Biased tokens a slot has room for on the device."""
MAX_LOGPROBS: Final = 20
"""Alternatives a token's log-probabilities can come with."""
MAX_SAMPLES: Final = 128
"""Samples one prompt can have."""
SEED_RANGE: Final = (-(2**31), 2**31 - 1)


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. The defaults are greedy: the most likely token, no draw.

    Logits pass, in float32: repetition penalty, logit bias; then, where ``temperature`` is not 0, division by it, top-k, top-p, min-p
    and a draw. Each of the three keeps everything on its threshold, so equal logits are kept or dropped together.

    Attributes:
        max_tokens: tokens to make at most, at least 1.
        temperature: 0 takes the most likely token; else 1e-5 to 1e5.
        top_k: keep the k largest logits; 0 keeps all.
        top_p: keep the fewest most likely tokens whose probabilities sum to this or more (Holtzman et al. 2020); 1 keeps all.
        min_p: keep tokens at least this times as likely as the most likely one (Nguyen et al. 2024); 0 keeps all.
        repetition_penalty: divide the positive logits of tokens in prompt and output by it, multiply their negative ones (Keskar et
            al. 2019); 1 changes nothing.
        logit_bias: token id to a number that is added to its logit, at most :data:`MAX_LOGIT_BIAS`; any mapping or pairs, kept as a
            sorted tuple of pairs.
        seed: of the draws, 32 bits with a sign: a request draws the same tokens whatever runs beside it. None: the engine chooses
            one, and the result reports it.
        ignore_eos: go on after the model's end-of-text tokens.
        stop_token_ids: further token ids that end the request; the ending token is part of the result.
        stop: texts that end the request.
        logprobs: with each token, its log-probability and those of so many most likely tokens (0 to 20), of the distribution before
            any processing; None: none.
        n: results to make of one prompt.

    Raises:
        InvalidInput: a value of another type or out of its range; numpy numbers are taken for Python's.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        self._keep("max_tokens", _whole("max_tokens", self.max_tokens, 1, None))
        self._keep("temperature", _temperature(self.temperature))
        self._keep("top_k", _whole("top_k", self.top_k, 0, 2**31 - 1))
        self._keep("top_p", _number("top_p", self.top_p, "a number from 1.2e-38 to 1", lambda x: _SMALLEST <= x <= 1))
        self._keep("min_p", _number("min_p", self.min_p, "a number in [0, 1]", lambda x: 0 <= x <= 1))
        penalty = _number("repetition_penalty", self.repetition_penalty, "a number in [0.01, 100]", _is_penalty)
        self._keep("repetition_penalty", penalty)
        self._keep("logit_bias", _bias(self.logit_bias))
        if self.seed is not None:
            self._keep("seed", _whole("seed", self.seed, *SEED_RANGE, expected="None or an int of 32 bits"))
        if not isinstance(self.ignore_eos, bool):
            raise InvalidInput(f"SamplingParams.ignore_eos: got {self.ignore_eos!r}, expected True or False")
        self._keep("stop_token_ids", _stop_tokens(self.stop_token_ids))
        self._keep("stop", _stop_texts(self.stop))
        if self.logprobs is not None:
            expected = f"None or an int from 0 to {MAX_LOGPROBS}"
            self._keep("logprobs", _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS, expected=expected))
        self._keep("n", _whole("n", self.n, 1, MAX_SAMPLES))

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as sorted pairs, empty where there is none."""
        return self.logit_bias if isinstance(self.logit_bias, tuple) else ()

    @property
    def draws(self) -> bool:
        """True if tokens are drawn, not the most likely ones."""
        return self.temperature > 0

    @property
    def penalises(self) -> bool:
        """True if the choice depends on the tokens seen so far; decided in float32, as on the device."""
        return bool(np.float32(self.repetition_penalty) != 1)

    @property
    def plain(self) -> bool:
        """True if a token is the argmax of the logits as they are."""
        return not (self.draws or self.penalises or self.bias)


def seed_of(params: SamplingParams, base: int, index: int) -> int:
    """The seed of request ``index`` of an engine: its own, or one that follows from the engine's seed ``base``; 32 bits, signed."""
    return wrapped(base * 0x85EBCA6B + index * 0xC2B2AE35) if params.seed is None else params.seed


def fork_seed(seed: int, index: int) -> int:
    """The seed of result ``index`` of one prompt: that of result 0 is ``seed``, and as an own request's it gives the same tokens.

    Steps of the 32-bit golden ratio: no two results of one prompt share a seed.
    """
    return wrapped(seed + index * 0x9E3779B1)


def check_vocabulary(params: SamplingParams, vocab_size: int, what: str) -> None:
    """Refuse parameters that ask for tokens a model does not have.

    Raises:
        InvalidInput: a biased token outside the vocabulary, or log-probabilities of one with fewer tokens than a step reports.
    """
    for token, _ in params.bias:
        if token >= vocab_size:
            raise InvalidInput(f"{what}: biased token {token} is not in the vocabulary (0 to {vocab_size - 1})")
    if params.logprobs is not None and vocab_size < MAX_LOGPROBS:
        raise InvalidInput(
            f"{what}: log-probabilities need a vocabulary of at least {MAX_LOGPROBS} tokens, this one has {vocab_size}; "
            "leave logprobs at None"
        )


_SMALLEST: Final = float(np.finfo(np.float32).tiny)
_HOTTEST: Final = 1e5
_COLDEST: Final = 1e-5


def _is_penalty(x: float) -> bool:
    return 0.01 <= x <= 100


def _whole(name: str, value: Any, low: int, high: int | None, *, expected: str = "") -> int:
    """An int of the range, numpy's too; a bool is none."""
    fits = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not fits or value < low or (high is not None and value > high):
        expected = expected or (f"an int >= {low}" if high is None else f"an int from {low} to {high}")
        raise InvalidInput(f"SamplingParams.{name}: got {value!r}, expected {expected}")
    return int(value)


def _number(name: str, value: Any, expected: str, fits: Any) -> float:
    """A finite number for which ``fits`` holds, numpy's too; a bool is none."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    # An int too long for a float is no finite number.
    is_number = is_number and (not isinstance(value, int) or abs(value) < 2**1023)
    if not is_number or not math.isfinite(value) or not fits(float(value)):
        raise InvalidInput(f"SamplingParams.{name}: got {value!r}, expected {expected}")
    return float(value)


def _temperature(value: Any) -> float:
    expected = f"0 or a number from {_COLDEST:g} to {_HOTTEST:g}"
    return _number("temperature", value, expected, lambda x: x == 0 or _COLDEST <= x <= _HOTTEST)


def _bias(given: Any) -> tuple[tuple[int, float], ...] | None:
    if given is None:
        return None
    expected = f"None or a mapping of at most {MAX_LOGIT_BIAS} token ids >= 0 to finite numbers"
    try:
        pairs = dict(given)
    except (TypeError, ValueError):
        raise InvalidInput(f"SamplingParams.logit_bias: got {given!r}, expected {expected}") from None
    if len(pairs) > MAX_LOGIT_BIAS:
        raise InvalidInput(f"SamplingParams.logit_bias: got {len(pairs)} tokens, expected {expected}")
    checked = {
        _whole("logit_bias", token, 0, 2**31 - 1, expected=expected): _number("logit_bias", value, expected, _is_bias)
        for token, value in pairs.items()
    }
    return tuple(sorted(checked.items()))


def _is_bias(x: float) -> bool:
    """Finite in float32 too, with room for the logit it is added to."""
    return abs(x) <= 1e30


def _stop_tokens(given: Any) -> tuple[int, ...]:
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        raise InvalidInput(f"SamplingParams.stop_token_ids: got {given!r}, expected token ids")
    return tuple(_whole("stop_token_ids", token, 0, None, expected="token ids >= 0") for token in given)


def _stop_texts(given: Any) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, Iterable) or isinstance(texts, bytes | bytearray):
        raise InvalidInput(f"SamplingParams.stop: got {given!r}, expected texts that are not empty")
    kept = tuple(texts)
    for text in kept:
        if not isinstance(text, str) or not text:
            raise InvalidInput(f"SamplingParams.stop: got {text!r}, expected texts that are not empty")
    return kept
