"""Steps of an engine until something holds, however the judged backend behaves, and the clock it goes by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


class Clock:
    """An engine's clock that stands still: seconds, as the test sets them."""

    now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def step_until(engine: Any, holds: Callable[[], object]) -> None:
    """Step ``engine`` until ``holds()`` is true; the test fails where every request has ended before."""
    while not holds():
        if not engine.has_work:
            pytest.fail("every request has ended, and what the test waits for has not come")
        engine.step()


def step_to(engine: Any, request: Any, tokens: int) -> None:
    """Step ``engine`` until ``request`` has made so many tokens; the test fails where every request has ended before."""
    step_until(engine, lambda: len(request.token_ids) >= tokens)


def finish(engine: Any) -> None:
    """Step ``engine`` until every request has ended."""
    while engine.has_work:
        engine.step()
