"""The process of one part: ``python -m forebay.hardware.checking.part PACKAGE NAME --result FILE ...``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from forebay.hardware.checking.plan import check_of
from forebay.hardware.checking.running import Status, write_result

HOOKS: Final = ("crash", "hang", "fail")


@dataclass(frozen=True)
class Task:
    """What a part is told.

    Attributes:
        backend: the device's, or what a dry run takes in its place.
        dry: whether it is one: the smallest sizes, and no number says anything of a device.
        work: a folder for its files, which all parts share.
        out: the folder of the results.
        tools: where the vendor's tools may lie.
        ends: when its time is over, of ``time.monotonic``.
        save: writes what was found so far.
    """

    backend: str
    dry: bool
    work: Path
    out: Path
    tools: Path
    ends: float
    save: Callable[[Status, Mapping[str, Any]], None]

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.ends - time.monotonic()


Result = tuple[Status, dict[str, Any], list[str]]
"""Status, what was found, what is wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one part and write its result; an error of the part ends the process with a traceback and without one."""
    parser = argparse.ArgumentParser(prog="part", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package")
    parser.add_argument("name")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tools", type=Path, default=Path())
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--hook", choices=HOOKS, help="break this part, to see that the check says so")
    a = parser.parse_args(argv)
    check = check_of(a.package)
    if a.name not in check.parts:
        parser.error(f"got the part {a.name!r}, expected one of {', '.join(check.parts)}")
    if a.hook == "crash":
        raise RuntimeError(f"{a.name}: told to crash")
    if a.hook == "hang":
        time.sleep(3600)

    def save(status: Status, data: Mapping[str, Any]) -> None:
        write_result(a.result, status, data)

    task = Task(
        backend=check.dry_backend if a.dry_run else check.backend,
        dry=a.dry_run,
        work=a.work,
        out=a.out,
        tools=a.tools,
        ends=time.monotonic() + a.limit,
        save=save,
    )
    module = import_module(f"{check.package}.{a.name.replace('-', '_')}")
    status, data, problems = module.run(task)
    if a.hook == "fail":
        status, problems = "failed", [*problems, "told to fail"]
    write_result(a.result, status, data, problems)
    return 0


if __name__ == "__main__":
    sys.exit(main())
