"""What compiling costs this process: how many programs XLA compiled, and the mappings of memory that they take on the host."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import jax

EVENT: Final = "/jax/core/compile/backend_compile_duration"
"""What JAX reports of every compilation."""
MAPPINGS: Final = Path("/proc/self/maps")
MOST_MAPPINGS: Final = 25_000
"""Of memory, before JAX's caches are cleared: Linux gives a process 65,530, and LLVM ends it when there are no more."""


@cache
def _heard() -> list[int]:
    """One count for the process: JAX keeps a listener for good."""
    count = [0]

    def listen(event: str, duration_secs: float, **_: Any) -> None:  # noqa: ARG001  (JAX names it)
        count[0] += event == EVENT

    jax.monitoring.register_event_duration_secs_listener(listen)
    return count


def compiles() -> int:
    """Compilations since the first call of this function, which starts the count: a replay that compiles is none, and this shows it."""
    return _heard()[0]


def make_room() -> None:
    """Drop what JAX keeps of programs nobody holds, where they take too much of what the process may map.

    On the host a program takes up to a few hundred mappings, and JAX keeps thousands of programs.
    """
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
