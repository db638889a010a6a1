"""A pytest plugin that fails a test of refusals in which nothing was refused: no error was made, and nothing withheld."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from forebay.specs import ForebayError

WITHHELD = ("test_nothing_is_released_from_a_receipt_that_is_wrong_in_one_field",)
"""Tests of refusals that raise nothing: what a receipt does not vouch for is not released, and the results say why."""
MADE = pytest.StashKey[list[type[BaseException]]]()


def pytest_configure(config: pytest.Config) -> None:
    """Note every error from here on."""
    made: list[type[BaseException]] = []
    config.stash[MADE] = made
    for kind in (ForebayError, pytest.UsageError, FrozenInstanceError):
        _note(kind, made)


def _note(kind: type[Exception], made: list[type[BaseException]]) -> None:
    before = kind.__init__

    def noted(self: Exception, *arguments: Any, **named: Any) -> None:
        made.append(type(self))
        before(self, *arguments, **named)

    setattr(kind, "__init__", noted)  # noqa: B010  # a type checker knows no such assignment


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Hold what was made during the test against its marks."""
    made = pyfuncitem.config.stash[MADE]
    made.clear()
    result = yield
    if any(pyfuncitem.iter_markers("refuses")) and not made and pyfuncitem.originalname not in WITHHELD:
        pytest.fail("a refusal test in which nothing was refused")
    return result
