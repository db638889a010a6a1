"""Runs the suite in this process with a fault in it, and says which tests fell."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import hypothesis
import pytest

from forebay.specs.faults.catalogue import PLAINEST, Fault
from forebay.specs.faults.evidence import Compared, fell_by
from forebay.specs.suite.collected import clauses_of, name_of
from forebay.specs.suite.command import suite_arguments

Scope = Literal["clause", "first", "all"]


@dataclass
class Judgement:
    """What the suite said.

    Attributes:
        plain_failed: tests of the plainest run that fell, by id.
        failed: other tests that fell, by id, with the clauses they carry.
        fell: for each of them the name of the error, then the names its failed assertion is about.
        ran: how many tests ran, the plainest included.
        error: why nothing could be run (the fault breaks the import), or ``""``.
    """

    plain_failed: list[str] = field(default_factory=list)
    failed: dict[str, list[str]] = field(default_factory=dict)
    fell: dict[str, list[str]] = field(default_factory=dict)
    ran: int = 0
    error: str = ""


class Collector:
    """A pytest plugin that notes which clauses each test carries, and runs none."""

    def __init__(self) -> None:
        self.clauses: dict[str, list[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note the clauses."""
        self.clauses = {name_of(item): list(clauses_of(item)) for item in items}


class Judge:
    """A pytest plugin that picks the tests of some clauses, or all, and keeps what fell; ``tell`` gets each test that begins."""

    def __init__(self, fault: Fault, scope: Scope, wanted: Collection[str], tell: Callable[[str], None]) -> None:
        self._fault = fault
        self._scope = scope
        self._wanted = frozenset(wanted)
        self._tell = tell
        self._compared: Compared | None = None
        self.judgement = Judgement()
        self.killed = False

    def pytest_pycollect_makemodule(self) -> None:
        """Falling is enough: the smallest failing input is nobody's interest here."""
        hypothesis.settings.register_profile(
            "forebay-faults",
            hypothesis.settings.get_profile("forebay-suite"),
            phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
            report_multiple_bugs=False,
            print_blob=False,
        )
        hypothesis.settings.load_profile("forebay-faults")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave the plainest tests, first, and those of the clause, the cheap ones before the others."""
        plain = [item for item in items if _is_plain(item)]
        rest = [item for item in items if not _is_plain(item)]
        if self._wanted:
            rest = sorted((item for item in rest if self._wanted & set(clauses_of(item))), key=_cost)
        kept = {*plain, *rest}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = plain + rest

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Say which test begins."""
        self._tell(name_of(item))

    @pytest.hookimpl(tryfirst=True)
    def pytest_assertrepr_compare(self, left: object, right: object) -> None:
        """Keep both sides of a comparison that does not hold."""
        self._compared = Compared(left, right)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep what fell, in any phase, and what its assertion is about."""
        report = yield
        made, name = self.judgement, name_of(item)
        made.ran += report.when == "call"
        if report.failed and _is_plain(item):
            made.plain_failed.append(name)
        elif report.failed:
            said = [""] if call.excinfo is None else fell_by(call.excinfo.value, self._compared)
            made.failed[name] = list(clauses_of(item))
            made.fell.setdefault(name, said)
            caught = self._fault.is_killed_by(made.failed[name], made.fell[name])
            self.killed = self.killed or caught or self._scope == "first"
        self._compared = None
        return report

    def pytest_runtest_logfinish(self) -> None:
        """Stop where the plainest run falls and, unless all is asked for, at the first kill."""
        if self.judgement.plain_failed or (self.killed and self._scope != "all"):
            raise pytest.exit.Exception("judged")


def collect(backend: str) -> dict[str, list[str]]:
    """The clauses of every test that the suite asks of ``backend``, by id."""
    collector = Collector()
    _pytest(backend, [], collector, "--collect-only")
    return collector.clauses


def files_of(clause: str, clauses: Mapping[str, list[str]]) -> list[str]:
    """Files of the suite that hold the plainest tests or one of a clause; ``clauses`` are those of every test (:func:`collect`)."""
    named = [PLAINEST, *(test.partition("::")[0] for test, carried in clauses.items() if clause in carried)]
    return list(dict.fromkeys(named))


def nobody(test: str) -> None:
    """Tell nobody which test begins."""


def judge(
    fault: Fault,
    scope: Scope,
    files: Sequence[str] = (),
    *,
    wanted: Collection[str] = (),
    tell: Callable[[str], None] = nobody,
) -> Judgement:
    """Run the suite, or ``files`` of it, on the fault's backend in this process, where ``fault`` was seeded; its output is dropped.

    ``scope`` says how far: up to the first test that catches the fault, up to the first that falls, or through all; ``wanted`` which
    tests: those of these clauses, or every one. ``tell`` is called with the name of each test that begins.
    """
    judge_plugin = Judge(fault, scope, wanted, tell)
    ended = _pytest(fault.backend, files, judge_plugin)
    made = judge_plugin.judgement
    if made.ran == 0 and not made.failed and not made.plain_failed:
        made.error = f"no test ran: {ended}"
    return made


def _pytest(backend: str, files: Sequence[str], plugin: object, *options: str) -> str:
    """Run pytest in a folder of its own; says how it ended."""
    with tempfile.TemporaryDirectory() as folder, _elsewhere(Path(folder)):
        arguments = [*suite_arguments(Path(folder), files), f"--backend={backend}", *options]
        try:
            status = pytest.main(arguments, plugins=[plugin])
        # Closing a backend that a fault has broken may raise anything, once every test has had its say.
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        return f"pytest ended with {int(status)}"


def _cost(item: pytest.Item) -> tuple[bool, bool]:
    """Tests that draw many examples last, and those of a whole engine behind those of a part."""
    drawn = bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))
    return drawn, "make_engine" in getattr(item, "fixturenames", ())


def _is_plain(item: pytest.Item) -> bool:
    return item.path.name == PLAINEST


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
