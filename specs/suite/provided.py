"""Fixtures of the suite, and how it draws random cases: the same ones every time.

It is no ``conftest.py``, which pytest would import under a name of its making, and all of the contract a second time with it:
:mod:`.surroundings` makes it known for the suite's folder.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

for _module in ("acts", "attention", "desk", "kv", "oracle", "staging", "steps"):
    pytest.register_assert_rewrite(f"forebay.specs.suite.{_module}")

from forebay.specs.suite.fixtures import (  # noqa: E402  (their modules assert, so they are imported after the line above)
    another,
    backend,
    backend_name,
    pair,
    shadow,
)

__all__ = ["another", "backend", "backend_name", "pair", "shadow"]

settings.register_profile("forebay-suite", deadline=None, derandomize=True, max_examples=40, print_blob=True)
settings.load_profile("forebay-suite")
