"""Fault smoke: a few faults of the Pallas kernels, each seeded in a process of its own; a test of its clause must fall."""

from __future__ import annotations

from importlib import resources
from typing import Final

from forebay.hardware.checking.part import Result, Task
from forebay.hardware.checking.smoke import Smoke, run_smoke
from forebay.specs.faults.catalogue import Fault, parse

TESTS: Final = {
    "pallas.window-off-by-one": ("test_decode.py::test_a_window_counts_the_current_token",),
    "pallas.tail-unmasked": ("test_decode.py::test_every_length",),
    "pallas.page-off-by-one": ("test_decode.py::test_every_length",),
    "pallas.invalid-block-left": ("test_invalid_blocks.py",),
    "pallas.lse-base-two": ("test_merging.py::test_the_lse_is_a_natural_logarithm",),
}
"""By fault the tests that are to catch it. All show by values: one that leaves a semaphore waiting would hang a device."""


def known() -> dict[str, Fault]:
    """The faults of ``pallas.toml``, by id."""
    text = resources.files(__package__).joinpath("pallas.toml").read_text(encoding="utf-8")
    return {fault.id: fault for fault in parse("pallas", text)}


def run(task: Task) -> Result:
    """Fails by a fault no test catches, and where a test falls without one; one process at a time, for a TPU belongs to one."""
    return run_smoke(task, Smoke("forebay.hardware.tpu", known(), TESTS, at_once=1))
