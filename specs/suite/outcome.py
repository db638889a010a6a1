"""The outcome of a test, from what its phases (setup, call, teardown) raised."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Final, Literal

import pytest

from forebay.specs import Capabilities, Unsupported
from forebay.specs.suite.command import FOLDER
from forebay.specs.suite.core import why_not_refused
from forebay.specs.suite.failure import leaves

Outcome = Literal["pass", "fail", "refused", "waived", "not-run"]
CONTRACT: Final = "forebay.specs"
RUNTIME: Final = "forebay.runtime"
NO_CHECKS: Final = (f"{CONTRACT}.suite.", f"{CONTRACT}.faults.")
"""Packages in the contract's folder whose modules check no call."""
AFTERWARDS: Final = "after the test: "
"""How the message begins of what failed when the test was over: while its fixtures, or the backend, were released."""


@dataclass(frozen=True)
class Refusal:
    """The declared limit that a refused test ran into, the value it asked for (as text), what was said, and the module that said so."""

    capability: str
    value: str
    message: str
    raised_in: str


@dataclass(frozen=True)
class Phase:
    """One phase's outcome, why, and what was refused."""

    outcome: Outcome
    message: str = ""
    refusal: Refusal | None = None


def judge_phase(report: pytest.TestReport, error: BaseException | None, capabilities: Capabilities | None) -> Phase:
    """Judge one phase; ``capabilities`` are the backend's, None before it was opened.

    A skip is a failure, and so is every kind of expected failure. ``Unsupported`` is a refusal where a declared limit outside the
    core says so and a check in front of the driver raised it, and a failure elsewhere: what a driver cannot do, it declares.
    """
    phase = _judged(report, error, capabilities)
    if phase.outcome == "fail" and report.when == "teardown":
        return Phase("fail", AFTERWARDS + phase.message)
    return phase


def judge_test(phases: Iterable[Phase]) -> Phase:
    """The outcome of all phases together: the first failure, with the words of every other, else the first refusal, else a pass."""
    seen = list(phases)
    if failed := [phase for phase in seen if phase.outcome == "fail"]:
        return Phase("fail", "\n".join(phase.message for phase in failed))
    return next((phase for phase in seen if phase.outcome == "refused"), Phase("pass"))


def raised_in(error: BaseException) -> str:
    """The module of the contract or the runtime whose check raised ``error``, ``""`` if that was anybody else, such as a driver.

    The check was asked by the suite or the runtime: one that a driver calls, or whose answer it hands on, speaks for the driver.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    where = [_module(frame) for frame in frames]
    outside = next((i for i in reversed(range(len(where))) if not _in(where[i], CONTRACT)), None)
    if outside is None:
        return ""
    if outside == len(where) - 1:
        return where[-1] if _in(where[-1], RUNTIME) else ""
    asked_for_it = _in(where[outside], RUNTIME) or Path(frames[outside].f_code.co_filename).resolve().parent == FOLDER
    return where[-1] if asked_for_it else ""


def _judged(report: pytest.TestReport, error: BaseException | None, capabilities: Capabilities | None) -> Phase:
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
        why = next(filter(None, (_why_not_refused(each, capabilities) for each in unsupported)), "")
        if why:
            return Phase("fail", why)
        first = unsupported[0]
        return Phase("refused", str(first), Refusal(first.capability, str(first.value), str(first), raised_in(first)))
    return Phase("fail", f"{type(errors[0]).__name__}: {errors[0]}")


def _why_not_refused(error: Unsupported, capabilities: Capabilities) -> str:
    why = why_not_refused(error, capabilities)
    if why or raised_in(error):
        return why
    return (
        f"Unsupported for {error.capability}={error.value!r} is no check of the contract's but raised behind them ({error}): what a "
        "backend cannot do is declared, and refused in front of its driver"
    )


def _module(frame: FrameType) -> str:
    """The imported module that a frame runs in, ``""`` if it only bears the name of one."""
    name = str(frame.f_globals.get("__name__", ""))
    return name if vars(sys.modules.get(name, object)) is frame.f_globals else ""


def _in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.") and not f"{module}.".startswith(NO_CHECKS)
