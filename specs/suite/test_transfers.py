"""KV on its way: parts of a sequence through every way in, uploads seen at once, a sequence to the host and back (S1 to S4, W6)."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from forebay.specs import Backend, InvalidInput, Pool, Segment, WriteLoc
from forebay.specs.suite import oracle
from forebay.specs.suite.attention import Array
from forebay.specs.suite.kv import (
    EACH_KV_DTYPE,
    changed_slots,
    device_rows,
    geometry,
    int32,
    new_pool,
    put,
    refused,
    row_bits,
)
from forebay.specs.suite.staging import stage

# -- a part of a sequence --------------------------------------------------------------------------------------------------

BS, HEADS, DIM = geometry().block_size, geometry().num_kv_heads, geometry().head_dim
LENGTH = 4 * BS
WAYS_IN = ("slots", "device slots", "paged", "device paged", "copy", "stage")
PARTS = ((BS, BS), (BS, 2 * BS - 1), (2 * BS, 2 * BS), (3 * BS, BS - 1), (0, BS + 1))
"""Where a part of the sequence begins, and how many tokens it has."""
PAGES = int32(3, 9, 5, 2)
"""The block of each of the sequence's pages; others hold blocks 1, 4 and 6 to 8."""
SOURCE = 10
"""The first block of a copy of the whole sequence in order."""


def bring(backend: Backend, pool: Pool, way: str, values: Array, start: int, mapping: Array) -> None:
    """Bring the tokens from ``start`` on to the slots ``mapping``, one a token; K of token t is ``values[t]``, V its negative."""
    positions = np.arange(start, start + len(mapping), dtype=np.int32)
    place = backend.to_device if way.startswith("device") else np.asarray
    if way == "copy":
        source = WriteLoc.slots(SOURCE * BS + positions)
        pool.copy(source, WriteLoc.slots(mapping))
    elif way == "stage":
        k = np.tile(values.reshape(-1, BS, 1, 1), (1, 1, HEADS, DIM))
        blocks = mapping[::BS] // BS
        pages = start // BS + np.arange(-(-len(positions) // BS))
        stage(backend, k, -k, pool, pages, blocks, len(positions))
    elif way.endswith("paged"):
        table = np.full((1, LENGTH // BS), 1, np.int32)  # what is before the part names a block of somebody else
        table[0, positions // BS] = mapping // BS
        loc = WriteLoc.paged(place(table), place(positions[None]), table_len=LENGTH // BS)
        pool.write(0, loc, *device_rows(backend, pool.geometry, values[positions]))
    else:
        pool.write(0, WriteLoc.slots(place(mapping)), *device_rows(backend, pool.geometry, values[positions]))


@pytest.mark.clause("S1", "S2", "W1", "W6")
@pytest.mark.case("G02")
@pytest.mark.parametrize("way", WAYS_IN)
def test_a_part_of_a_sequence_lands_where_its_mapping_says(backend: Backend, way: str) -> None:
    """The mapping begins with the part, not with the sequence: an index by absolute position reads past it or one part too far."""
    values = np.arange(100, 100 + LENGTH, dtype=np.float32)
    rows = np.tile(values[:, None, None], (1, HEADS, DIM))
    for start, count in PARTS:
        with new_pool(backend, geometry(num_blocks=SOURCE + LENGTH // BS)) as pool:
            put(backend, pool, SOURCE * BS + np.arange(LENGTH), rows, -rows)
            positions = np.arange(start, start + count)
            mapping = (PAGES[positions // BS] * BS + positions % BS).astype(np.int32)
            before = row_bits(backend, pool)
            bring(backend, pool, way, values, start, mapping)
            assert changed_slots(before, row_bits(backend, pool)) == sorted(mapping)
            arrays = oracle.stored(backend, pool, 0)
            k, v = oracle.rows_at(pool.layout, arrays, pool.geometry, mapping // BS, mapping % BS)
            np.testing.assert_array_equal(k, rows[positions])
            np.testing.assert_array_equal(v, -rows[positions])
            assert pool.dropped == 0


@pytest.mark.refuses("D1", "W6", "S1", "B6")
@pytest.mark.case("G02")
@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize("error", [-1, 1])
def test_a_mapping_of_another_length_is_refused(backend: Backend, way: str, error: int) -> None:
    """One element short or one too many: nothing moves."""
    g = geometry(num_blocks=SOURCE + LENGTH // BS)
    with new_pool(backend, g) as pool:
        k, v = device_rows(backend, g, [1, 2, 3, 4])
        mapping, host = np.arange(5 * BS, 5 * BS + 4 + error, dtype=np.int32), np.zeros((4, BS, HEADS, DIM), np.float32)
        place = backend.to_device if way.startswith("device") else np.asarray
        slots = WriteLoc.slots(place(mapping))
        paged = WriteLoc.paged(place(int32([5, 6])), place((mapping - 5 * BS)[None]), table_len=2)
        with refused(backend, InvalidInput, r"expected", pool):
            if way == "copy":
                pool.copy(WriteLoc.slots(SOURCE * BS + np.arange(4, dtype=np.int32)), slots)
            elif way == "stage":
                stage(backend, host, host, pool, [1, 2], [5, 6, 7][: 2 + error], 2 * BS)
            else:
                pool.write(0, paged if way.endswith("paged") else slots, k, v)


# -- uploads ---------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("S4", "C4", "C13")
@pytest.mark.case("G04")
@pytest.mark.parametrize("how", ["run", "replay"])
@pytest.mark.parametrize("upload", ["whole", "row"])
def test_a_step_sees_the_whole_upload_before_it(backend: Backend, upload: str, how: str) -> None:
    """2 MiB of one number go up and a step sums them at once, again and again; nobody waits in between, and the host's array is
    filled with something else as soon as the call returns."""
    rows, columns = 4, 2**17
    buffer = backend.buffer("big", np.ones((rows, columns), np.float32))
    segment = Segment("sum", lambda b: ({}, {"sum": b.xp.sum(buffer.get())}), reads=(buffer,))
    backend.run(segment).get()
    trace = backend.capture(segment)
    want = np.full((rows, 1), columns, np.float32)
    host = np.empty((rows, columns), np.float32)
    for first in range(2, 26, 6):
        steps = []
        for value in range(first, first + 6):
            if upload == "whole":
                host[:] = value
                want[:] = value * columns
                backend.upload(buffer, host)
            else:
                host[0] = value
                want[value % rows] = value * columns
                backend.upload(buffer, host[:1], value % rows)
            host[:] = np.nan
            steps.append((want.copy(), backend.run(segment) if how == "run" else backend.replay(trace)))
        for right, ticket in steps:
            np.testing.assert_array_equal(ticket.get()["sum"], right)
    backend.release(trace)
    backend.release(buffer)


# -- to the host and back --------------------------------------------------------------------------------------------------


@pytest.mark.clause("S1", "S2", "S3", "S4")
@pytest.mark.case("B05", "B06", "G02", "G04")
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize(("size", "tokens"), [(16, 1), (16, 17), (16, 32), (16, 47), (32, 33)])
def test_a_sequence_comes_back_bit_for_bit_to_other_blocks(
    backend: Backend, internals: ModuleType, dtype: str, size: int, tokens: int
) -> None:
    """Blocks in no order, the last one partly filled; rows behind the last token, and every other block, keep their bytes.

    What the host kept is overwritten as soon as it was staged.
    """
    g = geometry(num_blocks=9, block_size=size, num_layers=2, dtype=dtype)
    with new_pool(backend, g) as pool, new_pool(backend, g) as other:
        everything = np.arange(size, g.num_slots, dtype=np.int32)
        for seed, each in enumerate((pool, other)):
            random = np.random.default_rng(seed)
            for layer in range(2):
                k, v = (random.standard_normal((len(everything), HEADS, DIM)).astype(np.float32) for _ in range(2))
                put(backend, each, everything, k, v, layer)
        used = -(-tokens // size)
        positions = np.arange(tokens)
        source, target = (
            np.array(blocks)[positions // size] * size + positions % size for blocks in ([7, 2, 5], [3, 8, 1])
        )
        saved = internals.HostKV.read(backend, pool, [*[7, 2, 5][:used], 4], tokens)
        assert (saved.num_blocks, saved.tokens, saved.dtype) == (used, tokens, dtype)
        wanted = [row_bits(backend, other, layer) for layer in range(2)]
        for layer in range(2):
            wanted[layer][target] = row_bits(backend, pool, layer)[source]
        # A longer list of blocks than the sequence has: a request holds the block of its next token too.
        saved.stage(backend, other, [*[3, 8, 1][:used], 6])
        for stored in saved.layers:
            stored.fill(0)
        for layer in range(2):
            np.testing.assert_array_equal(row_bits(backend, other, layer), wanted[layer])
            half = wanted[layer].shape[1] // 2
            assert not np.array_equal(wanted[layer][target, :half], wanted[layer][target, half:])
