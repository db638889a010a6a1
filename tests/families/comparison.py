"""Comparing an engine's tokens with transformers', model by model, over block sizes, arms and ways of attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from forebay.runtime import Engine, Model, SamplingParams, Settings
from forebay.specs import Backend
from tests.families.zoo import MAX_LEN, NEW_TOKENS, Case, Reference, prompts

BLOCK_SIZES: Final = (1, 4, 16, 32)
ARMS: Final = ("captured", "hostfree", "eager")
PATHS: Final = ("direct", "gather")

ALLOWED_GAP: Final = 1e-4
"""Two summation orders may choose differently where transformers' two best logits are as close as this, relative to the largest."""
ALLOWED_SHARE: Final = 0.01
"""Largest share of sequences that may diverge, even so."""


@dataclass(frozen=True)
class Plan:
    """One engine: its block size, arm and way of attention."""

    block_size: int
    arm: str
    path: str


@dataclass(frozen=True)
class Divergence:
    """Where an engine's tokens leave transformers', and how close transformers' choice was there."""

    case: Case
    plan: Plan
    prompt_length: int
    step: int
    gap: float

    def __str__(self) -> str:
        return (
            f"{self.case}: {self.plan}, prompt of {self.prompt_length}: token {self.step} differs where the relative "
            f"top-2 gap is {self.gap:.1e}"
        )


def every_plan() -> list[Plan]:
    """The whole cross product."""
    return [Plan(*values) for values in product(BLOCK_SIZES, ARMS, PATHS)]


def plans_in_turn(turn: int) -> list[Plan]:
    """One plan a block size; arm and way of attention change with the block size and from one turn to the next."""
    return [
        Plan(size, ARMS[(turn + index) % len(ARMS)], PATHS[(turn // len(ARMS) + index) % len(PATHS)])
        for index, size in enumerate(BLOCK_SIZES)
    ]


def divergences(
    case: Case, model: Model, references: Sequence[Reference], plans: Iterable[Plan], backend: Backend
) -> Iterator[Divergence]:
    """Decode every prompt of the zoo in one engine a plan, and yield the sequences that are not the reference's."""
    for plan in plans:
        tokens = decode(model, plan, backend)
        for prompt, reference, made in zip(prompts(), references, tokens, strict=True):
            wrong = [step for step in range(NEW_TOKENS) if made[step] != reference.tokens[step]]
            if wrong:
                yield Divergence(case, plan, len(prompt), wrong[0], reference.gaps[wrong[0]])


def decode(model: Model, plan: Plan, backend: Backend, *, max_len: int = MAX_LEN) -> list[tuple[int, ...]]:
    """Greedy tokens of every prompt, decoded together."""
    wanted = prompts()
    engine = Engine(
        model,
        backend,
        settings=Settings(),
        arm=plan.arm,
        attention=plan.path,
        slots=len(wanted),
        block_size=plan.block_size,
        max_len=max_len,
    )
    with engine:
        results = engine.generate(wanted, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    return [tuple(result.token_ids) for result in results]
