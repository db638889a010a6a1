"""The suite's pytest plugin: the options that name what is judged, and the checks of what was collected.

pytest loads it in every environment that has Forebay installed, so that ``pytest --pyargs forebay.specs.suite --backend NAME`` works;
in a run that collects nothing of the suite it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

from forebay.specs.clauses import catalogue

SUITE: Final = Path(__file__).resolve().parent

MARKERS = (
    "clause(*ids): the contract clauses whose values this test shows",
    "refuses(*ids): the contract clauses whose refusal this test shows",
    "case(*ids): the kinds of public fault report this test covers",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("forebay", "Forebay's shared suite")
    group.addoption("--backend", metavar="NAME[:MODE]", default=None, help="the backend that the suite judges")


def pytest_configure(config: pytest.Config) -> None:
    """Register the suite's markers."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check the markers of the suite's own tests; those of others may mean anything by a ``clause``."""
    check_clauses(item for item in items if item.path.resolve().parent == SUITE)


def check_clauses(items: Iterable[pytest.Item]) -> None:
    """Raise UsageError if a marker names no clause, or one the contract does not have."""
    known = catalogue().clauses
    for item in items:
        for kind in ("clause", "refuses"):
            for marker in item.iter_markers(kind):
                unknown = [name for name in marker.args if name not in known]
                if unknown or not marker.args or marker.kwargs:
                    raise pytest.UsageError(
                        f"{item.nodeid}: {kind}{marker.args!r}: expected clause ids, all of them known"
                    )
