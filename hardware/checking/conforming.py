"""``forebay conform`` as a part of a check: its record is the evidence.

It is run without the command, which needs a library that reads command lines: a prepared machine may have none.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from forebay.hardware.checking.part import Result, Task
from forebay.hardware.checking.running import GRACE_S, run_process
from forebay.runtime.cli.suite_process import run_pytest
from forebay.runtime.settings import isolated_environment
from forebay.specs.errors import InvalidInput
from forebay.specs.suite.command import suite_arguments

SPARE_S: Final = 2 * GRACE_S
"""Seconds for the record of a run that is cut."""
SHOWN: Final = 20
"""Failed tests that are named."""
STALL_S: Final = 600.0
"""Seconds without progress after which pytest is killed."""


def conform(task: Task, name: str, profile: str, tests: Sequence[str] = ()) -> Result:
    """Judge the backend; a run that is cut by time leaves its record, in which the rest is not run."""
    record, statement = task.out / f"{name}.json", task.out / f"{name}.md"
    command = [sys.executable, "-m", "forebay.hardware.checking.conforming", task.backend, profile]
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
    """Judge ``argv``: backend, profile, record, statement, tests; 0 where the backend holds what was asked, else 1."""
    backend, profile, *files = argv
    record, statement = (Path(file).absolute() for file in files[:2])
    if profile not in ("smoke", "full"):
        raise InvalidInput(f"got the profile {profile!r}, expected smoke or full")
    with tempfile.TemporaryDirectory(prefix="conforming-") as folder:
        made = _judged(backend, profile, record, files[2:], Path(folder))
    if made is None:
        return 1
    from forebay.specs.suite.reports.statement import statement as text_of

    statement.write_text(text_of(made), encoding="utf-8")
    return 0 if made["verdict"] != "failed" else 1


def _judged(backend: str, profile: str, record: Path, tests: Sequence[str], folder: Path) -> dict[str, Any] | None:
    """The record of pytest over the suite, made of the journal where pytest died; None where nothing was asked."""
    from forebay.specs.suite.journal import journal_of, read_journal
    from forebay.specs.suite.record import assemble, write_record

    arguments = [f"--backend={backend}", f"--suite-profile={profile}", f"--suite-record={record}", "--disable-warnings"]
    command = [*suite_arguments(folder, tests), *arguments]
    journal = journal_of(record)
    ended = run_pytest(command, isolated_environment(folder), progress=journal, stall_s=STALL_S)
    print(ended.complaint)
    entries = read_journal(journal) if journal.exists() else []
    if any(entry["entry"] == "run" for entry in entries):
        if not any(entry["entry"] == "stopped" for entry in entries):
            entries.append({"entry": "stopped", "reason": f"its process {ended.told()}", "by_test": True})
        write_record(assemble(entries), record)
    journal.unlink(missing_ok=True)
    if not record.exists():
        return None
    made: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
