"""The doors of a pool: where rows land, and what becomes of ids that are pads, sinks or none (clauses W6, W8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import Backend, InvalidInput, WriteLoc
from forebay.specs.suite import oracle
from forebay.specs.suite.kv import (
    BLOCK_SIZE,
    EACH_KV_DTYPE,
    HEAD_DIM,
    LAYOUTS,
    bytes_of,
    changes,
    claimed,
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

Where = Callable[[Backend, npt.ArrayLike], Any]
HOST: Where = lambda _, ids: np.asarray(ids, np.int32)  # noqa: E731
DEVICE: Where = lambda backend, ids: backend.to_device(np.asarray(ids, np.int32))  # noqa: E731
BOTH = pytest.mark.parametrize("where", [HOST, DEVICE], ids=["host", "device"])


# -- A01: pads never wrap --------------------------------------------------------------------------------------------------


@pytest.mark.clause("W6", "L3")
@pytest.mark.case("A01")
@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pad_writes_nothing_and_never_wraps(backend: Backend, layout: str, where: Where) -> None:
    """7 in the last slot, then slots [a, b, -1, -1]: the last slot still holds 7, every other byte is as it was."""
    g = geometry(layout, num_blocks=5)
    with new_pool(backend, g, layout) as pool:
        last = pool.num_slots - 1
        pool.write(0, WriteLoc.slots(where(backend, [last])), *device_rows(backend, g, [7]))
        first = slot(pool, 0)
        want = oracle.stored(backend, pool, 0)
        pool.write(
            0, WriteLoc.slots(where(backend, [first, first + 1, -1, -1])), *device_rows(backend, g, [1, 2, 99, 99])
        )
        assert held(backend, pool, [first, first + 1, last]).tolist() == [1, 2, 7]
        pool.write(0, WriteLoc.slots(where(backend, [-1])), *device_rows(backend, g, [99]))
        assert pool.dropped == 0
        written = sum(int((a != b).sum()) for a, b in zip(want, oracle.stored(backend, pool, 0), strict=True))
        nans = sum(int(np.isnan(a).sum()) for a in oracle.stored(backend, pool, 0))
        assert written - nans == 2 * g.num_kv_heads * g.key_dim * (1 if layout == "LATENT" else 2)


@pytest.mark.clause("W6")
@pytest.mark.smoke("W6")
@pytest.mark.refuses("W6")
@pytest.mark.case("A01")
@pytest.mark.parametrize("bad", [-2, -64, -65, 80, 81, 143, 2**31 - 1, -(2**31)])
def test_an_id_outside_the_pool_raises_on_the_host_and_is_counted_on_the_device(backend: Backend, bad: int) -> None:
    g = geometry(num_blocks=5)
    with new_pool(backend, g) as pool:
        good = slot(pool, 1)
        put_values(backend, pool, [good], [5])
        k, v = device_rows(backend, g, [1, 2])
        loc = WriteLoc.slots(int32(good, bad))
        says = f"row 1 has slot {bad}, expected 0 <= slot < 80"
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
        assert changes(before, bytes_of(backend, *pool.storage(0))) != {}
        assert held(backend, pool, [good, good + 1]).tolist() == [0, 1]


@pytest.mark.clause("W6", "L4", "C9")
@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sink_ids_are_dropped_and_counted(backend: Backend, layout: str, where: Where) -> None:
    g = geometry(layout)
    with new_pool(backend, g, layout) as pool:
        sink = WriteLoc.slots(where(backend, [0, 15, 15]))
        live = WriteLoc.slots(where(backend, [16, 17, 18]))
        total = backend.counters.dropped
        with unchanged(backend, *pool.storage(0)):
            pool.write(0, sink, *device_rows(backend, g, [1, 2, 3]))
        assert pool.dropped == 3
        pool.write(0, live, *device_rows(backend, g, [1, 2, 3]))
        with unchanged(backend, *pool.storage(0)):
            pool.copy(live, sink)
            pool.copy(sink, live)
        assert pool.dropped == 9
        assert not any(backend.to_host(x).view(np.uint8).any() for x in pool.read(0, sink))
        assert pool.dropped == 12
        assert backend.counters.dropped - total == 12
    assert backend.counters.dropped - total == 12


@pytest.mark.clause("W6", "C9")
@BOTH
def test_every_layer_counts_what_it_drops(backend: Backend, where: Where) -> None:
    """A write and a read of sink ids in each of four layers; of ids outside too, where the device alone knows them."""
    g = geometry(num_layers=4)
    with new_pool(backend, g) as pool:
        ids = [0, 15, 16, 17] if where is HOST else [0, -2, 16, 17, 64, 2**31 - 1]
        loc, lost = WriteLoc.slots(where(backend, ids)), len(ids) - 2
        for layer in range(4):
            before, total = pool.dropped, backend.counters.dropped
            pool.write(layer, loc, *device_rows(backend, g, [1 + layer] * len(ids)))
            assert pool.dropped - before == lost
            k = backend.to_host(pool.read(layer, loc)[0])[:, 0, 0]
            np.testing.assert_array_equal(k, [1 + layer if i in (16, 17) else 0 for i in ids])
            assert pool.dropped - before == backend.counters.dropped - total == 2 * lost


@pytest.mark.clause("W6")
@BOTH
def test_a_copy_drops_a_row_once(backend: Backend, where: Where) -> None:
    """Both ends in the sink, in three layers: one row, counted once; a pad at either end: a pad, counted not at all."""
    with new_pool(backend, geometry(num_layers=3)) as pool:
        put_values(backend, pool, [16, 17], [1, 2])
        with unchanged(backend, *(buffer for layer in range(3) for buffer in pool.storage(layer))):
            pool.copy(WriteLoc.slots(where(backend, [0, 1])), WriteLoc.slots(where(backend, [2, 2])))
            assert pool.dropped == 2
            pool.copy(WriteLoc.slots(where(backend, [-1, 16, -1, 2])), WriteLoc.slots(where(backend, [16, -1, 0, -1])))
            assert pool.dropped == 2


@pytest.mark.clause("W6", "W8", "L3")
@given(data=st.data())
def test_any_device_ids_do_what_the_rule_says(backend: Backend, data: st.DataObject) -> None:
    """Against a dictionary: pads nothing, slots of the pool land whole, the rest is counted and lands nowhere."""
    layout = data.draw(claimed(backend, "layouts", LAYOUTS))
    block_size = data.draw(claimed(backend, "block_sizes", range(1, 6)))
    g = geometry(layout, num_blocks=data.draw(st.integers(2, 5)), block_size=block_size)
    with new_pool(backend, g, layout) as pool:
        n, low = pool.num_slots, pool.first_block * g.block_size
        near = st.integers(-3, n + 3) | st.sampled_from([2**31 - 1, -(2**31), n * 2**10])
        model: dict[int, float] = {}
        dropped = 0
        for step in range(3):
            ids = data.draw(st.lists(near, max_size=12, unique_by=lambda i: i if low <= i < n else object()))
            values = [100.0 * (step + 1) + i for i in range(len(ids))]
            pool.write(0, WriteLoc.slots(DEVICE(backend, np.array(ids, np.int64))), *device_rows(backend, g, values))
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
@pytest.mark.smoke("W8")
@pytest.mark.case("I05")
@BOTH
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_rows_of_one_call_in_one_block_land_whole_in_any_order(
    backend: Backend, layout: str | None, where: Where
) -> None:
    g = geometry(layout)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        with new_pool(backend, g, layout) as pool:
            block = [slot(pool, 1, t) for t in range(4)]
            pool.write(0, WriteLoc.slots(where(backend, block)), *device_rows(backend, g, [9] * 4))
            ids, values = [block[t] for t in order], [t + 1.0 for t in order]
            pool.write(0, WriteLoc.slots(where(backend, ids)), *device_rows(backend, g, values))
            assert held(backend, pool, block).tolist() == [1, 2, 3, 4]
            read = pool.read(0, WriteLoc.slots(where(backend, block)))
            assert backend.to_host(read[0])[:, 0, 0].tolist() == [1, 2, 3, 4]
            sign = 1 if layout == "LATENT" else -1
            assert (backend.to_host(read[1]) * sign == np.arange(1, 5, dtype=np.float32)[:, None, None]).all()


@pytest.mark.clause("W8")
@pytest.mark.refuses("W8")
@pytest.mark.case("I05")
def test_duplicate_slots_of_one_host_known_call_are_refused(backend: Backend) -> None:
    g = geometry()
    with new_pool(backend, g) as pool:
        a = slot(pool, 1)
        k, v = device_rows(backend, g, [1, 2, 3])
        says = f"slot {a} is given to 2 rows of one call"
        loc = WriteLoc.slots(int32(a, a + 1, a))
        with refused(backend, InvalidInput, says, pool):
            pool.write(0, loc, k, v)
        with refused(backend, InvalidInput, says, pool):
            pool.copy(WriteLoc.slots(int32(a + 1, a + 2, a + 3)), loc)
        paged = WriteLoc.paged(
            int32([a // BLOCK_SIZE], [a // BLOCK_SIZE], [a // BLOCK_SIZE]), int32(0, 1, 0), table_len=1
        )
        with refused(backend, InvalidInput, says, pool):
            pool.write(0, paged, k, v)
        put_values(backend, pool, [a, a + 1], [1, 2])
        pool.copy(WriteLoc.slots(int32(a, a)), WriteLoc.slots(int32(a + 2, a + 3)))
        assert held(backend, pool, [a + 2, a + 3]).tolist() == [0, 0]
        pool.write(0, WriteLoc.slots(int32(-1, -1, a)), k, v)
        pool.write(0, WriteLoc.slots(int32(0, 0, a)), k, v)
        assert held(backend, pool, [a])[0] == 3
        assert [x.shape for x in map(backend.to_host, pool.read(0, WriteLoc.slots(int32(a, a))))] == [
            (2, 2, HEAD_DIM)
        ] * 2


# -- copy ------------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("W6", "W8", "L2")
@BOTH
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_reads_before_it_writes_and_moves_bits(backend: Backend, layout: str, dtype: str, where: Where) -> None:
    """Source and target overlap in a rotation; every one of five layers moves; poison moves as it is."""
    g = geometry(layout, num_layers=5, dtype=dtype)
    with new_pool(backend, g, layout) as pool:
        live = np.arange(pool.first_block * BLOCK_SIZE, pool.num_slots)
        rng = np.random.default_rng(0)
        for layer in range(5):
            k, v = rng.standard_normal((2, 6, g.num_kv_heads, g.key_dim)).astype(np.float32)
            put(backend, pool, live[:6], k, v[..., : g.value_dim], layer)
        before = [oracle.stored(backend, pool, layer) for layer in range(5)]
        src, dst = live, np.roll(live, 5)
        pool.copy(WriteLoc.slots(where(backend, src)), WriteLoc.slots(where(backend, dst)))
        for layer in range(5):
            after = oracle.stored(backend, pool, layer)
            for part in (0, 1):
                moved, were = (
                    oracle.rows_at(layout, arrays, g, ids // BLOCK_SIZE, ids % BLOCK_SIZE)[part]
                    for arrays, ids in ((after, dst), (before[layer], src))
                )
                same_bits(np.ascontiguousarray(moved), np.ascontiguousarray(were))
        assert pool.dropped == 0


@pytest.mark.refuses("W6")
def test_a_copy_of_unequal_counts_is_refused(backend: Backend) -> None:
    says = "2 source rows and 1 target rows"
    with new_pool(backend, geometry()) as pool, refused(backend, InvalidInput, says, pool):
        pool.copy(WriteLoc.slots(int32(16, 17)), WriteLoc.slots(int32(18)))
