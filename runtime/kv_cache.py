"""Which blocks each request holds: growth, sharing between requests, copies before a shared block is written (clauses L4 to L6)."""

from __future__ import annotations

from collections.abc import Iterable

from forebay.specs.errors import OutOfBlocks
from forebay.specs.pool import Pool
from forebay.specs.segment import Ticket
from forebay.specs.write_loc import WriteLoc

from .allocator import BlockAllocator
from .host_kv import block_slots
from .prefix_cache import PrefixCache
from .request import Request


class KVCache:
    """Hands blocks of one pool to requests. What does not fit is said by the return value: nothing was changed then.

    Attributes:
        allocator: of the pool.
        prefix: None where prefixes are not reused.
        copies: shared blocks copied before a write.
    """

    def __init__(self, pool: Pool, allocator: BlockAllocator, prefix: PrefixCache | None) -> None:
        self._pool = pool
        self._size = pool.geometry.block_size
        self.allocator = allocator
        self.prefix = prefix
        self.copies = 0

    def attach(self, request: Request) -> int:
        """Give a request the cached blocks its tokens begin with, in place of those it holds and has not computed; the number of
        positions that it need not compute any more.

        What another request has published since this one got its blocks is found too, so prompts that arrive together share.
        """
        if self.prefix is None or request.computed >= request.to_compute:
            return 0
        found = self.prefix.match(request.known[: request.to_compute], request.salt)
        gained = len(found) * self._size - request.computed
        if gained <= 0:
            self.allocator.free(found)
            return 0
        replaced, request.blocks[: len(found)] = request.blocks[: len(found)], found
        request.computed += gained
        self.allocator.free(replaced)
        return gained

    def extend(self, request: Request, tokens: int) -> bool:
        """Give a request the blocks that ``tokens`` positions need, evicting cached ones; False if there are too few."""
        missing = -(-tokens // self._size) - len(request.blocks)
        blocks = self._allocate(missing) if missing > 0 else []
        if blocks is None:
            return False
        request.blocks += blocks
        return True

    def make_private(self, request: Request, position: int, after: Ticket | None) -> bool:
        """Before ``position`` is written: copy its block if anybody else holds it too (clause L5); False if no block is free.

        ``after`` is the last step that could touch the shared block.
        """
        index, rows = divmod(position, self._size)
        if not self.is_shared(request, position):
            return True
        blocks = self._allocate(1)
        if blocks is None:
            return False
        shared = request.blocks[index]
        if rows:
            source, target = (WriteLoc.slots(block_slots([b], self._size)[:rows], True) for b in (shared, blocks[0]))
            try:
                self._pool.copy(source, target)
            except BaseException:
                self.allocator.free(blocks)
                raise
        request.blocks[index] = blocks[0]
        self.allocator.free([shared], after=after)
        self.copies += 1
        return True

    def is_shared(self, request: Request, position: int) -> bool:
        """True if the block of ``position`` is held by somebody else too."""
        return self.allocator.is_shared(request.blocks[position // self._size])

    def fork(self, source: Request, child: Request) -> None:
        """Let ``child`` share the blocks that ``source`` has written; it has just computed the prompt of both."""
        child.blocks = source.blocks[: -(-source.computed // self._size)]
        child.computed = source.computed
        self.allocator.share(child.blocks)

    def publish(self, request: Request) -> None:
        """Cache the full blocks of what a request has computed."""
        if self.prefix is not None:
            self.prefix.publish(request.known[: request.computed], request.blocks, request.salt)

    def release(self, request: Request, after: Ticket | None) -> None:
        """Take a request's blocks away; ``after`` is the last step that could touch them."""
        blocks, request.blocks, request.computed = request.blocks, [], 0
        self.allocator.free(blocks, after=after)

    def distrust(self, requests: Iterable[Request], after: Ticket | None) -> None:
        """The pool may have been written out of place: forget the cached prefixes and what ``requests`` have computed."""
        if self.prefix is not None:
            self.prefix.clear()
        for request in requests:
            self.release(request, after)

    def _allocate(self, n: int) -> list[int] | None:
        short = n - self.allocator.num_free
        # Nothing is evicted for somebody who does not get in all the same.
        if short > 0 and self.prefix is not None and self.prefix.can_evict(short):
            self.prefix.evict(short)
        try:
            return self.allocator.allocate(n)
        except OutOfBlocks:
            return None
