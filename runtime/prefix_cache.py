"""Prefix cache: full KV blocks of past sequences, found again by their tokens (clause L6)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from .allocator import BlockAllocator

Key = tuple[object, tuple[int, ...]]


@dataclass(eq=False)
class CachedBlock:
    """One full block whose KV is that of ``tokens`` behind the blocks of ``parent``.

    Attributes:
        key: the parent's serial (or the salt where there is none) and the block's tokens. Keys are compared as a whole: equal hashes
            of unlike tokens never match.
        serial: differs between any two cached blocks ever made, so a key can never name a successor of its parent.
        children: cached blocks behind this one.
    """

    key: Key
    block: int
    parent: CachedBlock | None
    serial: int
    children: int = 0


class PrefixCache:
    """Keeps one hold on each cached block; a block nobody else holds is evicted when room is needed, least recently used first.

    Args:
        allocator: of the pool whose blocks are cached.
        block_size: tokens a block.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._size = block_size
        self._blocks: OrderedDict[Key, CachedBlock] = OrderedDict()
        self._serials = count(1)

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Blocks of the longest cached prefix of ``tokens``, each with a hold for the caller.

        The last token is never part of it: its logits are still to be computed, and so no caller writes into a cached block.
        """
        found = list(self._walk(tokens[: max(len(tokens) - 1, 0)], salt))
        self._touch(found)
        blocks = [entry.block for entry in found]
        self._allocator.share(blocks)
        return blocks

    def publish(self, tokens: Sequence[int], blocks: Sequence[int], salt: str) -> None:
        """Cache the full blocks of a sequence: ``blocks`` hold the KV of ``tokens``.

        A prefix that is cached already stays in the block it has.
        """
        parent: CachedBlock | None = None
        entries: list[CachedBlock] = []
        for block, key_tokens in zip(blocks, self._full(tokens), strict=False):
            key: Key = (salt if parent is None else parent.serial, key_tokens)
            entry = self._blocks.get(key)
            if entry is None:
                self._allocator.share([block])
                entry = CachedBlock(key, block, parent, next(self._serials))
                self._blocks[key] = entry
                if parent is not None:
                    parent.children += 1
            entries.append(entry)
            parent = entry
        self._touch(entries)

    def can_evict(self, n: int) -> bool:
        """True if nobody else holds at least ``n`` blocks; looks at the least recently used ones, and stops as soon as it knows."""
        unheld = (entry for entry in self._blocks.values() if self._allocator.references(entry.block) == 1)
        return len(list(islice(unheld, n))) == n

    def evict(self, n: int) -> int:
        """Give up to ``n`` blocks that nobody else holds back to the allocator; returns how many."""
        evicted = 0
        while evicted < n:
            entry = next((e for e in self._blocks.values() if self._can_go(e)), None)
            if entry is None:
                break
            self._drop(entry)
            evicted += 1
        return evicted

    def clear(self) -> None:
        """Forget everything; blocks that others hold stay theirs."""
        held = [entry.block for entry in self._blocks.values()]
        self._blocks.clear()
        self._allocator.free(held)

    def entries(self) -> list[tuple[str, tuple[int, ...], int]]:
        """(salt, tokens from the start of the sequence to the block's end, block) of every cached block, for checks."""
        return [(*self._content(entry), entry.block) for entry in self._blocks.values()]

    def _content(self, entry: CachedBlock) -> tuple[str, tuple[int, ...]]:
        tokens: tuple[int, ...] = ()
        while entry.parent is not None:
            tokens, entry = entry.key[1] + tokens, entry.parent
        return str(entry.key[0]), entry.key[1] + tokens

    def _full(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(tokens) - self._size + 1, self._size):
            yield tuple(tokens[start : start + self._size])

    def _walk(self, tokens: Sequence[int], salt: str) -> Iterator[CachedBlock]:
        parent: CachedBlock | None = None
        for key_tokens in self._full(tokens):
            entry = self._blocks.get((salt if parent is None else parent.serial, key_tokens))
            if entry is None:
                return
            yield entry
            parent = entry

    def _touch(self, chain: Sequence[CachedBlock]) -> None:
        # The end of a sequence first, so that it is evicted before what it hangs on.
        for entry in reversed(chain):
            self._blocks.move_to_end(entry.key)

    def _can_go(self, entry: CachedBlock) -> bool:
        return entry.children == 0 and self._allocator.references(entry.block) == 1

    def _drop(self, entry: CachedBlock) -> None:
        del self._blocks[entry.key]
        if entry.parent is not None:
            entry.parent.children -= 1
        self._allocator.free([entry.block])
