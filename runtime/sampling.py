"""How the tokens of a request are chosen, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from forebay.specs.errors import InvalidInput, Unsupported


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. Greedy (temperature 0) is what this version does; other temperatures are refused by name.

    Attributes:
        max_tokens: tokens to make at most, at least 1.
        temperature: 0 takes the most likely token.
        ignore_eos: go on after the model's end-of-text tokens.
        stop_token_ids: further token ids that end the request; the ending token is part of the result.
        seed: carried with the slot and reported in its receipts; greedy decoding does not draw.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise InvalidInput(f"SamplingParams.max_tokens: got {self.max_tokens!r}, expected an int >= 1")
        if not isinstance(self.temperature, int | float) or not math.isfinite(self.temperature) or self.temperature < 0:
            raise InvalidInput(f"SamplingParams.temperature: got {self.temperature!r}, expected a finite number >= 0")
        if self.temperature != 0:
            raise Unsupported(f"SamplingParams.temperature: got {self.temperature}, this version decodes greedily (0)")
        if self.seed is not None and (
            isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(2**31) <= self.seed < 2**31
        ):
            raise InvalidInput(f"SamplingParams.seed: got {self.seed!r}, expected an int of 32 bits")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidInput(f"SamplingParams.ignore_eos: got {self.ignore_eos!r}, expected True or False")
        if not isinstance(self.stop_token_ids, Iterable):
            raise InvalidInput(f"SamplingParams.stop_token_ids: got {self.stop_token_ids!r}, expected token ids")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise InvalidInput(f"SamplingParams.stop_token_ids: got {token!r}, expected token ids >= 0")
