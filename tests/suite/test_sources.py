"""The hash of the suite is over everything that decides a verdict, wherever it lies, and over nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import ROOT
from tests.suite.small import Small

DECIDING = (
    "specs/backend.py",
    "specs/clauses.toml",
    "specs/testing.py",
    "specs/suite/judge.py",
    "specs/suite/test_decode.py",
    "specs/suite/reports/statement.py",
    "specs/suite/reports/page.html.jinja",
    "specs/suite/verifier/whole.py",
    "runtime/suite_entry.py",
    "runtime/suite_plugin.py",
    "runtime/suite_parts.py",
    "runtime/models/suite_model.py",
)
JUDGED = ("specs/faults/decode.toml", "specs/faults/runner.py", "runtime/lanes.py", "specs/suite/README.md")
SCRIPT = """
import json, sys
from pathlib import Path
from forebay.specs.sources import suite_hash

folder, names = Path(sys.argv[1]), sys.argv[2:]
said = {"": suite_hash()}
for name in names:
    path = folder / name
    held = path.read_bytes()
    path.write_bytes(held + b"\\n")
    said[name] = suite_hash()
    path.write_bytes(held)
    said[f"gone {name}"] = (path.rename(path.with_suffix(".txt")), suite_hash())[1]
    path.with_suffix(".txt").rename(path)
for name in ("specs/more.py", "specs/suite/more.py", "specs/suite/verifier/more.py"):
    (folder / name).write_text("")
    said[f"more {name}"] = suite_hash()
    (folder / name).unlink()
said["again"] = suite_hash()
print(json.dumps([said, [name for name in sys.modules if name.startswith("forebay.runtime")]]))
"""


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The hash of a copy of the package: as it is, and with each of some files changed, or gone."""
    package = tmp_path_factory.mktemp("copy") / "forebay"
    for name in ("specs", "runtime"):
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-P", "-c", SCRIPT, str(package), *DECIDING, *JUDGED]
    environment = Small(package.parent).environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    said, imported = json.loads(done.stdout)
    assert imported == []
    made: dict[str, str] = said
    return made


@pytest.mark.parametrize("name", DECIDING)
def test_what_decides_a_verdict_is_in_the_hash(hashed: dict[str, str], name: str) -> None:
    assert len({hashed[""], hashed[name], hashed[f"gone {name}"]}) == 3


def test_a_new_module_is_in_it(hashed: dict[str, str]) -> None:
    assert len({value for name, value in hashed.items() if name.startswith("more ")} - {hashed[""]}) == 3


@pytest.mark.parametrize("name", JUDGED)
def test_what_is_judged_is_not(hashed: dict[str, str], name: str) -> None:
    assert {hashed[name], hashed[f"gone {name}"], hashed["again"]} == {hashed[""]}


def test_record_and_verifier_use_the_same_hash(small: Small) -> None:
    said, record = small.record()
    assert said.code == 0, said.out
    told = small.python("from forebay.specs.sources import suite_hash; print(suite_hash())")
    assert record["suite_hash"] == told.out.strip()
    assert "installed is" not in small.forebay("conform", "--verify", "record.json").out
    reports: Path = small.suite / "reports" / "statement.py"
    reports.write_text(reports.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    verified: Any = small.forebay("conform", "--verify", "record.json")
    assert (verified.code, f"suite {record['suite_hash'][:16]}, installed is" in verified.out) == (1, True)
