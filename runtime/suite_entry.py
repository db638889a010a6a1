"""The suite's entry into pytest, loaded wherever Forebay is installed: in a run that asks for the suite it loads the suite's plugin.

With it come the fixtures that hand the suite this runtime, of which the suite itself imports nothing.

A run that names no part of the suite gets no option, no fixture and no marker of it, and nothing heavy is imported. The module lies in
the runtime, whose package imports nothing when it is imported itself; importing ``forebay.specs`` imports numpy.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

SUITE: Final = "forebay.specs.suite"
PLUGIN: Final = f"{SUITE}.plugin"
FIXTURES: Final = "forebay.runtime.suite_plugin"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Load both where the suite's plugin is loaded already, or an argument names the suite, a module of it, or a path in it."""
    plugins = early_config.pluginmanager
    if plugins.has_plugin(PLUGIN):
        plugins.import_plugin(FIXTURES)
        return
    known = early_config.known_args_namespace
    # Values of options that are not known yet are among the places, so all that may be meant is looked at.
    named = [*known.file_or_dir, *early_config.getini("testpaths"), str(early_config.invocation_params.dir)]
    if any(_names_suite(name, early_config.invocation_params.dir, pyargs=known.pyargs) for name in named):
        plugins.import_plugin(PLUGIN)
        plugins.import_plugin(FIXTURES)
        # The options are known only now: without this their values would be taken for paths whose conftest files are to be loaded.
        again = parser.parse_known_args(args, namespace=copy.copy(early_config.option))
        again.confcutdir = known.confcutdir
        early_config.known_args_namespace = again


def _names_suite(argument: str, start: Path, *, pyargs: bool) -> bool:
    place = argument.partition("::")[0]
    if pyargs and f"{place}.".startswith(f"{SUITE}."):
        return True
    specs = find_spec("forebay.specs")
    folders = (
        [] if specs is None else [Path(folder, "suite").resolve() for folder in specs.submodule_search_locations or ()]
    )
    path = (start / place).resolve()
    return any(path.is_relative_to(folder) for folder in folders)
