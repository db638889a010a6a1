"""Greedy tokens of the seeded model in three arms, beside transformers' own ``generate`` in float32."""

from __future__ import annotations

from forebay.hardware.checking.part import Result, Task
from forebay.hardware.checking.tokens import compare
from forebay.hardware.checking.transformers_tokens import transformers_references


def run(task: Task) -> Result:
    """Fails by a token that differs where the reference is clear, or by arms that differ from one another anywhere."""
    device = "cpu" if task.dry else "cuda"
    return compare(task, lambda folder, wanted, made: transformers_references(folder, wanted, made, device))
