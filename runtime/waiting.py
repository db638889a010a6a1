"""The queue in front of the slots: fair between priorities, and bounded."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from forebay.specs.errors import QueueFull

from .request import Request


class WaitingQueue:
    """Requests in the order in which they are served.

    A request of priority p is served as if it had arrived ``p * steps_ahead`` engine steps earlier. So a higher priority goes first,
    and no stream of later arrivals, whatever their priority, holds a request back for longer than their priorities differ.

    Args:
        limit: requests that may wait; a request that was taken back by the engine is always let in.
        steps_ahead: engine steps that one step of priority is worth.
    """

    def __init__(self, limit: int, steps_ahead: int) -> None:
        self._limit = limit
        self._steps_ahead = steps_ahead
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests))

    def __contains__(self, request: object) -> bool:
        return any(r is request for r in self._requests)

    @property
    def has_room(self) -> bool:
        """True if ``push`` would take a request."""
        return len(self._requests) < self._limit

    def push(self, request: Request, step: int) -> None:
        """Let a new request in at engine step ``step``; sets its ``order``.

        Raises:
            QueueFull: ``limit`` requests wait already; it was not let in.
        """
        if not self.has_room:
            raise QueueFull(
                f"request {request.index}: {len(self._requests)} requests wait already and max_waiting is {self._limit}; "
                "finish some steps first, or raise max_waiting"
            )
        request.order = step - request.priority * self._steps_ahead
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """A request that was already in waits again, at its old place."""
        insort(self._requests, request, key=lambda r: r.place)

    @property
    def first(self) -> Request:
        """The request to be served next."""
        return self._requests[0]

    def remove(self, request: Request) -> None:
        """Take a request out."""
        self._requests = [r for r in self._requests if r is not request]
