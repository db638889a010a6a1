"""The suite's plugin judges the markers of the suite's own tests and no others."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.specs.suite.collected import check_ids, of_suite
from forebay.specs.suite.command import FOLDER
from forebay.specs.suite.plugin import MARKERS
from tests.cli.running import ROOT


def item(path: Path, kind: str, *ids: str) -> Any:
    """A test with one marker, as far as the plugin looks at it."""
    marks = [SimpleNamespace(args=ids, kwargs={})]
    return SimpleNamespace(path=path, nodeid=path.name, iter_markers=lambda name: marks if name == kind else [])


def test_this_checkouts_tests_know_the_markers_of_the_suite() -> None:
    """They carry clauses too, and the suite's plugin is not loaded for them."""
    own = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"][
        "markers"
    ]
    assert set(MARKERS) <= set(own)


@pytest.mark.parametrize("kind", ["clause", "refuses"])
@pytest.mark.parametrize("ids", [("D99",), ("D3", "nonsense"), ()])
def test_a_marker_of_the_suite_names_clauses_of_the_contract(kind: str, ids: tuple[str, ...]) -> None:
    wrong = item(FOLDER / "test_x.py", kind, *ids)
    with pytest.raises(pytest.UsageError, match=r"test_x.py: .*expected clause ids"):
        check_ids([item(FOLDER / "test_y.py", kind, "D3"), wrong])
    check_ids([item(FOLDER / "test_y.py", kind, "D3", "L1")])


def test_other_peoples_clauses_are_theirs(tmp_path: Path) -> None:
    assert of_suite([item(tmp_path / "test_x.py", "clause", "GDPR 17")]) == []
    (tmp_path / "test_theirs.py").write_text(
        "import pytest\n\n\n@pytest.mark.clause('GDPR 17')\ndef test_theirs():\n    pass\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout
