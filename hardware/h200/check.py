"""The whole check: every part in a process of its own, within one limit of time. ``hardware/h200/check.sh`` starts it.

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

from forebay.hardware.h200.part import HOOKS, PARTS, TIMING
from forebay.hardware.h200.report import write_report
from forebay.hardware.h200.running import Outcome, run_part

BUDGET_S: Final = 460.0
"""Seconds in all: less than eight minutes with the start of the script and the report."""
SHARES: Final = {"bandwidth": 0.2, "steps": 0.14}
"""Of the budget, kept for the parts that measure; the others have the rest."""
BESIDE: Final = 4
"""Parts that run at a time on a device; two in a dry run."""
MUST_PASS: Final = ("facts", "suite", "tokens", "faults", "memory")
"""Parts that decide the exit status: each has to end without a fault. The whole suite decides only by what fails in it."""
FAULTY: Final = ("failed", "crashed")


def bad_parts(outcomes: Sequence[Outcome]) -> list[str]:
    """Names of the parts for which the check is not good."""
    bad = []
    for outcome in outcomes:
        absent = outcome.name == "memory" and outcome.status == "not present"
        if outcome.name in MUST_PASS:
            if outcome.status != "passed" and not absent:
                bad.append(outcome.name)
        elif outcome.name not in TIMING and outcome.status in FAULTY:
            bad.append(outcome.name)
    return bad


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and write the report; 0 where every part that decides ended without a fault, else 1."""
    a = _arguments(argv)
    start = time.monotonic()
    a.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="check-", dir=a.work) as folder:
        outcomes = _run(a, start, Path(folder))
    bad = bad_parts(outcomes)
    seconds = round(time.monotonic() - start, 1)
    about = {"dry": a.dry_run, "backend": "cuda:interpret" if a.dry_run else "cuda", "budget_s": a.budget}
    write_report(a.out, outcomes, about | {"seconds": seconds, "good": not bad, "bad": bad})
    for outcome in outcomes:
        print(f"{outcome.name:11} {outcome.status:14} {outcome.seconds:6.1f} s  {'; '.join(outcome.problems)[:200]}")
    print(f"{'dry run: ' if a.dry_run else ''}{'good' if not bad else 'NOT GOOD: ' + ', '.join(bad)}, {seconds} s")
    return 1 if bad else 0


def _run(a: argparse.Namespace, start: float, work: Path) -> list[Outcome]:
    common = ["--work", str(work), "--out", str(a.out.resolve()), "--cuda-home", str(a.cuda_home)]
    common += ["--dry-run"] if a.dry_run else []
    hooks = dict(pair.split("=", 1) for pair in a.hook)
    only = a.only or PARTS
    limits = dict(pair.split("=", 1) for pair in a.limit)
    kept = sum(share for name, share in SHARES.items() if name in only) * a.budget

    def one(name: str, until: float) -> Outcome:
        left = until - (time.monotonic() - start)
        left = min(left, float(limits[name])) if name in limits else left
        hook = ["--hook", hooks[name]] if name in hooks else []
        return run_part(name, [*common, *hook], left, work)

    found: dict[str, Outcome] = {}
    with ThreadPoolExecutor(2 if a.dry_run else BESIDE) as pool:
        waiting = {
            name: pool.submit(one, name, a.budget - kept) for name in PARTS if name in only and name not in TIMING
        }
        found |= {name: future.result() for name, future in waiting.items()}
    until = a.budget
    for name in TIMING:  # a part that ends early leaves its time to the next
        if name in only:
            later = sum(SHARES[other] for other in TIMING[TIMING.index(name) + 1 :] if other in only)
            found[name] = one(name, until - later * a.budget)
    return [found.get(name) or Outcome(name, "not run: not asked for") for name in PARTS]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder for the results")
    parser.add_argument("--dry-run", action="store_true", help="the smallest sizes, in Triton's interpreter")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="the time in all")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help="only these parts")
    parser.add_argument("--limit", action="append", default=[], metavar="PART=SECONDS", help="less time for a part")
    parser.add_argument(
        "--hook", action="append", default=[], metavar=f"PART={'|'.join(HOOKS)}", help="break a part, to see it told"
    )
    parser.add_argument("--work", type=Path, help="a folder for temporary files")
    parser.add_argument("--cuda-home", type=Path, default=Path(), help="where the tools of CUDA may lie")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
