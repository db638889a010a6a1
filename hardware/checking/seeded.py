"""pytest over tests of the suite in a process with a fault in it: ``python -m forebay.hardware.checking.seeded ARGUMENT...``."""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Final

from forebay.specs.faults.seeding import check_applies, seed
from forebay.specs.suite.command import suite_arguments

UNSEEDED: Final = "unseeded"


def main(argv: list[str]) -> None:
    """Seed the fault, or none, and become pytest; ``argv``: package of the check, id, folder for a configuration, tests, options."""
    package, name, folder, *rest = argv
    tests = [argument for argument in rest if not argument.startswith("-")]
    options = [argument for argument in rest if argument.startswith("-")]
    arguments = suite_arguments(Path(folder), tests)
    if name != UNSEEDED:
        fault = import_module(f"{package}.faults").known()[name]
        check_applies(fault)
        seed(fault)
    sys.argv = ["pytest", *arguments, *options]
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
