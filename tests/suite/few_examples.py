"""A pytest plugin for runs in which most tests fail: two drawn examples a test, and a failing one is not made smaller."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import Phase, settings


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> None:
    """Before a test module is imported, for a test keeps the settings that it was defined under."""
    drawn = (Phase.explicit, Phase.generate)
    settings.register_profile("few-examples", settings.get_profile("forebay-suite"), phases=drawn, max_examples=2)
    settings.load_profile("few-examples")
