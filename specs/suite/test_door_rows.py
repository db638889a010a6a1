"""The rows that pass the doors of a pool: their dtypes, shapes and strides, and what is refused (clauses D1, L3, W6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, InvalidInput, WriteLoc
from forebay.specs.suite import attention
from forebay.specs.suite.kv import (
    BLOCK_SIZE,
    EACH_KV_DTYPE,
    HEAD_DIM,
    LAYOUTS,
    device_rows,
    geometry,
    held,
    int32,
    new_pool,
    put,
    put_values,
    refused,
    same_bits,
    slot,
    unchanged,
)

HARD = np.array(
    [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 2**-7 + 2**-8, 1 + 3 * 2**-9, 3.1415927, -2.7182817, 1e-30, 65504.0, 2**-14, 6e-8],
    np.float32,
)
"""Ties to even both ways, a value nearer to each side, tiny and large ones (all within float16)."""


@pytest.mark.clause("D1")
@pytest.mark.parametrize("kv_dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_door_rounds_rows_to_the_pools_dtype(backend: Backend, layout: str, dtype: str, kv_dtype: str) -> None:
    """Rows of any float dtype become the nearest value of the pool's, ties to even; equal dtypes keep their bits."""
    g = geometry(layout, dtype=kv_dtype)
    k = np.broadcast_to(np.resize(HARD, g.key_dim), (2, g.num_kv_heads, g.key_dim)).copy()
    k[1] *= -1
    device_k = backend.to_device(k, dtype)
    given_k = attention.nearest(k, dtype)
    with new_pool(backend, g, layout) as pool:
        slots = [slot(pool, 0), slot(pool, 2, 3)]
        pool.write(0, WriteLoc.slots(int32(*slots)), device_k, None if layout == "LATENT" else device_k)
        read = pool.read(0, WriteLoc.slots(int32(*slots)))
        assert [backend.xp.dtype(x) for x in read] == [kv_dtype] * 2
        want = attention.nearest(given_k, kv_dtype)
        same_bits(backend.to_host(read[0]).astype(np.float32), want)
        same_bits(backend.to_host(read[1]).astype(np.float32), np.ascontiguousarray(want[..., : g.value_dim]))


@pytest.mark.clause("D1", "L3")
@pytest.mark.parametrize("kv_dtype", EACH_KV_DTYPE)
def test_nan_and_inf_survive_the_door(backend: Backend, kv_dtype: str) -> None:
    g = geometry(dtype=kv_dtype)
    nan = np.uint32(0x7F800001).view(np.float32)
    special = np.array([np.nan, np.inf, -np.inf, nan, 3.4e38, -3.4e38], np.float32)
    with new_pool(backend, g) as pool:
        k = np.zeros((1, 2, HEAD_DIM), np.float32)
        k[..., : len(special)] = special
        put(backend, pool, [slot(pool, 0)], k, np.zeros_like(k))
        got = backend.to_host(pool.read(0, WriteLoc.slots(int32(slot(pool, 0))))[0])[0, 0, : len(special)]
        np.testing.assert_array_equal(np.isnan(got), [True, False, False, True, False, False])
        rounded = attention.nearest(special, kv_dtype)
        assert np.isfinite(rounded[4:]).all() == (kv_dtype == "float32")
        np.testing.assert_array_equal(got[[1, 2, 4, 5]], rounded[[1, 2, 4, 5]])


@pytest.mark.clause("D1", "L1")
def test_rows_and_ids_may_be_strided(backend: Backend) -> None:
    """Rows taken out of larger device arrays, ids out of a column: only their values count."""
    g = geometry()
    with new_pool(backend, g) as pool:
        wide = np.random.default_rng(0).standard_normal((3, 4, 2 * HEAD_DIM)).astype(np.float32)
        device = backend.to_device(wide)
        ids = backend.to_device(np.array([[16, 0], [33, 0], [50, 0]], np.int32))[:, 0]
        pool.write(0, WriteLoc.slots(ids), device[:, ::2, 3 : 3 + HEAD_DIM], device[:, 1:3, ::2])
        k, v = (backend.to_host(x) for x in pool.read(0, WriteLoc.slots(int32(16, 33, 50))))
        same_bits(k, np.ascontiguousarray(wide[:, ::2, 3 : 3 + HEAD_DIM]))
        same_bits(v, np.ascontiguousarray(wide[:, 1:3, ::2]))


@pytest.mark.clause("W6", "D1")
def test_many_rows_are_one_call(backend: Backend) -> None:
    """A prefill of 17,000 rows lands whole, in any order; so does a copy of all of them."""
    n = 17000
    g = geometry(num_blocks=2 * (-(-n // BLOCK_SIZE)) + 1, num_kv_heads=1)
    with new_pool(backend, g) as pool:
        slots = (slot(pool, 0) + np.random.default_rng(0).permutation(n)).astype(np.int32)
        behind = (slots + slot(pool, -(-n // BLOCK_SIZE)) - slot(pool, 0)).astype(np.int32)
        values = np.arange(1, n + 1, dtype=np.float32)
        pool.write(0, WriteLoc.slots(backend.to_device(slots)), *device_rows(backend, g, values))
        same_bits(held(backend, pool, slots), values)
        pool.copy(WriteLoc.slots(backend.to_device(slots)), WriteLoc.slots(backend.to_device(behind)))
        same_bits(held(backend, pool, behind), values)
        read = pool.read(0, WriteLoc.slots(backend.to_device(behind)))
        same_bits(backend.to_host(read[0])[:, 0, 0], values)


@pytest.mark.clause("W6", "D1")
def test_no_rows_are_a_legal_call(backend: Backend) -> None:
    """They change nothing, and the doors work on."""
    g = geometry()
    with new_pool(backend, g) as pool:
        put_values(backend, pool, [16], [3])
        none = WriteLoc.slots(np.zeros(0, np.int32))
        with unchanged(backend, pool):
            pool.write(0, none, *device_rows(backend, g, []))
            pool.copy(none, none)
            assert [backend.to_host(x).shape for x in pool.read(0, none)] == [(0, 2, HEAD_DIM)] * 2
        assert (backend.to_host(pool.read(0, WriteLoc.slots(int32(16)))[1]) == 3).all()


@pytest.mark.refuses("W6", "D1", "W3")
@pytest.mark.parametrize("door", ["write", "read", "copy src", "copy dst"])
@pytest.mark.parametrize(
    ("loc", "says"),
    [
        (int32(4), "got ndarray, expected a WriteLoc"),
        ([4], "got list, expected a WriteLoc"),
        (None, "got NoneType, expected a WriteLoc"),
        (WriteLoc(), "an empty WriteLoc"),
        (WriteLoc.slots([16]), "slot ids: got list, expected a numpy or device array of int32"),
        (WriteLoc.slots(16), "slot ids: got int"),
        (WriteLoc.slots(np.array([4], np.uint16)), "slot ids: got numpy uint16, expected int32 or int64"),
        (WriteLoc.slots(np.array([4], np.uint32)), "slot ids: got numpy uint32"),
        (WriteLoc.slots(np.array([4], np.int16)), "slot ids: got numpy int16"),
        (WriteLoc.slots(np.array([4.0])), "slot ids: got numpy float64"),
        (WriteLoc.slots(np.array([True])), "slot ids: got numpy bool"),
        (WriteLoc.slots(np.array([2**32 + 16])), "slot ids: int64 values 4294967312 to 4294967312 do not fit int32"),
        (WriteLoc.slots(int32([4])), r"slot ids: got shape \(1, 1\), expected 1-D"),
        (WriteLoc.slots(np.int32(4)), "slot ids: got int32, expected a numpy or device array"),
        (WriteLoc.paged(int32([1]), int32(4), table_len=2), "table_len 2; expected .* at most the table's width"),
        (WriteLoc.paged(int32([1], [2]), int32(4), table_len=1), "expected equal row counts"),
        (WriteLoc.paged(int32(1), int32(4), table_len=1), r"block table: got shape \(1,\), expected 2-D"),
        (WriteLoc.paged(np.array([[1]], np.uint16), int32(0), table_len=1), "block table: got numpy uint16"),
        (WriteLoc.paged(np.array([[2**40]]), int32(0), table_len=1), "block table: int64 values .* do not fit int32"),
        (WriteLoc.paged(int32([1]), np.array([0.0]), table_len=1), "positions: got numpy float64"),
        (WriteLoc.paged(int32([1]), np.array([2**33]), table_len=1), "positions: int64 values .* do not fit"),
        (
            WriteLoc.paged(int32([1]), int32([[0]]), table_len=1),
            r"positions: got shape \(1, 1, 1\), expected 1-D or 2-D",
        ),
        (WriteLoc.paged(int32([1]), int32(16), table_len=1), "row 0 has slot 64"),
        (WriteLoc.paged(int32([1]), int32(-2), table_len=1), "row 0 has slot 64"),
        (WriteLoc.paged(int32([-1]), int32(0), table_len=1), "row 0 has slot 64"),
        (WriteLoc.paged(int32([4]), int32(0), table_len=1), "row 0 has slot 64"),
    ],
)
def test_a_wrong_location_is_refused_at_every_door(backend: Backend, door: str, loc: Any, says: str) -> None:
    g = geometry()
    with new_pool(backend, g) as pool:
        put_values(backend, pool, [16], [3])
        good = WriteLoc.slots(int32(17))
        k, v = device_rows(backend, g, [1])
        doors: dict[str, Callable[[], Any]] = {
            "write": lambda: pool.write(0, loc, k, v),
            "read": lambda: pool.read(0, loc),
            "copy src": lambda: pool.copy(loc, good),
            "copy dst": lambda: pool.copy(good, loc),
        }
        with refused(backend, InvalidInput, f"pool.{door.split()[0]}.*{says}", pool):
            doors[door]()


@pytest.mark.refuses("W6", "D1")
def test_wrong_rows_and_layers_are_refused(backend: Backend) -> None:
    g = geometry()
    with new_pool(backend, g) as pool:
        loc = WriteLoc.slots(int32(16, 17))
        k, v = device_rows(backend, g, [1, 2])
        wide = backend.to_device(np.zeros((2, 2, 65), np.float32))
        ints = backend.to_device(np.zeros((2, 2, 64), np.int32))
        flat = backend.to_device(np.zeros((2, 128), np.float32))
        one = device_rows(backend, g, [1])[0]
        for args, says in (
            ((0, loc, one, v), r"k: got float32\[1, 2, 64\], expected a float \[2, 2, 64\]"),
            ((0, loc, k, one), r"v: got float32\[1, 2, 64\]"),
            ((0, loc, wide, v), r"k: got float32\[2, 2, 65\]"),
            ((0, loc, k, wide), r"v: got float32\[2, 2, 65\]"),
            ((0, loc, flat, v), r"k: got float32\[2, 128\]"),
            ((0, loc, ints, v), r"k: got int32\[2, 2, 64\]"),
            ((0, loc, np.zeros((2, 2, 64), np.float32), v), "k: got ndarray, expected a device array"),
            ((0, loc, k, np.zeros((2, 2, 64), np.float32)), "v: got ndarray, expected a device array"),
            ((0, loc, None, v), "k: got NoneType"),
            ((0, loc, k), "layout .* needs v"),
            ((1, loc, k, v), "got layer 1, expected 0 to 0"),
            ((-1, loc, k, v), "got layer -1"),
            ((True, loc, k, v), "got layer True"),
            ((0.0, loc, k, v), "got layer 0.0"),
        ):
            with refused(backend, InvalidInput, says, pool):
                pool.write(*args)
        layer: Any  # None too, which a type checker would refuse first
        for layer in (1, -1, None):
            with refused(backend, InvalidInput, f"read.*got layer {layer}", pool):
                pool.read(layer, loc)
        latent = geometry("LATENT")
        with new_pool(backend, latent, "LATENT") as other:
            k_latent, _ = device_rows(backend, latent, [1, 2])
            with refused(backend, InvalidInput, "LATENT keeps V inside K, so pass v=None", other):
                other.write(0, loc, k_latent, k_latent)


@pytest.mark.clause("L3")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_read_of_a_pad_is_zero_whatever_the_pool_holds(backend: Backend, layout: str) -> None:
    """And the row between two pads is its own."""
    with new_pool(backend, geometry(layout), layout) as pool:
        put_values(backend, pool, [25], [3])
        for ids in (int32(-1, 25, -1), backend.to_device(int32(-1, 25, -1))):
            k, v = (backend.to_host(x) for x in pool.read(0, WriteLoc.slots(ids)))
            assert not any(x[[0, 2]].view(np.uint32).any() for x in (k, v))
            assert (v[1] == 3).all()
        assert pool.dropped == 0
