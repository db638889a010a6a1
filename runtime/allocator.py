"""Block allocator of a pool: all-or-nothing, reference-counted, safe against steps still in flight (clauses L4, L5)."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from forebay.specs.errors import DoubleFree, InvalidInput, OutOfBlocks
from forebay.specs.segment import Ticket


class BlockAllocator:
    """Hands out block ids of one pool; block 0 is the sink and never handed out.

    A freed block is handed out again only once the step named by ``after`` has retired: until then a dispatched step could still
    write to it.

    Args:
        num_blocks: NB of the pool, the sink included.
        sink: False for wrapped foreign memory, where block 0 is an ordinary block.
    """

    def __init__(self, num_blocks: int, sink: bool = True) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise InvalidInput(f"BlockAllocator num_blocks: got {num_blocks!r}, expected a positive int")
        self._first = 1 if sink else 0
        self._num_blocks = num_blocks
        self._free: deque[int] = deque(range(self._first, num_blocks))
        self._references: dict[int, int] = {}
        self._in_flight: list[tuple[int, int]] = []
        self._last_use: dict[int, int] = {}
        self._retired = 0

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` could hand out now."""
        return len(self._free)

    @property
    def num_in_flight(self) -> int:
        """Freed blocks that wait for a step to retire."""
        return len(self._in_flight)

    @property
    def num_allocated(self) -> int:
        """Blocks somebody holds."""
        return len(self._references)

    def references(self, block: int) -> int:
        """How many holders a block has; 0 if nobody holds it."""
        return self._references.get(block, 0)

    def allocate(self, n: int) -> list[int]:
        """``n`` different blocks, each held once.

        Raises:
            OutOfBlocks: fewer are free; none was handed out.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise InvalidInput(f"allocate: got {n!r}, expected a non-negative int")
        if n > len(self._free):
            raise OutOfBlocks(
                f"allocate: {n} blocks wanted, {len(self._free)} free, {len(self._in_flight)} waiting for a step to retire, "
                f"{len(self._references)} in use of {self._num_blocks - self._first}"
            )
        blocks = [self._free.popleft() for _ in range(n)]
        self._references.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a holder to each block; a block named twice gets two.

        Raises:
            DoubleFree: a block nobody holds; nothing was shared.
        """
        self._check_held(blocks, {}, "share")
        for block in blocks:
            self._references[block] += 1

    def is_shared(self, block: int) -> bool:
        """True if a writer must copy the block first (more than one holder)."""
        return self.references(block) > 1

    def free(self, blocks: Iterable[int], after: Ticket | None = None) -> None:
        """Give up one hold of each block; blocks nobody holds any more become free once ``after`` has retired.

        Raises:
            DoubleFree: a block is given up more often than it is held; nothing was freed.
        """
        blocks = [self._checked(block) for block in blocks]
        wanted: dict[int, int] = {}
        for block in blocks:
            wanted[block] = wanted.get(block, 0) + 1
        self._check_held(blocks, wanted, "free")
        serial = after.serial if after is not None and not after.retired else 0
        for block in blocks:
            # Whoever of several holders gave the block up first may still have a step in flight.
            self._last_use[block] = max(self._last_use.get(block, 0), serial)
            self._references[block] -= 1
            if self._references[block] == 0:
                del self._references[block]
                last = self._last_use.pop(block)
                if last > self._retired:
                    self._in_flight.append((last, block))
                else:
                    self._free.append(block)

    def retire(self, ticket: Ticket) -> None:
        """Say that the step of ``ticket``, and so every earlier one, has ended: blocks that waited for them become free.

        Raises:
            InvalidInput: the ticket was not read yet, so nothing shows that its step has ended.
        """
        if not ticket.retired:
            raise InvalidInput(f"retire: step {ticket.serial} is not known to have ended; call ticket.get() first")
        self._retired = max(self._retired, ticket.serial)
        self._free.extend(block for serial, block in self._in_flight if serial <= self._retired)
        self._in_flight = [(serial, block) for serial, block in self._in_flight if serial > self._retired]

    def retire_all(self) -> None:
        """Say that no step will ever touch a block again, because the device is lost: blocks that waited, and later ones, are free."""
        self._retired = sys.maxsize
        self._free.extend(block for _, block in self._in_flight)
        self._in_flight.clear()

    def _checked(self, block: object) -> int:
        if isinstance(block, bool) or not isinstance(block, int | np.integer):
            raise InvalidInput(f"free: got {block!r}, expected block ids")
        return int(block)

    def _check_held(self, blocks: Iterable[int], wanted: dict[int, int], act: str) -> None:
        for block in blocks:
            held = self.references(block)
            if held < max(wanted.get(block, 1), 1):
                raise DoubleFree(
                    f"{act}: block {block} is held {held} time(s) and named {wanted.get(block, 1)} time(s); nothing was changed"
                )
