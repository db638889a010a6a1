"""Translation of virtual ids on the device, through a map of pages (clauses L8, W4, W9): an operation with a default.

A namespace (``backend.xp``) may have ``translate`` of its own and do it in one launch; where it has none, :func:`composed` does it
in operations that every namespace has.
"""

from __future__ import annotations

from typing import Final, Protocol, runtime_checkable

from .array_namespace import ArrayNamespace
from .dtypes import Array
from .errors import InvalidInput

INVALID_ID: Final = -2
"""What an id without a page becomes: no pad, so that every door drops and counts it."""


@runtime_checkable
class Translates(Protocol):
    """The optional operation of an array namespace."""

    def translate(self, ids: Array, page_map: Array, page_size: int) -> Array:
        """What :func:`translate` says, of arguments that were checked; the map is read when the device gets there."""


def translate(xp: ArrayNamespace, ids: Array, page_map: Array, *, page_size: int = 1) -> Array:
    """Physical ids of virtual ones under the map as it is when the device gets there; inside a Segment, at each replay.

    Args:
        ids: device int32 of any shape: ``page * page_size + offset``. -1 is a pad and stays one.
        page_map: device int32 ``[V]``, with any stride (a column of a table, say): the physical page of each virtual one, negative
            where it has none.
        page_size: ids a page: 1 where ids are blocks, the tokens of a block where they are slots.

    Returns:
        Device int32, the shape of ``ids``. An id whose page is not in the map, has none there, or has one whose ids do not fit
        int32, gives :data:`INVALID_ID`.

    Raises:
        InvalidInput: other arrays, or a page size that is none.
    """
    for name, x in (("ids", ids), ("page_map", page_map)):
        if not xp.is_array(x) or xp.dtype(x) != "int32":
            kind = xp.dtype(x) if xp.is_array(x) else type(x).__name__
            raise InvalidInput(f"translate: got {name} of {kind}, expected a device array of int32")
    if len(xp.shape(page_map)) != 1 or 0 in xp.shape(page_map):
        raise InvalidInput(f"translate: got a map {list(xp.shape(page_map))}, expected [V] with at least one page")
    if isinstance(page_size, bool) or not isinstance(page_size, int) or not 1 <= page_size < 2**31:
        raise InvalidInput(f"translate: got page_size {page_size!r}, expected an int from 1 to 2^31 - 1")
    if isinstance(xp, Translates):
        return xp.translate(ids, page_map, page_size)
    return composed(xp, ids, page_map, page_size)


def composed(xp: ArrayNamespace, ids: Array, page_map: Array, page_size: int) -> Array:
    """:func:`translate` in other operations."""
    pages = xp.shape(page_map)[0]
    page = ids // page_size
    found = xp.take(page_map, xp.clip(page, 0, pages - 1))
    # Ids of pages behind the last one would wrap.
    live = (ids >= 0) & (page < pages) & (found >= 0) & (found <= 2**31 // page_size - 1)
    physical = xp.where(live, found, 0) * page_size + ids % page_size
    return xp.where(ids == -1, ids, xp.where(live, physical, INVALID_ID))
