"""The check of an H200 machine: its dry run, without the packages that such a host does not have, and what it says of broken parts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forebay.hardware.checking import report
from forebay.hardware.checking.check import bad_parts
from forebay.hardware.checking.running import Outcome, run_process
from forebay.hardware.checking.tokens import Reference, differences
from forebay.hardware.h200.faults import TESTS as SMOKE
from forebay.hardware.h200.faults import known
from forebay.hardware.h200.memory import find_tool
from forebay.hardware.h200.plan import CHECK
from forebay.specs.faults.seeding import check_applies

from .dry import Ran, dry_run

ABSENT = ("pydantic", "pydantic_core", "gguf", "requests", "prometheus_client", "importlinter")
NUMBERS = ("gb_s", "median_s", "best_s", "to_ceiling", "median_step_s", "best_step_s")
"""Columns that would claim something of a device."""


def check(folder: Path, *arguments: str) -> Ran:
    """A dry run of the script, without ABSENT."""
    return dry_run("h200", ABSENT, folder, *arguments)


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return check(tmp_path_factory.mktemp("dry"))


def test_every_part_of_the_dry_run_has_a_result(dry: Ran) -> None:
    assert dry.status == 0, dry.said
    assert {name: part["status"] for name, part in dry.parts.items()} == {
        "facts": "passed",
        "suite": "passed",
        "suite-full": "passed",
        "tokens": "passed",
        "faults": "passed",
        "memory": "not present",
        "bandwidth": "dry",
        "steps": "dry",
    }
    assert tuple(dry.parts) == CHECK.parts
    for name in ("suite", "suite-full"):
        summary = dry.parts[name]["data"]["summary"]
        assert 1 <= summary["pass"] == summary["total"]
    assert dry.parts["tokens"]["data"]["compared"] >= 6
    assert dry.parts["tokens"]["data"]["distinct_tokens"] >= 4
    assert all(row["killed_by"] for row in dry.parts["faults"]["data"]["faults"])
    assert dry.parts["memory"]["data"]["ended"] == dry.parts["memory"]["data"]["cases"]


def test_it_ran_without_what_the_host_does_not_have(dry: Ran) -> None:
    assert dry.parts["facts"]["data"]["info"]["device"]
    assert importlib.util.find_spec("pydantic") is not None, "here it is, so its absence was made"
    code = "import sys, importlib.util as u; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    environment = os.environ | {"PYTHONPATH": str(dry.out.parent / "bare")}
    command = [sys.executable, "-c", code, *ABSENT, "numpy"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "['numpy']\n"


def test_a_dry_run_claims_nothing_of_a_device(dry: Ran) -> None:
    assert dry.report["dry"] is True
    assert CHECK.dry in (dry.out / "report.md").read_text(encoding="utf-8")
    for name in CHECK.timing:
        rows = dry.parts[name]["data"]["rows"]
        assert rows
        assert [row for row in rows if row.keys() & set(NUMBERS)] == []
    assert dry.parts["bandwidth"]["data"]["ceiling_gb_s"] is None


def test_it_leaves_few_and_small_files(dry: Ran) -> None:
    files = list(dry.out.rglob("*"))
    assert {"report.json", "report.md", "log.txt", "conform-smoke.json", "conform-full.json"} <= {f.name for f in files}
    assert len(files) <= report.MOST_FILES
    assert sum(file.stat().st_size for file in files) < report.MOST_BYTES


def test_broken_parts_and_one_over_its_time_are_told_and_lose_no_other(tmp_path: Path) -> None:
    hooks = ("--hook", "tokens=crash", "--hook", "memory=fail", "--hook", "suite=hang", "--limit", "suite=6")
    ran = check(tmp_path, "--only", "facts", "suite", "tokens", "memory", "--dry-run", *hooks)
    assert ran.status == 1
    assert ran.report["bad"] == ["suite", "tokens", "faults", "memory"]
    found = {name: part["status"] for name, part in ran.parts.items()}
    assert (found["facts"], found["suite"], found["tokens"]) == ("passed", "over its time", "crashed")
    assert (found["memory"], found["faults"]) == ("failed", "not run: not asked for")
    assert "told to crash" in (ran.out / "log.txt").read_text(encoding="utf-8")
    assert "NOT GOOD: suite, tokens, faults, memory" in (ran.out / "report.md").read_text(encoding="utf-8")


def test_a_part_that_has_no_time_is_not_run(tmp_path: Path) -> None:
    ran = check(tmp_path, "--budget", "4")
    assert ran.status == 1
    assert {part["status"] for part in ran.parts.values()} == {"not run: time"}


def test_a_process_over_its_time_is_ended_with_its_children(tmp_path: Path) -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    ended = run_process([sys.executable, "-c", code], 2.0, tmp_path / "log", own_group=True)
    assert ended.status is None
    assert ended.seconds < 30
    stat = Path("/proc", ended.output.strip(), "stat")
    ends = time.monotonic() + 10  # a process that was killed goes once the machine gives it a turn
    while not (gone := _is_gone(stat)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert gone


def _is_gone(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    ("name", "status", "bad"),
    [
        ("suite", "passed", False),
        ("suite", "not run: time", True),
        ("tokens", "over its time", True),
        ("memory", "not present", False),
        ("faults", "not present", True),
        ("suite-full", "not run: time", False),
        ("suite-full", "failed", True),
        ("bandwidth", "crashed", False),
    ],
)
def test_what_decides_the_exit_status(name: str, status: Any, bad: bool) -> None:
    assert (bad_parts(CHECK, [Outcome(name, status)]) == [name]) is bad


def test_tokens_are_compared_up_to_a_near_tie_and_arms_everywhere() -> None:
    want = [Reference((4, 5, 6), (0.5, 1e-5, 0.5))]
    same = {"eager": [[4, 7, 7]], "hostfree": [[4, 7, 7]]}
    assert differences(same, want) == []
    assert len(differences(same | {"hostfree": [[4, 7, 8]]}, want)) == 1
    assert len(differences({"eager": [[5, 5, 6]]}, want)) == 1
    assert len(differences({"eager": [[4, 5]]}, want)) == 1


def test_the_seeded_faults_apply() -> None:
    faults = known()
    assert faults.keys() >= SMOKE.keys()
    for name, tests in SMOKE.items():
        check_applies(faults[name])
        assert tests


def test_the_memory_checker_is_looked_for_beside_the_path(tmp_path: Path) -> None:
    assert find_tool(tmp_path) is None
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert find_tool(tmp_path) == str(tool)
