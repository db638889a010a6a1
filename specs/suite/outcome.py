"""The outcome of a test, from what its phases (setup, call, teardown) raised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import pytest

from forebay.specs import Capabilities, Unsupported
from forebay.specs.suite.core import why_not_refused
from forebay.specs.suite.failure import leaves

Outcome = Literal["pass", "fail", "refused", "waived", "not-run"]


@dataclass(frozen=True)
class Refusal:
    """The declared limit that a refused test ran into, the value it asked for (as text), and what the backend said."""

    capability: str
    value: str
    message: str


@dataclass(frozen=True)
class Phase:
    """One phase's outcome, why, and what was refused."""

    outcome: Outcome
    message: str = ""
    refusal: Refusal | None = None


def judge_phase(report: pytest.TestReport, error: BaseException | None, capabilities: Capabilities | None) -> Phase:
    """Judge one phase; ``capabilities`` are the backend's, None before it was opened.

    A skip is a failure, and so is every kind of expected failure. ``Unsupported`` is a refusal where a declared limit outside the
    core says so, and a failure elsewhere.
    """
    if hasattr(report, "wasxfail"):
        return Phase(
            "fail", f"marked as an expected failure ({report.wasxfail or 'no reason'}), which is not an outcome"
        )
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return Phase("fail", f"skipped ({reason}), which is not an outcome")
    if error is None:
        return Phase("fail", str(report.longrepr)) if report.failed else Phase("pass")
    errors = leaves(error)
    unsupported = [each for each in errors if isinstance(each, Unsupported)]
    if capabilities is not None and len(unsupported) == len(errors):
        why = next(filter(None, (why_not_refused(each, capabilities) for each in unsupported)), "")
        if why:
            return Phase("fail", why)
        first = unsupported[0]
        return Phase("refused", str(first), Refusal(first.capability, str(first.value), str(first)))
    return Phase("fail", f"{type(errors[0]).__name__}: {errors[0]}")


def judge_test(phases: Iterable[Phase]) -> Phase:
    """The outcome of all phases together: the first failure, else the first refusal, else a pass."""
    seen = list(phases)
    for outcome in ("fail", "refused"):
        if found := next((phase for phase in seen if phase.outcome == outcome), None):
            return found
    return Phase("pass")
