"""Finding blocks for a request: by evicting cached ones, by reading steps in flight, by making a later request give way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .decoder import Decoder, held_slot
from .kv_cache import KVCache
from .offload import Offload
from .request import Request
from .waiting import WaitingQueue

Attempt = Callable[[], bool]
"""Tries to get blocks; False if there are too few, and nothing was changed."""


class Room:
    """Waiting and running requests, and who gives way to whom.

    Args:
        offload: where preempted requests keep their KV; None recomputes it.
        keeps_chunks: the KV of a part of a prompt is in the request's blocks.
        drain: reads every step in flight, so that what each request has computed is known and freed blocks are free.
        gave_way: told of each request that waits again.

    Attributes:
        preemptions: running requests that had to give way.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: dict[int, Request],
        cache: KVCache,
        decoder: Decoder,
        offload: Offload | None,
        *,
        keeps_chunks: bool,
        drain: Callable[[], None],
        gave_way: Callable[[Request], None],
    ) -> None:
        self._waiting: Final = waiting
        self._running: Final = running
        self._cache = cache
        self._decoder = decoder
        self._offload = offload
        self._keeps_chunks = keeps_chunks
        self._drain = drain
        self._gave_way = gave_way
        self.preemptions = 0

    def for_newcomer(self, request: Request, attempt: Attempt) -> bool:
        """Blocks for a waiting request: only requests of lower priority give way, and blocks that wait for steps in flight are worth
        waiting for."""
        while not attempt():
            giving = self._parked(request) or self.lesser(request)
            coming = self._decoder.in_flight and self._cache.allocator.num_in_flight
            if giving is None or coming:
                return False
            self._give_way(giving)
        return True

    def for_running(self, request: Request, attempt: Attempt) -> bool:
        """Blocks for a running request: whoever is served last gives way; False if that is ``request`` itself, or if it has ended."""
        slot, decodes = request.slot, self._decoder.holds(request)
        while not attempt():
            giving = self._parked(request) or self._last()
            if giving is None:
                return False
            self._give_way(giving)
            # Reading steps may have ended it, or have taken its blocks because its receipt did not match.
            if request.slot != slot or self._decoder.holds(request) != decodes:
                return False
        return True

    def slot_for(self, request: Request) -> bool:
        """Make a running request of lower priority give its slot up; False if there is none."""
        giving = self.lesser(request)
        if giving is not None:
            self._give_way(giving)
        return giving is not None

    def lesser(self, request: Request) -> Request | None:
        """The running request that is served last, if it is of lower priority and stands behind ``request``."""
        last = self._last()
        return last if last and last.priority < request.priority and last.place > request.place else None

    def _last(self) -> Request | None:
        return max(self._running.values(), key=lambda r: r.place, default=None)

    def _parked(self, besides: Request) -> Request | None:
        """The last waiting request that holds blocks: a fork that found no slot yet. It can compute its prompt again."""
        holding = [r for r in self._waiting if r.blocks and r is not besides]
        return holding[-1] if holding else None

    def _give_way(self, request: Request) -> None:
        """Take blocks away, once every step in flight has been read: reading them may make room by itself."""
        if self._decoder.in_flight:
            self._drain()
        elif request.slot is None:
            self._cache.release(request, self._decoder.last_ticket)
        else:
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        """A running request waits again at its old place, its KV computed anew later or kept on the host."""
        self.preemptions += 1
        slot = held_slot(request)
        if request.computed == request.to_compute or self._keeps_chunks:
            if self._offload is not None and request.computed:
                self._offload.save(request)
            self._cache.publish(request)
        del self._running[slot]
        request.slot = None
        self._waiting.put_back(request)
        self._gave_way(request)
        self._cache.release(request, self._decoder.last_ticket)
        request.computed = 0 if request.saved is None else request.saved.tokens
        self._decoder.drop(slot, retired=False)
