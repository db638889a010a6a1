"""What a run of faults keeps on disk, and what of it the next one believes."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime.cli import app
from forebay.specs.errors import InvalidInput
from forebay.specs.faults import matrix, results
from forebay.specs.faults.catalogue import Fault, Patch, faults
from forebay.specs.faults.results import Results
from forebay.specs.faults.runner import Result

FAULT = Fault("test.fault", "D9", "a mistake", (Patch("a.module", "a", "b"),))
GOOD = Result(
    FAULT, "killed", {"test_a.py::test_it": ["D9", "L1"]}, 7, 1.5, fell={"test_a.py::test_it": ["AssertionError", "x"]}
)


def kept(folder: Path, **changes: Any) -> Path:
    """A file with the good result, changed."""
    path = folder / "partial"
    with Results(path) as made:
        made.add(GOOD)
    entry = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**entry, **changes}) + "\n", encoding="utf-8")
    return path


def taken(path: Path) -> list[Result]:
    with Results(path) as made:
        return list(made.taken_up([FAULT]))


def test_a_good_result_is_taken_up(tmp_path: Path) -> None:
    assert taken(kept(tmp_path)) == [GOOD]


CHANGES: list[dict[str, Any]] = [
    {"verdict": "survived"},
    {"verdict": "splendid"},
    {"verdict": None},
    {"killed_by": {}},
    {"killed_by": {"test_a.py::test_it": ["L1"]}},
    {"killed_by": {"test_a.py::test_it": "D9"}},
    {"killed_by": ["test_a.py::test_it"]},
    {"killed_by": None},
    {"fell": {"test_a.py::test_it": ["KeyError"]}},
    {"fell": {"test_a.py::test_it": [1]}},
    {"fell": {}},
    {"fell": 3},
    {"ran": -1},
    {"ran": True},
    {"ran": "7"},
    {"seconds": None},
    {"seconds": -1.0},
    {"detail": "no end"},
    {"detail": None},
    {"sources": ["a"]},
    {"fault": {}},
    {"more": 1},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_line_that_is_no_good_result_is_made_anew(changes: dict[str, Any], tmp_path: Path) -> None:
    """Also where it calls itself killed: the verdict follows from the tests that fell."""
    assert taken(kept(tmp_path, **changes)) == []


@pytest.mark.parametrize("key", ["sources", "fault", "verdict", "killed_by", "ran", "seconds", "detail", "fell"])
def test_a_line_that_lacks_something_is_made_anew(key: str, tmp_path: Path) -> None:
    path = kept(tmp_path)
    entry = json.loads(path.read_text(encoding="utf-8"))
    del entry[key]
    path.write_text(json.dumps(entry), encoding="utf-8")
    assert taken(path) == []


@pytest.mark.parametrize("line", ["5", "null", "[]", '"killed"', "{}", "{", "[" * 100_000, "\x00", "NaN"])
def test_a_line_that_is_something_else_is_left_out(line: str, tmp_path: Path) -> None:
    path = kept(tmp_path)
    path.write_text(f"{line}\n{path.read_text(encoding='utf-8')}{line}\n", encoding="utf-8")
    assert taken(path) == [GOOD]


def test_a_fault_with_a_counter_needs_an_assertion_about_it(tmp_path: Path) -> None:
    path = kept(tmp_path)
    counted = dataclasses.replace(FAULT, counter="uploads")
    entry = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**entry, "fault": counted.digest}), encoding="utf-8")
    with Results(path) as made:
        assert list(made.taken_up([counted])) == []


def test_other_libraries_make_it_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept(tmp_path)
    monkeypatch.setattr(results, "version", lambda name: "0.0")
    assert taken(path) == []
    monkeypatch.undo()
    monkeypatch.setattr(platform, "python_version", lambda: "3.0")
    assert taken(path) == []


def test_one_process_has_the_file(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    script = (
        "import sys\nfrom pathlib import Path\nfrom forebay.specs.faults.results import Results\n"
        "with Results(Path(sys.argv[1])):\n    print('taken')\n"
    )

    def other() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)

    with Results(path) as made:
        made.add(GOOD)
        second = other()
        assert "another process keeps its results there; wait for its end" in second.stderr
        assert second.returncode == 1
    assert other().stdout == "taken\n"
    assert [each.name for each in tmp_path.iterdir()] == ["partial"]
    assert taken(path) == [GOOD]


def test_a_lock_of_a_process_that_is_gone_keeps_nobody_out(tmp_path: Path) -> None:
    path = kept(tmp_path)
    (tmp_path / "partial.lock").touch()
    assert taken(path) == [GOOD]


def test_what_cannot_be_the_file_is_said(
    tmp_path: Path, plain_surroundings: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / matrix.PARTIAL).mkdir()
    with pytest.raises(InvalidInput, match="is a folder, expected a regular file"), Results(tmp_path / matrix.PARTIAL):
        pass
    assert app.main(("faults", "--full", "--matrix", str(tmp_path))) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "is a folder, expected a regular file" in err


def test_a_fault_that_is_named_twice_counts_once(plain_surroundings: None, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(iter(faults()))
    assert app.main(("faults", "--list", name, name)) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
