"""Small suites of a few tests, judged by everything that judges the real one: a copy of the package with other tests in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forebay.specs
from forebay.specs.clauses import catalogue

PROGRAM = "import sys; from forebay.runtime.cli.app import main; sys.exit(main())"
Place = Path | str | None
"""A folder of modules, or several with the system's separator between."""
SLOW = """
@pytest.mark.clause("D1")
def test_slow(backend: Backend) -> None:
    import time

    time.sleep(60)
"""
"""A test that does not end by itself."""
START = """
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import Backend, Unsupported
from forebay.specs.suite.kv import *
from forebay.specs.suite.scenes import *
from forebay.specs.suite.fixtures import Another

"""
EVERY_CLAUSE = """
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.clause(*{shown})
def test_decode(backend: Backend, path: str) -> None:
    with scene(backend, (5, 3), head_dim=8) as s:
        s.check(path=path)


@pytest.mark.refuses(*{refusing})
def test_refusal(backend: Backend) -> None:
    backend.release(backend.create_shadow(KVGeometry(2, 2, 1, 8)))


@pytest.mark.clause("S1")
def test_stage(backend: Backend) -> None:
    g = KVGeometry(2, 2, 1, 8)
    shadow = backend.create_shadow(g)
    k = np.ones((1, 2, 1, 8), np.float32)
    backend.stage(k, k, shadow, 0, src_blocks=[0], dst_blocks=[shadow.first_block], tokens=2, dtype="float32")
    backend.release(shadow)
"""
CAPTURED = """
from forebay.specs.suite.steps import decoder


@pytest.mark.clause("C1")
def test_captured(backend: Backend) -> None:
    made = decoder(backend)
    made.seat(0, 3, [made.pool.first_block])
    backend.run(made.segment)
    trace = backend.capture(made.segment)
    backend.replay(trace)
    backend.release(trace)
    made.close()
"""
"""A captured step, without which no record of a whole run is valid."""


def every_clause() -> str:
    """Tests that carry every clause in force, and do what the counters ask for."""
    return EVERY_CLAUSE.format(
        shown=tuple(clause.id for clause in catalogue().in_force() if clause.subject != "runtime"),
        refusing=tuple(clause.id for clause in catalogue().in_force()),
    )


@dataclass(frozen=True)
class Outcome:
    """What a command said."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Small:
    """A folder whose ``forebay`` is this checkout's but for the suite's tests; commands run in a folder beside it."""

    folder: Path

    @property
    def suite(self) -> Path:
        """Where the suite's modules are."""
        return self.folder / "forebay" / "specs" / "suite"

    @property
    def work(self) -> Path:
        """Where commands run."""
        return self.folder / "work"

    def add(self, name: str, text: str) -> None:
        """Put one more test file, or other module, into the suite."""
        (self.suite / name).write_text(START + text if name.startswith("test_") else text, encoding="utf-8")

    def forebay(self, *arguments: str, path: Place = None, cwd: Path | None = None, **environ: str) -> Outcome:
        """Run a command line, in ``work`` or another folder; modules of ``path`` come first."""
        return self.python(PROGRAM, *arguments, path=path, cwd=cwd, **environ)

    def python(
        self, script: str, *arguments: str, path: Place = None, cwd: Path | None = None, **environ: str
    ) -> Outcome:
        """Run a script that sees the small package, and no module of the folder it runs in."""
        return self._run(["-P", "-c", script, *arguments], path, cwd, **environ)

    def pytest(self, *arguments: str, path: Place = None) -> Outcome:
        """Run pytest as anyone would, with every plugin that is installed; modules of ``path`` come first."""
        return self._run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], path)

    def record(self, *arguments: str, backend: str = "sim", path: Place = None) -> tuple[Outcome, dict[str, Any]]:
        """Judge, and read the record."""
        said = self.forebay("conform", backend, "--record", "record.json", *arguments, path=path)
        made: dict[str, Any] = json.loads((self.work / "record.json").read_text(encoding="utf-8"))
        return said, made

    def environment(self, path: Place = None, **environ: str) -> dict[str, str]:
        """Variables of a process that sees the small package."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("FOREBAY_", "PYTEST_"))}
        places = [*([path] if path else []), self.folder, *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
        return {**kept, **environ, "PYTHONPATH": os.pathsep.join(map(str, places))}

    def _run(self, arguments: list[str], path: Place = None, cwd: Path | None = None, **environ: str) -> Outcome:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd or self.work,
            env=self.environment(path, **environ),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)


def make_small(folder: Path) -> Small:
    """A small suite without tests."""
    made = _make(folder, ("runtime", "backends", "kernels", "hardware"))
    ignored = shutil.ignore_patterns("__pycache__", "test_*.py", "faults")
    shutil.copytree(Path(forebay.specs.__file__).parent, made.suite.parent, ignore=ignored)
    return made


def make_whole(folder: Path) -> Small:
    """The suite of this checkout itself, judged as the small ones are."""
    return _make(folder, ("specs", "runtime", "backends", "kernels", "hardware"))


def _make(folder: Path, as_they_are: tuple[str, ...]) -> Small:
    made = Small(folder)
    (folder / "forebay").mkdir(parents=True)
    made.work.mkdir()
    for name in as_they_are:
        (folder / "forebay" / name).symlink_to(Path(__import__(f"forebay.{name}", fromlist=["_"]).__path__[0]))
    return made
