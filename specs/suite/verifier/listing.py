"""A pytest plugin that writes down what a collection of the suite holds: the tests with their marks, and which of them are asked."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest

OPTION: Final = "--suite-listing"
_SUITE: Final = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the file."""
    parser.addoption(OPTION, metavar="FILE", type=Path, required=True, help="write what was collected, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin that listens."""
    config.pluginmanager.register(_Listing(config.getoption(OPTION)))


class _Listing:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._all: list[dict[str, Any]] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, None, None]:
        """Note every test before the suite leaves out those that this backend is not asked."""
        self._all = [_marks_of(item) for item in items]
        yield

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write what is left, and how inputs are drawn."""
        drawn = hypothesis.settings()
        listed = {
            "all": self._all,
            "asked": [_marks_of(item)["test"] for item in session.items],
            "derandomized": drawn.derandomize,
            "examples": drawn.max_examples,
        }
        self._path.write_text(json.dumps(listed), encoding="utf-8")


def _marks_of(item: pytest.Item) -> dict[str, Any]:
    if item.path.resolve().parent != _SUITE:
        raise pytest.UsageError(f"{item.nodeid}: not a test of the suite in {_SUITE}")
    marks: dict[str, list[str]] = {key: [] for key in ("clauses", "refuses", "cases")}
    for mark, key in (("clause", "clauses"), ("refuses", "refuses"), ("case", "cases")):
        for found in item.iter_markers(mark):
            marks[key] += [name for name in found.args if name not in marks[key]]
    asks = "backend" in getattr(item, "fixturenames", ())
    return {"test": f"{item.path.name}::{item.nodeid.split('::', 1)[1]}", "asks_backend": asks, **marks}
