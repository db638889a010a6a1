"""Write locations: marks, lowering and batches (clauses W1 to W4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import Backend, Batch, BlockTable, ForebayError, InvalidInput, Pool, UnmarkedWriteLoc, WriteLoc
from forebay.specs.suite.kv import (
    HEAD_DIM,
    LAYOUTS,
    claimed,
    device_rows,
    geometry,
    held,
    int32,
    new_pool,
    put_values,
    refused,
    same_bits,
    slot,
)

# -- W1 --------------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("W1")
def test_a_location_carries_its_own_mark() -> None:
    ids, table, positions = int32(4), int32([1]), int32(0)
    for mark in (False, True):
        assert WriteLoc.slots(ids, mark).physical is mark
        assert WriteLoc.slots(ids, physical=mark).ids is ids
        assert BlockTable(table, physical=mark).physical is mark
        loc = WriteLoc.paged(BlockTable(table, mark), positions, table_len=1)
        assert (loc.physical, loc.positions, loc.table_len) == (mark, positions, 1)
        assert loc.table is not None
        assert loc.table.array is table
    assert WriteLoc.slots(ids).physical is False
    assert WriteLoc.paged(table, positions, table_len=1).physical is False
    assert BlockTable(table).physical is False


@pytest.mark.refuses("W1")
def test_a_mark_is_static() -> None:
    for marked in (WriteLoc.slots(int32(4)), BlockTable(int32([1]))):
        with pytest.raises(FrozenInstanceError):
            marked.physical = True  # type: ignore[misc]


@pytest.mark.refuses("W1")
@pytest.mark.parametrize("table_len", [-1, 1.0, None, True, "1"])
def test_a_table_len_that_is_none_is_refused(table_len: Any) -> None:
    with pytest.raises(InvalidInput, match=r"WriteLoc.paged table_len: got .*, expected a non-negative int"):
        WriteLoc.paged(int32([1]), int32(0), table_len=table_len)


@pytest.mark.clause("W1", "W6")
@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
def test_positions_and_a_table_are_lowered_to_slots(backend: Backend, layout: str, data: st.DataObject) -> None:
    """Any positions ``[B]`` or ``[B, T]`` of any table: rows land in the slots a plain division gives; idle rows nowhere."""
    g = geometry(layout, num_blocks=9, block_size=data.draw(claimed(backend, "block_sizes", range(1, 6))))
    bs = g.block_size
    with new_pool(backend, g, layout) as pool:
        blocks = np.array(data.draw(st.permutations(range(pool.first_block, 9)))[: 2 * 3], np.int32).reshape(2, 3)
        inside = st.integers(-1, 3 * bs - 1)
        row = st.lists(inside, min_size=2, max_size=2, unique_by=lambda p: p if p >= 0 else object())
        positions = np.array([data.draw(row), data.draw(row)], np.int32)
        want = np.where(positions >= 0, np.take_along_axis(blocks, positions // bs, axis=1) * bs + positions % bs, -1)
        wide = np.concatenate([blocks, np.full((2, 2), 10**6, np.int32)], axis=1)
        one_a_row = data.draw(st.booleans())
        if one_a_row:
            positions, want = positions[:, 0], want[:, 0]
        table: Any = backend.to_device(wide) if data.draw(st.booleans()) else wide
        where: Any = backend.to_device(positions) if data.draw(st.booleans()) else positions
        loc = WriteLoc.paged(table, where, table_len=3)
        values = np.arange(1, want.size + 1, dtype=np.float32)
        pool.write(0, loc, *device_rows(backend, g, values))
        flat = want.reshape(-1)
        assert pool.dropped == 0
        np.testing.assert_array_equal(held(backend, pool, flat[flat >= 0]), values[flat >= 0])
        live = np.arange(pool.first_block * bs, pool.num_slots)
        assert np.isfinite(held(backend, pool, live)).sum() == (flat >= 0).sum()
        read, wanted = (backend.to_host(pool.read(0, place)[0]) for place in (loc, WriteLoc.slots(flat)))
        np.testing.assert_array_equal(read, wanted)


@pytest.mark.clause("W1", "W6", "D2")
@pytest.mark.smoke("W1")
@pytest.mark.parametrize("width", [4, 9, 70, 300])
def test_only_the_first_table_len_columns_are_blocks(backend: Backend, width: int) -> None:
    """A stamp behind the blocks looks like a block of the pool and is never written to, however wide the table is."""
    g = geometry(num_blocks=6)
    with new_pool(backend, g) as pool:
        table = backend.to_device(int32([1, 2, *[3, 4] * width][:width]))
        before = held(backend, pool, np.arange(pool.num_slots))
        for position in (32, 47, 48, 63, 64, 400, 2**31 - 1, -2, -(2**31)):
            loc = WriteLoc.paged(table, backend.to_device(int32(position)), table_len=2)
            pool.write(0, loc, *device_rows(backend, g, [5]))
        same_bits(held(backend, pool, np.arange(pool.num_slots)), before)
        assert pool.dropped == 9
        for block in (-1, 6, 13, 2**31 - 1, -(2**31), 0):
            loc = WriteLoc.paged(backend.to_device(int32([1, block])), backend.to_device(int32(16)), table_len=2)
            pool.write(0, loc, *device_rows(backend, g, [5]))
        same_bits(held(backend, pool, np.arange(pool.num_slots)), before)
        assert pool.dropped == 15


@pytest.mark.clause("W6", "W1", "C9")
@pytest.mark.parametrize("block_size", [16, 32, pytest.param(1, marks=pytest.mark.beyond_core)])
@pytest.mark.parametrize("two_d", [False, True])
def test_a_table_entry_that_is_no_block_is_counted_at_every_offset(
    backend: Backend, two_d: bool, block_size: int
) -> None:
    """At its last offset -1 is no pad, and a product beyond 32 bits is no slot of the pool; the row beside it lands."""
    g = geometry(num_blocks=6, block_size=block_size, num_kv_heads=1)
    wraps = 2**32 // block_size
    entries = [-1, -2, -6, 0, 6, 7, 2**31 - 1, -(2**31), *(x for x in (wraps + 2, 2 - wraps) if abs(x) < 2**31)]
    with new_pool(backend, g) as pool:
        put_values(backend, pool, [slot(pool, 4, t) for t in range(block_size)], [9] * block_size)
        source = WriteLoc.slots(int32(*[slot(pool, 4)] * 2))
        before = held(backend, pool, np.arange(pool.num_slots))
        good = slot(pool, 2)
        for entry in entries:
            for offset in range(block_size):
                rows = int32([pool.first_block, entry], [pool.first_block + 2, entry])
                positions = int32([block_size + offset], [0]) if two_d else int32(block_size + offset, 0)
                loc = WriteLoc.paged(backend.to_device(rows), backend.to_device(positions), table_len=2)
                dropped = pool.dropped
                pool.write(0, loc, *device_rows(backend, g, [5, 7]))
                read = backend.to_host(pool.read(0, loc)[0])[..., 0]
                assert read.reshape(-1).tolist() == [0, 7], (entry, offset)
                pool.copy(source, loc)
                assert pool.dropped - dropped == 3, (entry, offset)
                before[good] = 0
                same_bits(held(backend, pool, np.arange(pool.num_slots)), before)
        dropped = pool.dropped
        whole = backend.to_device(np.arange(block_size, 2 * block_size, dtype=np.int32)[None])
        table = backend.to_device(int32([pool.first_block, -1]))
        pool.write(0, WriteLoc.paged(table, whole, table_len=2), *device_rows(backend, g, [5] * block_size))
        assert pool.dropped - dropped == block_size


# -- W2, W4 ----------------------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    is_cross_attention: bool


@pytest.mark.clause("W2")
def test_a_batch_gives_its_mark_to_its_own_ids_only() -> None:
    for mark in (False, True):
        batch = Batch(int32(4), physical=mark)
        window, full = WriteLoc.slots(int32(1), physical=not mark), WriteLoc.slots(int32(2), physical=True)
        loc = WriteLoc.for_batch(batch, window_loc=window, full_loc=full)
        assert loc.ids is batch.out_loc
        assert loc.physical is mark
        assert loc.window is window
        assert loc.full is full
        plain = WriteLoc.for_batch(batch)
        assert (plain.window, plain.full) == (None, None)
    for wrong in ({"window_loc": int32(1)}, {"full_loc": [1]}):
        with pytest.raises(InvalidInput, match="expected a WriteLoc that states its own mark"):
            WriteLoc.for_batch(batch, **wrong)


@pytest.mark.clause("W2", "W3")
@pytest.mark.refuses("W3")
def test_encoder_ids_are_never_marked(backend: Backend) -> None:
    encoder = int32(9)
    batch = Batch(int32(16), physical=True, encoder_out_loc=encoder)
    cross, own = (WriteLoc.for_layer(batch, Layer(is_cross)) for is_cross in (True, False))
    assert cross.ids is encoder
    assert cross.physical is False
    assert own.ids is batch.out_loc
    assert own.physical is True
    with new_pool(backend, geometry(), requires_physical_write_loc=True) as pool:
        pool.write(0, own, *device_rows(backend, pool.geometry, [1]))
        with refused(backend, UnmarkedWriteLoc, "an unmarked WriteLoc", pool):
            pool.read(0, cross)
        assert held(backend, pool, own.ids).tolist() == [1]


class Translator:
    """A pool's map from virtual to physical ids, as ``Batch.rebind`` asks for it."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def translate(self, ids: Any) -> Any:
        return ids + self.shift


def mark(batch: Batch) -> bool:
    """The batch's mark as it is now: of the attribute itself a type checker keeps what an earlier assertion said."""
    return batch.physical


@pytest.mark.clause("W4")
def test_rebinding_sets_the_mark_on_every_pool(backend: Backend) -> None:
    with new_pool(backend, geometry()) as pool:
        batch = Batch(int32(1))
        assert mark(batch) is False
        ids = int32(5)
        batch.rebind(ids, pool=pool)
        assert mark(batch) is True
        assert batch.out_loc is ids
        stated = Batch(int32(1), physical=True)
        assert WriteLoc.for_batch(stated).physical is True
    translator = Translator(8)
    batch.rebind(ids, pool=translator)
    assert batch.out_loc.tolist() == [13]
    translator.shift = 4
    batch.rebind(ids, pool=translator)
    assert batch.out_loc.tolist() == [9]
    assert WriteLoc.for_batch(batch).physical is True


# -- W3 --------------------------------------------------------------------------------------------------------------------


def table_for(pool: Pool, *blocks: int) -> Any:
    return int32([pool.first_block + block for block in blocks])


@pytest.mark.clause("W3")
@pytest.mark.refuses("W3")
@pytest.mark.parametrize("where", ["host", "device"])
def test_unmarked_ids_are_refused_at_every_door(backend: Backend, where: str) -> None:
    """Nothing is read, written, counted, uploaded or launched; the same calls with the mark work."""
    with new_pool(backend, geometry(), requires_physical_write_loc=True) as pool:
        put = backend.to_device if where == "device" else (lambda x: x)
        k, v = device_rows(backend, pool.geometry, [1])
        q = backend.to_device(np.ones((1, 2, HEAD_DIM), np.float32))
        ids, other, table = put(int32(16)), put(int32(17)), put(table_for(pool, 0))
        position, visible = put(int32(0)), put(int32(1))
        bad_locs = (
            WriteLoc.slots(ids),
            WriteLoc.paged(table, position, table_len=1),
            WriteLoc.paged(BlockTable(table), position, table_len=1),
            WriteLoc(table=BlockTable(table), positions=position, table_len=1, physical=True),
            ids,
        )
        good = WriteLoc.slots(ids, physical=True)
        for bad in bad_locs:
            doors: tuple[Callable[[], Any], ...] = (
                lambda bad=bad: pool.write(0, bad, k, v),  # type: ignore[misc]
                lambda bad=bad: pool.read(0, bad),  # type: ignore[misc]
                lambda bad=bad: pool.copy(bad, good),  # type: ignore[misc]
                lambda bad=bad: pool.copy(good, bad),  # type: ignore[misc]
            )
            for door in doors:
                with refused(
                    backend, UnmarkedWriteLoc, "an unmarked WriteLoc|a bare |BlockTable without physical=True", pool
                ):
                    door()
        for bad_table in (table, BlockTable(table), BlockTable(table, physical=False)):
            with refused(backend, UnmarkedWriteLoc, "a bare|a BlockTable without physical=True", pool):
                backend.paged_decode(q, pool, 0, bad_table, visible, table_len=1)
        downloads, syncs = backend.counters.downloads, backend.counters.syncs
        with pytest.raises(ValueError, match="translates ids"):
            pool.read(0, WriteLoc.slots(ids))
        assert (backend.counters.downloads, backend.counters.syncs) == (downloads, syncs)
        pool.write(0, good, k, v)
        pool.copy(good, WriteLoc.slots(other, physical=True))
        marked = BlockTable(table, physical=True)
        pool.read(0, WriteLoc.paged(marked, position, table_len=1))
        out = backend.paged_decode(q, pool, 0, marked, visible, table_len=1)
        np.testing.assert_allclose(backend.to_host(out), -1.0, rtol=1e-6)


@pytest.mark.clause("W3")
def test_an_unmarked_error_is_a_value_error() -> None:
    assert issubclass(UnmarkedWriteLoc, ValueError)
    assert issubclass(UnmarkedWriteLoc, ForebayError)


@pytest.mark.clause("W3")
def test_static_pools_ask_for_no_mark(backend: Backend) -> None:
    with new_pool(backend, geometry()) as pool:
        assert pool.requires_physical_write_loc is False
        put_values(backend, pool, [slot(pool, 0)], [3])
        q = backend.to_device(np.zeros((1, 2, HEAD_DIM), np.float32))
        for table in (
            table_for(pool, 0),
            BlockTable(table_for(pool, 0)),
            BlockTable(table_for(pool, 0), physical=True),
        ):
            out = backend.to_host(backend.paged_decode(q, pool, 0, table, int32(1), table_len=1))
            np.testing.assert_allclose(out, 3.0, rtol=1e-6)
        for mark in (False, True):
            read = pool.read(0, WriteLoc.slots(int32(slot(pool, 0)), physical=mark))
            np.testing.assert_array_equal(backend.to_host(read[1]), 3.0)
