"""The doors in Triton's interpreter against loops over rows: bits, bounds, counts, strides and 64-bit addresses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forebay.kernels.triton.rows import copy_rows, read_rows, write_rows
from forebay.kernels.triton.slots import slots_from_table
from forebay.kernels.triton.tiles import INTERPRETER_TILES, RowTiles
from tests.kernels_triton.memory import FLOATS, LAYOUTS, Store, any_bits, bits, from_bits, lazy, poisoned, store

NB, BS = 5, 3
NUM_SLOTS = NB * BS
SMALL_TILES = RowTiles(rows=2, columns=4, entries=4, fitted=False)
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
EDGES = (INT_MIN, -2, -1, 0, BS - 1, BS, NUM_SLOTS - 1, NUM_SLOTS, INT_MAX, -1, 1, 1, 2 * BS + 1)
"""Slots at every edge; pads and sink ids repeat, live ones do not."""
TILES = pytest.mark.parametrize("tiles", [INTERPRETER_TILES, SMALL_TILES], ids=["large", "small"])


def ids(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def counter() -> Tensor:
    return torch.tensor([7], dtype=torch.int32)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return poisoned(shape, dtype)


def live(slot: int, first_slot: int = BS) -> bool:
    return first_slot <= slot < NUM_SLOTS


def dropped(slots: Sequence[int], first_slot: int = BS) -> int:
    return sum(not live(s, first_slot) and s != -1 for s in slots)


def rows_for(memory: Store, n: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
    """Rows of any bits for both views of a store."""
    k = any_bits((n, *memory.k.shape[2:]), dtype or memory.k.dtype, 1)
    return k, None if memory.v is None else any_bits((n, *memory.v.shape[2:]), dtype or memory.v.dtype, 2)


def heads_of(layout: str) -> int:
    return 1 if layout == "LATENT" else 3


def put(view: Tensor | None, rows: Tensor | None, slots: Sequence[int], first_slot: int = BS) -> None:
    """The oracle of a write."""
    if view is not None and rows is not None:
        for row, slot in enumerate(slots):
            if live(slot, first_slot):
                bits(view)[slot // BS, slot % BS] = bits(rows)[row]


def assert_same(got: Store, want: Store) -> None:
    for a, b in zip(got.snapshot(), want.snapshot(), strict=True):
        np.testing.assert_array_equal(a, b)


# -- writing -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@TILES
def test_a_write_moves_bits_to_its_slots_and_nowhere_else(layout: str, dtype: torch.dtype, tiles: RowTiles) -> None:
    got, want = (store(layout, NB, BS, heads_of(layout), 5, dtype) for _ in range(2))
    k, v = rows_for(got, len(EDGES))
    count = counter()
    write_rows(got.k, got.v, ids(EDGES), k, v, count, first_slot=BS, num_slots=NUM_SLOTS, tiles=tiles)
    put(want.k, k, EDGES)
    put(want.v, v, EDGES)
    assert_same(got, want)
    assert count.item() == 7 + dropped(EDGES)


def test_a_pool_without_a_sink_keeps_its_first_block() -> None:
    got, want = (store("NHD", NB, BS, 2, 4, torch.float32) for _ in range(2))
    slots = (0, BS - 1, -1, -2, NUM_SLOTS)
    k, v = rows_for(got, len(slots))
    count = counter()
    write_rows(got.k, got.v, ids(slots), k, v, count, first_slot=0, num_slots=NUM_SLOTS, tiles=INTERPRETER_TILES)
    put(want.k, k, slots, 0)
    put(want.v, v, slots, 0)
    assert_same(got, want)
    assert count.item() == 9


def ties() -> Tensor:
    """float32 around every kind of rounding to 16 bits: ties to even, subnormals, overflow, infinities, NaNs."""
    near = [b + d for b in (0x3F800000, 0x3F810000, 0x38801000, 0x33000000, 0x477FE000, 0x477FF000) for d in (-1, 0, 1)]
    half = [0x3F808000, 0x3F818000, 0x3F808001, 0x00008000, 0x00018000, 0x7F7F8000, 0x7F7FFFFF, 0x3F801000, 0x3F803000]
    odd = [0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7FC12345, 0x7F80FFFF, 0, 1, 0x007FFFFF, 0x00800000]
    values = np.array(near + half + odd, np.uint32)
    return from_bits(np.concatenate([values, values | np.uint32(0x80000000)]).view(np.int32), torch.float32)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # what float16 cannot hold is its infinity
@pytest.mark.parametrize(("source", "target"), list(itertools.product(FLOATS, FLOATS)), ids=str)
def test_rows_of_another_type_are_rounded_to_nearest_even(source: torch.dtype, target: torch.dtype) -> None:
    values = ties() if source == torch.float32 else any_bits((400,), source)
    values = torch.cat([values, any_bits((len(values) % 2 + 200,), source, 3)])
    k = values.reshape(2, 1, -1)
    memory = store("LATENT", 2, 1, 1, k.shape[2], target)
    write_rows(memory.k, None, ids([1, 0]), k, None, counter(), first_slot=0, num_slots=2, tiles=INTERPRETER_TILES)
    got, want = memory.k.flip(0).reshape(-1), values.to(target)
    nan = values.isnan()
    assert nan.any()
    assert got[nan].isnan().all()
    np.testing.assert_array_equal(bits(got)[~nan], bits(want)[~nan])
    if source == target:
        np.testing.assert_array_equal(bits(got), bits(values))


def test_a_nan_rounded_to_bfloat16_keeps_its_sign_and_becomes_quiet() -> None:
    k = from_bits(np.array([[[0x7F800001, -0x7FFFFF, 0x7FFFFFFF, -1]]], np.int32), torch.float32)
    memory = store("LATENT", 1, 1, 1, 4, torch.bfloat16)
    write_rows(memory.k, None, ids([0]), k, None, None, first_slot=0, num_slots=1, tiles=INTERPRETER_TILES)
    np.testing.assert_array_equal(bits(memory.k).reshape(-1).view(np.uint16), [0x7FC0, 0xFFC0, 0x7FFF, 0xFFFF])


def test_rows_and_ids_may_be_strided() -> None:
    got, want = (store("HND", NB, BS, 3, 4, torch.bfloat16) for _ in range(2))
    k = any_bits((4, 9, 3, 2), torch.bfloat16)[:, ::2, :, 0].permute(1, 2, 0)
    v = any_bits((5, 3, 8), torch.bfloat16, 4)[:, :, 4:]
    slots = ids([BS, 99, NUM_SLOTS - 1, 99, -1, 99, 4, 99, 2, 99])[::2]
    count = counter()
    write_rows(got.k, got.v, slots, k, v, count, first_slot=BS, num_slots=NUM_SLOTS, tiles=SMALL_TILES)
    put(want.k, k.contiguous(), slots.tolist())
    put(want.v, v.contiguous(), slots.tolist())
    assert_same(got, want)
    assert count.item() == 8


@pytest.mark.parametrize("dims", [(4, 6), (6, 4)], ids=str)
@TILES
def test_k_and_v_may_differ_in_width(dims: tuple[int, int], tiles: RowTiles) -> None:
    views, before = ([poisoned((NB, BS, 2, dim), torch.float32) for dim in dims] for _ in range(2))
    k, v = (any_bits((2, 2, dim), torch.float32) for dim in dims)
    outs = [poisoned((4, 2, dim), torch.float32) for dim in dims]
    limits: dict[str, Any] = {"first_slot": BS, "num_slots": NUM_SLOTS, "tiles": tiles}
    write_rows(views[0], views[1], ids([4, 8]), k, v, None, **limits)
    put(before[0], k, [4, 8])
    put(before[1], v, [4, 8])
    read_rows(views[0], views[1], ids([4, 8]), outs[0][1:3], outs[1][1:3], None, **limits)
    for got, want, out, rows in zip(views, before, outs, (k, v), strict=True):
        np.testing.assert_array_equal(bits(got), bits(want))
        poison = poisoned((1, *rows.shape[1:]), torch.float32)
        np.testing.assert_array_equal(bits(out), np.concatenate([bits(poison), bits(rows), bits(poison)]))


def test_no_rows_are_nothing_to_launch() -> None:
    def launch(*_: object, **__: object) -> None:
        raise AssertionError("launched")

    memory, none = store("NHD", NB, BS, 2, 4, torch.float32), torch.empty(0, 2, 4)
    limits: dict[str, Any] = {"first_slot": BS, "num_slots": NUM_SLOTS}
    write_rows(memory.k, memory.v, ids([]), none, none, counter(), **limits, launch=launch)
    read_rows(memory.k, memory.v, ids([]), none, none, counter(), **limits, launch=launch)
    copy_rows(memory.k, memory.v, ids([]), ids([]), counter(), **limits, empty=empty, launch=launch)


def test_rows_that_do_not_fit_the_views_are_refused_before_a_launch() -> None:
    memory, k, v = store("NHD", NB, BS, 2, 4, torch.float32), torch.empty(2, 2, 4), torch.empty(2, 2, 4)
    limits: dict[str, Any] = {"first_slot": BS, "num_slots": NUM_SLOTS, "launch": None}
    for bad in (torch.empty(2, 2, 5), torch.empty(3, 2, 4), torch.empty(2, 1, 4)):
        with pytest.raises(ValueError, match=r"v: got rows .*, expected \[2, 2, 4\] for a view \[5, 3, 2, 4\]"):
            write_rows(memory.k, memory.v, ids([3, 4]), k, bad, None, **limits)
    with pytest.raises(ValueError, match=r"k: got a rows of torch\.float64, expected one of torch\.float32, torch\.bf"):
        read_rows(memory.k, memory.v, ids([3, 4]), k.double(), v, None, **limits)
    with pytest.raises(ValueError, match="v: got only one of view and rows, expected both or neither"):
        write_rows(memory.k, None, ids([3, 4]), k, v, None, **limits)


# -- reading -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@TILES
def test_a_read_gives_bits_and_zeros(layout: str, dtype: torch.dtype, tiles: RowTiles) -> None:
    memory = store(layout, NB, BS, heads_of(layout), 5, dtype)
    for part in memory.parts:
        part.copy_(any_bits(part.shape, dtype, 5))
    v_view = memory.k[..., :2] if memory.v is None else memory.v
    before = memory.snapshot()
    outs = [poisoned((len(EDGES), 2, *view.shape[2:]), dtype) for view in (memory.k, v_view)]
    count = counter()
    slots = [*EDGES[:-2], EDGES[5], EDGES[-1]]  # of a read a live slot may repeat
    k, v = outs[0][:, 0], outs[1][:, 0]
    read_rows(memory.k, v_view, ids(slots), k, v, count, first_slot=BS, num_slots=NUM_SLOTS, tiles=tiles)
    for view, out in zip((memory.k, v_view), outs, strict=True):
        want = bits(poisoned(out.shape, dtype))
        for row, slot in enumerate(slots):
            want[row, 0] = bits(view)[slot // BS, slot % BS] if live(slot) else 0
        np.testing.assert_array_equal(bits(out), want)
    for a, b in zip(memory.snapshot(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert count.item() == 7 + dropped(slots)


# -- copying -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@TILES
def test_a_copy_reads_every_row_before_it_writes_one(layout: str, tiles: RowTiles) -> None:
    got, want = (store(layout, NB, BS, heads_of(layout), 5, torch.float32) for _ in range(2))
    for memory in (got, want):
        for part in memory.parts:
            part.copy_(any_bits(part.shape, torch.float32, 6))
    source = [3, 4, 5, 6, 8, 14, -1, 3, 0, 3, 15, -1, INT_MIN, 7]
    target = [4, 5, 6, 3, 14, 8, 9, -1, 10, 2, 11, 99, -1, INT_MAX]
    count = counter()
    limits: dict[str, Any] = {"first_slot": BS, "num_slots": NUM_SLOTS}
    copy_rows(got.k, got.v, ids(source), ids(target), count, **limits, empty=empty, tiles=tiles)
    moved = [(s, t) for s, t in zip(source, target, strict=True) if live(s) and live(t)]
    for view, old in ((want.k, got.k), (want.v, got.v)):
        if view is not None and old is not None:
            held = bits(view).copy()
            for s, t in moved:
                bits(view)[t // BS, t % BS] = held[s // BS, s % BS]
    assert_same(got, want)
    padded = sum(-1 in pair for pair in zip(source, target, strict=True))
    assert count.item() == 7 + len(source) - len(moved) - padded


def test_a_copy_may_leave_the_count_to_another_layer() -> None:
    memory = store("KV2", NB, BS, 2, 4, torch.bfloat16)
    before = memory.snapshot()
    limits: dict[str, Any] = {"first_slot": BS, "num_slots": NUM_SLOTS}
    copy_rows(memory.k, memory.v, ids([0, -1]), ids([4, 5]), None, **limits, empty=empty, tiles=INTERPRETER_TILES)
    np.testing.assert_array_equal(memory.snapshot()[0], before[0])


# -- slots from tables -------------------------------------------------------------------------------------------------
@TILES
@pytest.mark.parametrize("length", [None, 1, 3], ids=str)
def test_slots_follow_the_table(length: int | None, tiles: RowTiles) -> None:
    rng = np.random.default_rng(0)
    wide = torch.from_numpy(rng.integers(0, NB, (12, 9), np.int32))
    table = wide[:, 1:8:2]
    table[0] = ids([INT_MIN, -1, INT_MAX, NB])
    edges = [0, BS - 1, BS, 3 * BS - 1, 3 * BS, 4 * BS, -1, -2, INT_MAX, INT_MIN]
    positions = torch.zeros(12, 2 * (length or 1), dtype=torch.int32)[:, ::2]
    positions.copy_(torch.from_numpy(np.resize(rng.permutation(np.array(edges, np.int32)), positions.shape)))
    positions = positions[:, 0] if length is None else positions
    out = torch.full((positions.numel() + 2,), 77, dtype=torch.int32)
    sizes: dict[str, Any] = {"table_len": 3, "block_size": BS, "first_block": 1, "num_blocks": NB}
    slots_from_table(table, positions, out[1:-1], **sizes, tiles=tiles)
    want = []
    for row, step in itertools.product(range(12), range(length or 1)):
        position = int(positions.reshape(12, -1)[row, step])
        column = position // BS
        block = int(table[row, column]) if 0 <= column < 3 else -1
        want.append(-1 if position == -1 else block * BS + position % BS if 1 <= block < NB else -2)
    assert out.tolist() == [77, *want, 77]
    assert {-1, -2} < set(want)


# -- addresses beyond 32 bits ------------------------------------------------------------------------------------------
def far_store(dim_outermost: bool) -> Tensor:
    """A view ``[NB, 2, 2, 4]`` that spans more than 2^31 elements along its blocks, or along its last axis."""
    if dim_outermost:
        step = 2**30
        return lazy(3 * step + 64, torch.bfloat16).as_strided((4, 2, 2, 4), (4, 2, 1, step))
    step = 2**29 + 16
    return lazy(5 * step, torch.bfloat16).as_strided((5, 2, 2, 4), (step, 8, 4, 1))


@pytest.mark.parametrize("dim_outermost", [False, True], ids=["blocks", "columns"])
def test_offsets_in_the_pool_have_64_bits(dim_outermost: bool) -> None:
    view = far_store(dim_outermost)
    slots = ids([2 * view.shape[0] - 1, 0])
    k, out = any_bits((2, 2, 4), torch.bfloat16), poisoned((2, 2, 4), torch.bfloat16)
    limits: dict[str, Any] = {"first_slot": 0, "num_slots": 2 * view.shape[0], "tiles": INTERPRETER_TILES}
    write_rows(view, None, slots, k, None, None, **limits)
    np.testing.assert_array_equal(bits(view[-1, 1].contiguous()), bits(k[0]))
    np.testing.assert_array_equal(bits(view[0, 0].contiguous()), bits(k[1]))
    read_rows(view, None, slots, out, None, None, **limits)
    np.testing.assert_array_equal(bits(out), bits(k))
    copy_rows(view, None, slots, slots.flip(0), None, **limits, empty=empty)
    np.testing.assert_array_equal(bits(view[0, 0].contiguous()), bits(k[0]))


def test_offsets_of_rows_ids_and_tables_have_64_bits() -> None:
    far = 2**31 + 8
    rows = lazy(far + 64, torch.bfloat16).as_strided((2, 2, 4), (far, 4, 1))
    rows.copy_(any_bits((2, 2, 4), torch.bfloat16))
    numbers = lazy(far + 64, torch.int32)
    slots, table = numbers.as_strided((2,), (far,)), numbers[4:].as_strided((2, 2), (far, 1))
    slots.copy_(ids([1, 2]))
    table.copy_(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))
    memory = store("NHD", 3, 1, 2, 4, torch.bfloat16)
    write_rows(memory.k, None, slots, rows, None, None, first_slot=1, num_slots=3, tiles=INTERPRETER_TILES)
    np.testing.assert_array_equal(bits(memory.k)[1:, 0], bits(rows.contiguous()))
    positions, out = numbers[8:].as_strided((2, 1), (far, 1)), torch.empty(2, dtype=torch.int32)
    positions.fill_(BS)
    sizes: dict[str, Any] = {"table_len": 2, "block_size": BS, "first_block": 1, "num_blocks": NB}
    slots_from_table(table, positions, out, **sizes, tiles=INTERPRETER_TILES)
    assert out.tolist() == [2 * BS, 4 * BS]
    wide = numbers[16:].as_strided((1, 3), (1, 2**30 + 8))
    wide.copy_(torch.tensor([[1, 2, 3]], dtype=torch.int32))
    last = torch.tensor([2 * BS], dtype=torch.int32)
    slots_from_table(wide, last, out[:1], **{**sizes, "table_len": 3}, tiles=INTERPRETER_TILES)
    assert out[:1].tolist() == [3 * BS]


# -- what a caller plans by --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", [write_rows, read_rows], ids=["write", "read"])
def test_one_program_moves_many_rows(call: Callable[..., None]) -> None:
    """What the interpreter's time depends on: programs and launches, not rows."""
    grids = []

    def launch(_kernel: object, grid: tuple[int, ...], *_: object, **__: object) -> None:
        grids.append(grid)

    memory = store("NHD", 40, 16, 2, 64, torch.float32)
    rows = torch.empty(512, 2, 64)
    call(
        memory.k,
        memory.v,
        torch.zeros(512, dtype=torch.int32),
        rows,
        rows,
        counter(),
        first_slot=16,
        num_slots=640,
        tiles=INTERPRETER_TILES,
        launch=launch,
    )
    assert grids == [(1, 1)]
