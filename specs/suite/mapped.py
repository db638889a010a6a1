"""A pool behind a map from virtual to physical slots that the device reads from a Buffer, as a unified pool keeps one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.specs import Backend, Pool, WriteLoc


class Mapped:
    """Translates virtual slot ids for a static pool; a replayed write reads the map as it is then.

    Attributes:
        map: int32 Buffer ``[num_slots]``, virtual slot to physical slot.
    """

    def __init__(self, backend: Backend, pool: Pool) -> None:
        self.backend, self.pool = backend, pool
        slots = pool.geometry.num_blocks * pool.geometry.block_size
        self.map = backend.buffer("virtual_to_physical", np.arange(slots, dtype=np.int32))

    def remap(self, table: Sequence[int]) -> None:
        """Put a new map into the Buffer; entries past ``table`` keep their own slot."""
        values = np.arange(self.map.shape[0], dtype=np.int32)
        values[: len(table)] = table
        self.backend.upload(self.map, values)

    def translate(self, ids: Any) -> Any:
        """Physical ids of device int32 ``ids``, under the map of this moment."""
        return self.backend.xp.take(self.map.get(), ids)

    def loc(self, ids: Any) -> WriteLoc:
        """Where virtual ``ids`` are, marked."""
        return WriteLoc.slots(self.translate(ids), physical=True)


class Composite:
    """Two pools behind one door: a sliding window and a full one, each given the location that belongs to it."""

    def __init__(self, window: Pool, full: Pool) -> None:
        self.window, self.full = window, full

    def write(self, loc: WriteLoc, k: Any, v: Any) -> None:
        self.window.write(0, loc.window or loc, k, v)
        self.full.write(0, loc.full or loc, k, v)
