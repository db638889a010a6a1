"""Latencies of requests: how long each waited, when its first token came, and the gaps between the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from .request import Request

KEPT: Final = 65536
"""Measurements kept of each kind; the oldest go first."""

PERCENTILES: Final = (50, 90, 99)


class Latencies:
    """Times of one engine, in seconds of its clock, and waits in engine steps too.

    Args:
        clock: seconds.

    Attributes:
        waits, first_tokens, gaps: seconds from arrival to a slot, from arrival to the first token, between two tokens of a request.
        worst_wait_steps: engine steps the longest wait for a first slot took.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.waits: deque[float] = deque(maxlen=KEPT)
        self.first_tokens: deque[float] = deque(maxlen=KEPT)
        self.gaps: deque[float] = deque(maxlen=KEPT)
        self.worst_wait_steps = 0

    def arrived(self, request: Request, step: int) -> None:
        """A request was queued at engine step ``step``."""
        request.arrived_at, request.arrived_step = self._clock(), step

    def admitted(self, request: Request, step: int) -> None:
        """A request got a slot; only its first one ends its wait."""
        if not request.admitted:
            request.admitted = True
            self.waits.append(self._clock() - request.arrived_at)
            self.worst_wait_steps = max(self.worst_wait_steps, step - request.arrived_step)

    def released(self, request: Request) -> None:
        """A token of the request was released."""
        now = self._clock()
        if request.last_token_at is None:
            self.first_tokens.append(now - request.arrived_at)
        else:
            self.gaps.append(now - request.last_token_at)
        request.last_token_at = now

    def report(self) -> dict[str, Any]:
        """Percentiles in seconds of each kind with their number, and the worst wait in steps."""
        return {
            "queue_wait_s": _summary(self.waits),
            "time_to_first_token_s": _summary(self.first_tokens),
            "inter_token_s": _summary(self.gaps),
            "worst_wait_steps": self.worst_wait_steps,
        }


def _summary(values: Sequence[float] | deque[float]) -> dict[str, float | int]:
    """Count, mean, percentiles and maximum; only the count where there is nothing."""
    if not values:
        return {"count": 0}
    array = np.fromiter(values, np.float64)
    shown = {f"p{p}": float(v) for p, v in zip(PERCENTILES, np.percentile(array, PERCENTILES), strict=True)}
    return {"count": len(array), "mean": float(array.mean()), **shown, "max": float(array.max())}
