"""Counters of a pool: int32 that stay at their largest value instead of wrapping."""

from __future__ import annotations

import triton.language as tl

from .jit import jit


@jit
def add_count(counter: tl.tensor, number: tl.tensor) -> None:
    """Add ``number``, int64 and not negative, to ``counter`` int32 ``[1]``, up to the largest int32.

    Programs that count at once take turns by compare and swap; few rows of few calls have anything to count.
    """
    if number > 0:
        held = tl.atomic_add(counter, 0)
        waiting = True
        while waiting:
            more = tl.minimum(held.to(tl.int64) + number, 0x7FFFFFFF).to(tl.int32)
            found = tl.atomic_cas(counter, held, more)
            waiting = found != held
            held = found
