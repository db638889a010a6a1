"""What a pytest session must be like for the suite to judge in it, and how the suite's modules get into one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from forebay.specs.suite.command import FOLDER

PACKAGE: Final = "forebay.specs.suite"
RUNTIME_FIXTURES: Final = "forebay.runtime.suite_plugin"
"""The plugin whose fixtures hand the suite the runtime's objects. Whoever starts a run loads it; the suite asks that it is there, and
imports nothing of it."""
_TRUSTED: Final = (f"{PACKAGE}.", f"{RUNTIME_FIXTURES}.", "_pytest.")
"""How the names of modules begin, a dot behind them, whose fixtures a test of the suite may use."""


def folder_of_suite(path: Path, parent: pytest.Collector) -> pytest.Dir | None:
    """The collector of the suite's folder, or of its package, that imports nothing of it; None for any other folder.

    With the suite's own folder its fixtures become known, in this folder alone.
    """
    if path.resolve() == FOLDER:
        plugins, provided = parent.config.pluginmanager, import_module(f"{PACKAGE}.provided")
        if not plugins.is_registered(provided):
            plugins.register(provided, str(path / "conftest.py"))
    elif path.resolve() != FOLDER.parent:
        return None
    made: pytest.Dir = pytest.Dir.from_parent(parent, path=path)
    return made


class SuiteModule(pytest.Module):
    """A module of the suite, imported under its own name from where it is installed; ``sys.path`` stays what it is."""

    def _getobj(self) -> ModuleType:
        return import_module(f"{PACKAGE}.{self.path.stem}")


def is_of_suite(path: Path) -> bool:
    """Whether a file lies in the suite's own folder."""
    return path.resolve().parent == FOLDER


def check_session(config: pytest.Config) -> None:
    """Stop a run that cannot judge.

    Raises:
        pytest.UsageError: its tests would run in several processes, none of which sees all outcomes; or assertions are switched off,
            or pytest does not rewrite them, so that failures do not say what came; or nobody hands it a runtime.
    """
    if not config.pluginmanager.has_plugin(RUNTIME_FIXTURES):
        raise pytest.UsageError(
            "the suite is given a runtime by a plugin that Forebay installs, and none is loaded: run `forebay conform`, or pytest with "
            "the plugins it finds by itself"
        )
    if getattr(config, "workerinput", None) is not None or config.getoption("dist", "no") != "no":
        raise pytest.UsageError(
            "the suite runs in one process, for one backend and one record: run it without -n and --dist of pytest-xdist"
        )
    if sys.flags.optimize:
        raise pytest.UsageError("the suite judges by assertions: run python without -O and without PYTHONOPTIMIZE")
    if config.getoption("assertmode") != "rewrite":
        raise pytest.UsageError("the suite reads what its assertions compared: run pytest without --assert=plain")


def check_fixtures(items: Iterable[pytest.Item]) -> None:
    """Stop a run in which a test of the suite would use a fixture that somebody else put in the place of the suite's.

    Raises:
        pytest.UsageError: with the fixture and the module that defines it.
    """
    for item in items:
        info = getattr(item, "_fixtureinfo", None)
        if info is None:
            continue
        foreign = _foreign(info.argnames, info.name2fixturedefs)
        if foreign is not None:
            name, module = foreign
            raise pytest.UsageError(
                f"{item.path.name}: its fixture {name!r} is that of {module}, and nothing of the suite can be overridden; "
                "run `forebay conform`, or pytest in another folder"
            )


def _foreign(asked: Sequence[str], definitions: dict[str, Sequence[Any]]) -> tuple[str, str] | None:
    """A fixture, of those a test asks for and those they ask for, whose definition is not to be trusted, with its module."""
    waiting, seen = list(asked), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or not definitions.get(name):
            continue
        seen.add(name)
        used = definitions[name][-1]
        module = str(getattr(used.func, "__module__", None))
        if not f"{module}.".startswith(_TRUSTED):
            return name, module
        waiting += used.argnames
    return None
