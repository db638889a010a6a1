"""Rows in and out of the pages of a TPU's pool, and the columns of a table that are no blocks, against plain Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forebay.kernels.pallas import rows
from forebay.kernels.pallas.paged_decode import count_invalid
from tests.kernels_pallas.cases import NONE, Array, poison, rounded

LOW, HIGH = -(2**31), 2**31 - 1
NB, HEADS, BS, LANES, DIM = 4, 2, 3, 10, 4
SLOTS = NB * BS
FIRST = BS
"""The first slot that is a row: block 0 is the sink."""
OUTSIDE = (LOW, -SLOTS, -2, 0, FIRST - 1, SLOTS, SLOTS + 1, HIGH)
"""Slots that are no row and no pad; JAX takes a negative index for one that counts from the end."""
DTYPES = ["float32", "bfloat16"]


def pool(dtype: str) -> jax.Array:
    """Pages full of poison."""
    return jnp.asarray(poison((NB, HEADS, BS, LANES))).astype(dtype)


def host(x: jax.Array) -> Array:
    return np.array(x.astype(jnp.float32)) if x.dtype == jnp.bfloat16 else np.array(x)


def bits(x: jax.Array) -> bytes:
    return np.array(x).tobytes()


def int32(*values: int) -> jax.Array:
    return jnp.asarray(np.array(values, np.int32))


def drawn(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def jitted(function: Callable[..., Any], *args: Any, **fixed: Any) -> Any:
    return jax.jit(partial(function, **fixed))(*args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("latent", [False, True])
def test_a_written_row_lands_in_its_slot_and_nothing_else_changes(dtype: str, latent: bool) -> None:
    """Dropped rows hold NaN, and would show wherever they landed."""
    slots = (FIRST, *OUTSIDE, SLOTS - 1, -1, FIRST + 4, -1)
    k, v = drawn((len(slots), HEADS, DIM)), drawn((len(slots), HEADS, DIM), 1)
    kept = [i for i, slot in enumerate(slots) if FIRST <= slot < SLOTS]
    for x in (k, v):
        x[[i for i in range(len(slots)) if i not in kept]] = np.nan
    before = pool(dtype)
    pages, dropped = jitted(
        rows.write_rows, before, int32(5), int32(*slots), k, None if latent else v, first_slot=FIRST
    )
    want = host(before)
    for i in kept:
        row = want[slots[i] // BS, :, slots[i] % BS]
        row[:] = 0.0
        row[:, :DIM] = rounded(k[i], dtype)
        if not latent:
            row[:, DIM : 2 * DIM] = rounded(v[i], dtype)
    assert pages.dtype == dtype
    np.testing.assert_array_equal(host(pages), want)
    assert np.array(dropped).tolist() == [5 + len(OUTSIDE)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_rows_for_one_slot_one_lands_whole(dtype: str) -> None:
    """Which one is nobody's promise; that K and V of all heads are of the same one is."""
    slots = int32(*(FIRST + 2,) * 5)
    k = np.broadcast_to(np.arange(1, 6, dtype=np.float32)[:, None, None], (5, HEADS, DIM))
    pages, dropped = jitted(rows.write_rows, pool(dtype), int32(0), slots, k, k + 10, first_slot=FIRST)
    row = host(pages)[1, :, 2]
    assert (row[:, :DIM] == row[0, 0]).all()
    assert (row[:, DIM : 2 * DIM] == row[0, 0] + 10).all()
    assert row[0, 0] in k
    assert not row[:, 2 * DIM :].any()
    assert np.array(dropped).tolist() == [0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_read_row_is_that_of_its_slot_and_zero_where_there_is_none(dtype: str) -> None:
    slots = (FIRST, *OUTSIDE, SLOTS - 1, -1, FIRST)
    pages = pool(dtype)
    got, dropped = jitted(rows.read_rows, pages, int32(1), int32(*slots), first_slot=FIRST)
    want = np.zeros((len(slots), HEADS, LANES), np.float32)
    for i, slot in enumerate(slots):
        if FIRST <= slot < SLOTS:
            want[i] = host(pages)[slot // BS, :, slot % BS]
    assert got.dtype == dtype
    np.testing.assert_array_equal(host(got), want)
    assert np.array(dropped).tolist() == [1 + len(OUTSIDE)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_read_everything_before_they_write(dtype: str) -> None:
    """A swap and a chain; the layers hold different rows."""
    layers = tuple(jnp.asarray(drawn((NB, HEADS, BS, LANES), seed)).astype(dtype) for seed in (0, 1))
    source = (3, 4, 5, 6, 7, *OUTSIDE, *(8,) * len(OUTSIDE), -1, 8, -1, 0)
    target = (4, 3, 6, 7, 8, *(9,) * len(OUTSIDE), *OUTSIDE, 10, -1, 0, -1)
    moved, dropped = jitted(rows.copy_rows, layers, int32(2), int32(*source), int32(*target), first_slot=FIRST)
    for before, after in zip(layers, moved, strict=True):
        want = host(before)
        for a, b in zip(source[:5], target[:5], strict=True):
            want[b // BS, :, b % BS] = host(before)[a // BS, :, a % BS]
        np.testing.assert_array_equal(host(after), want)
    assert np.array(dropped).tolist() == [2 + 2 * len(OUTSIDE)]


def test_a_row_bad_at_both_ends_is_counted_once() -> None:
    pages = pool("float32")
    (after,), dropped = jitted(
        rows.copy_rows, (pages,), int32(0), int32(-5, 0, HIGH), int32(-5, HIGH, 0), first_slot=FIRST
    )
    assert bits(after) == bits(pages)
    assert np.array(dropped).tolist() == [3]


@pytest.mark.parametrize(
    ("before", "bad", "after"), [(0, 3, 3), (HIGH - 3, 3, HIGH), (HIGH - 2, 3, HIGH), (HIGH, 3, HIGH), (HIGH, 0, HIGH)]
)
def test_a_count_stays_at_its_largest(before: int, bad: int, after: int) -> None:
    got = jitted(rows.counted, int32(before), jnp.arange(5) < bad)
    assert got.dtype == jnp.int32
    assert np.array(got).tolist() == [after]


@pytest.mark.parametrize("dtype", DTYPES)
def test_staged_pages_replace_their_first_rows_bit_for_bit(dtype: str) -> None:
    """NaN of any bits included; rows behind, spare lanes and other pages keep their bits, and target NB is none."""
    word = np.uint32 if dtype == "float32" else np.uint16
    rng, lanes = np.random.default_rng(0), 2 * DIM
    old, new = (rng.integers(0, np.iinfo(word).max, (n, HEADS, BS, LANES), word, endpoint=True) for n in (NB, 4))
    old[0, 0, 0, :2] = new[1, 0, 0, :2] = [0x7F800001, 0xFFC12345] if dtype == "float32" else [0x7F81, 0xFFC1]
    targets, tokens = (3, 0, NB, 1), (2, BS, BS, 0)
    got = jitted(
        rows.stage_pages,
        jnp.asarray(old.view(dtype)),
        jnp.asarray(new.view(dtype)),
        int32(*targets),
        int32(*tokens),
        lanes=lanes,
    )
    want = old.copy()
    for i, (target, count) in enumerate(zip(targets, tokens, strict=True)):
        if target < NB:
            want[target, :, :count, :lanes] = new[i, :, :count, :lanes]
    assert np.array(got).view(word).tobytes() == want.tobytes()


TABLE = np.array([[2, 0, 3, 9], [1, -1, NB, 9], [3, 2, 1, 9], [LOW, HIGH, -NB, 9]], np.int32)


@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_slots_are_those_of_the_table(shape: tuple[int, ...]) -> None:
    positions = np.resize(np.array([0, 4, 8, -1, 9, 5, 2, -2, 3, LOW, HIGH, 7, 1], np.int32), shape)
    for table_len in (0, 3):
        got = jitted(rows.slots_of, TABLE, positions, table_len=table_len, block_size=BS, num_blocks=NB)
        want = []
        for row, at in zip(TABLE, positions.reshape(4, -1), strict=True):
            for position in at.tolist():
                block = int(row[position // BS]) if 0 <= position < table_len * BS else -1
                want.append(-1 if position == -1 else block * BS + position % BS if 0 <= block < NB else SLOTS)
        assert np.array(got).tolist() == want


def seen_columns(visible: int, query_len: int, window: int) -> range:
    """Columns that a query of a row sees, key by key's words: from the first key of the first query to the last key of the last."""
    first = max(max(visible - (query_len - 1), 0) - window, 0)
    return range(first // BS, -(-max(visible, 0) // BS))


@pytest.mark.parametrize("window", [NONE, 1, 4])
@pytest.mark.parametrize("query_len", [1, 3])
def test_gathered_pages_are_the_seen_ones_in_order_and_zeros(query_len: int, window: int) -> None:
    pages, visible = pool("float32"), (9, 4, 100, 0)
    got = host(
        jitted(
            rows.gather_pages,
            pages,
            TABLE,
            int32(*visible),
            table_len=3,
            first_block=1,
            query_len=query_len,
            window=window,
        )
    )
    want = np.zeros((4 * 3, HEADS, BS, LANES), np.float32)
    for b, row in enumerate(TABLE):
        for column in range(3):
            if column in seen_columns(visible[b], query_len, window) and 1 <= row[column] < NB:
                want[3 * b + column] = host(pages)[row[column]]
    np.testing.assert_array_equal(got, want)


def test_a_table_of_no_columns_gathers_one_page_of_zeros_a_row() -> None:
    got = jitted(
        rows.gather_pages,
        pool("bfloat16"),
        TABLE,
        int32(9, 4, 100, 0),
        table_len=0,
        first_block=1,
        query_len=1,
        window=NONE,
    )
    assert got.shape == (4, HEADS, BS, LANES)
    assert not host(got).any()


@pytest.mark.parametrize("window", [NONE, 1, 4])
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("visible", [(9, 4, 8, 0), (10, 13, LOW, 200), (1, 2, 3, -1)])
def test_columns_that_are_no_blocks_are_counted_once_each(
    visible: tuple[int, ...], query_len: int, window: int
) -> None:
    """Columns behind the table are none; the one behind ``table_len`` is not looked at."""
    got = jitted(
        count_invalid,
        TABLE,
        int32(*visible),
        table_len=3,
        first_block=1,
        num_blocks=NB,
        block_size=BS,
        query_len=query_len,
        window=window,
    )
    want = sum(
        column >= 3 or not 1 <= TABLE[b, column] < NB
        for b in range(4)
        for column in seen_columns(visible[b], query_len, window)
    )
    assert got.dtype == jnp.int32
    assert int(got) == want


def test_more_bad_columns_than_a_count_holds_are_its_largest() -> None:
    fixed = {"first_block": 1, "num_blocks": NB, "block_size": 1, "query_len": 1}
    for table_len in (0, 3):
        assert int(jitted(count_invalid, TABLE, int32(HIGH, 5, HIGH, 0), table_len=table_len, **fixed)) == HIGH
    assert int(jitted(count_invalid, TABLE[:1], int32(HIGH), table_len=0, **fixed)) == HIGH
    assert (
        int(jitted(count_invalid, TABLE[:1], int32(HIGH), table_len=3, **fixed)) == HIGH - 2
    )  # blocks 2 and 3 are blocks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parts_of_an_attention_are_merged_by_their_sums(dtype: str) -> None:
    """Empty parts hold NaN; rows of empty parts alone are 0 and -inf; sums far apart do not overflow."""
    rng = np.random.default_rng(0)
    lses = rng.normal(0, 3, (3, 6, 2)).astype(np.float32)
    lses[0, 1], lses[:, 2], lses[1:, 3] = -np.inf, -np.inf, -np.inf
    lses[:, 4, 0], lses[:, 5, 0] = [300.0, -300.0, 299.0], [-3e38, 3e38, 0.0]
    outs = rounded(rng.standard_normal((3, 6, 2, DIM)), dtype)
    outs[np.isneginf(lses)] = np.nan
    merged, lse = jitted(rows.merge_partials, tuple(jnp.asarray(x).astype(dtype) for x in outs), tuple(lses))
    peak = np.where(np.isneginf(lses.max(0)), 0.0, lses.max(0)).astype(np.float64)
    weights = np.exp(lses.astype(np.float64) - peak)
    total = weights.sum(0)
    want = (np.nan_to_num(outs) * weights[..., None]).sum(0) / np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):
        want_lse = peak + np.log(total)
    assert merged.dtype == dtype
    near = {"float32": 1e-6, "bfloat16": 8e-3, "float16": 1e-3}[dtype]
    np.testing.assert_allclose(np.array(merged.astype(jnp.float32)), want, rtol=near, atol=near)
    np.testing.assert_allclose(np.array(lse), want_lse, rtol=1e-6, atol=1e-6)


def test_one_part_beside_empty_ones_keeps_its_bits() -> None:
    out, lse = drawn((4, 2, DIM)), drawn((4, 2), 1)
    empty, none = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
    merged, merged_lse = jitted(rows.merge_partials, (empty, jnp.asarray(out), empty), (none, jnp.asarray(lse), none))
    assert bits(merged) == out.tobytes()
    assert bits(merged_lse) == lse.tobytes()
