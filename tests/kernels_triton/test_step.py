"""The place of the largest element in Triton's interpreter against torch, and where torch leaves it open against a loop."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from forebay.kernels.triton.spans import INTERPRETER_SPANS, SpanTiles
from forebay.kernels.triton.step import argmax_rows
from tests.kernels_triton.memory import FLOATS, any_bits, from_bits, lazy, poisoned

SMALL = SpanTiles(columns=8, elements=16, fitted=False)
TILES = pytest.mark.parametrize("tiles", [INTERPRETER_SPANS, SMALL], ids=["large", "small"])
INF, NAN = float("inf"), float("nan")


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Scratch that would win every comparison."""
    return torch.full(tuple(shape), 2**63 - 1, dtype=dtype)


def first_largest(row: list[float]) -> int:
    """The oracle: the first NaN, else the first of the largest."""
    for place, value in enumerate(row):
        if value != value:
            return place
    return row.index(max(row))


def places(x: Tensor, tiles: SpanTiles) -> list[int]:
    out = torch.full((2 * x.shape[0] + 1,), 77, dtype=torch.int32)
    argmax_rows(x, out[1::2], empty=empty, tiles=tiles)
    assert out[::2].tolist() == [77] * (x.shape[0] + 1)
    found: list[int] = out[1::2].tolist()
    return found


@TILES
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (5, 8), (2, 9), (4, 65)], ids=str)
def test_rows_of_any_bits(tiles: SpanTiles, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = any_bits(shape, dtype)
    assert places(x, tiles) == [first_largest(row) for row in x.tolist()]
    x = torch.nan_to_num(x, nan=-1.0)
    assert places(x, tiles) == [first_largest(row) for row in x.tolist()]


@TILES
def test_the_first_of_equals_in_every_order(tiles: SpanTiles) -> None:
    kinds = (NAN, INF, 3.0, 1e-45, 0.0, -0.0, -1e-45, -3.0, -INF)
    x = torch.tensor(list(itertools.product(kinds, repeat=3)))
    assert places(x, tiles) == [first_largest(row) for row in x.tolist()]


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF])
def test_every_nan_is_equal_and_larger_than_infinity(bits: int) -> None:
    row = from_bits(np.array([[0x7F800000, bits, 0x7FFFFFFF, -1]], np.int32), torch.float32)
    assert places(row, INTERPRETER_SPANS) == [1]


@TILES
@pytest.mark.parametrize("at", [0, 7, 8, 15, 16, 32])
def test_equals_in_two_tiles_give_the_earlier_place(tiles: SpanTiles, at: int) -> None:
    x = torch.full((3, 33), -INF)
    x[:, at:] = 2.0
    assert places(x, tiles) == [at] * 3


@TILES
def test_nothing_beside_the_rows_is_looked_at(tiles: SpanTiles) -> None:
    memory = poisoned((2 * 7 + 1, 70), torch.bfloat16)
    x = memory[1::2, 3:60:3]
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))
    assert places(x, tiles) == torch.argmax(x, -1).tolist()
    assert places(x.t(), tiles) == torch.argmax(x.t(), -1).tolist()


def test_a_row_does_not_know_the_others() -> None:
    x = torch.randn(9, 50, generator=torch.Generator().manual_seed(1))
    assert [places(x[i : i + 1], SMALL)[0] for i in range(9)] == places(x, SMALL)


def test_offsets_have_64_bits() -> None:
    far = 2**31 + 8
    memory = lazy(far + 64, torch.bfloat16)
    rows, columns = memory.as_strided((2, 4), (far, 1)), memory[16:].as_strided((1, 2), (1, far))
    rows[1, 3], columns[0, 1] = 1.0, 1.0
    assert places(rows, INTERPRETER_SPANS) == [0, 3]
    assert places(columns, INTERPRETER_SPANS) == [1]


def test_rows_without_elements_are_refused_and_no_rows_are_none_to_launch() -> None:
    out = torch.empty(0, dtype=torch.int32)
    argmax_rows(torch.empty(0, 4), out, empty=empty, launch=lambda *_, **__: pytest.fail("launched"))
    with pytest.raises(ValueError, match=r"got rows \[2, 0\], expected at least one column"):
        argmax_rows(torch.empty(2, 0), out, empty=empty)
