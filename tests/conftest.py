"""Shared by all tests: a test may only claim clauses that the contract has."""

from __future__ import annotations

import pytest

from forebay.specs.clauses import catalogue


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Stop the run if a ``clause`` marker names no clause, or one the contract does not have."""
    known = catalogue().clauses
    for item in items:
        for marker in item.iter_markers("clause"):
            unknown = [name for name in marker.args if name not in known]
            if unknown or not marker.args or marker.kwargs:
                raise pytest.UsageError(f"{item.nodeid}: clause{marker.args!r}: expected clause ids, all of them known")
