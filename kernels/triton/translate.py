"""Virtual to physical ids through the page map of a unified pool (clauses L8, W4): block ids or slot ids, on the device."""

from __future__ import annotations

from torch import Tensor

import triton.language as tl

from .counting import add_count
from .jit import kernel
from .launching import Launch, cdiv, launch_now
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
    missed: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    block_size: tl.tensor,
    num_blocks: tl.tensor,
    ENTRIES: tl.constexpr,
) -> None:
    """One program: ``ENTRIES`` ids, counted along rows of ``width``."""
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < count
    row, column = entry // width, entry % width
    virtual = tl.load(ids + row * id_strides[0] + column * id_strides[1], mask=inside, other=-1).to(tl.int64)
    page = virtual // block_size
    known = (virtual >= 0) & (page < map_length)
    block = tl.load(page_map + page * map_stride, mask=known, other=-1)
    live = (block >= 0) & (block < num_blocks)
    physical = tl.where(live, block * block_size + (virtual - page * block_size).to(tl.int32), -1)
    tl.store(out + row * out_strides[0] + column * out_strides[1], physical, mask=inside)
    number = tl.sum(((live | (virtual == -1)) == 0).to(tl.int64), 0)
    add_count(missed, number)


def translate(
    ids: Tensor,
    page_map: Tensor,
    out: Tensor,
    missed: Tensor,
    *,
    num_blocks: int,
    block_size: int | None = None,
    tiles: RowTiles = DEVICE_TILES,
    launch: Launch = launch_now,
) -> None:
    """Physical ids of virtual ones under the map as it is when the kernel runs.

    Args:
        ids: int32 or int64 ``[N]`` or ``[B, width]``, any strides: block ids, or with ``block_size`` slots ``block * block_size +
            offset``. -1 is a pad and stays -1.
        page_map: int32 ``[V]``, any stride: the physical block of each virtual one; negative where it has none.
        out: int32, the shape of ``ids``, any strides; written. An id without a block of the pool gives -1.
        missed: int32 ``[1]``, to which the number of such ids is added; pads are not counted.
        num_blocks: physical blocks of the pool; ``num_blocks * block_size`` fits int32.
        block_size: tokens a block where ``ids`` are slots; None where they are blocks.
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
            missed,
            count,
            width,
            block_size or 1,
            num_blocks,
            ENTRIES=tiles.entries,
        )
