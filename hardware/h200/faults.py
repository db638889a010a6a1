"""Fault smoke: a few faults of Triton kernels, each seeded in a process of its own; a test of its clause must fall."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from forebay.hardware.h200.part import Result, Task
from forebay.hardware.h200.running import run_process
from forebay.hardware.h200.seeded import UNSEEDED, known
from forebay.runtime.settings import isolated_environment

TESTS: Final = {
    "triton.window-off-by-one": ("test_decode.py::test_a_window_counts_the_current_token",),
    "triton.tile-tail-unmasked": ("test_decode.py::test_every_length",),
    "triton.lse-base-two": ("test_merging.py::test_the_lse_is_a_natural_logarithm",),
    "triton.slot-wrapped": ("test_doors.py",),
    "triton.invalid-block-skipped": ("test_invalid_blocks.py",),
}
"""By fault the tests that are to catch it."""
DRY: Final = 1
"""Faults of a dry run: each costs a process."""


@dataclass(frozen=True)
class Run:
    """One process: its fault or none, what fell, with its clauses, and how many tests ran."""

    name: str
    fell: dict[str, list[str]]
    ran: int
    status: int | None
    output: str


def run(task: Task) -> Result:
    """Fails by a fault no test catches, and where a test falls without one."""
    faults = known()
    chosen = list(TESTS)[-DRY:] if task.dry else list(TESTS)
    asked = list(dict.fromkeys(test for name in chosen for test in TESTS[name]))
    with ThreadPoolExecutor(2 if task.dry else 4) as pool:
        control = pool.submit(_pytest, task, UNSEEDED, asked)
        seeded = {name: pool.submit(_pytest, task, name, list(TESTS[name])) for name in chosen}
        found, plain = {name: future.result() for name, future in seeded.items()}, control.result()
    problems = []
    rows: list[dict[str, Any]] = []
    late = plain.status is None
    if plain.status != 0 and not late:
        problems.append(f"without a fault: {len(plain.fell)} of {plain.ran} tests fell: {plain.output[-600:]}")
    for name, ended in found.items():
        killers = [test for test, carried in ended.fell.items() if faults[name].clause in carried]
        killed = ended.status == 1 and bool(killers)
        late = late or (ended.status is None and not killers)
        rows.append({"fault": name, "clause": faults[name].clause, "killed_by": killers[:1], "ran": ended.ran})
        if not killed and ended.status is not None:
            problems.append(f"{name}: no test of {faults[name].clause} fell; pytest ended with {ended.status}")
    data = {"faults": rows, "unseeded_ran": plain.ran, "of": len(faults)}
    if problems:
        return "failed", data, problems
    return ("over its time", data, ["not every process ended"]) if late else ("passed", data, [])


def _pytest(task: Task, name: str, tests: list[str]) -> Run:
    folder = task.work / f"fault-{name}"
    folder.mkdir()
    record = folder / "record.json"
    environment = isolated_environment(folder)
    if task.dry:  # seeding imports kernels, and with them Triton, before the backend could announce how
        environment["TRITON_INTERPRET"] = "1"
    options = [f"--backend={task.backend}", f"--suite-record={record}", "--suite-profile=full"]
    options += [] if name == UNSEEDED else ["--maxfail=1"]
    command = [sys.executable, "-m", "forebay.hardware.h200.seeded", name, str(folder), *tests, *options]
    ended = run_process(command, task.left_s - 12, folder / "log", environment)
    results = json.loads(record.read_text(encoding="utf-8"))["results"] if record.exists() else []
    fell = {result["test"]: result["clauses"] for result in results if result["outcome"] == "fail"}
    ran = sum(result["outcome"] != "not-run" for result in results)
    print(f"{name}: status {ended.status}, {ran} ran, {len(fell)} fell, {ended.seconds:.1f} s\n{ended.output[-1500:]}")
    return Run(name, fell, ran, ended.status, ended.output)
