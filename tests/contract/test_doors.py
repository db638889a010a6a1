"""The doors of a pool: what they do with every id, every row and every dtype (clauses W6, W8, D1, L3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import Backend, InvalidInput, KVGeometry, Pool, WriteLoc
from tests.contract import oracle
from tests.contract.kv import (
    KV_DTYPES,
    LAYOUTS,
    bytes_of,
    geometry,
    int32,
    new_pool,
    put,
    put_values,
    refused,
    same_bits,
    slot,
    unchanged,
)
from tests.contract.oracle import Array

Where = Callable[[Backend, npt.ArrayLike], Any]
HOST: Where = lambda _, ids: np.asarray(ids, np.int32)  # noqa: E731
DEVICE: Where = lambda backend, ids: backend.to_device(np.asarray(ids, np.int32))  # noqa: E731
BOTH = pytest.mark.parametrize("where", [HOST, DEVICE], ids=["host", "device"])


def rows(backend: Backend, g: KVGeometry, values: Any, dtype: str | None = None) -> tuple[Any, Any]:
    """Device rows that hold one number each, in K and, negated, in V (None in LATENT)."""
    ones = np.ones((len(values), g.num_kv_heads, g.key_dim), np.float32)
    k = np.array(values, np.float32)[:, None, None] * ones
    v = None if g.value_head_dim is not None else backend.to_device(-k, dtype)
    return backend.to_device(k, dtype), v


def held(backend: Backend, pool: Pool, slots: Any, layer: int = 0) -> Array:
    """The first element of K at each slot, as the device stores it (not through a door)."""
    slots, bs = np.asarray(slots), pool.geometry.block_size
    arrays = oracle.stored(backend, pool, layer)
    return oracle.rows_at(pool.layout, arrays, pool.geometry, slots // bs, slots % bs)[0][:, 0, 0]


# -- A01: pads never wrap --------------------------------------------------------------------------------------------------


@pytest.mark.clause("W6", "L3")
@pytest.mark.case("A01")
@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pad_writes_nothing_and_never_wraps(backend: Backend, layout: str, where: Where) -> None:
    """7 in the last slot, then slots [a, b, -1, -1]: the last slot still holds 7, every other byte is as it was."""
    g = geometry(layout, num_blocks=5, head_dim=2)
    with new_pool(backend, g, layout) as pool:
        last = pool.num_slots - 1
        pool.write(0, WriteLoc.slots(where(backend, [last])), *rows(backend, g, [7]))
        first = slot(pool, 0)
        want = oracle.stored(backend, pool, 0)
        pool.write(0, WriteLoc.slots(where(backend, [first, first + 1, -1, -1])), *rows(backend, g, [1, 2, 99, 99]))
        assert held(backend, pool, [first, first + 1, last]).tolist() == [1, 2, 7]
        pool.write(0, WriteLoc.slots(where(backend, [-1])), *rows(backend, g, [99]))
        assert pool.dropped == 0
        written = sum(int((a != b).sum()) for a, b in zip(want, oracle.stored(backend, pool, 0), strict=True))
        nans = sum(int(np.isnan(a).sum()) for a in oracle.stored(backend, pool, 0))
        assert written - nans == 2 * g.num_kv_heads * 2 * (1 if layout == "LATENT" else 2)


@pytest.mark.clause("W6")
@pytest.mark.case("A01")
@pytest.mark.parametrize("bad", [-2, -16, -17, 20, 21, 35, 2**31 - 1, -(2**31)])
def test_an_id_outside_the_pool_raises_on_the_host_and_is_counted_on_the_device(backend: Backend, bad: int) -> None:
    g = geometry(num_blocks=5)
    with new_pool(backend, g) as pool:
        good = slot(pool, 1)
        put_values(backend, pool, [good], [5])
        k, v = rows(backend, g, [1, 2])
        loc = WriteLoc.slots(int32(good, bad))
        says = f"row 1 has slot {bad}, expected 0 <= slot < 20"
        for door in (
            lambda: pool.write(0, loc, k, v),
            lambda: pool.read(0, loc),
            lambda: pool.copy(loc, WriteLoc.slots(int32(good, good + 1))),
            lambda: pool.copy(WriteLoc.slots(int32(good, good + 1)), loc),
        ):
            with refused(backend, InvalidInput, says, pool):
                door()
        device_loc = WriteLoc.slots(backend.to_device(int32(good + 1, bad)))
        before = bytes_of(backend, *pool.storage(0))
        pool.write(0, device_loc, k, v)
        assert pool.dropped == 1
        read = backend.to_host(pool.read(0, device_loc)[0])
        assert (read[0] == 1).all()
        assert not read[1].view(np.uint32).any()
        assert pool.dropped == 2
        put_back = WriteLoc.slots(backend.to_device(int32(good)))
        pool.copy(put_back, WriteLoc.slots(backend.to_device(int32(bad))))
        pool.copy(WriteLoc.slots(backend.to_device(int32(bad))), put_back)
        assert pool.dropped == 4
        changed = [a != b for a, b in zip(before, bytes_of(backend, *pool.storage(0)), strict=True)]
        assert any(changed)
        assert held(backend, pool, [good, good + 1]).tolist() == [0, 1]


@pytest.mark.clause("W6", "L4", "C9")
@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sink_ids_are_dropped_and_counted(backend: Backend, layout: str, where: Where) -> None:
    g = geometry(layout)
    with new_pool(backend, g, layout) as pool:
        sink = WriteLoc.slots(where(backend, [0, 3, 3]))
        live = WriteLoc.slots(where(backend, [4, 5, 6]))
        total = backend.counters.dropped
        with unchanged(backend, *pool.storage(0)):
            pool.write(0, sink, *rows(backend, g, [1, 2, 3]))
        assert pool.dropped == 3
        pool.write(0, live, *rows(backend, g, [1, 2, 3]))
        with unchanged(backend, *pool.storage(0)):
            pool.copy(live, sink)
            pool.copy(sink, live)
        assert pool.dropped == 9
        assert not any(backend.to_host(x).view(np.uint8).any() for x in pool.read(0, sink))
        assert pool.dropped == 12
        assert backend.counters.dropped - total == 12
    assert backend.counters.dropped - total == 12


@pytest.mark.clause("W6")
@BOTH
def test_a_copy_drops_a_row_once(backend: Backend, where: Where) -> None:
    """Both ends in the sink, in three layers: one row, counted once; a pad at either end: a pad, counted not at all."""
    with new_pool(backend, geometry(num_layers=3)) as pool:
        put_values(backend, pool, [4, 5], [1, 2])
        with unchanged(backend, *(buffer for layer in range(3) for buffer in pool.storage(layer))):
            pool.copy(WriteLoc.slots(where(backend, [0, 1])), WriteLoc.slots(where(backend, [2, 2])))
            assert pool.dropped == 2
            pool.copy(WriteLoc.slots(where(backend, [-1, 4, -1, 2])), WriteLoc.slots(where(backend, [4, -1, 0, -1])))
            assert pool.dropped == 2


@pytest.mark.clause("W6", "W8", "L3")
@given(data=st.data())
def test_any_device_ids_do_what_the_rule_says(backend: Backend, data: st.DataObject) -> None:
    """Against a dictionary: pads nothing, slots of the pool land whole, the rest is counted and lands nowhere."""
    layout = data.draw(st.sampled_from(LAYOUTS))
    g = geometry(layout, num_blocks=data.draw(st.integers(2, 5)), block_size=data.draw(st.integers(1, 5)), head_dim=3)
    with new_pool(backend, g, layout) as pool:
        n, low = pool.num_slots, pool.first_block * g.block_size
        near = st.integers(-3, n + 3) | st.sampled_from([2**31 - 1, -(2**31), n * 2**10])
        model: dict[int, float] = {}
        dropped = 0
        for step in range(3):
            ids = data.draw(st.lists(near, max_size=12, unique_by=lambda i: i if low <= i < n else object()))
            values = [100.0 * (step + 1) + i for i in range(len(ids))]
            pool.write(0, WriteLoc.slots(DEVICE(backend, np.array(ids, np.int64))), *rows(backend, g, values))
            model |= {i: value for i, value in zip(ids, values, strict=True) if low <= i < n}
            dropped += sum(not low <= i < n and i != -1 for i in ids)
        assert pool.dropped == dropped
        everywhere = np.arange(low, n)
        got = held(backend, pool, everywhere)
        for i, value in zip(everywhere, got, strict=True):
            assert (value == model[int(i)]) if int(i) in model else not np.isfinite(value)
        if low:
            assert not np.isfinite(held(backend, pool, np.arange(low))).any()


# -- W8: one block, several rows -------------------------------------------------------------------------------------------


@pytest.mark.clause("W8")
@pytest.mark.case("I05")
@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_one_call_in_one_block_land_whole_in_any_order(backend: Backend, layout: str, where: Where) -> None:
    g = geometry(layout)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        with new_pool(backend, g, layout) as pool:
            block = [slot(pool, 1, t) for t in range(4)]
            pool.write(0, WriteLoc.slots(where(backend, block)), *rows(backend, g, [9] * 4))
            ids, values = [block[t] for t in order], [t + 1.0 for t in order]
            pool.write(0, WriteLoc.slots(where(backend, ids)), *rows(backend, g, values))
            assert held(backend, pool, block).tolist() == [1, 2, 3, 4]
            read = pool.read(0, WriteLoc.slots(where(backend, block)))
            assert backend.to_host(read[0])[:, 0, 0].tolist() == [1, 2, 3, 4]
            sign = 1 if layout == "LATENT" else -1
            assert (backend.to_host(read[1]) * sign == np.arange(1, 5, dtype=np.float32)[:, None, None]).all()


@pytest.mark.clause("W8")
@pytest.mark.case("I05")
def test_duplicate_slots_of_one_host_known_call_are_refused(backend: Backend) -> None:
    g = geometry()
    with new_pool(backend, g) as pool:
        a = slot(pool, 1)
        k, v = rows(backend, g, [1, 2, 3])
        says = f"slot {a} is given to 2 rows of one call"
        loc = WriteLoc.slots(int32(a, a + 1, a))
        with refused(backend, InvalidInput, says, pool):
            pool.write(0, loc, k, v)
        with refused(backend, InvalidInput, says, pool):
            pool.copy(WriteLoc.slots(int32(a + 1, a + 2, a + 3)), loc)
        paged = WriteLoc.paged(int32([a // 4], [a // 4], [a // 4]), int32(0, 1, 0), table_len=1)
        with refused(backend, InvalidInput, says, pool):
            pool.write(0, paged, k, v)
        put_values(backend, pool, [a, a + 1], [1, 2])
        pool.copy(WriteLoc.slots(int32(a, a)), WriteLoc.slots(int32(a + 2, a + 3)))
        assert held(backend, pool, [a + 2, a + 3]).tolist() == [0, 0]
        pool.write(0, WriteLoc.slots(int32(-1, -1, a)), k, v)
        pool.write(0, WriteLoc.slots(int32(0, 0, a)), k, v)
        assert held(backend, pool, [a])[0] == 3
        assert [x.shape for x in map(backend.to_host, pool.read(0, WriteLoc.slots(int32(a, a))))] == [(2, 2, 8)] * 2


# -- copy ------------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("W6", "W8", "L2")
@BOTH
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_reads_before_it_writes_and_moves_bits(backend: Backend, layout: str, dtype: str, where: Where) -> None:
    """Source and target overlap in a rotation; every layer moves; poison moves as it is."""
    g = geometry(layout, num_layers=2, dtype=dtype)
    with new_pool(backend, g, layout) as pool:
        live = np.arange(pool.first_block * 4, pool.num_slots)
        rng = np.random.default_rng(0)
        for layer in range(2):
            k, v = rng.standard_normal((2, 6, g.num_kv_heads, g.key_dim)).astype(np.float32)
            put(backend, pool, live[:6], k, v[..., : g.value_dim], layer)
        before = [oracle.stored(backend, pool, layer) for layer in range(2)]
        src, dst = live, np.roll(live, 5)
        pool.copy(WriteLoc.slots(where(backend, src)), WriteLoc.slots(where(backend, dst)))
        for layer in range(2):
            after = oracle.stored(backend, pool, layer)
            for part in (0, 1):
                moved, were = (
                    oracle.rows_at(layout, arrays, g, ids // 4, ids % 4)[part]
                    for arrays, ids in ((after, dst), (before[layer], src))
                )
                same_bits(np.ascontiguousarray(moved), np.ascontiguousarray(were))
        assert pool.dropped == 0


@pytest.mark.clause("W6")
def test_a_copy_of_unequal_counts_is_refused(backend: Backend) -> None:
    says = "2 source rows and 1 target rows"
    with new_pool(backend, geometry()) as pool, refused(backend, InvalidInput, says, pool):
        pool.copy(WriteLoc.slots(int32(4, 5)), WriteLoc.slots(int32(6)))


# -- rows: dtypes, shapes, strides -----------------------------------------------------------------------------------------


HARD = np.array(
    [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 2**-7 + 2**-8, 1 + 3 * 2**-9, 3.1415927, -2.7182817, 1e-30, 65504.0, 2**-14, 6e-8],
    np.float32,
)
"""Ties to even both ways, a value nearer to each side, tiny and large ones (all within float16)."""


@pytest.mark.clause("D1")
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_door_rounds_rows_to_the_pools_dtype(backend: Backend, layout: str, dtype: str, kv_dtype: str) -> None:
    """Rows of any float dtype become the nearest value of the pool's, ties to even; equal dtypes keep their bits."""
    g = geometry(layout, head_dim=len(HARD), dtype=kv_dtype)
    k = np.broadcast_to(HARD, (2, g.num_kv_heads, len(HARD))).copy()
    k[1] *= -1
    device_k = backend.to_device(k, dtype)
    given_k = backend.to_host(device_k).astype(np.float32)
    with new_pool(backend, g, layout) as pool:
        slots = [slot(pool, 0), slot(pool, 2, 3)]
        pool.write(0, WriteLoc.slots(int32(*slots)), device_k, None if layout == "LATENT" else device_k)
        read = pool.read(0, WriteLoc.slots(int32(*slots)))
        assert [backend.xp.dtype(x) for x in read] == [kv_dtype] * 2
        want = oracle.round_to_bfloat16(given_k) if kv_dtype == "bfloat16" else given_k
        same_bits(backend.to_host(read[0]), want)
        same_bits(backend.to_host(read[1]), np.ascontiguousarray(want[..., : g.value_dim]))


@pytest.mark.clause("D1", "L3")
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_nan_and_inf_survive_the_door(backend: Backend, kv_dtype: str) -> None:
    g = geometry(head_dim=6, dtype=kv_dtype)
    nan = np.uint32(0x7F800001).view(np.float32)
    special = np.array([np.nan, np.inf, -np.inf, nan, 3.4e38, -3.4e38], np.float32)
    with new_pool(backend, g) as pool:
        put(backend, pool, [4], np.broadcast_to(special, (1, 2, 6)).copy(), np.zeros((1, 2, 6), np.float32))
        got = backend.to_host(pool.read(0, WriteLoc.slots(int32(4)))[0])[0, 0]
        np.testing.assert_array_equal(np.isnan(got), [True, False, False, True, False, False])
        rounded = special if kv_dtype == "float32" else np.array([0, np.inf, -np.inf, 0, np.inf, -np.inf], np.float32)
        np.testing.assert_array_equal(got[[1, 2, 4, 5]], rounded[[1, 2, 4, 5]])


@pytest.mark.clause("D1", "L1")
def test_rows_and_ids_may_be_strided(backend: Backend) -> None:
    """Rows taken out of larger device arrays, ids out of a column: only their values count."""
    g = geometry()
    with new_pool(backend, g) as pool:
        wide = np.random.default_rng(0).standard_normal((3, 4, 16)).astype(np.float32)
        device = backend.to_device(wide)
        ids = backend.to_device(np.array([[4, 0], [9, 0], [14, 0]], np.int32))[:, 0]
        pool.write(0, WriteLoc.slots(ids), device[:, ::2, 3:11], device[:, 1:3, ::2])
        k, v = (backend.to_host(x) for x in pool.read(0, WriteLoc.slots(int32(4, 9, 14))))
        same_bits(k, np.ascontiguousarray(wide[:, ::2, 3:11]))
        same_bits(v, np.ascontiguousarray(wide[:, 1:3, ::2]))


@pytest.mark.clause("W6", "D1")
def test_no_rows_are_a_legal_call(backend: Backend) -> None:
    g = geometry()
    with new_pool(backend, g) as pool, unchanged(backend, pool):
        none = WriteLoc.slots(np.zeros(0, np.int32))
        pool.write(0, none, *rows(backend, g, []))
        pool.copy(none, none)
        assert [backend.to_host(x).shape for x in pool.read(0, none)] == [(0, 2, 8)] * 2


@pytest.mark.clause("W6", "D1", "W3")
@pytest.mark.parametrize("door", ["write", "read", "copy src", "copy dst"])
@pytest.mark.parametrize(
    ("loc", "says"),
    [
        (int32(4), "got ndarray, expected a WriteLoc"),
        ([4], "got list, expected a WriteLoc"),
        (None, "got NoneType, expected a WriteLoc"),
        (WriteLoc(), "an empty WriteLoc"),
        (WriteLoc.slots([4]), "slot ids: got list, expected a numpy or device array of int32"),
        (WriteLoc.slots(4), "slot ids: got int"),
        (WriteLoc.slots(np.array([4], np.uint16)), "slot ids: got numpy uint16, expected int32 or int64"),
        (WriteLoc.slots(np.array([4], np.uint32)), "slot ids: got numpy uint32"),
        (WriteLoc.slots(np.array([4], np.int16)), "slot ids: got numpy int16"),
        (WriteLoc.slots(np.array([4.0])), "slot ids: got numpy float64"),
        (WriteLoc.slots(np.array([True])), "slot ids: got numpy bool"),
        (WriteLoc.slots(np.array([2**32 + 4])), "slot ids: int64 values 4294967300 to 4294967300 do not fit int32"),
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
        (WriteLoc.paged(int32([1]), int32(4), table_len=1), "row 0 has slot 16"),
        (WriteLoc.paged(int32([1]), int32(-2), table_len=1), "row 0 has slot 16"),
        (WriteLoc.paged(int32([-1]), int32(0), table_len=1), "row 0 has slot 16"),
        (WriteLoc.paged(int32([4]), int32(0), table_len=1), "row 0 has slot 16"),
    ],
)
def test_a_wrong_location_is_refused_at_every_door(backend: Backend, door: str, loc: Any, says: str) -> None:
    g = geometry()
    with new_pool(backend, g) as pool:
        put_values(backend, pool, [4], [3])
        good = WriteLoc.slots(int32(5))
        k, v = rows(backend, g, [1])
        doors: dict[str, Callable[[], Any]] = {
            "write": lambda: pool.write(0, loc, k, v),
            "read": lambda: pool.read(0, loc),
            "copy src": lambda: pool.copy(loc, good),
            "copy dst": lambda: pool.copy(good, loc),
        }
        with refused(backend, InvalidInput, f"pool.{door.split()[0]}.*{says}", pool):
            doors[door]()


@pytest.mark.clause("W6", "D1")
def test_wrong_rows_and_layers_are_refused(backend: Backend) -> None:
    g = geometry()
    with new_pool(backend, g) as pool:
        loc = WriteLoc.slots(int32(4, 5))
        k, v = rows(backend, g, [1, 2])
        wide = backend.to_device(np.zeros((2, 2, 9), np.float32))
        ints = backend.to_device(np.zeros((2, 2, 8), np.int32))
        flat = backend.to_device(np.zeros((2, 16), np.float32))
        one = rows(backend, g, [1])[0]
        for args, says in (
            ((0, loc, one, v), r"k: got float32\[1, 2, 8\], expected a float \[2, 2, 8\]"),
            ((0, loc, k, one), r"v: got float32\[1, 2, 8\]"),
            ((0, loc, wide, v), r"k: got float32\[2, 2, 9\]"),
            ((0, loc, k, wide), r"v: got float32\[2, 2, 9\]"),
            ((0, loc, flat, v), r"k: got float32\[2, 16\]"),
            ((0, loc, ints, v), r"k: got int32\[2, 2, 8\]"),
            ((0, loc, np.zeros((2, 2, 8), np.float32), v), "k: got ndarray, expected a device array"),
            ((0, loc, k, np.zeros((2, 2, 8), np.float32)), "v: got ndarray, expected a device array"),
            ((0, loc, None, v), "k: got NoneType"),
            ((0, loc, k), "layout .* needs v"),
            ((1, loc, k, v), "got layer 1, expected 0 to 0"),
            ((-1, loc, k, v), "got layer -1"),
            ((True, loc, k, v), "got layer True"),
            ((0.0, loc, k, v), "got layer 0.0"),
        ):
            with refused(backend, InvalidInput, says, pool):
                pool.write(*args)
        for layer in (1, -1, None):
            with refused(backend, InvalidInput, f"read.*got layer {layer}", pool):
                pool.read(layer, loc)  # type: ignore[arg-type]
        latent = geometry("LATENT")
        with new_pool(backend, latent, "LATENT") as other:
            k_latent, _ = rows(backend, latent, [1, 2])
            with refused(backend, InvalidInput, "LATENT keeps V inside K, so pass v=None", other):
                other.write(0, loc, k_latent, k_latent)


@pytest.mark.clause("L3")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_read_of_a_pad_is_zero_whatever_the_pool_holds(backend: Backend, layout: str) -> None:
    with new_pool(backend, geometry(layout), layout) as pool:
        for ids in (int32(-1, -1), backend.to_device(int32(-1, -1))):
            assert not any(backend.to_host(x).view(np.uint32).any() for x in pool.read(0, WriteLoc.slots(ids)))
        assert pool.dropped == 0
