"""pytest over tests of the suite in a process with a fault in it: ``python -m forebay.hardware.h200.seeded ID FOLDER ARGUMENT...``.

Triton compiles and interprets the text of a kernel's file, which is not what Python imported where that was patched; so the patched
text is also put where ``inspect`` looks for it.
"""

from __future__ import annotations

import linecache
import runpy
import sys
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from forebay.specs.errors import InvalidInput
from forebay.specs.faults.catalogue import Fault, faults, parse
from forebay.specs.faults.seeding import check_applies, seed
from forebay.specs.suite.command import suite_arguments

AREA: Final = "triton"
KERNELS: Final = "forebay.kernels.triton"
OWN: Final = "smoke"
"""The area of the faults of this folder."""
UNSEEDED: Final = "unseeded"


def known() -> dict[str, Fault]:
    """The catalogue's faults of Triton kernels by id; where it has none, those of ``seeds.toml``."""
    found = {
        fault.id: fault
        for fault in faults().values()
        if fault.id.startswith(f"{AREA}.") and all(patch.module.startswith(KERNELS) for patch in fault.patches)
    }
    text = (resources.files("forebay.hardware.h200") / "seeds.toml").read_text(encoding="utf-8")
    return found or {fault.id: fault for fault in parse(OWN, text)}


def show_patched(fault: Fault) -> None:
    """Put the patched text of every module of ``fault`` into the cache that ``inspect.getsource`` reads.

    Raises:
        InvalidInput: a module is not found, or a patch does not apply.
    """
    for module in dict.fromkeys(patch.module for patch in fault.patches):
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise InvalidInput(f"{module}: no such module; fault {fault.id} no longer applies, adapt it")
        text = Path(spec.origin).read_text(encoding="utf-8")
        for patch in fault.patches:
            if patch.module == module:
                text = patch.apply(text)
        # Without a time of change the entry is never compared with the file.
        linecache.cache[spec.origin] = (len(text), None, text.splitlines(keepends=True), spec.origin)


def main(argv: list[str]) -> None:
    """Seed the fault, or none, and become pytest; ``argv``: id, a folder for its configuration, tests, then pytest's options."""
    name, folder, *rest = argv
    tests = [argument for argument in rest if not argument.startswith("-")]
    options = [argument for argument in rest if argument.startswith("-")]
    arguments = suite_arguments(Path(folder), tests)
    if name != UNSEEDED:
        fault = known()[name]
        check_applies(fault)
        show_patched(fault)
        seed(fault)
    sys.argv = ["pytest", *arguments, *options]
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
