"""Running command lines in the tests, in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]
"""The fixture ``run``: runs its arguments as a command line in this process."""


def run_process(*arguments: str, cwd: Path, path: Sequence[Path] = (), **environ: str) -> Outcome:
    """Run a command line in a process of its own, with the folders ``path`` first on the import path."""
    environ = {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), "HOME": str(cwd), **environ}
    command = [sys.executable, "-m", "forebay.runtime.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


def assert_one_line(outcome: Outcome, *parts: str) -> None:
    """One clear line on stderr, exit code 2, nothing else said."""
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("error: ")
    for part in parts:
        assert part in outcome.err
