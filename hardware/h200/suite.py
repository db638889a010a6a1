"""A sample of every clause of the shared suite; in a dry run the plainest tests."""

from __future__ import annotations

from forebay.hardware.checking.conforming import conform
from forebay.hardware.checking.part import Result, Task


def run(task: Task) -> Result:
    """Fails by a test that fails."""
    return conform(task, "conform-smoke", "smoke", ["test_plainest.py"] if task.dry else [])
