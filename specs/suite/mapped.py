"""Static pools behind maps from virtual to physical pages that the device reads from a Buffer, as a unified pool keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.specs import Backend, BlockTable, Pool, WriteLoc, translation
from forebay.specs.suite.attention import Array


class Mapped:
    """Translates the virtual ids of a pool that demands the mark; what a replay translates, it translates by the map as it is then.

    ``pages`` is virtual page to physical page, of the first pages; the others map to themselves. Whoever makes one releases ``map``.

    Attributes:
        pages: numpy int32 ``[NB]``, virtual page to physical page; the host's copy of the map.
        map: int32 Buffer ``[NB]``, the device's.
    """

    def __init__(self, backend: Backend, pool: Pool, pages: Sequence[int] = ()) -> None:
        self.backend, self.pool = backend, pool
        self.pages = np.arange(pool.geometry.num_blocks, dtype=np.int32)
        self.map = backend.buffer("virtual_to_physical", self.pages)
        self.remap(pages)

    def remap(self, pages: Sequence[int] | Array) -> None:
        """Put a new map into ``pages`` and into the Buffer, and move nothing; pages past the given ones keep their place."""
        self.pages[: len(pages)] = pages
        self.backend.upload(self.map, self.pages)

    def compact(self, pages: Sequence[int]) -> None:
        """Move what the pages hold to where a new map says, in every layer by one copy, and put it into ``pages`` and the Buffer."""
        new = self.pages.copy()
        new[: len(pages)] = pages
        moved = np.flatnonzero(new != self.pages).astype(np.int32)
        self.pool.copy(*(WriteLoc.slots(self.slots_of(where[moved]), physical=True) for where in (self.pages, new)))
        self.remap(new)

    def slots_of(self, pages: Array) -> Array:
        """numpy int32 ``[n * block_size]``: every slot of physical ``pages [n]``, in order."""
        size = self.pool.geometry.block_size
        return (pages[:, None] * size + np.arange(size, dtype=np.int32)).reshape(-1).astype(np.int32)

    def physical(self, slots: Sequence[int] | Array) -> Array:
        """numpy int32 ``[n]``: the physical slots of virtual ``slots [n]``, by the host's copy of the map."""
        size, virtual = self.pool.geometry.block_size, np.asarray(slots, np.int32)
        return (self.pages[virtual // size] * size + virtual % size).astype(np.int32)

    def table(self, pages: Any) -> BlockTable:
        """Physical pages of device int32 ``pages`` of any shape, marked; what is no page of the pool becomes ``INVALID_ID``."""
        return BlockTable(translation.translate(self.backend.xp, pages, self.map.get()), physical=True)

    def translate(self, ids: Any) -> Any:
        """Device int32 ``[n]``: the physical slots of device int32 ``ids [n]``; pads stay, what is no slot becomes ``INVALID_ID``."""
        size = self.pool.geometry.block_size
        return translation.translate(self.backend.xp, ids, self.map.get(), page_size=size)

    def loc(self, ids: Any) -> WriteLoc:
        """Where device int32 ``ids [n]``, which are virtual, lie now; marked."""
        return WriteLoc.slots(self.translate(ids), physical=True)


class Composite:
    """A pool of two layers in two parts: layer 0 in a pool for sliding windows, layer 1 in one for full attention.

    Each part is given, untouched, the location that belongs to it; its own door checks it, and raises what a door raises. A location
    that carries none for the part is handed on as it is.
    """

    def __init__(self, window: Pool, full: Pool) -> None:
        self.parts = (window, full)

    def write(self, layer: int, loc: Any, k: Any, v: Any) -> None:
        """Write device rows ``k [n, Hkv, D]`` and ``v [n, Hkv, Dv]`` into the part that holds ``layer``, where ``loc`` says for it."""
        self.parts[layer].write(0, self._own(layer, loc), k, v)

    def read(self, layer: int, loc: Any) -> tuple[Any, Any]:
        """Device rows ``k [n, Hkv, D]`` and ``v [n, Hkv, Dv]`` of the part that holds ``layer``, from where ``loc`` says for it."""
        return self.parts[layer].read(0, self._own(layer, loc))

    def copy(self, layer: int, src: Any, dst: Any) -> None:
        """Copy rows within the part that holds ``layer``, from where ``src`` to where ``dst`` says for it; the other part stays."""
        self.parts[layer].copy(self._own(layer, src), self._own(layer, dst))

    def _own(self, layer: int, loc: Any) -> Any:
        own = (loc.window, loc.full)[layer] if isinstance(loc, WriteLoc) else None
        return loc if own is None else own
