"""The suite's pytest plugin: the options that name what is judged, the checks of what was collected, and who judges.

It is loaded by a run that names the suite, as ``pytest --pyargs forebay.specs.suite --backend NAME``, or by ``-p``; other people's runs
do not see it.
"""

from __future__ import annotations

from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from forebay.specs.clauses import catalogue
from forebay.specs.errors import InvalidInput
from forebay.specs.suite import collected
from forebay.specs.suite.command import SHOWN
from forebay.specs.suite.surroundings import (
    SuiteModule,
    check_fixtures,
    check_session,
    folder_of_suite,
    is_of_suite,
)
from forebay.specs.suite.waivers import Waiver, check_matched, load_waivers

MARKERS = (
    "clause(*ids): the contract clauses whose values this test shows",
    "refuses(*ids): the contract clauses whose refusal this test shows",
    "beyond_core: needs an ability that a backend may lack, so it may be refused: the smoke profile takes another if there is one",
    "smoke(*ids): of the clauses this test carries, those for which it is in the profile smoke",
    "case(*ids): the kinds of public fault report this test covers",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("forebay", "Forebay's shared suite")
    group.addoption("--backend", metavar="NAME[:MODE]", default=None, help="the backend that the suite judges")
    group.addoption(
        "--suite-profile",
        choices=("smoke", "full"),
        default="full",
        help="smoke asks a sample of every clause, full (the default) everything",
    )
    group.addoption("--suite-record", metavar="FILE", type=Path, default=None, help="write the run's record, as JSON")
    group.addoption(
        "--suite-waivers", metavar="FILE", type=Path, default=None, help="TOML file of the backend's waivers"
    )
    group.addoption(
        "--suite-show", metavar="N", type=int, default=SHOWN, help=f"failures that are told in full (default: {SHOWN})"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the suite's markers, and stop a run that names a backend and cannot judge it."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if config.getoption("--backend") is not None:
        check_session(config)


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the suite's folder, and the package it is in, without importing them as pytest would."""
    return folder_of_suite(path, parent)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> Generator[None, pytest.Module | None, pytest.Module | None]:
    """Import the suite's modules under their own names."""
    made = yield
    return SuiteModule.from_parent(parent, path=module_path) if is_of_suite(module_path) else made


def pytest_exception_interact(node: pytest.Item | pytest.Collector, call: pytest.CallInfo[object]) -> None:
    """Stop at a module of the suite that cannot be imported: the rest of it is not the suite.

    Raises:
        pytest.UsageError: always, with the cause, where such a module was to be collected.
    """
    if isinstance(node, pytest.Module) and is_of_suite(node.path) and call.excinfo:
        said = str(call.excinfo.value).strip().splitlines() or [""]
        raise pytest.UsageError(f"{node.path.name} cannot be collected: {call.excinfo.typename}: {said[0]}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check the suite's tests and its waivers, keep those the backend is asked, and have them judged."""
    mine = collected.of_suite(items)
    if not mine:
        return
    backend: str | None = config.getoption("--backend")
    if backend is None:
        raise pytest.UsageError("the suite judges one backend: name it with --backend NAME[:MODE]")
    check_session(config)
    check_fixtures(mine)
    collected.check_ids(mine)
    selected = config.getoption("keyword") or config.getoption("markexpr")
    all_of_it = collected.is_whole(mine, config.args)  # options that select take tests away behind this function
    whole = all_of_it and not selected
    if whole:
        collected.check_whole(mine, catalogue())
    waivers = _waivers(config, mine, whole=all_of_it)
    asked = collected.asked_of(mine, backend, config.getoption("--suite-profile"))
    if whole:
        collected.check_whole(asked, catalogue(), backend)
    dropped = set(mine) - set(asked)
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]
    if not config.getoption("collectonly"):
        from forebay.specs.suite.judge import JUDGE, Judge

        try:
            judge = Judge(config, asked, waivers, whole=whole)
        except (InvalidInput, OSError) as error:
            raise pytest.UsageError(str(error)) from error
        config.stash[JUDGE] = judge
        config.pluginmanager.register(judge)


def _waivers(config: pytest.Config, items: list[pytest.Item], *, whole: bool) -> tuple[Waiver, ...]:
    """The waivers the options name, each of a test and a clause that exist; in a part of the suite that is known of its tests alone.

    Raises:
        pytest.UsageError: a waiver is malformed, expired or unmatched.
    """
    path: Path | None = config.getoption("--suite-waivers")
    if path is None:
        return ()
    try:
        waivers = load_waivers(path, datetime.now(UTC).date())
        check_matched(waivers, {collected.name_of(item): collected.clauses_of(item) for item in items}, whole=whole)
    except InvalidInput as error:
        raise pytest.UsageError(str(error)) from error
    return waivers
