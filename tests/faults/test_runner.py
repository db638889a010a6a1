"""The runner tells a fault that is caught from one that survives, is too coarse, is caught by others only, or does not apply."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime.cli import app
from forebay.specs.errors import InvalidInput
from forebay.specs.faults import catalogue, matrix, results, runner
from forebay.specs.faults.catalogue import Fault, Patch, faults
from forebay.specs.faults.results import Results
from forebay.specs.faults.runner import Result, Verdict
from forebay.specs.faults.runner import run as seed
from forebay.specs.signals import ENDING, heard, interrupted_by
from forebay.specs.sources import suite_hash

ATTENTION = "forebay.backends.sim.attention"
WINDOW = Patch(
    ATTENTION, "max(end - (call.window or end), 0)", "max(end - (call.window + 1 if call.window else end), 0)"
)
NOTHING = Patch(ATTENTION, "TILE: Final = 512", "TILE: Final = 256 * 2")
EVERYTHING = Patch(ATTENTION, "    outs[0].put(out)", "    outs[0].put(out + 1)")
CRASH = Patch(
    ATTENTION, "heads, _ = q.shape\n", "heads, _ = q.shape\n    if batch > 8:\n        raise ZeroDivisionError\n"
)
DEAD = Patch(ATTENTION, "    outs[0].put(out)", "    import os; os._exit(3)")


READ = Patch(
    "forebay.specs.backend",
    '        self._launch("paged_decode")\n',
    '        self.to_host(seen) if self._scope is None and not is_host(visible) else None\n        self._launch("paged_decode")\n',
)


def judged(clause: str, *patches: Patch, counter: str = "", pair_of: str = "") -> Result:
    fault = Fault("test.fault", clause, "a mistake", patches, counter, pair_of)
    (result,) = seed([fault], everything=False, workers=1)
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


def test_a_fault_that_merely_crashes_is_not_the_mistake_of_its_title() -> None:
    result = judged("D3", CRASH)
    assert (result.verdict, result.good, result.killers) == ("killed otherwise", False, [])
    assert result.detail == "only by DeviceLost"


def test_a_fault_with_a_counter_is_killed_by_an_assertion_about_it_alone() -> None:
    result = judged("D7", READ, counter="downloads")
    assert (result.verdict, result.killers) == ("killed", list(result.killed_by))
    other = judged("D7", READ, counter="uploads")
    assert (other.verdict, other.good, other.killers) == ("killed otherwise", False, [])
    assert other.killed_by
    assert "no assertion about uploads fell" in other.detail


def test_its_pair_is_killed_by_any_other_assertion() -> None:
    result = judged("D7", READ, counter="downloads", pair_of="test.other")
    assert (result.verdict, result.good) == ("killed otherwise", False)
    assert "no assertion about a value fell" in result.detail
    assert judged("D9", WINDOW, counter="downloads", pair_of="test.other").verdict == "killed"


def test_a_fault_that_only_another_clause_catches_names_that_clause() -> None:
    assert "D9" in judged("D10", WINDOW).detail


def test_a_fault_that_does_not_apply_is_reported() -> None:
    result = judged("D9", Patch(ATTENTION, "no such text", "x"))
    assert result.verdict == "does not apply"
    assert "no longer applies" in result.detail


def test_a_process_that_dies_is_reported() -> None:
    result = judged("D9", DEAD)
    assert result.verdict == "too coarse"
    assert "died" in result.detail
    assert "in test_plainest.py::test_one_request_in_one_block" in result.detail


@pytest.mark.parametrize(
    ("where", "verdict", "says"),
    [
        ("True", "too coarse", "in test_plainest.py::test_one_request_in_one_block"),
        ("call.window", "no end", "in test_capabilities.py::test_a_feature_works_exactly_where_it_is_claimed[window]"),
    ],
)
def test_a_process_that_does_not_end_is_reported_with_the_test_it_was_in(where: str, verdict: str, says: str) -> None:
    """It is no kill: on a slow machine a fault that nobody catches comes to no end either."""
    slow = Patch(
        ATTENTION,
        "    outs[0].put(out)",
        f"    if {where}:\n        import time; time.sleep(600)\n    outs[0].put(out)",
    )
    (result,) = seed([Fault("test.slow", "D9", "t", (slow,))], everything=False, workers=2, timeout_s=20)
    assert (result.verdict, result.good) == (verdict, False)
    assert "no end within 20 s" in result.detail
    assert says in result.detail


def test_a_suite_that_falls_without_a_fault_stops_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that falls on this machine anyway would catch every fault of its clause; tests of other clauses are nobody's concern."""
    monkeypatch.setattr(runner, "UNSEEDED", dataclasses.replace(catalogue.UNSEEDED, patches=(WINDOW,)))
    with pytest.raises(
        InvalidInput,
        match=r"no fault was seeded, and the suite does not pass: test_capabilities\.py::.* and \d+ more; see",
    ):
        judged("D9", Patch(ATTENTION, "call.softcap is not None", "call.softcap == 0"))
    assert judged("D12", NOTHING).verdict == "survived"


def test_the_matrix_counts_what_fell(tmp_path: Path) -> None:
    made = [judged("D9", WINDOW)]
    matrix.write(made, tmp_path)
    data = json.loads((tmp_path / matrix.MATRIX_JSON).read_text(encoding="utf-8"))
    (row,) = data["faults"].values()
    assert row["fallen_by_clause"]["D9"] == row["tests_fallen"] == row["tests_catching"] == 1
    assert data["suite_hash"] == suite_hash()
    assert "| `test.fault` | D9 | killed |  | 1 | 1 |" in (tmp_path / matrix.MATRIX_PAGE).read_text(encoding="utf-8")


def test_nothing_of_the_machines_own_pytest_reaches_a_fault(tmp_path: Path) -> None:
    """Its options, its plugins (which may say that everything failed), and what lies in the folder it is run in."""
    (tmp_path / "meddler.py").write_text(
        "def pytest_collection_modifyitems(items):\n    items.clear()\n", encoding="utf-8"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --nonsense\n", encoding="utf-8")
    (tmp_path / "meddler-1.0.dist-info").mkdir()
    for name, text in (
        ("METADATA", "Metadata-Version: 2.1\nName: meddler\nVersion: 1.0\n"),
        ("entry_points.txt", "[pytest11]\nmeddler = meddler\n"),
    ):
        (tmp_path / "meddler-1.0.dist-info" / name).write_text(text, encoding="utf-8")
    places = [str(tmp_path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    meddled = {"PYTHONPATH": os.pathsep.join(places), "PYTEST_ADDOPTS": "-k nothing -x", "PYTEST_PLUGINS": "meddler"}
    name = "doors.pad-wraps"
    command = [sys.executable, "-m", "forebay.runtime.cli", "faults", name]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | meddled, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout.startswith("killed    "), done.stdout + done.stderr
    assert "1 fault, 1 killed by a test of their clause, 0 not" in done.stdout
    assert done.returncode == 0


def test_without_fork_faults_are_listed_and_running_says_what_it_needs(
    plain_surroundings: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert app.main(("faults", "--list")) == 0
    assert app.main(("faults", next(iter(faults())))) == 2
    assert "(fork)" in capsys.readouterr().err


@pytest.mark.parametrize("number", [0, 1, 2], ids=["collecting", "without a fault", "with one"])
def test_a_signal_behind_the_start_of_a_process_leaves_none(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment in which a process runs and nobody has noted it yet."""
    started: list[multiprocessing.process.BaseProcess] = []
    start = multiprocessing.context.ForkProcess.start

    def and_signal(process: multiprocessing.context.ForkProcess) -> None:
        start(process)
        started.append(process)
        if len(started) == number + 1:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", and_signal)
    with heard(ENDING, interrupted_by), pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        list(seed([next(iter(faults().values()))], everything=False, workers=2))
    assert [process.is_alive() for process in started] == [False] * (number + 1)


def test_a_suite_that_cannot_be_collected_is_no_fault_s_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_collect", lambda *_: os._exit(3))
    with pytest.raises(InvalidInput, match="no fault was seeded, and the suite cannot be collected"):
        list(seed([next(iter(faults().values()))], everything=False, workers=1))


def test_faults_of_two_backends_do_not_share_a_process() -> None:
    both = [next(iter(faults(backend).values())) for backend in ("sim", "cuda:interpret")]
    with pytest.raises(InvalidInput, match="faults of sim and of cuda:interpret; expected those of one backend"):
        list(seed(both, everything=False, workers=1))


def test_the_suite_catches_every_fault(tmp_path: Path) -> None:
    """``forebay faults``, as anyone would run it; under CI pytest explains a failed comparison at length, which must not take long."""
    command = [sys.executable, "-m", "forebay.runtime.cli", "faults"]
    surroundings = {**os.environ, "CI": "true"}
    result = subprocess.run(
        command, cwd=tmp_path, env=surroundings, capture_output=True, text=True, check=False, timeout=1200
    )
    bad = [line for line in result.stdout.splitlines() if not line.startswith("killed    ")]
    assert bad == [f"{len(faults())} faults, {len(faults())} killed by a test of their clause, 0 not"], result.stderr
    assert result.returncode == 0


@pytest.mark.parametrize(
    "verdict",
    ["survived", "killed by another clause", "killed otherwise", "too coarse", "no end", "does not apply"],
)
def test_whatever_is_not_killed_fails_the_command(
    plain_surroundings: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    """A survivor, and what other clauses' tests alone catch, is named with its clause."""
    names = list(faults())[:2]

    def results_of(chosen: Sequence[Fault], **_: Any) -> Iterator[Result]:
        for fault, said in zip(chosen, ("killed", verdict), strict=True):
            yield Result(fault, said, {}, 1, 0.1)

    monkeypatch.setattr(runner, "run", results_of)
    assert app.main(("faults", *names)) == 1
    said = capsys.readouterr().out
    assert "2 faults, 1 killed by a test of their clause, 1 not" in said
    assert f"{verdict:24} {faults()[names[1]].clause:4} {names[1]}" in said


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good results of the same sources and the same fault are kept; a cut-off line and everything else is made anew."""
    path = tmp_path / "partial"
    good = judged("D9", WINDOW)
    bad = dataclasses.replace(good, fault=dataclasses.replace(good.fault, id="test.bad"), verdict="survived")
    with Results(path) as kept:
        kept.add(good)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"sources": "cut of')
    other = dataclasses.replace(good.fault, id="test.other")
    with Results(path) as kept:
        kept.add(bad)
        kept.add(dataclasses.replace(good, fault=other))
    with Results(path) as kept:
        assert list(kept.taken_up([good.fault, bad.fault, other])) == [good, dataclasses.replace(good, fault=other)]
        assert list(kept.taken_up([dataclasses.replace(good.fault, clause="D10")])) == []
        monkeypatch.setattr(results, "sources_hash", lambda: "other sources")
        assert list(Results(path).taken_up([good.fault])) == []
        kept.discard()
    assert not path.exists()


def test_what_was_kept_is_in_the_matrix(
    plain_surroundings: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An interrupted command leaves its results, and the next one needs no run for them; then they are gone."""
    made = judged("D9", WINDOW)
    monkeypatch.setattr(catalogue, "faults", lambda *_: {made.fault.id: made.fault})
    runs: list[str] = []

    def interrupted(faults: Sequence[Fault], **_: Any) -> Iterator[Result]:
        for fault in faults:
            runs.append(fault.id)
            yield made
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    assert app.main(("faults", "--full", "--matrix", str(tmp_path))) == 130
    assert [path.name for path in tmp_path.glob("[mM]*")] == [matrix.PARTIAL]
    assert app.main(("faults", "--full", "--matrix", str(tmp_path))) == 0
    assert runs == [made.fault.id]
    assert "an earlier run" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("[mM]*")} == {matrix.MATRIX_JSON, matrix.MATRIX_PAGE}


def test_a_survivor_costs_no_result_of_the_others(
    plain_surroundings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The matrix tells of it; once it is mended the next command judges it alone, for the others may have taken hours."""
    good = judged("D9", WINDOW)
    weak = dataclasses.replace(good.fault, id="test.weak", title="before it was mended")
    both = {good.fault.id: good.fault, weak.id: weak}
    monkeypatch.setattr(catalogue, "faults", lambda *_: both)
    runs: list[str] = []

    def run(faults: Sequence[Fault], **_: Any) -> Iterator[Result]:
        for fault in faults:
            runs.append(fault.id)
            verdict: Verdict = "survived" if fault is weak else "killed"
            yield dataclasses.replace(good, fault=fault, verdict=verdict)

    monkeypatch.setattr(runner, "run", run)
    folder = ("faults", "--full", "--matrix", str(tmp_path))
    assert app.main(folder) == 1
    assert "survived" in (tmp_path / matrix.MATRIX_PAGE).read_text(encoding="utf-8")
    both[weak.id] = dataclasses.replace(weak, title="mended")
    assert app.main(folder) == 0
    assert runs == [good.fault.id, weak.id, weak.id]
    assert {path.name for path in tmp_path.glob("[mM]*")} == {matrix.MATRIX_JSON, matrix.MATRIX_PAGE}


def test_an_unknown_fault_and_a_matrix_of_a_part_are_refused(
    plain_surroundings: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = next(iter(faults()))
    matrices = ("--full", "--matrix", str(tmp_path))
    for wrong in (("nosuch",), matrices[1:], (name, *matrices), (*matrices, "--backend", "cuda:interpret")):
        assert app.main(("faults", *wrong)) == 2
    assert "no fault nosuch" in capsys.readouterr().err
    assert app.main(("faults", "--list")) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(faults())
