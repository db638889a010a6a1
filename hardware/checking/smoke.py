"""Fault smoke: a few faults, each seeded in a process of its own; a test of its clause must fall, and none without a fault."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from forebay.hardware.checking.part import Result, Task
from forebay.hardware.checking.running import run_process
from forebay.hardware.checking.seeded import UNSEEDED
from forebay.runtime.settings import isolated_environment
from forebay.specs.faults.catalogue import Fault


@dataclass(frozen=True)
class Smoke:
    """Which faults, and how they are run.

    Attributes:
        package: of the check; its module ``faults`` knows the faults.
        faults: by id, those that can be seeded.
        tests: by fault the tests that are to catch it.
        at_once: processes at a time on the device.
        dry_environment: variables of a dry run.
    """

    package: str
    faults: Mapping[str, Fault]
    tests: Mapping[str, Sequence[str]]
    at_once: int
    dry_environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One process: its fault or none, what fell, with its clauses, and how many tests ran."""

    name: str
    fell: dict[str, list[str]]
    ran: int
    status: int | None
    output: str


def run_smoke(task: Task, smoke: Smoke) -> Result:
    """Fails by a fault no test catches, and where a test falls without one; a dry run takes the last fault alone."""
    chosen = list(smoke.tests)[-1:] if task.dry else list(smoke.tests)
    asked = list(dict.fromkeys(test for name in chosen for test in smoke.tests[name]))
    with ThreadPoolExecutor(2 if task.dry else smoke.at_once) as pool:
        control = pool.submit(_pytest, task, smoke, UNSEEDED, asked)
        seeded = {name: pool.submit(_pytest, task, smoke, name, list(smoke.tests[name])) for name in chosen}
        found, plain = {name: future.result() for name, future in seeded.items()}, control.result()
    problems = []
    rows: list[dict[str, Any]] = []
    late = plain.status is None
    if plain.status != 0 and not late:
        problems.append(f"without a fault: {len(plain.fell)} of {plain.ran} tests fell: {plain.output[-600:]}")
    for name, ended in found.items():
        clause = smoke.faults[name].clause
        killers = [test for test, carried in ended.fell.items() if clause in carried]
        killed = ended.status == 1 and bool(killers)
        late = late or (ended.status is None and not killers)
        rows.append({"fault": name, "clause": clause, "killed_by": killers[:1], "ran": ended.ran})
        if not killed and ended.status is not None:
            problems.append(f"{name}: no test of {clause} fell; pytest ended with {ended.status}")
    data = {"faults": rows, "unseeded_ran": plain.ran, "of": len(smoke.faults)}
    if problems:
        return "failed", data, problems
    return ("over its time", data, ["not every process ended"]) if late else ("passed", data, [])


def _pytest(task: Task, smoke: Smoke, name: str, tests: list[str]) -> Run:
    folder = task.work / f"fault-{name}"
    folder.mkdir()
    record = folder / "record.json"
    environment = isolated_environment(folder) | (dict(smoke.dry_environment) if task.dry else {})
    options = [f"--backend={task.backend}", f"--suite-record={record}", "--suite-profile=full"]
    options += [] if name == UNSEEDED else ["--maxfail=1"]
    command = [sys.executable, "-m", "forebay.hardware.checking.seeded", smoke.package, name, str(folder)]
    ended = run_process([*command, *tests, *options], task.left_s - 12, folder / "log", environment)
    results = json.loads(record.read_text(encoding="utf-8"))["results"] if record.exists() else []
    fell = {result["test"]: result["clauses"] for result in results if result["outcome"] == "fail"}
    ran = sum(result["outcome"] != "not-run" for result in results)
    print(f"{name}: status {ended.status}, {ran} ran, {len(fell)} fell, {ended.seconds:.1f} s\n{ended.output[-1500:]}")
    return Run(name, fell, ran, ended.status, ended.output)
