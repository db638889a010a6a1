"""The row operations of a decode step in Triton's interpreter against loops over rows, in integers of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from forebay.kernels.triton.spans import INTERPRETER_SPANS, SpanTiles
from forebay.kernels.triton.step_rows import accepted_rows, advance_rows, digest_rows
from forebay.kernels.triton.tiles import INTERPRETER_TILES, RowTiles
from tests.kernels_triton.memory import lazy

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
SMALL_TILES = RowTiles(rows=2, columns=4, entries=4, fitted=False)
SMALL_SPANS = SpanTiles(columns=8, elements=16, fitted=False)
TILES = pytest.mark.parametrize("tiles", [INTERPRETER_TILES, SMALL_TILES], ids=["large", "small"])
SPANS = pytest.mark.parametrize("spans", [INTERPRETER_SPANS, SMALL_SPANS], ids=["large", "small"])
BLOCK, FIRST, BLOCKS = 4, 1, 9
ROWS = 300


def wrapped(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def apart(values: npt.ArrayLike, step: int = 3) -> Tensor:
    """int32 values at every ``step``-th place of memory that would change every answer."""
    x = np.asarray(values, np.int32)
    memory = torch.full((*x.shape[:-1], x.shape[-1] * step + 1), 1, dtype=torch.int32)
    view = memory[..., 1::step]
    view.copy_(torch.from_numpy(x))
    return view


def states(width: int, seed: int) -> dict[str, npt.NDArray[np.int32]]:
    """Rows that would act, of which most are damaged in one thing: stale stamps, limits met, idle rows, pages that are none."""
    random = np.random.default_rng([seed, width])
    position = random.integers(0, width * BLOCK, ROWS)
    rows = {
        "position": position,
        "visible": position + 1,
        "epoch": random.integers(0, 5, ROWS),
        "limit": position + random.integers(1, 4, ROWS),
        "stamp": np.zeros(ROWS, np.int64),
        "table": random.integers(FIRST, BLOCKS, (ROWS, width)),
    }
    rows["stamp"] = rows["epoch"].copy()
    for row in range(ROWS):
        at = int(position[row])
        match row % 9:
            case 0:
                rows["stamp"][row] = random.choice([rows["epoch"][row] + 1, INT_MIN, INT_MAX])
            case 1:
                rows["visible"][row] = random.choice([at, at + 2, 0, INT_MIN])
            case 2:
                rows["limit"][row] = random.choice([at, 0, -1, INT_MIN])
            case 3:
                rows["table"][row, at // BLOCK] = random.choice([0, -1, BLOCKS, INT_MIN, INT_MAX])
            case 4:
                rows["position"][row], rows["visible"][row] = -1, 0
            case 5:
                beyond = random.choice([width * BLOCK, INT_MAX - 1])
                rows["position"][row], rows["visible"][row], rows["limit"][row] = beyond, beyond + 1, INT_MAX
    rows["position"][8], rows["visible"][8], rows["limit"][8] = INT_MAX, INT_MIN, INT_MAX
    return {name: x.astype(np.int32) for name, x in rows.items()}


def may_act(rows: dict[str, npt.NDArray[np.int32]], row: int, width: int) -> bool:
    """The check by its words."""
    at = int(rows["position"][row])
    if at < 0 or at >= rows["limit"][row] or rows["visible"][row] != wrapped(at + 1):
        return False
    in_table = rows["stamp"][row] == rows["epoch"][row] and at // BLOCK < width
    return bool(in_table and FIRST <= rows["table"][row, at // BLOCK] < BLOCKS)


@TILES
@pytest.mark.parametrize("width", [1, 7])
def test_a_row_acts_where_everything_fits(tiles: RowTiles, width: int) -> None:
    for seed in range(3):
        rows = states(width, seed)
        out = torch.zeros(ROWS * 2, dtype=torch.bool)
        accepted_rows(
            apart(rows["position"]),
            apart(rows["visible"]),
            apart(rows["epoch"]),
            apart(rows["limit"]),
            apart(rows["stamp"]),
            apart(rows["table"]),
            out[1::2],
            block_size=BLOCK,
            first_block=FIRST,
            num_blocks=BLOCKS,
            tiles=tiles,
        )
        want = [may_act(rows, row, width) for row in range(ROWS)]
        assert out[1::2].tolist() == want
        assert not out[::2].any()
        assert 0.2 < np.mean(want) < 0.6


@TILES
@pytest.mark.parametrize("stops", [0, 1, 5, 8])
def test_rows_advance_retire_or_stay(tiles: RowTiles, stops: int) -> None:
    random = np.random.default_rng(stops)
    position: npt.NDArray[Any] = random.integers(-1, 50, ROWS)
    position[:2] = INT_MAX, INT_MAX - 1
    limit = position + random.integers(-1, 4, ROWS)
    visible, token, chosen = position + 1, random.integers(0, 9, ROWS), random.integers(0, 9, ROWS)
    visible[5:9] = INT_MAX
    stop, acts = random.integers(-1, 9, (ROWS, stops)), random.integers(0, 2, ROWS)
    rows: list[npt.NDArray[Any]] = [x.astype(np.int32) for x in (token, position, visible, limit, chosen, stop)]
    token, position, visible, limit, chosen, stop = rows
    out = torch.full((3, ROWS, 2), 77, dtype=torch.int32)
    gone = torch.zeros(ROWS * 2, dtype=torch.bool)
    gone[::2] = torch.from_numpy(acts == 1)
    advance_rows(
        apart(token),
        apart(position),
        apart(visible),
        apart(limit),
        gone[::2],
        apart(chosen),
        apart(stop),
        [x[:, 1] for x in out],
        tiles=tiles,
    )
    want = []
    for row in range(ROWS):
        if not acts[row]:
            want.append((token[row], position[row], visible[row]))
        elif wrapped(int(position[row]) + 1) >= limit[row] or chosen[row] in stop[row]:
            want.append((chosen[row], -1, 0))
        else:
            want.append((chosen[row], wrapped(int(position[row]) + 1), wrapped(int(visible[row]) + 1)))
    assert out[:, :, 1].t().tolist() == [[int(x) for x in row] for row in want]
    assert (out[:, :, 0] == 77).all()
    assert {row[1] == -1 for row in want} == {True, False}


@SPANS
@pytest.mark.parametrize("width", [1, 8, 65])
def test_digests_wrap(spans: SpanTiles, width: int) -> None:
    random = np.random.default_rng(width)
    values = random.integers(INT_MIN, INT_MAX, (37, width), np.int32, endpoint=True)
    weights = random.integers(INT_MIN, INT_MAX, width, np.int32, endpoint=True)
    values[0], weights[0] = INT_MIN, INT_MIN + 1
    out = torch.full((75,), 77, dtype=torch.int32)
    digest_rows(apart(values), apart(weights), out[1::2], tiles=spans)
    want = [wrapped(sum(int(v) * int(w) for v, w in zip(row, weights, strict=True))) for row in values]
    assert out[1::2].tolist() == want
    assert (out[::2] == 77).all()


def test_no_columns_sum_to_nothing_and_no_rows_are_none_to_launch() -> None:
    out = torch.full((2,), 77, dtype=torch.int32)
    digest_rows(torch.empty(2, 0, dtype=torch.int32), torch.empty(0, dtype=torch.int32), out)
    assert out.tolist() == [0, 0]
    none, table = torch.empty(0, dtype=torch.int32), torch.empty(0, 3, dtype=torch.int32)
    acts = torch.empty(0, dtype=torch.bool)

    def launch(*_: object, **__: object) -> None:
        raise AssertionError("launched")

    accepted_rows(none, none, none, none, none, table, acts, block_size=4, first_block=1, num_blocks=9, launch=launch)
    advance_rows(none, none, none, none, acts, none, table, [none] * 3, launch=launch)
    digest_rows(table, torch.empty(3, dtype=torch.int32), none, launch=launch)


def test_offsets_have_64_bits() -> None:
    far = 2**31 + 8
    memory = lazy(far + 64, torch.int32)
    memory[:64], memory[far:] = 0, 0
    wide = [memory[i:].as_strided((2,), (far,)) for i in range(8)]
    table, stop = (memory[i:].as_strided((2, 1), (far, 1)) for i in (16, 20))
    position, visible, epoch, limit, stamp, token, chosen, out = wide
    position.copy_(torch.tensor([0, 1]))
    for x, value in ((visible, [1, 2]), (epoch, [3, 4]), (limit, [9, 2]), (stamp, [3, 4]), (chosen, [5, 6])):
        x.copy_(torch.tensor(value))
    table.copy_(torch.tensor([[1], [2]]))
    stop.copy_(torch.tensor([[6], [7]]))
    acts = torch.zeros(2, dtype=torch.bool)
    accepted_rows(position, visible, epoch, limit, stamp, table, acts, block_size=4, first_block=1, num_blocks=3)
    assert acts.tolist() == [True, True]
    made = [memory[i:].as_strided((2,), (far,)) for i in (24, 25, 26)]
    advance_rows(token, position, visible, limit, acts, chosen, stop, made)
    assert [x.tolist() for x in made] == [[5, 6], [1, -1], [2, 0]]
    digest_rows(table, torch.tensor([3], dtype=torch.int32), out)
    assert out.tolist() == [3, 6]
