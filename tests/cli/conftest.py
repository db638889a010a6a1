"""Fixtures of the command-line tests."""

from __future__ import annotations

import pytest

from forebay.runtime.cli import app
from tests.cli.running import Outcome, Run


@pytest.fixture(autouse=True)
def surroundings(plain_surroundings: None) -> None:
    """Every test of this folder has them plain."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> Outcome:
        code = app.main(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
