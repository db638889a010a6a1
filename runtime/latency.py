"""Latencies of requests: how long each waited, when its first token came, and the gaps between the others."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, Final

import numpy as np

from .request import Request

KEPT: Final = 65536
"""Durations kept of each kind for percentiles; the oldest go first."""

PERCENTILES: Final = (50, 90, 99)

BOUNDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histograms' buckets, seconds."""


class Durations:
    """Durations of one kind, in seconds: all of them counted in buckets, the latest ones kept."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=KEPT)
        self._buckets = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0
        self._max = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self._latest.append(seconds)
        self._buckets[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds
        self._max = max(self._max, seconds)

    def report(self) -> dict[str, Any]:
        """``count``, ``sum``, and ``buckets``: how many were at most so long. Unless there is none: ``mean``, ``max``, and ``p50``,
        ``p90``, ``p99`` of the latest 65,536 (linear between neighbours)."""
        *below, count = accumulate(self._buckets)
        buckets = dict(zip(map(str, BOUNDS), below, strict=True))
        known = {"count": count, "sum": self._sum, "buckets": buckets}
        if not count:
            return known
        values = np.percentile(np.fromiter(self._latest, np.float64), PERCENTILES)
        percentiles = {f"p{p}": float(value) for p, value in zip(PERCENTILES, values, strict=True)}
        return {**known, "mean": self._sum / count, "max": self._max, **percentiles}


class Latencies:
    """Times of one engine, in seconds of its clock, and waits in engine steps too.

    Args:
        clock: seconds.

    Attributes:
        waits, first_tokens, gaps: from arrival to a first slot, from arrival to the first token, between two tokens of a request.
        worst_wait_steps, worst_wait_s: the longest wait for a slot, the first or a later one, of those who gave up waiting too.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.waits = Durations()
        self.first_tokens = Durations()
        self.gaps = Durations()
        self.worst_wait_steps = 0
        self.worst_wait_s = 0.0

    def arrived(self, request: Request, step: int) -> None:
        """A request was queued at engine step ``step``."""
        request.arrived_at = self._clock()
        self.waits_from(request, step)

    def waits_from(self, request: Request, step: int) -> None:
        """A request begins to wait for a slot at engine step ``step``: for its first, or again because it had to give way."""
        request.waiting_at, request.waiting_step = self._clock(), step

    def admitted(self, request: Request, step: int) -> None:
        """A request got a slot."""
        wait = self._note_wait(request, step)
        if not request.admitted:
            request.admitted = True
            self.waits.add(wait)

    def left(self, request: Request, step: int) -> None:
        """A request ended while it waited."""
        self._note_wait(request, step)

    def released(self, request: Request) -> None:
        """A token of the request was released."""
        now = self._clock()
        if request.last_token_at is None:
            self.first_tokens.add(now - request.arrived_at)
        else:
            self.gaps.add(now - request.last_token_at)
        request.last_token_at = now

    def report(self, waiting: Iterable[Request], step: int) -> dict[str, Any]:
        """``queue_wait_s``, ``time_to_first_token_s`` and ``inter_token_s`` as of :meth:`Durations.report`, and ``worst_wait_steps``
        and ``worst_wait_s``, in which those who are still ``waiting`` at engine step ``step`` count."""
        for request in waiting:
            self.left(request, step)
        return {
            "queue_wait_s": self.waits.report(),
            "time_to_first_token_s": self.first_tokens.report(),
            "inter_token_s": self.gaps.report(),
            "worst_wait_steps": self.worst_wait_steps,
            "worst_wait_s": self.worst_wait_s,
        }

    def _note_wait(self, request: Request, step: int) -> float:
        """Seconds the request has waited; they and the steps count for the worst wait."""
        wait = self._clock() - request.waiting_at
        self.worst_wait_s = max(self.worst_wait_s, wait)
        self.worst_wait_steps = max(self.worst_wait_steps, step - request.waiting_step)
        return wait
