"""Every wrong version of the kernel in every interpreter: ``python -m tests.kernels_pallas.full`` prints what was found in each."""

from __future__ import annotations

import sys
import time

from tests.kernels_pallas.mutants import CASES, MODES, MUTANTS
from tests.kernels_pallas.watched import watch_together


def main() -> int:
    """Run the kernel as it is through everything and each mutant through its case in all modes; 0 if all is as it should be."""
    started = time.monotonic()
    runs = [("", case, mode) for case in CASES for mode in MODES]
    runs += [(name, mutant.case, mode) for name, mutant in MUTANTS.items() for mode in MODES]
    found = watch_together(runs)
    failed = sorted(
        f"the kernel as it is, {case}, {mode}: {f}" for (name, case, mode), f in found.items() if not name and f
    )
    for name, mutant in MUTANTS.items():
        by_mode = {mode: "+".join(found[name, mutant.case, mode]) or "-" for mode in MODES}
        print(f"{name}: " + ", ".join(f"{mode} {what}" for mode, what in by_mode.items()))
        if mutant.shown not in found[name, mutant.case, mutant.mode]:
            failed.append(f"{name}: not found by {mutant.shown} in {mutant.case}, {mutant.mode}")
    print("\n".join(failed) or "nothing found in the kernel as it is")
    print(f"{len(MUTANTS)} mutants, {len(runs)} runs, {len(failed)} failed, {time.monotonic() - started:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
