"""``forebay conform`` as a part of the check: its record is the evidence.

The command is called as a function. Some versions of the library that reads command lines need pydantic, and the host has none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from forebay.hardware.h200.part import Result, Task
from forebay.hardware.h200.running import GRACE_S, run_process
from forebay.specs.errors import InvalidInput

SPARE_S: Final = 2 * GRACE_S
"""Seconds for the record of a run that is cut."""
SHOWN: Final = 20
"""Failed tests that are named."""


def conform(task: Task, name: str, profile: str, tests: Sequence[str] = ()) -> Result:
    """Judge the backend; a run that is cut by time leaves its record, in which the rest is not run."""
    record, statement = task.out / f"{name}.json", task.out / f"{name}.md"
    command = [sys.executable, "-m", "forebay.hardware.h200.conforming", task.backend, profile]
    command += [str(record), str(statement), *tests]
    ended = run_process(command, task.left_s - SPARE_S, task.work / f"{name}-conform.log")
    print(ended.output)
    if not record.exists():
        return "failed", {}, [f"conform left no record; it ended with {ended.status}"]
    data = _short(record)
    failed: list[str] = data.pop("failed")
    problems = [f"{len(failed)} failed, among them {test}" for test in failed[:1]]
    data["failed_tests"] = failed[:SHOWN]
    if ended.status is None:
        problems.append(f"not run: time, {data['summary']['not-run']} of {data['summary']['total']} tests")
        return ("failed" if failed else "not run: time"), data, problems
    if ended.status != 0:
        problems += data["problems"] or [f"conform ended with status {ended.status}"]
        return "failed", data, problems
    return "passed", data, problems


def _short(record: Path) -> dict[str, Any]:
    made = json.loads(record.read_text(encoding="utf-8"))
    data = {key: made[key] for key in ("requested", "profile", "complete", "summary", "problems", "verdict", "stopped")}
    data["failed"] = [result["test"] for result in made["results"] if result["outcome"] == "fail"]
    data["record"] = record.name
    return data


def main(argv: Sequence[str]) -> int:
    """Judge ``argv``: backend, profile, record, statement, tests; the exit status of the command."""
    from forebay.runtime.cli.conform import conform as command

    backend, profile, record, statement, *tests = argv
    if profile not in ("smoke", "full"):
        raise InvalidInput(f"got the profile {profile!r}, expected smoke or full")
    chosen: Literal["smoke", "full"] = "smoke" if profile == "smoke" else "full"
    try:
        command(backend, chosen, Path(record), statement=Path(statement), test=list(tests))
    except RuntimeError as error:  # how the command ends with a status that is not 0
        status = getattr(error, "exit_code", None)
        if status is None:
            raise
        return int(status)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
