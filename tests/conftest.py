"""Shared by all tests: a test may only claim clauses that the contract has; fixtures of several folders."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.specs.suite.collected import check_ids
from tests.selection.fakes import Site

# Triton interprets or compiles in a process, never both, and decides when it is imported: here it interprets, and tests of
# compilation run in processes of their own.
os.environ["TRITON_INTERPRET"] = "1"

GOLDEN = Path(__file__).parent / "golden" / "smollm2_fp32.json"


def pytest_configure() -> None:
    """Heed the signals that a shell has its background jobs ignore: every process the tests start would ignore them too."""
    for number, heeding in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, heeding)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of the checkout name clauses too."""
    check_ids(items)


@pytest.fixture
def plain_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings from the machine the tests run on."""
    for name in list(os.environ):
        if name.startswith("FOREBAY_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An import path of its own, into which the test installs distributions."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    site = Site(folder)
    yield site
    for module in site.modules:
        sys.modules.pop(module, None)


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    """The reference prompts with their ids and greedy continuations."""
    items: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["items"]
    return items
