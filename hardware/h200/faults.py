"""Fault smoke: a few faults of Triton kernels, each seeded in a process of its own; a test of its clause must fall."""

from __future__ import annotations

from typing import Final

from forebay.hardware.checking.part import Result, Task
from forebay.hardware.checking.smoke import Smoke, run_smoke
from forebay.specs.faults.catalogue import Fault, faults

CATALOGUE: Final = "cuda:interpret"
"""Where the catalogue's faults of Triton kernels are judged; on a device they have to show as well."""
KERNELS: Final = "forebay.kernels.triton"
TESTS: Final = {
    "triton.window-off-by-one": ("test_decode.py::test_a_window_counts_the_current_token",),
    "triton.tile-tail-unmasked": ("test_decode.py::test_every_length",),
    "triton.lse-base-two": ("test_merging.py::test_the_lse_is_a_natural_logarithm",),
    "triton.slot-wrapped": ("test_doors.py",),
    "triton.invalid-block-skipped": ("test_invalid_blocks.py",),
}
"""By fault the tests that are to catch it."""


def known() -> dict[str, Fault]:
    """The catalogue's faults that lie in Triton kernels alone, by id."""
    found = faults(CATALOGUE)
    return {name: fault for name, fault in found.items() if all(p.module.startswith(KERNELS) for p in fault.patches)}


def run(task: Task) -> Result:
    """Fails by a fault no test catches, and where a test falls without one."""
    # Seeding imports kernels, and with them Triton, before the backend could announce how.
    return run_smoke(
        task, Smoke("forebay.hardware.h200", known(), TESTS, at_once=4, dry_environment={"TRITON_INTERPRET": "1"})
    )
