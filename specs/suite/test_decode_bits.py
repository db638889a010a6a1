"""Direct equals gather, and a row's bits are its own (clauses D4, D5, D7, D12)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import Backend
from forebay.specs.suite.kv import (
    EACH_KV_DTYPE,
    KV_DTYPES,
    LAYOUTS,
    Params,
    Sizes,
    claimed,
    geometry,
    int32,
    launches,
    new_pool,
    own_counts,
    put_values,
    same_arrays,
    same_bits,
    slot,
)
from forebay.specs.suite.scenes import Q_DTYPES, Scene, scene

LENGTHS = (700, 33, 512, 0, 1, 513, 64, 31, *range(100, 124))
GEOMETRIES = ((9, 3, 64), (8, 2, 128), (32, 8, 64), (5, 1, 80), (20, 1, 17), (7, 1, 100), (3, 3, 32))
PARAMS: tuple[Params, ...] = ({}, {"window": 45}, {"softcap": 3.0, "scale": 1.0}, {"window": 600, "scale": 0.3})


def asked(backend: Backend) -> list[Params]:
    """Those of ``PARAMS`` whose features the backend claims."""
    return [
        params
        for params in PARAMS
        if all(backend.capabilities.allows(name, True) for name in params if name != "scale")
    ]


# -- D4 --------------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("D4")
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), GEOMETRIES)
def test_direct_equals_gather(
    backend: Backend, heads: int, kv_heads: int, dim: int, query_len: int, dtype: str
) -> None:
    sizes: Sizes = {"num_kv_heads": kv_heads, "head_dim": dim, "dtype": dtype}
    with scene(backend, (1030, 70, 0, 5, 512), heads=heads, query_len=query_len, **sizes) as s:
        s.table[1, 2] = -1
        for params in asked(backend):
            for q_dtype in Q_DTYPES:
                direct, gather = s.both_paths(q_dtype=q_dtype, **params)
                same_arrays(direct, gather)


@pytest.mark.clause("D4", "L2")
@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
def test_direct_equals_gather_for_any_call(backend: Backend, layout: str, data: st.DataObject) -> None:
    draw = data.draw
    lengths = draw(st.lists(st.integers(0, 50) | st.sampled_from([511, 512, 513]), min_size=1, max_size=5))
    with scene(
        backend,
        lengths,
        layout=layout,
        head_dim=draw(claimed(backend, "head_dims", range(1, 71))),
        block_size=draw(claimed(backend, "block_sizes", range(1, 21))),
        dtype=draw(claimed(backend, "kv_dtypes", KV_DTYPES)),
        query_len=draw(claimed(backend, "max_query_len", range(1, 4))),
        layer=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 999)),
        heads=draw(st.sampled_from([2, 4, 6])),
    ) as s:
        params: Params = {
            "window": draw(st.none() | st.integers(1, 60)),
            "softcap": draw(st.none() | st.floats(0.5, 9)) if backend.capabilities.softcap else None,
        }
        direct, gather = s.both_paths(q_dtype=draw(st.sampled_from(Q_DTYPES)), **params)
        same_arrays(direct, gather)


@pytest.mark.clause("D12", "C9")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), GEOMETRIES)
def test_only_the_switch_selects_gather(backend: Backend, heads: int, kv_heads: int, dim: int) -> None:
    """No geometry, length or parameter makes direct fall back."""
    with scene(backend, (70, 0, 513), heads=heads, num_kv_heads=kv_heads, head_dim=dim) as s:
        for path in ("direct", "gather"):
            for params in asked(backend):
                before = {name: launches(backend, name) for name in ("gather", "paged_decode")}
                s.decode(path=path, **params)
                assert launches(backend, "paged_decode") == before["paged_decode"] + 1
                assert launches(backend, "gather") == before["gather"] + (path == "gather")


@pytest.mark.clause("D12")
def test_direct_needs_no_memory_that_grows_with_the_table(backend: Backend) -> None:
    """A table for 2^24 tokens, whose contiguous copy would take 137 GB: three tokens of it are visible."""
    with new_pool(backend, geometry(num_kv_heads=8, head_dim=128)) as pool:
        put_values(backend, pool, [slot(pool, 1, t) for t in range(3)], [1, 2, 6])
        table = np.full((1, 2**20), -1, np.int32)
        table[0, 0] = 1 + pool.first_block
        q = backend.to_device(np.ones((1, 8, 128), np.float32))
        out = backend.paged_decode(q, pool, 0, table, int32(3), table_len=2**20)
        np.testing.assert_allclose(backend.to_host(out), 3.0, rtol=1e-6)


# -- D5 --------------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("D5")
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), GEOMETRIES)
def test_batches_of_1_3_8_and_32(backend: Backend, heads: int, kv_heads: int, dim: int, path: str, dtype: str) -> None:
    sizes: Sizes = {"num_kv_heads": kv_heads, "head_dim": dim, "dtype": dtype}
    with scene(backend, LENGTHS, heads=heads, **sizes) as s:
        out, lse = s.decode(path=path)
        for size in (1, 3, 8):
            for first in range(0, 32, 8 if size == 8 else 5):
                rows = [(first + i) % 32 for i in range(size)]
                part, part_lse = s.rows(*rows).decode(path=path)
                same_bits(part, out[rows])
                same_bits(part_lse, lse[rows])
        four = [*range(32)] * 4
        same_arrays(s.rows(*four).decode(path=path), (out[four], lse[four]))


@pytest.mark.clause("D5")
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("q_dtype", Q_DTYPES)
def test_no_batch_is_too_large(backend: Backend, q_dtype: str, path: str) -> None:
    """The rows of a batch of 2,100, whatever q's dtype, have the bits that each has alone and among three."""
    with scene(backend, (70, 33, 1, 600, 16, 0, 100), heads=8, num_kv_heads=2) as s:
        each = [s.rows(row).decode(q_dtype=q_dtype, path=path) for row in range(7)]
        alone = [np.concatenate(parts) for parts in zip(*each, strict=True)]
        same_arrays(s.rows(2, 0, 4).decode(q_dtype=q_dtype, path=path), [x[[2, 0, 4]] for x in alone])
        many = [*range(7)] * 300 if path == "direct" else [*range(7)] * 20
        same_arrays(s.rows(*many).decode(q_dtype=q_dtype, path=path), [x[many] for x in alone])


@pytest.mark.clause("D5", "D3")
@given(data=st.data())
def test_neighbours_padding_and_table_width_change_nothing(backend: Backend, data: st.DataObject) -> None:
    """Any bucket, any order, padded rows whose q and table are garbage, any width: the same bits for every live row."""
    draw = data.draw
    heads, kv_heads, dim = draw(
        st.sampled_from([g for g in GEOMETRIES if backend.capabilities.allows("head_dims", g[2])])
    )
    sizes: Sizes = {"num_kv_heads": kv_heads, "head_dim": dim}
    sizes["block_size"] = draw(claimed(backend, "block_sizes", (1, 5, 16)))
    params = draw(st.sampled_from(asked(backend)))
    lengths = draw(st.lists(st.integers(1, 40) | st.just(600), min_size=2, max_size=4))
    with scene(backend, lengths, heads=heads, **sizes) as s:
        alone = [s.rows(b).decode(**params) for b in range(len(s.visible))]
        order = draw(st.permutations(range(len(s.visible))))
        batch = s.rows(*order)
        pads, width = draw(st.integers(0, 13)), draw(st.integers(0, 40) | st.just(200))
        batch.q = np.concatenate([batch.q, np.full((pads, *s.q.shape[1:]), np.nan, np.float32)])
        batch.table = np.pad(batch.table, ((0, pads), (0, width)), constant_values=10**6)
        batch.visible = np.append(batch.visible, np.zeros(pads, np.int32))
        batch.table_len = draw(st.integers(s.table_len, batch.table.shape[1]))
        out, lse = batch.decode(**params)
        for place, b in enumerate(order):
            same_bits(out[place : place + 1], alone[b][0])
            same_bits(lse[place : place + 1], alone[b][1])
        assert not out[len(order) :].view(np.uint32).any()
        assert s.pool.invalid == 0


@pytest.mark.clause("D5", "D11")
def test_a_query_among_several_equals_the_query_alone(backend: Backend) -> None:
    with scene(backend, (530, 4, 17), heads=6, query_len=5) as s:
        for params in asked(backend):
            out, lse = s.decode(**params)
            for t in range(5):
                visible = np.maximum(s.visible - (4 - t), 0)
                one = Scene(backend, s.pool, s.q[:, t : t + 1].copy(), s.table, visible, s.table_len)
                single, single_lse = one.decode(**params)
                same_bits(single, out[:, t : t + 1])
                same_bits(single_lse, lse[:, t : t + 1])


@pytest.mark.clause("D5")
def test_repeats_give_the_same_bits(backend: Backend) -> None:
    with scene(backend, (4097, 1500, 700, 3), heads=8, num_kv_heads=2, head_dim=128) as s:
        out, lse = s.decode()
        for _ in range(10):
            again, again_lse = s.decode()
            same_bits(again, out)
            same_bits(again_lse, lse)


# -- D7 --------------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("D7", "W3", "C9")
@pytest.mark.smoke("D7")
@pytest.mark.parametrize("path", ["direct", "gather"])
def test_no_host_read_and_no_sync(backend: Backend, path: str) -> None:
    """Nothing of the kind is counted in front of the driver, nor by the driver itself where it keeps counts of its own."""
    with scene(backend, (17, 0, 5)) as s:
        s.table[0, 1] = -1
        counters = backend.counters
        backend.synchronize()
        # Behind the wait, so that a device that defers work has some queued for which a wait would count.
        q, table, visible = (backend.to_device(x) for x in (s.q, s.table, s.visible))
        before, own = (counters.downloads, counters.syncs, counters.uploads), own_counts(backend)
        out, _ = backend.paged_decode(q, s.pool, 0, table, visible, table_len=s.table_len, path=path, return_lse=True)
        assert (counters.downloads, counters.syncs, counters.uploads) == before
        assert own_counts(backend) == own
        backend.to_host(out)
        assert [name for name, count in own_counts(backend).items() if count <= own[name]] == [], "it counts nothing"
        assert s.pool.invalid == 1
