"""Greedy tokens of the seeded model in three arms, beside transformers where it is present, else beside ``tpu:xla``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from forebay.hardware.checking.part import Result, Task
from forebay.hardware.checking.running import run_process
from forebay.hardware.checking.tokens import Reference, compare
from forebay.hardware.checking.transformers_tokens import transformers_references

HOST: Final = "tpu:xla"
ON_HOST: Final = ("env", "JAX_PLATFORMS=cpu")
"""The reference runs in a process of its own, in which JAX must not look for the TPU: that belongs to this one."""
TIE_NATS: Final = 5e-3
"""Of two log-probabilities, where logits are not known: as far apart as the usual tie of logits of 50."""


def run(task: Task) -> Result:
    """Fails by a token that differs where the reference is clear, or by arms that differ from one another anywhere."""

    def references(folder: Path, wanted: Sequence[Sequence[int]], made: int) -> tuple[str, list[Reference]]:
        if find_spec("torch") is not None and find_spec("transformers") is not None:
            return transformers_references(folder, wanted, made, "cpu")
        return HOST, host_references(folder, wanted, made, task)

    return compare(task, references)


def host_references(folder: Path, wanted: Sequence[Sequence[int]], made: int, task: Task) -> list[Reference]:
    """Those of ``tpu:xla``, hostfree, by :mod:`.reference`.

    Raises:
        RuntimeError: its process did not end well.
    """
    asked, answer = task.work / "reference-asked.json", task.work / "reference.json"
    asked.write_text(json.dumps({"prompts": wanted, "made": made}), encoding="utf-8")
    command = [*ON_HOST, sys.executable, "-m", "forebay.hardware.tpu.reference", str(folder), str(asked), str(answer)]
    ended = run_process(command, task.left_s - 10, task.work / "reference.log")
    if ended.status != 0:
        raise RuntimeError(f"the reference on {HOST} ended with {ended.status}: {ended.output[-1000:]}")
    found = json.loads(answer.read_text(encoding="utf-8"))
    return [Reference(tuple(row["tokens"]), tuple(row["gaps"]), TIE_NATS) for row in found]
