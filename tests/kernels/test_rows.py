"""The doors: what enters and leaves paged storage, and what is left alone."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kernels.numba.gather import gather_blocks
from forebay.kernels.numba.rows import (
    INVALID_SLOT,
    bf16_to_float32,
    copy_rows,
    float32_to_bf16,
    prepare_write_rows,
    read_rows,
    slots_from_table,
    write_rows,
)
from forebay.specs.suite import attention
from forebay.specs.suite.attention import Array
from tests.kernels import oracle
from tests.kernels.cases import LAYOUTS, Dtype, encode, make, views

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
BLOCKS, BLOCK_SIZE, HEADS = 5, 4, 3
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def pool(layout: str, dtype: Dtype, k_dim: int = 6, v_dim: int = 5) -> tuple[Array, Array]:
    """K and V views of poisoned storage."""
    return views(layout, BLOCKS, BLOCK_SIZE, HEADS, k_dim, v_dim, dtype, np.random.default_rng(3))


def whole(k: Array, v: Array) -> Array:
    """All bytes of the storage that the views lie in: the same memory if it is one store, else a copy."""
    stores = []
    for view in (k, v):
        store: Any = view
        while store.base is not None:
            store = store.base
        stores.append(store.view(np.uint8).reshape(-1))
    return stores[0] if stores[0].ctypes.data == stores[1].ctypes.data else np.concatenate(stores)


def bits(values: Array) -> Array:
    """Values as integers, so that NaN compares."""
    return np.ascontiguousarray(values).view(np.uint32 if values.itemsize == 4 else np.uint16)


def numbers(shape: tuple[int, ...], dtype: Dtype, seed: int = 0) -> Array:
    return encode(np.random.default_rng(seed).standard_normal(shape), dtype)


def limits(*, sink: bool = True) -> dict[str, int]:
    return {"first_slot": BLOCK_SIZE if sink else 0, "num_slots": BLOCKS * BLOCK_SIZE}


@pytest.mark.clause("W6", "L1", "L2")
@pytest.mark.case("B06", "B09")
@every_layout
@every_dtype
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_a_write_changes_its_rows_and_nothing_else(layout: str, dtype: Dtype, index: type) -> None:
    k, v = pool(layout, dtype)
    slots: Array = np.array([19, 4, -1, 9], index)
    new_k, new_v = numbers((4, HEADS, 6), dtype), numbers((4, HEADS, 5), dtype, 1)
    want_k, want_v = k.copy(), v.copy()
    for row, slot in enumerate(slots):
        if slot >= 0:
            want_k[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = new_k[row]
            want_v[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = new_v[row]
    old_k, old_v, before = k.copy(), v.copy(), whole(k, v).copy()
    dropped = np.zeros(1, np.int32)
    write_rows(k, v, slots, new_k, new_v, dropped, **limits())
    np.testing.assert_array_equal(bits(k), bits(want_k))
    np.testing.assert_array_equal(bits(v), bits(want_v))
    assert dropped[0] == 0
    k[...], v[...] = old_k, old_v
    np.testing.assert_array_equal(whole(k, v), before)


@pytest.mark.clause("W6")
@pytest.mark.case("A01")
@every_layout
@pytest.mark.parametrize("sink", [True, False])
def test_bad_slots_are_dropped_and_counted_and_pads_are_not(layout: str, sink: bool) -> None:
    for bad in (-2, -(2**31), BLOCKS * BLOCK_SIZE, BLOCKS * BLOCK_SIZE + 1, 2**31 - 1, 2**40, -(2**40), 0, 3):
        if bad in (0, 3) and not sink:
            continue
        k, v = pool(layout, "float32")
        slots = np.array([bad, -1, bad], np.int64)
        before = whole(k, v).copy()
        dropped = np.full(1, 10, np.int32)
        rows_k, rows_v = numbers((3, HEADS, 6), "float32"), numbers((3, HEADS, 5), "float32")
        write_rows(k, v, slots, rows_k, rows_v, dropped, **limits(sink=sink))
        copy_rows(k, v, slots, np.array([8, 9, 10]), dropped, **limits(sink=sink))
        copy_rows(k, v, np.array([8, 9, 10]), slots, dropped, **limits(sink=sink))
        np.testing.assert_array_equal(whole(k, v), before)
        assert dropped[0] == 16
        read_rows(k, v, slots, rows_k, rows_v, dropped, **limits(sink=sink))
        assert not rows_k.any()
        assert not rows_v.any()
        assert dropped[0] == 18


@pytest.mark.clause("W6")
def test_without_a_sink_the_first_block_is_live() -> None:
    k, v = pool("NHD", "float32")
    rows_k, rows_v = numbers((2, HEADS, 6), "float32"), numbers((2, HEADS, 5), "float32")
    dropped = np.zeros(1, np.int32)
    write_rows(k, v, np.array([0, 3]), rows_k, rows_v, dropped, **limits(sink=False))
    np.testing.assert_array_equal(k[0, [0, 3]], rows_k)
    assert dropped[0] == 0


@pytest.mark.clause("W8")
@pytest.mark.case("I05")
@every_layout
def test_several_rows_of_one_block_land_whole_in_any_order(layout: str) -> None:
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        k, v = pool(layout, "bfloat16")
        rows_k, rows_v = numbers((4, HEADS, 6), "bfloat16"), numbers((4, HEADS, 5), "bfloat16", 1)
        dropped = np.zeros(1, np.int32)
        write_rows(k, v, 8 + np.array(order), rows_k[order], rows_v[order], dropped, **limits())
        np.testing.assert_array_equal(k[2], rows_k)
        np.testing.assert_array_equal(v[2], rows_v)


@pytest.mark.clause("W6", "L3")
@every_layout
@every_dtype
def test_reading_gives_the_bits_back_nan_and_inf_included(layout: str, dtype: Dtype) -> None:
    k, v = pool(layout, dtype)
    slots = np.arange(BLOCK_SIZE, BLOCKS * BLOCK_SIZE)
    out_k = np.zeros((len(slots), HEADS, 6), k.dtype)
    out_v = np.zeros((len(slots), HEADS, 5), k.dtype)
    dropped = np.zeros(1, np.int32)
    read_rows(k, v, slots, out_k, out_v, dropped, **limits())
    np.testing.assert_array_equal(bits(out_k), bits(k[1:].reshape(-1, HEADS, 6)))
    np.testing.assert_array_equal(bits(out_v), bits(v[1:].reshape(-1, HEADS, 5)))
    wide = np.zeros((len(slots), HEADS, 6), np.float32)
    read_rows(k, None, slots, wide, None, dropped, **limits())
    np.testing.assert_array_equal(wide.astype(np.float64), oracle.values(k[1:].reshape(-1, HEADS, 6)))


@pytest.mark.clause("W6")
@every_layout
@every_dtype
def test_an_overlapping_copy_reads_before_it_writes(layout: str, dtype: Dtype) -> None:
    k, v = pool(layout, dtype)
    source = np.arange(4, 19)
    before_k, before_v = k.copy().reshape(20, HEADS, 6), v.copy().reshape(20, HEADS, 5)
    dropped = np.zeros(1, np.int32)
    copy_rows(k, v, source, source + 1, dropped, **limits())
    after_k, after_v = k.copy().reshape(20, HEADS, 6), v.copy().reshape(20, HEADS, 5)
    np.testing.assert_array_equal(bits(after_k[5:]), bits(before_k[4:19]))
    np.testing.assert_array_equal(bits(after_v[5:]), bits(before_v[4:19]))
    np.testing.assert_array_equal(bits(after_k[:5]), bits(before_k[:5]))
    copy_rows(k, v, np.array([5, 9], np.int32), np.array([9, 5], np.int32), dropped, **limits())
    np.testing.assert_array_equal(bits(k.reshape(20, HEADS, 6)[[9, 5]]), bits(after_k[[5, 9]]))


@pytest.mark.clause("W6", "D1")
def test_float32_rows_round_to_nearest_even_in_a_bfloat16_store() -> None:
    special = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0x80000001, 0xFF800000], np.uint32)
    rows = np.concatenate([special.view(np.float32), np.random.default_rng(0).standard_normal(5).astype(np.float32)])
    rows = rows.reshape(2, 1, 6)
    k, _ = pool("NHD", "bfloat16")
    dropped = np.zeros(1, np.int32)
    write_rows(k[:, :, :1], None, np.array([4, 5]), rows, None, dropped, **limits())
    want = torch.from_numpy(rows).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(k[1, :2, :1], want)
    np.testing.assert_array_equal(want, attention.round_to_bfloat16(rows))
    nan = np.array([0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0x7FC00000, 0x7F80FFFF, 0xFF810000], np.uint32).view(np.float32)
    write_rows(k[:, :, :1], None, np.array([4]), nan.reshape(1, 1, 6), None, dropped, **limits())
    assert np.isnan(oracle.values(k[1, 0, 0])).all()
    assert (k[1, 0, 0] & 0x40).all()


@pytest.mark.clause("D1")
@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_bit_helpers_agree_with_torch(raw: list[int]) -> None:
    given_values = np.array(raw, np.uint32).view(np.float32)
    got = float32_to_bf16(given_values)
    real = ~np.isnan(given_values)
    want = torch.from_numpy(given_values.copy()).bfloat16()
    np.testing.assert_array_equal(got[real], want.view(torch.int16).numpy().view(np.uint16)[real])
    assert np.isnan(bf16_to_float32(got[~real])).all()
    np.testing.assert_array_equal(bf16_to_float32(got)[real], want.float().numpy()[real])


@pytest.mark.clause("W1", "D2")
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_slots_from_a_table(index: type) -> None:
    wide = np.full((3, 9), 77, np.int32)
    table = wide[:, 1:7:2]
    table[:] = [[3, 1, 9], [2, 0, -1], [4, 4, 4]]
    positions = np.array([[0, 5, 8, 12], [7, 3, 11, -1], [-2, 2**31 - 1, 9, 11]], np.int32)
    out: Array = np.zeros(12, index)
    slots_from_table(table, positions, 3, 4, 1, 5, out)
    bad = INVALID_SLOT
    np.testing.assert_array_equal(out.reshape(3, 4), [[12, 5, bad, bad], [bad, 11, bad, -1], [bad, bad, 17, 19]])
    slots_from_table(table, positions, 2, 4, 0, 5, out)
    np.testing.assert_array_equal(out.reshape(3, 4), [[12, 5, bad, bad], [3, 11, bad, -1], [bad, bad, bad, bad]])
    slots_from_table(table, positions[:, 0].copy(), 3, 4, 1, 5, out[:3])
    np.testing.assert_array_equal(out[:3], [12, bad, bad])


@pytest.mark.clause("W1", "L1")
def test_slots_that_do_not_fit_their_type_are_refused() -> None:
    table, positions = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    with pytest.raises(ValueError, match=r"slots of 67108865 blocks of 32 tokens do not fit int32; pass an int64 out"):
        slots_from_table(table, positions, 1, 32, 0, 2**26 + 1, np.zeros(1, np.int32))
    with pytest.raises(ValueError, match=r"out: got contiguous int32\[2\], expected int32 or int64 \[1\]"):
        slots_from_table(table, positions, 1, 32, 0, 2, np.zeros(2, np.int32))
    large = np.zeros(1, np.int64)
    table[:] = 2**30
    slots_from_table(table, np.array([31], np.int32), 1, 32, 0, 2**31 - 1, large)
    assert large[0] == 2**35 + 31


@pytest.mark.clause("D1", "W6")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": np.zeros(2, np.int16)}, "slots: got contiguous int16[2], expected int32 or int64 [N]"),
        ({"slots": np.zeros((2, 1), np.int64)}, "slots: got contiguous int64[2, 1], expected int32 or int64 [N]"),
        ({"k": np.zeros((3, 3, 6), np.float32)}, "k: got contiguous float32[3, 3, 6], expected float32 or uint16"),
        (
            {"k": np.zeros((2, 3, 6))},
            "k: got contiguous float64[2, 3, 6], expected float32 or uint16 (bfloat16 bits) [2, 3, 6]",
        ),
        ({"v": None}, "v_view and v: got only one of them, expected both or neither"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    k, v = pool("NHD", "float32")
    before = whole(k, v).copy()
    good = {"slots": np.array([8, 9]), "k": numbers((2, HEADS, 6), "float32"), "v": numbers((2, HEADS, 5), "float32")}
    call = {**good, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        write_rows(k, v, call["slots"], call["k"], call["v"], np.zeros(1, np.int32), **limits())
    np.testing.assert_array_equal(whole(k, v), before)


@pytest.mark.clause("W9")
def test_a_prepared_write_follows_its_arrays() -> None:
    k, v = pool("KV2", "float32")
    slots, rows_k, rows_v = np.array([4]), numbers((1, HEADS, 6), "float32"), numbers((1, HEADS, 5), "float32")
    dropped = np.zeros(1, np.int32)
    write = prepare_write_rows(k, v, slots, rows_k, rows_v, dropped, **limits())
    for slot in (4, 11, 19):
        slots[0], rows_k[:], rows_v[:] = slot, slot, -slot
        write()
        np.testing.assert_array_equal(k[slot // 4, slot % 4], float(slot))
        np.testing.assert_array_equal(v[slot // 4, slot % 4], float(-slot))
    slots[0] = 0
    write()
    assert dropped[0] == 1


@pytest.mark.clause("W6", "L2")
def test_latent_rows_are_written_once_and_seen_by_both_views() -> None:
    k, v = views("LATENT", BLOCKS, BLOCK_SIZE, 1, 6, 4, "float32", np.random.default_rng(0))
    rows = numbers((2, 1, 6), "float32")
    dropped = np.zeros(1, np.int32)
    write_rows(k, None, np.array([5, 18]), rows, None, dropped, **limits())
    np.testing.assert_array_equal(k[[1, 4], [1, 2]], rows)
    np.testing.assert_array_equal(v[[1, 4], [1, 2]], rows[..., :4])


@pytest.mark.clause("L1")
def test_rows_may_have_any_strides() -> None:
    k, v = pool("NHD", "float32")
    rows_k = numbers((HEADS, 12, 2), "float32").transpose(2, 0, 1)[:, :, ::2]
    rows_v = numbers((2, HEADS, 10), "float32")[..., ::2]
    slots = np.array([7, 99, 12, 99])[::2]
    dropped = np.zeros(1, np.int32)
    write_rows(k, v, slots, rows_k, rows_v, dropped, **limits())
    np.testing.assert_array_equal(k[[1, 3], [3, 0]], rows_k)
    np.testing.assert_array_equal(v[[1, 3], [3, 0]], rows_v)


@pytest.mark.clause("D2", "L3")
@every_dtype
def test_gather_copies_visible_rows_and_zeros_for_blocks_that_are_not_there(dtype: Dtype) -> None:
    case = make([10, 0, 7], block_size=4, layout="KV2", dtype=dtype, dim=6, window=3)
    case.table[0, 2] = -4
    shape = (3, case.options["table_len"] * 4, *case.k.shape[2:])
    got_k, got_v = np.full(shape, 7, case.k.dtype), np.full(shape, 7, case.k.dtype)
    gather_blocks(
        case.k,
        case.v,
        case.table,
        case.visible,
        got_k,
        got_v,
        query_len=2,
        table_len=case.options["table_len"],
        first_block=case.options["first_block"],
        num_blocks=case.options["num_blocks"],
        window=case.options["window"],
    )
    want_k, want_v = np.full(shape, 7, case.k.dtype), np.full(shape, 7, case.k.dtype)
    for b, seen in ((0, range(6, 10)), (2, range(3, 7))):
        for position in seen:
            page = case.table[b, position // 4]
            want_k[b, position] = case.k[page, position % 4] if page >= 0 else 0
            want_v[b, position] = case.v[page, position % 4] if page >= 0 else 0
    np.testing.assert_array_equal(bits(got_k), bits(want_k))
    np.testing.assert_array_equal(bits(got_v), bits(want_v))
