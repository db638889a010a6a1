"""A whole check: every part in a process of its own, within one limit of time. ``hardware/checking/check.sh`` starts it.

Parts that hold something run beside one another; those that measure follow, one at a time, with a share of the time kept for them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from forebay.hardware.checking.part import HOOKS
from forebay.hardware.checking.plan import Check, check_of
from forebay.hardware.checking.report import write_report
from forebay.hardware.checking.running import Outcome, run_part

BUDGET_S: Final = 460.0
"""Seconds in all: less than eight minutes with the start of the script and the report."""
DRY_BESIDE: Final = 2
"""Parts that run at a time in a dry run."""
FAULTY: Final = ("failed", "crashed")


def bad_parts(check: Check, outcomes: Sequence[Outcome]) -> list[str]:
    """Names of the parts for which the check is not good."""
    bad = []
    for outcome in outcomes:
        absent = outcome.name in check.may_lack and outcome.status == "not present"
        if outcome.name in check.must_pass:
            if outcome.status != "passed" and not absent:
                bad.append(outcome.name)
        elif outcome.name not in check.timing and outcome.status in FAULTY:
            bad.append(outcome.name)
    return bad


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and write the report; 0 where every part that decides ended without a fault, else 1."""
    check, a = _arguments(argv)
    start = time.monotonic()
    a.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="check-", dir=a.work) as folder:
        outcomes = _run(check, a, start, Path(folder))
    bad = bad_parts(check, outcomes)
    seconds = round(time.monotonic() - start, 1)
    about = {"dry": a.dry_run, "backend": check.dry_backend if a.dry_run else check.backend, "budget_s": a.budget}
    write_report(check, a.out, outcomes, about | {"seconds": seconds, "good": not bad, "bad": bad})
    for outcome in outcomes:
        print(f"{outcome.name:11} {outcome.status:14} {outcome.seconds:6.1f} s  {'; '.join(outcome.problems)[:200]}")
    print(f"{'dry run: ' if a.dry_run else ''}{'good' if not bad else 'NOT GOOD: ' + ', '.join(bad)}, {seconds} s")
    return 1 if bad else 0


def _run(check: Check, a: argparse.Namespace, start: float, work: Path) -> list[Outcome]:
    common = ["--work", str(work), "--out", str(a.out.resolve()), "--tools", str(a.tools)]
    common += ["--dry-run"] if a.dry_run else []
    hooks = dict(pair.split("=", 1) for pair in a.hook)
    only = a.only or check.parts
    limits = dict(pair.split("=", 1) for pair in a.limit)
    kept = sum(share for name, share in check.shares.items() if name in only) * a.budget

    def one(name: str, until: float) -> Outcome:
        left = until - (time.monotonic() - start)
        left = left if a.dry_run else min(left, check.caps.get(name, 1.0) * a.budget)
        left = min(left, float(limits[name])) if name in limits else left
        hook = ["--hook", hooks[name]] if name in hooks else []
        return run_part(check.package, name, [*common, *hook], left, work)

    found: dict[str, Outcome] = {}
    with ThreadPoolExecutor(DRY_BESIDE if a.dry_run else check.beside) as pool:
        waiting = {
            name: pool.submit(one, name, a.budget - kept)
            for name in check.parts
            if name in only and name not in check.timing
        }
        found |= {name: future.result() for name, future in waiting.items()}
    until = a.budget
    for name in check.timing:  # a part that ends early leaves its time to the next
        if name in only:
            later = sum(check.shares[other] for other in check.timing[check.timing.index(name) + 1 :] if other in only)
            found[name] = one(name, until - later * a.budget)
    return [found.get(name) or Outcome(name, "not run: not asked for") for name in check.parts]


def _arguments(argv: Sequence[str] | None) -> tuple[Check, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package", help="whose check it is, such as forebay.hardware.h200")
    parser.add_argument("out", type=Path, help="the folder for the results")
    parser.add_argument("--dry-run", action="store_true", help="the smallest sizes, without the device")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="the time in all")
    parser.add_argument("--only", nargs="+", metavar="PART", help="only these parts")
    parser.add_argument("--limit", action="append", default=[], metavar="PART=SECONDS", help="less time for a part")
    parser.add_argument(
        "--hook", action="append", default=[], metavar=f"PART={'|'.join(HOOKS)}", help="break a part, to see it told"
    )
    parser.add_argument("--work", type=Path, help="a folder for temporary files")
    parser.add_argument("--tools", type=Path, default=Path(), help="where the vendor's tools may lie")
    a = parser.parse_args(argv)
    check = check_of(a.package)
    unknown = [name for name in a.only or () if name not in check.parts]
    if unknown:
        parser.error(f"--only: got {', '.join(unknown)}, expected some of {', '.join(check.parts)}")
    return check, a


if __name__ == "__main__":
    sys.exit(main())
