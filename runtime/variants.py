"""Variants of the decode step: what traffic asks for decides what a step computes, so that plain greedy traffic pays for nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from .sampling import MAX_LOGPROBS, SamplingParams

LOGPROB_SIZES: Final = (1, 5, MAX_LOGPROBS)
"""Numbers of alternatives a step is made for; few, for each is a trace a bucket."""


@dataclass(frozen=True, order=True)
class Variant:
    """What a step does with the logits.

    Attributes:
        sampled: it processes them and draws by the options of each row; else it takes the argmax.
        logprobs: so many most likely tokens come with their log-probabilities, and the chosen one's; 0: none. Only sampled steps.
    """

    sampled: bool = False
    logprobs: int = 0

    def __str__(self) -> str:
        if not self.sampled:
            return "greedy"
        return f"sampled+logprobs{self.logprobs}" if self.logprobs else "sampled"

    def serves(self, params: SamplingParams) -> bool:
        """True if a row with these parameters gets from this step what it asks for."""
        return self >= variant_for([params])


GREEDY: Final = Variant()


def variant_for(params: Iterable[SamplingParams]) -> Variant:
    """The least variant that serves every one of ``params``; variants are in order, each serves what the ones before it do."""
    needed = GREEDY
    for each in params:
        if each.logprobs is not None:
            size = next(n for n in LOGPROB_SIZES if n >= each.logprobs)
            needed = max(needed, Variant(sampled=True, logprobs=size))
        elif not each.plain:
            needed = max(needed, Variant(sampled=True))
    return needed
