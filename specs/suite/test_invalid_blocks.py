"""What invalid, missing and absent blocks and empty rows give (clauses D2, D3)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import Backend
from forebay.specs.suite.kv import (
    BAD_BLOCKS,
    BLOCK_SIZE,
    HEAD_DIM,
    LAYOUTS,
    Params,
    claimed,
    geometry,
    int32,
    mean_of_values,
    new_pool,
    put_values,
    same_arrays,
    same_bits,
    slot,
)
from forebay.specs.suite.scenes import WAYS, How, Scene, scene

SINKS = np.linspace(-2, 8, 4, dtype=np.float32)
MISSING: dict[str, Params] = {
    "scale": {"scale": 0.7},
    "window": {"window": 3000},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "softcap and window": {"softcap": 0.5, "scale": -0.4, "window": 1010},
    "all": {"softcap": 4.0, "scale": 0.7, "window": 4000, "sinks": SINKS},
}
"""Parameters of calls that see rows behind the table."""


@pytest.mark.clause("D2", "L3")
@pytest.mark.case("I04")
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overhanging_table_entry_is_never_read(backend: Backend, layout: str, path: str) -> None:
    """BS = 16, 24 visible of table [a, b, bad, bad]: the same bits as the two-entry table, nothing counted."""
    with scene(backend, (24,), layout=layout, extra_width=2) as s:
        want, want_lse = s.rows(0).decode(path=path)
        for bad in (*BAD_BLOCKS, s.pool.geometry.num_blocks, s.pool.geometry.num_blocks + 7, 0):
            s.table[0, 2:] = bad
            for table_len in (2, 4):
                s.table_len = table_len
                for host in (False, True):
                    out, lse = s.decode(path=path, host=host)
                    same_bits(out, want)
                    same_bits(lse, want_lse)
        assert s.pool.invalid == 0


@pytest.mark.clause("D2")
@pytest.mark.smoke("D2")
@pytest.mark.case("I04")
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_an_invalid_block_is_zero_rows_that_take_part(
    backend: Backend, layout: str | None, host: bool, path: str
) -> None:
    """Values 6 in sixteen tokens, then eight tokens of a block that is none: the mean is 4, and one entry is counted."""
    with new_pool(backend, geometry(layout), layout) as pool:
        put_values(backend, pool, [slot(pool, 2, t) for t in range(BLOCK_SIZE)], [6] * BLOCK_SIZE)
        outside = [-1, -5, -(2**31), 2**31 - 1, 4, 5, 4 + 7, *range(pool.first_block)]
        for count, bad in enumerate(outside, start=1):
            table = int32([2 + pool.first_block, bad])
            table = table if host else backend.to_device(table)
            got = mean_of_values(backend, pool, table, [24], table_len=2, path=path)
            assert got[0] == pytest.approx(4.0, rel=1e-6)
            assert pool.invalid == count


@pytest.mark.clause("D2", "D6")
@given(data=st.data())
def test_invalid_blocks_anywhere_meet_the_oracle(backend: Backend, data: st.DataObject) -> None:
    draw = data.draw
    lengths = draw(st.lists(st.integers(0, 40) | st.just(530), min_size=1, max_size=4))
    block_size = draw(claimed(backend, "block_sizes", (1, 4, 7)))
    query_len = draw(claimed(backend, "max_query_len", (1, 2, 3)))
    layer = draw(st.integers(0, 2))
    with scene(backend, lengths, block_size=block_size, query_len=query_len, layer=layer) as s:
        nb = s.pool.geometry.num_blocks
        bad = [-1, -9, nb, nb + 1, 2**31 - 1, *range(s.pool.first_block)]
        for b in range(len(lengths)):
            for column in draw(st.lists(st.integers(0, s.table_len - 1), max_size=4)):
                s.table[b, column] = draw(st.sampled_from(bad))
        window = draw(st.none() | st.integers(1, 20))
        direct = s.check(window=window)
        gather = s.check(path="gather", window=window)
        same_arrays(direct, gather)


@pytest.mark.clause("D1", "D2", "D3")
@pytest.mark.case("A04")
@pytest.mark.parametrize("extra_width", [2, 70, 250])
@pytest.mark.parametrize("path", ["direct", "gather"])
def test_visible_beyond_the_table_known_to_the_device_only(backend: Backend, path: str, extra_width: int) -> None:
    """The blocks that are missing count as invalid; a canary of a million tokens is not followed anywhere."""
    with scene(backend, (48, 48, 48), extra_width=extra_width) as s:
        # Blocks that hold rows: whoever follows them gets another result.
        s.table[:, s.table_len :] = np.tile(s.table[:, :2], extra_width // 2)
        s.visible = int32(160, 48, 4097)
        s.check(path=path)
        s.check(path=path, window=3)
        before, s.visible = s.pool.invalid, int32(0, 48, 1_000_001)
        out, lse = s.decode(path=path)
        assert s.pool.invalid - before == -(-1_000_001 // BLOCK_SIZE) - 3
        assert np.abs(out[2]).max() < 1e-3
        np.testing.assert_allclose(lse[2], np.log(1e6), rtol=1e-3)


@pytest.mark.clause("D3", "D2")
@pytest.mark.case("D03")
@pytest.mark.parametrize("path", ["direct", "gather"])
def test_an_empty_row_is_zero_whatever_the_maximum(backend: Backend, path: str) -> None:
    """Lengths [17, 0] in tables for 32 and for 131,072 tokens: row 1 is 0 with LSE -inf, row 0 has the same bits."""
    answers = []
    for width in (2, 131072 // BLOCK_SIZE):
        with scene(backend, (17, 0), extra_width=0) as s:
            wide = np.full((2, width), -1, np.int32)
            wide[:, :2] = s.table[:, :2]
            s.table, s.table_len = wide, width
            s.q[1] = np.nan
            out, lse = s.decode(path=path)
            assert not out[1].view(np.uint32).any()
            assert np.isneginf(lse[1]).all()
            assert s.pool.invalid == 0
            answers.append((out, lse))
    same_arrays(answers[0], answers[1])


@pytest.mark.clause("D3")
@pytest.mark.parametrize("path", ["direct", "gather"])
def test_nothing_but_empty_rows(backend: Backend, path: str) -> None:
    with scene(backend, (0, 0, 0), heads=6) as s:
        every: dict[str, Params] = {
            "window": {"window": 3},
            "sinks": {"sinks": np.ones(6, np.float32)},
            "softcap": {"softcap": 2.0},
        }
        plain: Params = {}
        for params in (plain, *(params for name, params in every.items() if backend.capabilities.allows(name, True))):
            out, lse = s.decode(path=path, **params)
            assert not out.view(np.uint32).any()
            assert np.isneginf(lse).all()
        s.table, s.table_len = s.table[:, :0], 0
        assert np.isneginf(s.decode(path=path)[1]).all()
        empty, empty_lse = Scene(backend, s.pool, s.q[:0], s.table[:0], s.visible[:0], 0).decode(path=path)
        assert (empty.shape, empty_lse.shape) == ((0, 1, 6, HEAD_DIM), (0, 1, 6))


@pytest.mark.clause("D2", "C9")
def test_invalid_blocks_are_counted_in_pool_and_backend(backend: Backend) -> None:
    with scene(backend, (33, 33)) as s:
        s.table[:, 1] = -1
        before = backend.counters.invalid
        s.decode()
        assert s.pool.invalid == 2
        assert backend.counters.invalid - before == 2
        s.decode(window=1)
        assert s.pool.invalid == 2
    assert backend.counters.invalid - before == 2


@pytest.mark.clause("D2", "C9")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("path", ["direct", "gather"])
def test_every_layer_counts_its_invalid_blocks(backend: Backend, path: str, how: How) -> None:
    """By themselves and in a step, in every layer of a pool; what a window hides is not met."""
    for layer in range(4):
        with scene(backend, (70, 33, 0, 16), layer=layer, num_layers=4) as s:
            s.table[0, [0, 2, 4]], s.table[1, 1] = (-1, 10**6, s.pool.geometry.num_blocks), -(2**31)
            before, total = s.pool.invalid, backend.counters.invalid
            s.check(path=path, how=how)
            assert s.pool.invalid - before == 4
            # The last 20 of 70 tokens begin in column 3.
            s.check(path=path, how=how, window=20)
            assert s.pool.invalid - before == 4 + 2
            assert backend.counters.invalid - total == 6


@pytest.mark.clause("D1", "D2", "D9")
@pytest.mark.beyond_core
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("name", MISSING)
def test_many_missing_rows_under_every_parameter(backend: Backend, name: str, path: str) -> None:
    """Thousands of rows that the table does not reach each have the score 0, after any scale and soft-cap, beside any sink."""
    with scene(backend, (48, 0, 48), layer=1) as s:
        s.visible = int32(48 + 1024, 0, 5000)
        s.check(path=path, **MISSING[name])
