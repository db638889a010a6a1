"""Watches a run of the suite: the outcome of every test into the journal, the record at the end, the failures on the terminal."""

from __future__ import annotations

import math
import platform
from collections.abc import Generator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

import hypothesis
import pytest

from forebay.specs import Backend, Capabilities
from forebay.specs.clauses import catalogue
from forebay.specs.files import output_at
from forebay.specs.signals import ENDING, heard, interrupted_by
from forebay.specs.sources import suite_hash
from forebay.specs.suite.collected import ids, name_of, of_suite, selection_of
from forebay.specs.suite.core import core_gaps
from forebay.specs.suite.failure import Comparison, asserting, failure_of
from forebay.specs.suite.journal import Journal, journal_of
from forebay.specs.suite.measured import hearing
from forebay.specs.suite.outcome import Outcome, Phase, judge_phase, judge_test
from forebay.specs.suite.record import Record, assemble, write_record
from forebay.specs.suite.summary import summary_lines
from forebay.specs.suite.waivers import Waiver

CANNOT_START: Final = 2
"""Exit status of a run whose backend could not be opened."""
_LETTERS: Final = {"refused": "r", "waived": "w"}


class Judge:
    """The pytest plugin of one run of the suite, registered once the suite's tests are known."""

    def __init__(
        self, config: pytest.Config, asked: Sequence[pytest.Item], waivers: tuple[Waiver, ...], *, whole: bool
    ) -> None:
        record: Path | None = config.getoption("--suite-record")
        self._config = config
        self._path = None if record is None else output_at(record, f"--suite-record {record}")
        self._journal = Journal(None if self._path is None else journal_of(self._path))
        self._asked = {name_of(item) for item in asked}
        self._whole = whole
        self._selection = selection_of(config)
        self._waivers = waivers
        self._capabilities: Capabilities | None = None
        self._device: object = None
        self._phases: list[Phase] = []
        self._failure: dict[str, str] | None = None
        self._seconds = 0.0
        self._errors: dict[str, tuple[float, float]] = {}
        self._comparison: Comparison | None = None
        self._shown: dict[tuple[str, str], Outcome] = {}
        self._cannot_start = False
        self.record: Record | None = None

    # -- the backend, told by its fixture ------------------------------------------------------------------------------
    def opened(self, backend: Backend) -> None:
        """Note which backend is judged and what it declares."""
        self._capabilities = backend.capabilities
        self._device = backend.info.get("device")
        selection = backend.selection
        self._journal.add(
            "backend",
            {
                **{name: getattr(selection, name) for name in ("name", "mode", "distribution", "version", "kind")},
                "info": backend.info,
                "capabilities": backend.capabilities.as_dict(),
                "core_gaps": core_gaps(backend.capabilities),
            },
        )

    def closing(self, backend: Backend) -> None:
        """Note the backend's counters; a device that is lost has none to read beside those the host keeps."""
        try:
            counts = {**backend.counters.as_dict(), "info": backend.info}
        except Exception as error:  # noqa: BLE001  # whatever a vendor library raises
            counts = {
                "launches": dict(backend.counters.launches),
                "delegated": dict(backend.counters.delegated),
                "unreadable": f"{type(error).__name__}: {error}",
            }
        self._journal.add("counters", counts)

    # -- the run -------------------------------------------------------------------------------------------------------
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note what is asked, now that the selection by name and mark is done."""
        items = of_suite(session.items)
        chosen = {name_of(item) for item in items}
        default = hypothesis.settings()
        self._journal.add(
            "run",
            {
                "spec_version": catalogue().version,
                "suite_hash": suite_hash(),
                "requested": self._config.getoption("--backend"),
                "profile": self._config.getoption("--suite-profile"),
                "complete": self._whole and chosen == self._asked,
                "selection": self._selection,
                "waivers": [waiver.as_dict() for waiver in self._waivers],
                "seeds": {
                    "hypothesis": "derandomized: drawn from each test's own source"
                    if default.derandomize
                    else "random",
                    "hypothesis_max_examples": default.max_examples,
                    "numpy": "fixed in each test",
                },
                "versions": {
                    "python": platform.python_version(),
                    "platform": platform.platform(),
                    **{name: version(name) for name in ("forebay", "numpy", "pytest", "hypothesis")},
                },
                "started": _now(),
                "tests": [
                    {
                        "test": name_of(item),
                        "clauses": list(ids(item, "clause")),
                        "refuses": list(ids(item, "refuses")),
                        "cases": [case for marker in item.iter_markers("case") for case in marker.args],
                    }
                    for item in items
                ],
            },
        )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """A signal that would end the process without a word ends the run as a Ctrl-C does, with a record that names it.

        A backend that cannot start ends it too, and the summary says why: pytest is not told, or it would say it once more.
        """
        with heard(ENDING, interrupted_by):
            try:
                return (yield)
            except pytest.exit.Exception as error:
                if error.returncode != CANNOT_START:
                    raise
                self._cannot_start = True
                self._journal.add("stopped", {"reason": error.msg, "by_test": False})
                return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """One test: forget the last one, and write down what became of this one."""
        if name_of(item) not in self._asked:
            return (yield)
        self._phases, self._failure, self._seconds, self._errors, self._comparison = [], None, 0.0, {}, None
        self._journal.add("started", {"test": name_of(item)})
        with hearing(self._measure):
            result = yield
        verdict = judge_test(self._phases)
        self._journal.add(
            "result",
            {
                "test": name_of(item),
                "outcome": self._waived(item, verdict),
                "seconds": round(self._seconds, 6),
                "message": verdict.message,
                "failure": self._failure if verdict.outcome == "fail" else None,
                "refusal": None if verdict.refusal is None else asdict(verdict.refusal),
                "errors": self._errors,
            },
        )
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Judge a phase, and make pytest count it the same way."""
        report = yield
        if name_of(item) not in self._asked:
            return report
        phase = judge_phase(report, call.excinfo and call.excinfo.value, self._capabilities)
        self._phases.append(phase)
        self._seconds += call.duration
        if phase.outcome == "fail" and call.excinfo is not None and self._failure is None:
            self._failure = failure_of(item, call.excinfo, self._comparison).as_dict()
        outcome = self._waived(item, phase)
        if outcome != "pass":
            self._shown[report.nodeid, report.when] = outcome
        if outcome == "fail" and not report.failed:
            report.outcome, report.longrepr = "failed", phase.message
            vars(report).pop("wasxfail", None)
        elif outcome in _LETTERS:
            # A fixture that was refused leaves nothing to call: pytest calls the test only after a setup that "passed".
            refused = (str(item.path), 0, phase.message) if report.when == "setup" else None
            report.outcome, report.longrepr = "skipped" if refused else "passed", refused
        return report

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Show refusals and waived failures as what they are."""
        outcome = self._shown.get((report.nodeid, report.when), "pass")
        return (outcome, _LETTERS[outcome], outcome.upper()) if outcome in _LETTERS else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> None:
        """Keep both sides of a comparison that does not hold: the last one is that of the smallest input."""
        self._comparison = Comparison(_text(left), op, _text(right), asserting())

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note why the run stops before its end."""
        said = str(excinfo.value)
        reason = f"{excinfo.typename}: {said}".rstrip(": ") if isinstance(excinfo.value, KeyboardInterrupt) else said
        self._journal.add("stopped", {"reason": reason, "by_test": True})

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note that pytest itself broke."""
        self._journal.add("stopped", {"reason": f"internal error of pytest: {excinfo.exconly()}", "by_test": True})

    # -- its end -------------------------------------------------------------------------------------------------------
    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the record, once every fixture is gone; a run that pytest calls passed may still have failed."""
        if exitstatus in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):  # nothing was asked
            self._journal.discard()
        if not any(entry["entry"] == "run" for entry in self._journal.entries):
            return
        if session.shouldfail:
            asked = (
                f"after {session.testsfailed} failure{'s' if session.testsfailed > 1 else ''}, as asked by --maxfail"
            )
            self._journal.add("stopped", {"reason": asked, "by_test": False})
        self._journal.add("end", {"ended": _now(), "status": int(exitstatus)})
        with self._journal:
            self.record = assemble(self._journal.entries)
        if self._cannot_start:
            session.exitstatus = CANNOT_START
        elif self.record["verdict"] == "failed" and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._path is not None:
            write_record(self.record, self._path)
            self._journal.discard()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what failed, each with how to run it alone, then the verdict."""
        if self.record is not None:
            for line in summary_lines(self.record, self._config.getoption("--suite-show")):
                terminalreporter.write_line(line)

    # -- inside --------------------------------------------------------------------------------------------------------
    def _measure(self, dtype: str, error: float, limit: float) -> None:
        # One that is not finite fails its test, and JSON has no NaN.
        if math.isfinite(error) and error >= self._errors.get(dtype, (0.0, limit))[0]:
            self._errors[dtype] = (error, limit)

    def _waived(self, item: pytest.Item, phase: Phase) -> Outcome:
        if phase.outcome != "fail":
            return phase.outcome
        mine = [waiver for waiver in self._waivers if (waiver.test, waiver.device) == (name_of(item), self._device)]
        return "waived" if mine else "fail"


JUDGE: Final = pytest.StashKey[Judge]()
"""Where the configuration of a run that asks tests of the suite keeps its judge."""


def _text(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  # a value of a test, whatever it is
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= 500 else f"{text[:500]}…"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
