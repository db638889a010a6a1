"""How many programs XLA compiled in this process: a replay that compiles is none, and this shows it."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import jax

EVENT: Final = "/jax/core/compile/backend_compile_duration"
"""What JAX reports of every compilation."""


@cache
def _heard() -> list[int]:
    """One count for the process: JAX keeps a listener for good."""
    count = [0]

    def listen(event: str, _seconds: float, **_: Any) -> None:
        count[0] += event == EVENT

    jax.monitoring.register_event_duration_secs_listener(listen)
    return count


def compiles() -> int:
    """Compilations since the first call of this function, which starts the count."""
    return _heard()[0]
