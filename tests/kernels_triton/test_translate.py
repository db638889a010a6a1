"""Virtual to physical ids in Triton's interpreter against a loop over ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forebay.kernels.triton.tiles import INTERPRETER_TILES, RowTiles
from forebay.kernels.triton.translate import translate
from tests.kernels_triton.memory import lazy

NUM_BLOCKS = 6
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
PAGES = [0, 5, -1, NUM_BLOCKS, 3, INT_MIN, INT_MAX, 1]
"""Physical blocks of virtual 0 to 7: two of the pool's, none, one past the end, ..."""
SMALL_TILES = RowTiles(rows=2, columns=4, entries=4, fitted=False)
TILES = pytest.mark.parametrize("tiles", [INTERPRETER_TILES, SMALL_TILES], ids=["large", "small"])


def expected(virtual: int, block_size: int) -> tuple[int, int]:
    """(physical id, 1 if it counts as missed)."""
    if virtual == -1:
        return -1, 0
    page = PAGES[virtual // block_size] if 0 <= virtual < len(PAGES) * block_size else -1
    return (page * block_size + virtual % block_size, 0) if 0 <= page < NUM_BLOCKS else (-1, 1)


def strided_map(stride: int) -> Tensor:
    """The map at every ``stride``-th place; a block of the pool between, where nothing may look."""
    memory = torch.full((len(PAGES) * stride,), 2, dtype=torch.int32)
    memory[::stride] = torch.tensor(PAGES, dtype=torch.int32)
    return memory[::stride]


@TILES
@pytest.mark.parametrize("block_size", [None, 1, 4], ids=str)
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_go_through_the_map(tiles: RowTiles, block_size: int | None, stride: int, dtype: torch.dtype) -> None:
    bs = block_size or 1
    values = [*range(-2, len(PAGES) * bs + 2), INT_MIN, INT_MAX, -1, -1, 0]
    ids, missed = torch.tensor(values, dtype=dtype), torch.tensor([7], dtype=torch.int32)
    out = torch.full((len(values) + 2,), 77, dtype=torch.int32)
    translate(ids, strided_map(stride), out[1:-1], missed, num_blocks=NUM_BLOCKS, block_size=block_size, tiles=tiles)
    want = [expected(v, bs) for v in values]
    assert out.tolist() == [77, *(physical for physical, _ in want), 77]
    assert missed.item() == 7 + sum(lost for _, lost in want)


@TILES
def test_a_table_of_any_strides_is_translated_in_place_or_beside(tiles: RowTiles) -> None:
    memory = torch.full((9, 14), 4, dtype=torch.int32)
    table = memory.t()[1:12:2, 1:8]
    table.copy_(torch.arange(-2, 40, dtype=torch.int32).reshape(6, 7) % 11 - 1)
    want = [[expected(v, 1) for v in row] for row in table.tolist()]
    beside, missed = torch.full((6, 9), 77, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    options: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "tiles": tiles}
    translate(table, strided_map(2), beside[:, 1:8], missed, **options)
    physical = [[p for p, _ in row] for row in want]
    assert beside.tolist() == [[77, *row, 77] for row in physical]
    assert missed.item() == sum(lost for row in want for _, lost in row) > 0
    untouched = memory.clone()
    translate(table, strided_map(2), table, missed, **options)
    assert table.tolist() == physical
    untouched.t()[1:12:2, 1:8] = torch.tensor(physical, dtype=torch.int32)
    assert torch.equal(memory, untouched)


def test_the_map_is_read_when_the_kernel_runs() -> None:
    ids, page_map = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    out, missed = torch.empty(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    queue: list[Callable[[], None]] = []

    def later(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        queue.append(lambda: kernel[grid](*args, **meta))

    translate(ids, page_map, out, missed, num_blocks=3, launch=later)
    page_map.copy_(torch.tensor([0, 2, 1]))
    for run in queue:
        run()
    assert out.tolist() == [2, 1]


def test_offsets_of_ids_map_and_output_have_64_bits() -> None:
    far = 2**31 + 8
    memory = lazy(far + 16, torch.int32)
    ids, page_map, out = (memory[i:].as_strided((2, 1), (far, 1)) for i in (0, 4, 8))
    ids.copy_(torch.tensor([[1], [0]], dtype=torch.int32))
    page_map.copy_(torch.tensor([[3], [5]], dtype=torch.int32))
    missed = torch.zeros(1, dtype=torch.int32)
    translate(ids, page_map[:, 0], out, missed, num_blocks=NUM_BLOCKS, tiles=INTERPRETER_TILES)
    assert out.tolist() == [[5], [3]]


def test_no_ids_are_nothing_to_launch() -> None:
    none, missed = torch.empty(3, 0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

    def launch(*_: object, **__: object) -> None:
        raise AssertionError("launched")

    translate(none, strided_map(1), none, missed, num_blocks=NUM_BLOCKS, launch=launch)
    translate(none[0], strided_map(1), none[0], missed, num_blocks=NUM_BLOCKS, launch=launch)
