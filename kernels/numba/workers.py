"""Helper threads for compiled work that is cut into claimable items.

A parallel region that waits for every thread collapses when another process holds a core. Here nobody waits for a
helper: the caller works through the items itself, a helper takes what it can get, and only items that were claimed
are waited for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from threading import Thread

Job = Callable[[], None]


class Helper:
    """One daemon thread that runs jobs (compiled code that releases the GIL) in the order they come."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self.start: Callable[[Job], None] = self._jobs.put
        Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._jobs.get()()


@cache
def helper(index: int) -> Helper:
    """The process's helper ``index``, started when first asked for."""
    return Helper(f"forebay-helper-{index}")


def usable_cpus() -> int:
    """Number of CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else (os.cpu_count() or 1)


if sys.platform != "win32":
    os.register_at_fork(after_in_child=helper.cache_clear)  # a forked child has none of its parent's threads
