"""Operations that take a row together: exact where they choose, and with bits that depend on the row alone (clauses C4, D5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forebay.specs import draws
from forebay.specs.dtypes import Array, HostArray
from tests.backends_tpu.device import Device

NAN, INF = np.nan, np.inf
LOW, HIGH = -(2**31), 2**31 - 1


def awkward(n: int) -> HostArray:
    """Rows of equal, infinite, missing and subnormal numbers and of both zeros."""
    rows = np.round(np.random.default_rng(n).normal(0, 3, (8, n)), 1).astype(np.float32)
    rows[0] = 1.5
    rows[1, ::2], rows[2, ::3], rows[3, ::4] = -INF, INF, NAN
    rows[4], rows[5] = -INF, NAN
    rows[6] = np.float32(1e-42) * (np.arange(n) - n // 2)
    rows[7] = np.where(np.arange(n) % 2, 0.0, -0.0)
    return rows


def falling(x: HostArray) -> HostArray:
    """Columns from the largest to the smallest: NaN first, the first of equals first."""
    return np.argsort(np.where(np.isnan(x), -np.inf, -x), axis=-1, kind="stable")


@pytest.mark.clause("C4")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("n", [2, 33, 1000])
def test_argmax_is_the_first_maximum_and_nan_is_one(device: Device, n: int, dtype: str) -> None:
    x = device.put(awkward(n), dtype)
    got = device.host(device.xp.argmax(x))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, np.argmax(device.host(x), -1))


@pytest.mark.clause("C4")
@pytest.mark.parametrize("n", [1, 5, 267])
@pytest.mark.parametrize("k", [LOW, -1, 0, 1, 2, 5, 267, 268, HIGH])
def test_the_kth_largest_counts_equals_one_by_one(device: Device, n: int, k: int) -> None:
    x = awkward(n)
    ordered = np.take_along_axis(x, falling(x), 1)
    want = ordered[:, k - 1 : k] if 1 <= k <= n else np.full((len(x), 1), -INF)
    got = device.host(device.xp.kth_largest(device.put(x), device.put(np.full((len(x), 1), k, np.int32))))
    np.testing.assert_array_equal(got, want)


@pytest.mark.clause("C4")
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 1), (33, 20), (33, 33), (1000, 3)])
def test_top_k_falls_and_has_the_first_of_equals_first(device: Device, n: int, k: int) -> None:
    x = awkward(n)
    values, places = (device.host(a) for a in device.xp.top_k(device.put(x), k))
    want = falling(x)[:, :k]
    assert places.dtype == np.int32
    np.testing.assert_array_equal(places, want)
    assert values.tobytes() == np.take_along_axis(x, want, 1).tobytes()


def cutoff(row: HostArray, mass: float) -> float:
    """By the words of the operation: try every element."""
    reached = [t for t in row if row[row >= t].astype(np.float64).sum() >= mass]
    return -INF if np.isnan(row).any() else max(reached, default=-INF)


@pytest.mark.clause("C4")
@pytest.mark.parametrize("n", [1, 16, 267])
@pytest.mark.parametrize("part", [-0.1, 0.0, 0.3, 0.9, 1.0, 1.1])
def test_a_cutoff_is_the_largest_whose_mass_is_reached(device: Device, n: int, part: float) -> None:
    """Multiples of 1/16, whose sums are exact in any order."""
    p = np.abs(np.round(np.random.default_rng(n).normal(0, 3, (6, n)) * 16) / 16).astype(np.float32)
    p[1], p[2], p[3, 0], p[4, -1] = 0.0, 0.25, NAN, INF
    mass = np.round(np.nansum(np.where(p == INF, 0, p), -1, keepdims=True) * part * 16).astype(np.float32) / 16
    mass[5] = NAN if part > 1 else mass[5]
    want = np.array([[cutoff(row, m[0])] for row, m in zip(p, mass, strict=True)], np.float32)
    np.testing.assert_array_equal(device.host(device.xp.mass_cutoff(device.put(p), device.put(mass))), want)


@pytest.mark.clause("C4")
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_additions_reach_their_columns_and_no_others(device: Device, dtype: Any) -> None:
    x = np.arange(27, dtype=dtype).reshape(3, 9)
    indices = np.array([[0, 8, 3, 3, 0, 3], [-1, -9, LOW, 9, 10, HIGH], [-1, 5, -1, 5, 9, 0]], np.int32)
    values = np.arange(1, 19, dtype=dtype).reshape(3, 6)
    want = x.copy()
    for row, column in np.ndindex(indices.shape):
        if 0 <= indices[row, column] < 9:
            want[row, indices[row, column]] += values[row, column]
    got = device.host(device.xp.add_along(*(device.put(a) for a in (x, indices, values))))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.clause("C4")
def test_integers_wrap(device: Device) -> None:
    xp, x = device.xp, np.array([[HIGH, 1, 0], [LOW, -1, 5]], np.int32)
    assert device.host(xp.sum(device.put(x))).tolist() == [[LOW], [4 + LOW]]
    word = xp.add_along(*(device.put(np.array([[v]], np.int32)) for v in (2**30, 0, LOW)))
    assert device.host(word).tolist() == [[2**30 + LOW]]
    assert device.host(device.put(x) + 1).tolist() == [[LOW, 2, 1], [LOW + 1, 0, 6]]


@pytest.mark.clause("D5")
def test_a_sum_is_exact_where_its_parts_are_and_of_nothing_is_nothing(device: Device) -> None:
    for n in (1, 7, 8, 9, 64, 65, 4097):
        x = np.random.default_rng(n).integers(-99, 99, (2, n)).astype(np.float32)
        np.testing.assert_array_equal(device.host(device.xp.sum(device.put(x))), x.sum(-1, keepdims=True))
    assert device.host(device.xp.sum(device.put(np.ones((2, 0), np.float32)))).tolist() == [[0], [0]]


@pytest.mark.clause("D1")
def test_a_quotient_is_the_nearest_also_by_a_number_or_a_column(device: Device) -> None:
    """XLA would multiply with the reciprocal."""
    x = np.random.default_rng(0).normal(0, 1, (5, 267)).astype(np.float32)
    by = np.array([[1.3], [2.0], [7.0], [-0.3], [1.1]], np.float32)
    a, b = device.put(x), device.put(by)
    np.testing.assert_array_equal(device.host(a / 1.3), x / np.float32(1.3))
    for made in (a / b, *device.replayed(lambda a, b: a / device.xp.repeat(b, 267), a, b)):
        np.testing.assert_array_equal(device.host(made), x / by)


@pytest.mark.clause("C4")
def test_the_penalty_reaches_the_columns_of_the_bitmap(device: Device) -> None:
    x = awkward(267)
    x[6] = np.linspace(-2, 2, 267)  # no subnormals: XLA computes with zeros in their place
    marked = np.random.default_rng(1).random(x.shape) < 0.4
    seen = np.zeros((8, 9 * 32), np.uint8)
    seen[:, :267] = marked
    words = np.packbits(seen, axis=-1, bitorder="little").view("<i4").astype(np.int32)
    penalty = np.array([1.3, 2.0, 1.0, 0.5, 1.1, 3.0, 1.0, 1.7], np.float32)[:, None]
    got = device.host(device.xp.penalise(*(device.put(a) for a in (x, words, draws.bit_values(), penalty))))
    np.testing.assert_array_equal(got, np.where(marked, np.where(x < 0, x * penalty, x / penalty), x))


@pytest.mark.clause("C4")
def test_variates_are_gumbels_of_the_hash(device: Device) -> None:
    keys, blocks = np.array([[3], [-77], [HIGH]], np.int32), draws.token_blocks(20_000)[None]
    upper = np.minimum(draws.draw_bits(keys, blocks).view(np.uint32) >> 1, 2**31 - 128).astype(np.float32)
    u = (upper + np.float32(0.5)) * np.float32(2.0**-31)
    got = device.host(device.xp.gumbel(device.put(keys), device.put(blocks)))
    np.testing.assert_allclose(got, -np.log(-np.log1p(-u.astype(np.float64))), rtol=1e-6, atol=1e-5)


ROWS: dict[str, Callable[[Any, Array, Array], Any]] = {
    "sum": lambda xp, x, k: xp.sum(x),
    "mean": lambda xp, x, k: xp.mean(x),
    "max": lambda xp, x, k: xp.max(x),
    "argmax": lambda xp, x, k: xp.argmax(x),
    "kth_largest": lambda xp, x, k: xp.kth_largest(x, k),
    "top_k": lambda xp, x, k: xp.top_k(x, 5),
    "mass_cutoff": lambda xp, x, k: xp.mass_cutoff(xp.exp(x), xp.astype(k * 99, "float32")),
    "gumbel": lambda xp, x, k: xp.gumbel(k, xp.reshape(xp.bitcast(x[:1], "int32"), (1, -1))),
    "rms_norm": lambda xp, x, k: xp.rms_norm(x, xp.reshape(x[:1] * 0 + 0.7, (-1,)), 1e-5),
    "silu": lambda xp, x, k: xp.silu(x),
    "exp": lambda xp, x, k: xp.exp(x - xp.max(x)),
    "sum of squares": lambda xp, x, k: xp.sum(x[:, :2048] * x[:, :2048]),
    "log": lambda xp, x, k: xp.log(xp.maximum(x, 0 - x)),
    "tanh": lambda xp, x, k: xp.tanh(x),
    "quotient": lambda xp, x, k: x / xp.max(x),
}


@pytest.mark.clause("D5", "C4")
@pytest.mark.parametrize("how", ["alone", "replayed"])
@pytest.mark.parametrize("name", ROWS)
def test_a_lone_row_has_the_bits_it_has_among_others(device: Device, name: str, how: str) -> None:
    """Each operation by itself and as a program, cut out of wider memory."""
    n = 2999
    x = np.random.default_rng(5).normal(0, 1, (11, n + 3)).astype(np.float32)
    ranks = np.arange(1, 12, dtype=np.int32)[:, None]

    def results(rows: slice) -> list[HostArray]:
        def op(a: Array, k: Array) -> list[Array]:
            made = ROWS[name](device.xp, a[:, 1 : n + 1], k)
            return [*made] if isinstance(made, tuple) else [made]

        arrays = device.put(x[rows]), device.put(ranks[rows])
        return [device.host(a) for a in (op(*arrays) if how == "alone" else device.replayed(op, *arrays))]

    if name == "gumbel":
        x[:] = x[:1]  # its blocks are those of the first row
    whole = results(slice(None))
    for rows in (slice(0, 1), slice(4, 7)):
        for part, of_all in zip(results(rows), whole, strict=True):
            assert part.tobytes() == of_all[rows].tobytes()
