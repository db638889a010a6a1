"""Virtual to physical ids in Triton's interpreter against a loop over ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forebay.kernels.triton.slots import INVALID_SLOT
from forebay.kernels.triton.tiles import INTERPRETER_TILES, RowTiles
from forebay.kernels.triton.translate import translate
from forebay.specs.translation import INVALID_ID
from tests.kernels_triton.memory import lazy

INVALID = INVALID_ID
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
PAGES = [0, 5, -1, 2**29 - 1, 2**29, INT_MIN, INT_MAX, 1]
"""Physical pages of virtual 0 to 7: small ones, none, the last whose four slots fit int32, the first whose do not, ..."""
SMALL_TILES = RowTiles(rows=2, columns=4, entries=4, fitted=False)
TILES = pytest.mark.parametrize("tiles", [INTERPRETER_TILES, SMALL_TILES], ids=["large", "small"])


def expected(virtual: int, page_size: int) -> int:
    """The physical id in unbounded integers."""
    if virtual == -1:
        return -1
    page = PAGES[virtual // page_size] if 0 <= virtual < len(PAGES) * page_size else -1
    return page * page_size + virtual % page_size if page >= 0 and (page + 1) * page_size <= 2**31 else INVALID


def strided_map(stride: int) -> Tensor:
    """The map at every ``stride``-th place; a page between, where nothing may look."""
    memory = torch.full((len(PAGES) * stride,), 2, dtype=torch.int32)
    memory[::stride] = torch.tensor(PAGES, dtype=torch.int32)
    return memory[::stride]


@TILES
@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_go_through_the_map(tiles: RowTiles, page_size: int, stride: int, dtype: torch.dtype) -> None:
    values = [*range(-2, len(PAGES) * page_size + 2), INT_MIN, INT_MAX, -1, -1, 0]
    ids, out = torch.tensor(values, dtype=dtype), torch.full((len(values) + 2,), 77, dtype=torch.int32)
    translate(ids, strided_map(stride), out[1:-1], page_size=page_size, tiles=tiles)
    assert out.tolist() == [77, *(expected(v, page_size) for v in values), 77]


def test_one_page_of_every_id() -> None:
    ids, out = torch.tensor([0, 5, INT_MAX - 1, INT_MAX, -1], dtype=torch.int32), torch.empty(5, dtype=torch.int32)
    for page, want in ((0, [0, 5, INT_MAX - 1, INVALID, -1]), (1, [INVALID] * 4 + [-1])):
        translate(ids, torch.tensor([page], dtype=torch.int32), out, page_size=INT_MAX)
        assert out.tolist() == want


@TILES
def test_a_table_of_any_strides_is_translated_in_place_or_beside(tiles: RowTiles) -> None:
    memory = torch.full((9, 14), 4, dtype=torch.int32)
    table = memory.t()[1:12:2, 1:8]
    table.copy_(torch.arange(-2, 40, dtype=torch.int32).reshape(6, 7) % 11 - 1)
    physical = [[expected(v, 1) for v in row] for row in table.tolist()]
    beside = torch.full((6, 9), 77, dtype=torch.int32)
    translate(table, strided_map(2), beside[:, 1:8], page_size=1, tiles=tiles)
    assert beside.tolist() == [[77, *row, 77] for row in physical]
    untouched = memory.clone()
    translate(table, strided_map(2), table, page_size=1, tiles=tiles)
    assert table.tolist() == physical
    untouched.t()[1:12:2, 1:8] = torch.tensor(physical, dtype=torch.int32)
    assert torch.equal(memory, untouched)


def test_the_map_is_read_when_the_kernel_runs() -> None:
    ids, page_map = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    out = torch.empty(2, dtype=torch.int32)
    queue: list[Callable[[], None]] = []

    def later(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        queue.append(lambda: kernel[grid](*args, **meta))

    translate(ids, page_map, out, page_size=1, launch=later)
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
    translate(ids, page_map[:, 0], out, page_size=1, tiles=INTERPRETER_TILES)
    assert out.tolist() == [[5], [3]]


def test_no_ids_are_nothing_to_launch() -> None:
    none = torch.empty(3, 0, dtype=torch.int32)

    def launch(*_: object, **__: object) -> None:
        raise AssertionError("launched")

    translate(none, strided_map(1), none, page_size=1, launch=launch)
    translate(none[0], strided_map(1), none[0], page_size=1, launch=launch)


def test_contract_and_kernels_mean_the_same_invalid_id() -> None:
    assert INVALID_SLOT.value == INVALID_ID
