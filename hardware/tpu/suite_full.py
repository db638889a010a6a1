"""The whole suite, as far as time goes; in a dry run one small file of it."""

from __future__ import annotations

from forebay.hardware.checking.conforming import conform
from forebay.hardware.checking.part import Result, Task


def run(task: Task) -> Result:
    """Fails by a test that fails; ``not run: time`` where the time ends it."""
    return conform(task, "conform-full", "full", ["test_host_arrays.py"] if task.dry else [])
