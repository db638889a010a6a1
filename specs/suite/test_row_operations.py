"""Operations of the array namespace that sampling needs: thresholds, sums, additions, draws; each row by itself (clauses D5, C4)."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, draws
from forebay.specs.dtypes import HostArray
from forebay.specs.suite.kv import int32
from forebay.specs.suite.murmur import murmur3

NAN, INF = np.nan, np.inf
SIZES = (1, 5, 16, 33, 267, 3000)


def in_falling_order(x: HostArray) -> HostArray:
    """Columns of each row from the largest element to the smallest: NaN first, the first of equals first."""
    return np.argsort(np.where(np.isnan(x), -np.inf, -x), axis=-1, kind="stable")


def floats(rows: int, n: int, seed: int = 0, scale: float = 3.0) -> HostArray:
    """Random rows with equal elements among them."""
    x = np.random.default_rng([seed, rows, n]).standard_normal((rows, n)) * scale
    return np.round(x, 1).astype(np.float32)


def awkward(n: int) -> HostArray:
    """Rows of equal, infinite, missing and subnormal numbers and of both zeros."""
    rows = floats(8, n, seed=7)
    rows[0] = 1.5
    rows[1, ::2], rows[2, ::3], rows[3, ::4] = -INF, INF, NAN
    rows[4] = -INF
    rows[5] = NAN
    rows[6] = np.float32(1e-42) * np.arange(n)
    rows[7] = np.where(np.arange(n) % 2, 0.0, -0.0)
    return rows


def column(values: Any, dtype: Any) -> HostArray:
    return np.array(values, dtype)[:, None]


@pytest.mark.clause("C4")
@pytest.mark.parametrize("n", SIZES[1:])  # of one column the answer is 0, which is no answer
def test_the_largest_is_the_first_of_equals(backend: Backend, n: int) -> None:
    """Both zeros are equal; a row without a number above -inf has its first place."""
    for x in (floats(3, n), awkward(n)[[0, 1, 2, 4, 6, 7]]):
        got = backend.xp.argmax(backend.to_device(x))
        assert backend.xp.dtype(got) == "int32"
        np.testing.assert_array_equal(backend.to_host(got), np.argmax(x, -1))


@pytest.mark.clause("C4")
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("k", [-(2**31), -1, 0, 1, 2, 4, 16, "n", "n+1", 2**31 - 1])
def test_the_kth_largest_counts_equals_one_by_one(backend: Backend, n: int, k: Any) -> None:
    k = {"n": n, "n+1": n + 1}.get(k, k)
    for x in (floats(3, n), awkward(n)):
        falling = np.take_along_axis(x, in_falling_order(x), 1)
        want = falling[:, k - 1] if 1 <= k <= n else np.full(len(x), -INF, np.float32)
        got = backend.xp.kth_largest(backend.to_device(x), backend.to_device(column([k] * len(x), np.int32)))
        np.testing.assert_array_equal(backend.to_host(got), want[:, None])


@pytest.mark.clause("C4")
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("k", [1, 3, 20])
def test_the_k_largest_come_in_falling_order_the_first_of_equals_first(backend: Backend, n: int, k: int) -> None:
    for x in (floats(3, n), awkward(n)):
        values, places = (backend.to_host(a) for a in backend.xp.top_k(backend.to_device(x), min(k, n)))
        want = in_falling_order(x)[:, : min(k, n)]
        assert places.dtype == np.int32
        np.testing.assert_array_equal(places, want)
        np.testing.assert_array_equal(values, np.take_along_axis(x, want, 1))


def cutoff(row: HostArray, mass: float) -> float:
    """By the words of the operation: try every element."""
    if np.isnan(row).any():
        return -INF
    reached = [t for t in row if row[row >= t].astype(np.float64).sum() >= mass]
    return max(reached, default=-INF)


@pytest.mark.clause("C4")
@pytest.mark.parametrize("n", SIZES[:-1])
def test_a_cutoff_is_the_largest_whose_mass_is_reached(backend: Backend, n: int) -> None:
    """Multiples of 1/16, whose sums are exact in any order; a mass that is met exactly, just missed, never, or from the start."""
    p = np.abs(np.round(floats(8, n, seed=3) * 16) / 16).astype(np.float32)
    p[1], p[2] = 0.0, 0.25
    p[3, 0] = NAN
    p[4, 0] = INF
    total = np.where(np.isfinite(p), p, 0).sum(-1, keepdims=True, dtype=np.float64)
    for part in (0.0, 0.125, 0.5, 0.75, 1.0):
        for shift in (-1 / 32, 0.0, 1 / 32):
            mass = (np.round(total * part * 16) / 16 + shift).astype(np.float32)
            got = backend.to_host(backend.xp.mass_cutoff(backend.to_device(p), backend.to_device(mass)))
            want = column([cutoff(row, m[0]) for row, m in zip(p, mass, strict=True)], np.float32)
            np.testing.assert_array_equal(got, want)
    for mass_of_all in (INF, NAN, 1e30):
        masses = column([mass_of_all] * len(p), np.float32)
        got = backend.to_host(backend.xp.mass_cutoff(backend.to_device(p), backend.to_device(masses)))
        want = column([-INF] * 4 + [INF if mass_of_all == 1e30 else -INF] + [-INF] * 3, np.float32)
        np.testing.assert_array_equal(got[[0, 1, 2, 3, 5, 6, 7]], want[[0, 1, 2, 3, 5, 6, 7]])
        if mass_of_all == 1e30:
            assert got[4, 0] == INF


@pytest.mark.clause("C4")
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_additions_reach_their_columns_and_no_others(backend: Backend, dtype: Any) -> None:
    """Repeated indices add up; -1 and everything else outside the row adds nothing, wherever it would point to."""
    n, outside = 9, [-1, -9, -(2**31), 9, 10, 2**31 - 1]
    x = (floats(4, n) * 10).astype(dtype)
    indices = int32([0, 8, 3, 3, 0, 3], outside, [-1, 5, -1, 5, 9, 0], [7] * 6)
    values = np.arange(1, 25, dtype=dtype).reshape(4, 6)
    want = x.copy()
    for row in range(4):
        for at, value in zip(indices[row].tolist(), values[row], strict=True):
            if 0 <= at < n:
                want[row, at] += value
    got = backend.xp.add_along(*(backend.to_device(a) for a in (x, indices, values)))
    np.testing.assert_array_equal(backend.to_host(got), want)
    assert backend.xp.dtype(got) == np.dtype(dtype).name


@pytest.mark.clause("C4")
def test_integer_sums_wrap(backend: Backend) -> None:
    x = int32([2**31 - 1, 1, 0], [-(2**31), -1, 5], [2**31 - 1, 2**31 - 1, 2**31 - 1])
    got = backend.to_host(backend.xp.sum(backend.to_device(x)))
    np.testing.assert_array_equal(got[:, 0], int32(-(2**31), 4 - 2**31, 2**31 - 3))
    word = backend.xp.add_along(*(backend.to_device(a) for a in (int32([2**30]), int32([0]), int32([-(2**31)]))))
    assert backend.to_host(word).tolist() == [[2**30 - 2**31]]


@pytest.mark.clause("C5")
def test_a_bitcast_keeps_every_bit(backend: Backend) -> None:
    bits = np.random.default_rng(0).integers(-(2**31), 2**31, (7, 33)).astype(np.int32)
    bits[0, :4] = np.array([0x7F800001, 0xFFC00000, 0x80000000, 1], np.uint32).view(np.int32)
    as_floats = backend.xp.bitcast(backend.to_device(bits)[:, 1:20], "float32")
    assert backend.xp.dtype(as_floats) == "float32"
    assert backend.to_host(as_floats).tobytes() == bits[:, 1:20].tobytes()
    np.testing.assert_array_equal(backend.to_host(backend.xp.bitcast(as_floats, "int32")), bits[:, 1:20])


@pytest.mark.clause("C4")
def test_a_lone_row_has_the_bits_it_has_among_others(backend: Backend) -> None:
    """Sums of floats, variates, thresholds: one row alone, three, eight; in the middle of memory, at any step from row to row."""
    xp, n = backend.xp, 2999
    x = np.random.default_rng(5).standard_normal((8, n + 3)).astype(np.float32)
    k, mass = column(range(1, 9), np.int32), column(np.linspace(1, 900, 8), np.float32)
    keys, blocks = column(range(8), np.int32), draws.token_blocks(n)[None]
    device = [backend.to_device(a) for a in (x, np.abs(x), k, mass, keys, blocks)]

    def results(begin: int, end: int) -> list[HostArray]:
        rows, weights, ranks, masses, states = (a[begin:end] for a in device[:5])
        rows, weights = rows[:, 1 : n + 1], weights[:, 1 : n + 1]
        made = (
            xp.sum(rows),
            xp.kth_largest(rows, ranks),
            xp.mass_cutoff(weights, masses),
            xp.gumbel(states, device[5]),
            *xp.top_k(rows, 5),
        )
        return [backend.to_host(a) for a in made]

    whole = results(0, 8)
    for begin, end in ((0, 1), (7, 8), (2, 5)):
        for part, all_rows in zip(results(begin, end), whole, strict=True):
            assert part.tobytes() == all_rows[begin:end].tobytes()
    np.testing.assert_allclose(whole[0], x[:, 1 : n + 1].sum(-1, keepdims=True, dtype=np.float64), atol=2e-4)


@pytest.mark.clause("C4")
def test_the_reference_hash_is_the_published_one() -> None:
    vectors = {
        (b"", 0): 0,
        (b"", 1): 0x514E28B7,
        (b"", 0xFFFFFFFF): 0x81F16F39,
        (b"\0\0\0\0", 0): 0x2362F9DE,
        (b"test", 0): 0xBA6BD213,
        (b"Hello, world!", 0x9747B28C): 0x24884CBA,
        (b"The quick brown fox jumps over the lazy dog", 0x9747B28C): 0x2FA826CD,
    }
    assert {key: murmur3(*key) for key in vectors} == vectors


SEEDS = (0, 1, -1, 12345, 2**31 - 1, -(2**31))
POSITIONS = (0, 1, 7, 4096, 131071, 2**31 - 1)


@pytest.mark.clause("C4")
def test_draws_are_a_published_hash_of_seed_position_and_token(backend: Backend) -> None:
    """The same integers on every backend: MurmurHash3 of the two words, in wrapping int32."""
    seeds, positions = (a.reshape(-1).astype(np.int32) for a in np.meshgrid(SEEDS, POSITIONS))
    keys = draws.row_keys(backend.to_device(seeds), backend.to_device(positions))
    tokens = draws.token_blocks(50_000)
    picked = [0, 1, 2, 31, 32, 266, 49_151, 49_999]
    blocks = backend.to_device(tokens[picked][None])
    got = backend.to_host(draws.draw_bits(backend.xp.reshape(keys, (-1, 1)), blocks))
    want = [
        [murmur3(struct.pack("<ii", position, token), seed) for token in picked]
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(got.view(np.uint32), np.array(want, np.uint32))


def exact_variates(bits: HostArray) -> HostArray:
    """In float64, of u in float32: its upper 31 bits, exclusive of both ends. ``1 - u`` has an error of at most 2**-25."""
    upper = np.minimum(bits.astype(np.uint64) >> np.uint64(1), np.uint64(2**31 - 128)).astype(np.float32)
    u = (upper + np.float32(0.5)) * np.float32(2.0**-31)
    assert ((u > 0) & (u < 1)).all()
    variates: HostArray = -np.log(-np.log1p(-u.astype(np.float64)))
    return variates


@pytest.mark.clause("C4")
def test_variates_are_gumbels_of_the_hash(backend: Backend) -> None:
    keys, n = int32([3], [-77], [2**31 - 1]), 60_000
    bits = draws.draw_bits(keys, draws.token_blocks(n)[None]).view(np.uint32)
    want = exact_variates(bits)
    got = backend.to_host(backend.xp.gumbel(backend.to_device(keys), backend.to_device(draws.token_blocks(n)[None])))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)
    assert want.max() > 9.5


@pytest.mark.clause("C4")
def test_variates_at_both_ends_are_finite(backend: Backend) -> None:
    """Blocks made so that the hash comes out as all zeros, all ones, and in the place where the series begins."""
    wanted = np.array([0, 1, 2, 2**24, 2**24 + 1, 2**32 - 2, 2**32 - 1, 2**32 - 200], np.uint64)
    blocks = np.array([block_for(int(h)) for h in wanted], np.uint32).view(np.int32)[None]
    np.testing.assert_array_equal(draws.draw_bits(int32([0]), blocks).view(np.uint32)[0], wanted)
    got = backend.to_host(backend.xp.gumbel(backend.to_device(int32([0])), backend.to_device(blocks)))[0]
    np.testing.assert_allclose(got, exact_variates(wanted), rtol=1e-6, atol=1e-5)
    assert got[0] > 22
    assert got[-1] < -2.8


def block_for(h: int) -> int:
    """The mixed block with which key 0 hashes to ``h``: the last steps of the hash backwards, each of which is one to one."""
    mask = 0xFFFFFFFF
    h ^= h >> 16
    for shift, factor in ((13, 0xC2B2AE35), (16, 0x85EBCA6B)):
        h = h * pow(factor, -1, 2**32) & mask
        x = h
        for _ in range(32 // shift + 1):
            x = h ^ (x >> shift)
        h = x
    h = ((h ^ 8) - 0xE6546B64) * pow(5, -1, 2**32) & mask
    return ((h >> 13) | (h << 19)) & mask


@pytest.mark.clause("C4")
@pytest.mark.parametrize("n", [1, 15, 32, 33, 100, 267])
def test_the_penalty_reaches_the_columns_of_the_bitmap(backend: Backend, n: int) -> None:
    x = floats(5, n)
    x[3, 0], x[4, -1] = NAN, -INF
    marked = np.random.default_rng(n).random((5, n)) < 0.4
    marked[0], marked[1] = True, False
    words = -(-n // 32)
    seen = np.zeros((5, words * 32), np.uint8)
    seen[:, :n] = marked
    packed = np.packbits(seen, axis=-1, bitorder="little").view("<i4").astype(np.int32)
    penalty = column([1.3, 2.0, 1.0, 0.5, 1.1], np.float32)
    device = [backend.to_device(a) for a in (x, packed, draws.bit_values(), penalty)]
    got = backend.to_host(backend.xp.penalise(*device))
    want = np.where(marked, np.where(x < 0, x * penalty, x / penalty), x)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got[2], x[2])
