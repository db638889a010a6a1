"""A backend that does nothing fails every test of the suite that shows a value; refusals alone may pass on it."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.selection.fakes import Site
from tests.suite.test_backends import judge

NOTHING = """
from tests.suite.do_nothing import IdleDriver


def usable():
    return Availability(usable=True, reason="it needs no device")


@hookimpl
def forebay_backend():
    mode = ModeDescriptor("", "accelerator", IdleDriver, usable)
    return BackendDescriptor("nothing", "a device that does nothing", (mode,), "")
"""

REPORTER = """
import pathlib

DEVICE = {"backend", "another", "shadow", "pair", "desk"}
OUTCOMES = pathlib.Path(__file__).with_name("outcomes.txt")


def pytest_runtest_logreport(report):
    words = dict(report.user_properties)
    if "kind" in words and (report.when == "call" or report.failed):
        with OUTCOMES.open("a") as out:
            out.write(f"{words['kind']} {report.outcome} {report.nodeid}\\n")


def pytest_collection_modifyitems(items):
    for item in items:
        shows = "value" if item.get_closest_marker("clause") else "refusal"
        asks = shows if DEVICE & set(item.fixturenames) else "host"
        item.user_properties.append(("kind", asks))
"""
"""Writes ``KIND OUTCOME NODEID`` of every test: it shows a ``value``, a ``refusal`` alone, or needs no device (``host``)."""


def test_a_backend_that_does_nothing_fails_every_test_but_those_of_refusals(tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    site.mkdir()
    work.mkdir()
    Site(site).install("does-nothing", {"nothing": NOTHING})
    (site / "outcomes_of_tests.py").write_text(textwrap.dedent(REPORTER))
    checkout = Path(__file__).parents[2]
    result = judge("nothing", work, "-p", "outcomes_of_tests", path=(site, checkout))
    outcomes = [line.split(" ", 2) for line in (site / "outcomes.txt").read_text().splitlines()]
    failed = {node for kind, outcome, node in outcomes if kind == "value" and outcome == "failed"}
    vacuous = [node for kind, outcome, node in outcomes if kind == "value" and node not in failed]
    assert len(failed) > 900, result.stdout[-3000:]
    assert not vacuous, f"{len(vacuous)} tests of values pass on a device that does nothing: {vacuous[:20]}"
    assert {kind for kind, outcome, _ in outcomes if outcome == "passed"} == {"refusal", "host"}
