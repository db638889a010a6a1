"""The sample backend as a porting team would ship it: built, installed, found by its entry point and judged."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.specs.driver import DELEGABLE
from tests.suite.small import PROGRAM

SAMPLE = Path(__file__).parents[1] / "sample_backend"
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")


def ran(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """This interpreter with some arguments, run in ``folder``; modules of ``path`` come first."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FOREBAY_", "PYTEST_", "PIP_"))}
    places = [*([str(path)] if path else []), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def installed(folder: Path) -> Path:
    """A folder of installed distributions that has the wheel of the copy in ``folder / "source"``."""
    built = ran(folder, "-m", "pip", "wheel", *OFFLINE, "--wheel-dir", "wheels", "./source")
    assert built.returncode == 0, built.stderr
    (wheel,) = (folder / "wheels").glob("*.whl")
    done = ran(folder, "-m", "pip", "install", *OFFLINE, "--target", "site", str(wheel))
    assert done.returncode == 0, done.stderr
    return folder / "site"


def copied(folder: Path) -> Path:
    """A copy of the sample's source."""
    return shutil.copytree(
        SAMPLE, folder / "source", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed distributions that has the sample's wheel."""
    folder = tmp_path_factory.mktemp("sample")
    copied(folder)
    return installed(folder)


@pytest.fixture(scope="module")
def judged(site: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The record and the statement of the sample, by ``forebay conform`` in a folder of its own."""
    work = tmp_path_factory.mktemp("judged")
    reports = ("--record", "record.json", "--statement", "statement.md")
    said = ran(work, "-c", PROGRAM, "conform", "sample", *reports, path=site)
    assert said.returncode == 0, said.stdout[-3000:] + said.stderr[-1000:]
    return json.loads((work / "record.json").read_text()), (work / "statement.md").read_text()


def test_the_sample_is_found_by_its_entry_point(site: Path, tmp_path: Path) -> None:
    told = "import forebay_sample; from forebay.runtime import open_backend; print(open_backend('sample').selection)"
    said = ran(tmp_path, "-c", told, path=site)
    assert "distribution='forebay-sample', version='0.3.1'" in said.stdout, said.stderr
    alone = ran(tmp_path, "-c", told)
    assert "No module named 'forebay_sample'" in alone.stderr


def test_a_copy_renamed_as_its_page_says_is_found(tmp_path: Path) -> None:
    """The rows of the table are enough: it is found, `auto` takes it, and nothing is left under the old name."""
    page = (SAMPLE / "README.md").read_text(encoding="utf-8").partition("## Rename it")[2]
    (folder_from, folder_to) = re.findall(r"rename `(src/\w+)` to `(src/\w+)`", page)[0]
    rows = re.findall(r"^\| `([\w.]+)` \| `(.+?)` \| `(.+?)` \|$", page, re.MULTILINE)
    assert len(rows) > 5
    source = copied(tmp_path)
    package = (source / folder_from).rename(source / folder_to)
    for file, old, new in rows:
        path = source / file if file == "pyproject.toml" else package / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, (file, old)
        path.write_text(text.replace(old, new), encoding="utf-8")
    told = "from forebay.runtime import open_backend as o; b = o('auto'); print(b.selection); print(b.info['device'])"
    said = ran(tmp_path, "-c", told, path=installed(tmp_path))
    for part in ("name='mydevice'", "kind='accelerator'", "distribution='forebay-mydevice'", "\nMy Device 2\n"):
        assert part in said.stdout, said.stdout + said.stderr
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == [
        "forebay_mydevice",
        "forebay_mydevice-0.3.1.dist-info",
    ]
    left = [path.name for path in package.rglob("*.py") if re.search("forebay[-_]sample", path.read_text("utf-8"))]
    assert left == []


def test_the_sample_conforms(judged: tuple[dict[str, Any], str]) -> None:
    record, _ = judged
    assert record["profile"] == "full"
    assert record["verdict"] == "conformant"
    assert record["summary"]["pass"] > 1000
    assert {name: record["summary"][name] for name in ("fail", "not-run", "refused", "waived")} == {
        "fail": 0,
        "not-run": 0,
        "refused": 0,
        "waived": 0,
    }


def test_its_own_kernels_did_the_work(judged: tuple[dict[str, Any], str]) -> None:
    record, _ = judged
    counters = record["counters"]
    assert set(DELEGABLE) <= {name for name, launches in counters["launches"].items() if launches}
    assert not counters["delegated"]
    assert counters["replay"] > 100


def test_the_statement_names_who_was_judged(judged: tuple[dict[str, Any], str]) -> None:
    record, statement = judged
    assert (record["backend"]["distribution"], record["backend"]["version"]) == ("forebay-sample", "0.3.1")
    assert "forebay-sample 0.3.1" in statement
