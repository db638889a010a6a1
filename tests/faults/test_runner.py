"""The runner tells a fault that is caught from one that survives, is too coarse, is caught by others only, or does not apply."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.runtime.cli import app
from forebay.specs.faults import matrix
from forebay.specs.faults.catalogue import Fault, Patch, faults
from forebay.specs.faults.runner import Result
from forebay.specs.faults.runner import run as seed
from forebay.specs.suite.digest import suite_hash

ATTENTION = "forebay.backends.sim.attention"
WINDOW = Patch(
    ATTENTION, "max(end - (call.window or end), 0)", "max(end - (call.window + 1 if call.window else end), 0)"
)
NOTHING = Patch(ATTENTION, "TILE: Final = 512", "TILE: Final = 256 * 2")
EVERYTHING = Patch(ATTENTION, "    outs[0].put(out)", "    outs[0].put(out + 1)")
DEAD = Patch(ATTENTION, "    outs[0].put(out)", "    import os; os._exit(3)")


def judged(clause: str, *patches: Patch) -> Result:
    (result,) = seed([Fault("test.fault", clause, "a mistake", patches)], everything=False, workers=1)
    return result


def test_a_fault_that_a_test_of_its_clause_catches_is_killed() -> None:
    result = judged("D9", WINDOW)
    assert (result.verdict, result.good) == ("killed", True)
    assert all("D9" in clauses for clauses in result.killed_by.values())
    assert len(result.killed_by) == 1


@pytest.mark.parametrize(
    ("patch", "clause", "verdict"),
    [(NOTHING, "D9", "survived"), (WINDOW, "D10", "killed by another clause"), (EVERYTHING, "D9", "too coarse")],
)
def test_other_faults_are_told_apart(patch: Patch, clause: str, verdict: str) -> None:
    result = judged(clause, patch)
    assert (result.verdict, result.good) == (verdict, False)


def test_a_fault_that_does_not_apply_is_reported() -> None:
    result = judged("D9", Patch(ATTENTION, "no such text", "x"))
    assert result.verdict == "does not apply"
    assert "no longer applies" in result.detail


def test_a_process_that_dies_is_reported() -> None:
    result = judged("D9", DEAD)
    assert result.verdict == "too coarse"
    assert "died" in result.detail


def test_a_process_that_does_not_end_is_reported() -> None:
    slow = Patch(ATTENTION, "    outs[0].put(out)", "    import time; time.sleep(60)")
    (result,) = seed([Fault("test.slow", "D9", "t", (slow,))], everything=False, workers=1, timeout_s=4)
    assert "no end within 4 s" in result.detail


def test_the_matrix_counts_what_fell(tmp_path: Path) -> None:
    made = [judged("D9", WINDOW)]
    matrix.write(made, tmp_path)
    data = json.loads((tmp_path / matrix.MATRIX_JSON).read_text(encoding="utf-8"))
    (row,) = data["faults"].values()
    assert row["fallen_by_clause"]["D9"] == row["tests_fallen"] == 1
    assert data["suite_hash"] == suite_hash()
    assert "| `test.fault` | D9 | killed | 1 |" in (tmp_path / matrix.MATRIX_PAGE).read_text(encoding="utf-8")


def test_the_suite_catches_every_fault(tmp_path: Path) -> None:
    """``forebay faults``, as anyone would run it."""
    command = [sys.executable, "-c", "from forebay.runtime.cli.app import main; main()", "faults"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=1200)
    bad = [line for line in result.stdout.splitlines() if not line.startswith("killed  ")]
    assert bad == [f"{len(faults())} faults, {len(faults())} killed by a test of their clause, 0 not"], result.stderr
    assert result.returncode == 0


def test_an_unknown_fault_and_a_matrix_of_a_part_are_refused(
    plain_surroundings: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert app.main(("faults", "nosuch")) == app.main(("faults", "--matrix", str(tmp_path))) == 2
    assert "no fault nosuch" in capsys.readouterr().err
    assert app.main(("faults", "--list")) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(faults())
