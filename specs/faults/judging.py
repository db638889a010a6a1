"""Runs the suite in this process with a fault in it, and says which tests fell."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest

from forebay.specs.faults.catalogue import Fault

BACKEND: Final = "sim"
PLAINEST: Final = "test_plainest.py"
"""Tests of one request, one block, contiguous NHD: a fault that breaks them is too coarse."""


@dataclass
class Judgement:
    """What the suite said.

    Attributes:
        plain_failed: tests of the plainest run that fell, by id.
        failed: other tests that fell, by id, with the clauses they carry.
        ran: how many tests ran, the plainest included.
        error: why nothing could be run (the fault breaks the import), or ``""``.
    """

    plain_failed: list[str] = field(default_factory=list)
    failed: dict[str, list[str]] = field(default_factory=dict)
    ran: int = 0
    error: str = ""


class Judge:
    """A pytest plugin that picks the tests of a clause, or all, and keeps what fell."""

    def __init__(self, fault: Fault | None, *, everything: bool) -> None:
        self._fault = fault
        self._everything = everything
        self._clauses: Mapping[str, list[str]] = {}
        self.judgement = Judgement()

    def pytest_pycollect_makemodule(self) -> None:
        """Falling is enough: the smallest failing input is nobody's interest here."""
        hypothesis.settings.register_profile(
            "forebay-faults",
            hypothesis.settings.get_profile("forebay-suite"),
            phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
            print_blob=False,
        )
        hypothesis.settings.load_profile("forebay-faults")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave the plainest tests, first, and those of the clause."""
        plain = [item for item in items if _is_plain(item)]
        rest = [item for item in items if not _is_plain(item)]
        self._clauses = {item.nodeid: clauses_of(item) for item in items}
        if not self._everything and self._fault is not None:
            rest = [item for item in rest if self._fault.clause in clauses_of(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(plain + rest)])
        items[:] = plain + rest

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what fell, in any phase."""
        if report.when == "call" or report.outcome == "failed":
            self.judgement.ran += report.when == "call"
            if report.outcome == "failed":
                if PLAINEST in report.nodeid:
                    self.judgement.plain_failed.append(report.nodeid)
                else:
                    self.judgement.failed[report.nodeid] = self._clauses[report.nodeid]

    def pytest_runtest_logfinish(self) -> None:
        """Stop at the first kill unless everything is asked for."""
        if self.judgement.failed and not self._everything:
            raise pytest.exit.Exception("killed")


def clauses_of(item: pytest.Item) -> list[str]:
    """The clauses a test carries, of values and of refusals."""
    return sorted(
        {str(name) for kind in ("clause", "refuses") for mark in item.iter_markers(kind) for name in mark.args}
    )


def judge(fault: Fault | None, *, everything: bool) -> Judgement:
    """Run the suite on ``sim`` in this process, into which ``fault`` has been seeded; its output is dropped."""
    judge_plugin = Judge(fault, everything=everything)
    with tempfile.TemporaryDirectory() as folder, _elsewhere(Path(folder)):
        empty = Path("pytest.ini")
        empty.write_text("[pytest]\n", encoding="utf-8")
        arguments: list[Any] = [
            "--pyargs",
            "forebay.specs.suite",
            "--backend",
            BACKEND,
            "-q",
            "--tb=no",
            "-c",
            str(empty),
        ]
        ended = "it ended"
        try:
            status = pytest.main(
                [*arguments, "-p", "no:cacheprovider", "--import-mode=importlib"], plugins=[judge_plugin]
            )
            ended = f"pytest ended with {int(status)}"
        # Closing a backend that a fault has broken may raise anything, once every test has had its say.
        except Exception as error:  # noqa: BLE001
            ended = f"{type(error).__name__}: {error}"
    made = judge_plugin.judgement
    if made.ran == 0 and not made.failed and not made.plain_failed:
        made.error = f"no test ran: {ended}"
    return made


def _is_plain(item: pytest.Item) -> bool:
    return PLAINEST in item.nodeid


@contextlib.contextmanager
def _elsewhere(folder: Path) -> Iterator[None]:
    """In a folder of its own, with nothing printed."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with (
            Path(os.devnull).open("w", encoding="utf-8") as nothing,
            contextlib.redirect_stdout(nothing),
            contextlib.redirect_stderr(nothing),
        ):
            yield
    finally:
        os.chdir(before)
