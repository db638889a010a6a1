"""pytest over tests of the suite in a process with a fault in it: ``python -m forebay.hardware.h200.seeded ID FOLDER ARGUMENT...``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Final

from forebay.specs.faults.catalogue import Fault, faults
from forebay.specs.faults.seeding import check_applies, seed
from forebay.specs.suite.command import suite_arguments

CATALOGUE: Final = "cuda:interpret"
"""Where the catalogue's faults of Triton kernels are judged; on a device they have to show as well."""
KERNELS: Final = "forebay.kernels.triton"
UNSEEDED: Final = "unseeded"


def known() -> dict[str, Fault]:
    """The catalogue's faults that lie in Triton kernels alone, by id."""
    found = faults(CATALOGUE)
    return {name: fault for name, fault in found.items() if all(p.module.startswith(KERNELS) for p in fault.patches)}


def main(argv: list[str]) -> None:
    """Seed the fault, or none, and become pytest; ``argv``: id, a folder for its configuration, tests, then pytest's options."""
    name, folder, *rest = argv
    tests = [argument for argument in rest if not argument.startswith("-")]
    options = [argument for argument in rest if argument.startswith("-")]
    arguments = suite_arguments(Path(folder), tests)
    if name != UNSEEDED:
        fault = known()[name]
        check_applies(fault)
        seed(fault)
    sys.argv = ["pytest", *arguments, *options]
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
