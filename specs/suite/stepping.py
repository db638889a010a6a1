"""Steps of an engine until something holds, however the judged backend behaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def step_until(engine: Any, holds: Callable[[], object]) -> None:
    """Step ``engine`` until ``holds()``. Fails where every request has ended before."""
    while not holds():
        assert engine.has_work, "every request has ended, and what the test waits for has not come"
        engine.step()


def step_to(engine: Any, request: Any, tokens: int) -> None:
    """Step ``engine`` until a request has made so many tokens."""
    step_until(engine, lambda: len(request.token_ids) >= tokens)


def finish(engine: Any) -> None:
    """Step ``engine`` until every request has ended."""
    while engine.has_work:
        engine.step()
