"""Items of work that threads claim one by one.

A *queue* is two 64-bit counts in memory that all threads share. The caller opens it with a number of items, works
through them like any helper, and waits only for items that somebody claimed: a helper that never comes, or comes when
the work is done, costs nothing. What an item means is the caller's affair; all that a claimed item needs must stand
before the queue is opened.

Claims count down, so one atomic operation decides whether there is an item and which. A thread that is late for one
round of items cannot take the next round's count for that of its own.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .address import atomic_add_i64, exchange_i64
from .checks import Array
from .compiled import SOURCES, compiled, inner, int64

QUEUE_BYTES: Final = 128
"""Size of a queue, which starts on a cache line; each count has a line of its own."""
_UNCLAIMED: Final = 0
_UNFINISHED: Final = 64


class Queue:
    """An empty queue in memory of its own. Whoever may use ``address`` keeps the Queue alive."""

    def __init__(self) -> None:
        self._memory: Array = np.zeros(QUEUE_BYTES + 64, np.uint8)
        start = int(self._memory.__array_interface__["data"][0])
        self.address: Final = start + -start % 64


@inner
def open_queue(queue: int, items: int) -> None:
    """Let threads claim ``items`` items; all items of the last round are finished."""
    exchange_i64(queue + _UNFINISHED, items)
    exchange_i64(queue + _UNCLAIMED, items)


@inner
def claim_item(queue: int) -> int:
    """An item that no thread has taken, the highest first; negative if none is left."""
    return int64(atomic_add_i64(queue + _UNCLAIMED, int64(-1)) - 1)


@inner
def finish_item(queue: int) -> None:
    """Note that a claimed item is done."""
    atomic_add_i64(queue + _UNFINISHED, int64(-1))


@compiled
def wait_for_items(queue: int, _sources: int = SOURCES) -> None:
    """Return when all items are finished; the caller has found none left to claim."""
    while atomic_add_i64(queue + _UNFINISHED, int64(0)) > 0:
        pass
