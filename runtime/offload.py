"""KV of preempted requests in host memory: saved through the pool's read door, brought back through ``stage``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from forebay.specs.backend import Backend
from forebay.specs.pool import Pool

from .host_kv import HostKV
from .request import Request


class Offload:
    """Keeps the KV of preempted requests, within a number of blocks.

    Args:
        limit: blocks of host memory; a request that does not fit is recomputed instead.
        holders: the requests that may hold saved KV.

    Attributes:
        saves, restores, refused: requests saved, brought back, and not saved for want of room.
    """

    def __init__(self, backend: Backend, pool: Pool, limit: int, holders: Callable[[], Iterable[Request]]) -> None:
        self._backend = backend
        self._pool = pool
        self._limit = limit
        self._holders = holders
        self.saves = self.restores = self.refused = 0

    @property
    def blocks(self) -> int:
        """Blocks of host memory in use."""
        return sum(r.saved.num_blocks for r in self._holders() if r.saved is not None)

    def save(self, request: Request) -> None:
        """Copy what the request has computed to ``request.saved``, if there is room; every step of it must have been read."""
        needed = -(-request.computed // self._pool.geometry.block_size)
        if self.blocks + needed > self._limit:
            self.refused += 1
            return
        request.saved = HostKV.read(self._backend, self._pool, request.blocks, request.computed)
        self.saves += 1

    def restore(self, request: Request) -> None:
        """Stage ``request.saved`` to the request's blocks, which it holds already."""
        if request.saved is not None:
            request.saved.stage(self._backend, self._pool, request.blocks)
            request.computed, request.saved = request.saved.tokens, None
            self.restores += 1
