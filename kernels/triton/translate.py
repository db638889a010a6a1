"""Virtual to physical ids through the page map of a unified pool (clauses L8, W4): block ids or slot ids, on the device."""

from __future__ import annotations

from torch import Tensor

import triton.language as tl

from .jit import kernel
from .launching import Launch, cdiv, launch_now
from .slots import INVALID_SLOT
from .tiles import DEVICE_TILES, RowTiles


@kernel(general=("count", "width"))
def translate_kernel(
    ids: tl.tensor,
    id_strides: tl.tuple,
    page_map: tl.tensor,
    map_stride: tl.tensor,
    map_length: tl.tensor,
    out: tl.tensor,
    out_strides: tl.tuple,
    count: tl.tensor,
    width: tl.tensor,
    page_size: tl.tensor,
    last_page: tl.tensor,
    ENTRIES: tl.constexpr,
) -> None:
    """One program: ``ENTRIES`` ids, counted along rows of ``width``."""
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < count
    row, column = entry // width, entry % width
    virtual = tl.load(ids + row * id_strides[0] + column * id_strides[1], mask=inside, other=-1).to(tl.int64)
    page = virtual // page_size
    known = (virtual >= 0) & (page < map_length)
    held = tl.load(page_map + page * map_stride, mask=known, other=-1)
    live = (held >= 0) & (held <= last_page)
    physical = tl.where(live, held * page_size + (virtual - page * page_size).to(tl.int32), INVALID_SLOT)
    tl.store(out + row * out_strides[0] + column * out_strides[1], tl.where(virtual == -1, -1, physical), mask=inside)


def translate(
    ids: Tensor,
    page_map: Tensor,
    out: Tensor,
    *,
    page_size: int,
    tiles: RowTiles = DEVICE_TILES,
    launch: Launch = launch_now,
) -> None:
    """Physical ids of virtual ones under the map as it is when the kernel runs.

    Args:
        ids: int32 or int64 ``[N]`` or ``[B, width]``, any strides: ``page * page_size + offset``. -1 is a pad and stays -1.
        page_map: int32 ``[V]``, any stride: the physical page of each virtual one; negative where it has none.
        out: int32, the shape of ``ids``, any strides; written. An id without a page, or one whose page's ids do not fit int32,
            gives :data:`.slots.INVALID_SLOT`.
        page_size: ids a page, from 1: 1 where ids are blocks, the tokens of a block where they are slots.
    """
    strides, out_strides = ((x.stride(0), x.stride(1)) if x.ndim == 2 else (0, x.stride(0)) for x in (ids, out))
    width = ids.shape[-1]
    count = ids.shape[0] * width if ids.ndim == 2 else width
    if count:
        launch(
            translate_kernel,
            (cdiv(count, tiles.entries),),
            ids,
            strides,
            page_map,
            page_map.stride(0),
            page_map.shape[0],
            out,
            out_strides,
            count,
            width,
            page_size,
            2**31 // page_size - 1,
            ENTRIES=tiles.entries,
        )
