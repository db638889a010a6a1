"""Greedy tokens of the seeded model in three arms, beside those of a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forebay.hardware.checking.part import Result, Task
from forebay.hardware.checking.shaped_model import absent, prompts, write_model
from forebay.runtime import Settings, open_backend

ARMS: Final = ("eager", "hostfree", "captured")
TIE: Final = 1e-4
"""The least gap of a step's two best logits, relative to its largest, below which rounding may choose; nothing behind is compared."""
LEAST_COMPARED: Final = 0.5
"""Share of the tokens that must be compared for the part to have shown anything."""
MAX_LEN: Final = 256


@dataclass(frozen=True)
class Reference:
    """What a reference decodes from one prompt, and each step's gap between its two best logits, relative to the largest.

    ``tie``: the gap below which rounding may choose.
    """

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    tie: float = TIE

    @property
    def clear(self) -> int:
        """Tokens before the first near tie."""
        return next((step for step, gap in enumerate(self.gaps) if gap < self.tie), len(self.gaps))


References = Callable[[Path, Sequence[Sequence[int]], int], tuple[str, list[Reference]]]
"""Of a model's folder, prompts and tokens a prompt: who made them, and one a prompt."""


def sizes(*, dry: bool) -> tuple[int, int]:
    """How many prompts, and tokens a prompt."""
    return (2, 4) if dry else (8, 32)


def compare(task: Task, references: References) -> Result:
    """Fails by a token that differs where the reference is clear, or by arms that differ from one another anywhere."""
    lacking = absent()
    if lacking:
        return "not present", {}, [f"no model can be opened without {', '.join(lacking)}"]
    from forebay.runtime import Engine, SamplingParams, load_model

    count, made = sizes(dry=task.dry)
    wanted = prompts(count, dry=task.dry)
    settings = Settings()
    found: dict[str, list[list[int]]] = {}
    folder = write_model(task.work / "model-tokens", dry=task.dry)
    with open_backend(task.backend, settings=settings) as backend:
        by, want = references(folder, wanted, made)
        model = load_model(folder, dtype="float32", settings=settings)
        for arm in ARMS:
            options: dict[str, Any] = {"slots": count, "max_len": MAX_LEN, "prefix_reuse": False, "settings": settings}
            with Engine(model, backend, arm=arm, **options) as engine:
                results = engine.generate(wanted, SamplingParams(max_tokens=made, ignore_eos=True))
                found[arm] = [list(result.token_ids) for result in results]
    problems = differences(found, want)
    compared = sum(reference.clear for reference in want)
    data = {
        "reference": by,
        "prompts": [len(ids) for ids in wanted],
        "tokens_a_prompt": made,
        "compared": compared,
        "of": count * made,
        "distinct_tokens": len({token for reference in want for token in reference.tokens}),
        "smallest_gap": min(gap for reference in want for gap in reference.gaps),
    }
    if compared < LEAST_COMPARED * count * made:
        problems.append(f"only {compared} of {count * made} tokens lie before a near tie; nothing much was shown")
    return ("failed" if problems else "passed"), data, problems


def differences(found: dict[str, list[list[int]]], want: Sequence[Reference]) -> list[str]:
    """In words, where tokens differ."""
    problems = []
    for arm, rows in found.items():
        if rows != found[ARMS[0]]:
            problems.append(f"{arm}: other tokens than {ARMS[0]}")
        for index, (row, reference) in enumerate(zip(rows, want, strict=True)):
            clear, ours = reference.clear, tuple(row)
            if len(ours) != len(reference.tokens) or ours[:clear] != reference.tokens[:clear]:
                problems.append(f"{arm}, prompt {index}: {list(ours)}, the reference has {list(reference.tokens)}")
    return problems
