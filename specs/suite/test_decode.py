"""Paged decode against the oracle: geometries, lengths, windows, sinks, soft-cap, several queries (clauses D6, D9, D11, L3)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import AttentionParams, Backend
from forebay.specs.suite import oracle
from forebay.specs.suite.kv import (
    BLOCK_SIZE,
    EACH_KV_DTYPE,
    HEAD_DIM,
    KV_DTYPES,
    LAYOUTS,
    Params,
    claimed,
    geometry,
    int32,
    mean_of_values,
    new_pool,
    poison,
    put,
    put_values,
    same_arrays,
    same_bits,
    slot,
)
from forebay.specs.suite.scenes import Q_DTYPES, WAYS, Scene, scene, tolerance

HEAD_SIZES = (64, 128, 1, 17, 32, 80, 96, 100, 192)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 20)
BLOCK_SIZES = (16, 32, 1, 2, 3, 5, 8, 17, 64, 128, 256)
LENGTHS = (5, 0, 1, 37, 64, 130)
PROBABILITIES_IN_FLOAT32 = 5e-5
"""The most that a result may be off, of the largest |V|, beside the rounding of its own dtype, where q and stored values are exact."""


@pytest.mark.clause("D6", "L3")
@pytest.mark.case("D06", "D07")
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("dim", [*HEAD_SIZES, 16])
def test_any_head_size(backend: Backend, dim: int, dtype: str) -> None:
    with scene(backend, LENGTHS, heads=6, num_kv_heads=2, head_dim=dim, dtype=dtype) as s:
        s.check()


@pytest.mark.clause("D6", "L3")
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("group", GROUPS)
def test_any_group_of_query_heads(backend: Backend, group: int, dtype: str) -> None:
    for dim in (64, 128):
        with scene(backend, LENGTHS, heads=2 * group, num_kv_heads=2, head_dim=dim, dtype=dtype) as s:
            s.check()


@pytest.mark.clause("D6", "L3")
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (24, 8), (64, 8), (64, 64), (128, 16)])
def test_many_heads(backend: Backend, heads: int, kv_heads: int) -> None:
    """As many as models of one device have; every KV head answers its own query heads."""
    for dim, q_dtype in ((64, "float32"), (128, "bfloat16")):
        with scene(backend, (37, 0, 18), heads=heads, num_kv_heads=kv_heads, head_dim=dim, layer=1) as s:
            s.check(q_dtype=q_dtype)


@pytest.mark.clause("D6", "L3")
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_any_block_size(backend: Backend, block_size: int) -> None:
    lengths = (*LENGTHS, block_size - 1, block_size, block_size + 1)
    with scene(backend, lengths, heads=6, num_kv_heads=2, block_size=block_size) as s:
        s.check()


@pytest.mark.clause("D6", "L2", "L3")
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(backend: Backend, layout: str, dtype: str) -> None:
    for layer, dim in enumerate((64, 128)):
        with scene(
            backend, LENGTHS, layout=layout, heads=8, num_kv_heads=2, head_dim=dim, dtype=dtype, layer=layer
        ) as s:
            s.check()
            s.check(path="gather", window=9)


@pytest.mark.clause("D6", "D3")
@pytest.mark.parametrize(("dtype", "longest"), [("float32", 4097), ("bfloat16", 1025)])
def test_every_length(backend: Backend, dtype: str, longest: int) -> None:
    """One sequence, each row seeing a prefix of it: every length to 1,025, beyond it those around each 128 and one in 31."""
    with scene(backend, [longest], heads=1, num_kv_heads=1, dtype=dtype) as s:
        rows = np.arange(longest + 1)
        rows = rows[(rows <= 1025) | (np.abs((rows + 64) % 128 - 64) <= 1) | (rows % 31 == 0)]
        every = Scene(
            backend,
            s.pool,
            np.random.default_rng(1).standard_normal((len(rows), 1, 1, HEAD_DIM)).astype(np.float32),
            np.repeat(s.table, len(rows), axis=0),
            rows.astype(np.int32),
            s.table_len,
        )
        every.check()


@pytest.mark.clause("D6")
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (128, 4), (100, 2)])
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
def test_long_sequences_beside_short_ones(backend: Backend, dtype: str, dim: int, group: int) -> None:
    lengths = (4097, 0, 511, 512, 513, 4096, 1, 2049)
    with scene(backend, lengths, heads=group, num_kv_heads=1, head_dim=dim, dtype=dtype) as s:
        s.check()
        s.check(window=600)


@pytest.mark.clause("D6")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.beyond_core)])
@pytest.mark.parametrize("group", [1, 3])
def test_probabilities_stay_float32_beside_values_of_two_bytes(backend: Backend, dtype: str, group: int) -> None:
    """Stored values are exact for the oracle: what is left is the rounding of out, and the error of float32 probabilities.

    Weights rounded to bfloat16 are off by 1e-3 and more where a row sees few keys, which D6's limit for bfloat16 lets pass.
    """
    half_steps = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
    with scene(backend, (2, 3, 5, 20), heads=2 * group, dtype=dtype) as s:
        for q_dtype in ("float32", dtype):
            out, want = s.decode(q_dtype=q_dtype)[0], s.expect(q_dtype=q_dtype)
            limit = max(PROBABILITIES_IN_FLOAT32, tolerance(backend, "float32")) * want.largest
            assert (np.abs(out - want.out) <= np.abs(want.out) * half_steps[q_dtype] + limit).all()


SINKS = np.linspace(-3, 3, 6, dtype=np.float32)
PARAMS: dict[str, Params] = {
    "scale": {"scale": 0.31},
    "negative scale": {"scale": -0.2},
    "zero scale": {"scale": 0.0},
    "window": {"window": 7},
    "window 1": {"window": 1},
    "window wider than all": {"window": 10**6},
    "softcap": {"softcap": 1.5, "scale": 2.0},
    "sinks": {"sinks": SINKS},
    "sinks outweigh": {"sinks": SINKS + 30},
    "all": {"scale": 0.7, "window": 33, "softcap": 4.0, "sinks": SINKS},
}


@pytest.mark.clause("D9", "D6")
@pytest.mark.parametrize(
    ("dtype", "query_len"),
    [("float32", 1), ("bfloat16", 1), pytest.param("bfloat16", 3, marks=pytest.mark.clause("D11"))],
)
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter(backend: Backend, name: str, path: str, dtype: str, query_len: int) -> None:
    with scene(backend, (3, 0, 16, 40, 600), heads=6, dtype=dtype, query_len=query_len) as s:
        s.check(path=path, **PARAMS[name])


@pytest.mark.clause("D9", "D6", "C3", "D4")
@pytest.mark.parametrize("query_len", [1, pytest.param(3, marks=[pytest.mark.clause("D11"), pytest.mark.beyond_core])])
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("name", PARAMS)
def test_every_parameter_counts_for_any_query(backend: Backend, name: str, dtype: str, query_len: int) -> None:
    """Queries of every dtype, in the last layer of three, eager and as a step; the path changes no bit."""
    with scene(backend, (3, 0, 40, 70), heads=6, dtype=dtype, query_len=query_len, layer=2) as s:
        # What is left beside a sink of 33 is 0 in float16.
        params: Params = {"sinks": SINKS + 6} if name == "sinks outweigh" else PARAMS[name]
        for q_dtype in Q_DTYPES:
            direct = s.check_every_way(q_dtype=q_dtype, **params)
            same_arrays(s.decode(q_dtype=q_dtype, path="gather", **params), direct)


@pytest.mark.clause("D9")
@pytest.mark.parametrize("name", [name for name in PARAMS if name != "window wider than all"])
def test_every_parameter_changes_the_result(backend: Backend, name: str) -> None:
    with scene(backend, (40,), heads=6) as s:
        assert np.abs(s.decode(**PARAMS[name])[0] - s.decode()[0]).max() > 1e-3


@pytest.mark.clause("D11", "D3")
@pytest.mark.parametrize(
    "query_len", [1, 2, pytest.param(3, marks=[pytest.mark.smoke("D11"), pytest.mark.beyond_core]), 7, 16]
)
def test_several_queries(backend: Backend, query_len: int) -> None:
    """Rows with fewer keys than queries: the first queries see nothing and are zero."""
    lengths = (0, 1, 2, 6, 7, 15, 16, 17, 31, 32, 33, 70)
    with scene(backend, lengths, heads=6, query_len=query_len) as s:
        for q_dtype in Q_DTYPES:
            _, lse = s.check(q_dtype=q_dtype)
            assert lse.shape == (len(lengths), query_len, 6)
            for b, length in enumerate(lengths):
                assert np.isneginf(lse[b]).all(axis=-1).sum() == max(0, query_len - length)
            s.check(q_dtype=q_dtype, window=5)


@pytest.mark.clause("C3", "D6")
@pytest.mark.parametrize("rows", [16, 32, 100])
def test_a_step_of_many_rows(backend: Backend, rows: int) -> None:
    """Every row of a wide bucket is attended to in a Segment and in its replay, whatever q's dtype."""
    with scene(backend, [1 + 7 * row % 40 for row in range(rows)], heads=4, extra_width=70, layer=1) as s:
        for q_dtype in Q_DTYPES:
            s.check_every_way(q_dtype=q_dtype)


@pytest.mark.clause("D11")
def test_a_3d_query_is_one_query(backend: Backend) -> None:
    with scene(backend, (5, 0, 9), heads=4) as s:
        out, lse = s.decode()
        flat, flat_lse = backend.paged_decode(
            backend.to_device(s.q[:, 0]),
            s.pool,
            0,
            backend.to_device(s.table),
            backend.to_device(s.visible),
            table_len=s.table_len,
            return_lse=True,
        )
        same_bits(backend.to_host(flat), out[:, 0])
        same_bits(backend.to_host(flat_lse), lse[:, 0])


@pytest.mark.clause("D9")
@pytest.mark.smoke("D9")
@pytest.mark.case("D05")
@pytest.mark.parametrize("query_len", [1, 6])
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_a_window_counts_the_current_token(backend: Backend, layout: str | None, query_len: int) -> None:
    """Equal keys, V = t: the mean of the last W tokens, in decode and as the last rows of a prefill."""
    with new_pool(backend, geometry(layout), layout) as pool:
        put_values(backend, pool, [slot(pool, 0, t) for t in range(18)], range(18))
        table = int32([pool.first_block, pool.first_block + 1])
        for window in (1, 2, 3, 4, 16, 17, 100):
            for length in (1, 2, 6, 15, 16, 17, 18):
                g = pool.geometry
                q = backend.to_device(np.zeros((1, query_len, g.num_kv_heads, g.key_dim), np.float32))
                params = AttentionParams(window=window)
                seen = int32(length)
                out = backend.paged_decode(q, pool, 0, table, seen, table_len=2, params=params)
                got = backend.to_host(out)[0, :, 0, 0]
                for t in range(query_len):
                    end = length - (query_len - 1 - t)
                    want = np.mean(range(max(0, end - window), end)) if end > 0 else 0.0
                    assert got[t] == pytest.approx(want, rel=1e-6), f"window {window}, {length} tokens, query {t}"
        assert mean_of_values(backend, pool, table, [6], params=AttentionParams(window=4))[0] == pytest.approx(3.5)


@pytest.mark.clause("D6", "D5")
@given(data=st.data())
def test_any_call_meets_the_oracle(backend: Backend, data: st.DataObject) -> None:
    draw = data.draw
    allowed = backend.capabilities.allows
    layout = draw(claimed(backend, "layouts", LAYOUTS))
    kv_heads = 1 if layout == "LATENT" else draw(st.integers(1, 8))
    heads = kv_heads * draw(claimed(backend, "max_group", [group for group in GROUPS if group * kv_heads <= 24]))
    q_dtype, how = draw(st.sampled_from(Q_DTYPES)), draw(st.sampled_from(WAYS))
    params: Params = {
        "scale": draw(st.none() | st.floats(-1, 1)),
        "window": draw(st.none() | st.integers(1, 80)),
        "softcap": draw(st.none() | st.floats(0.5, 50)) if allowed("softcap", True) else None,
        "sinks": draw(st.none() | st.just(np.linspace(-2, 2, heads, dtype=np.float32)))
        if allowed("sinks", True)
        else None,
    }
    with scene(
        backend,
        draw(st.lists(st.integers(0, 70) | st.sampled_from([511, 512, 513, 1025]), min_size=1, max_size=6)),
        layout=layout,
        heads=heads,
        query_len=draw(claimed(backend, "max_query_len", range(1, 5))),
        extra_width=draw(st.integers(0, 5) | st.just(200)),
        layer=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 2**16)),
        num_kv_heads=kv_heads,
        head_dim=draw(claimed(backend, "head_dims", (*HEAD_SIZES, *range(2, 41)))),
        block_size=draw(claimed(backend, "block_sizes", range(1, 65))),
        dtype=draw(claimed(backend, "kv_dtypes", KV_DTYPES)),
    ) as s:
        every = s.check(path=draw(st.sampled_from(["direct", "gather"])), q_dtype=q_dtype, how=how, **params)
        row = draw(st.integers(0, len(s.visible) - 1))
        same_arrays(s.rows(row).decode(q_dtype=q_dtype, how=how, **params), [x[row : row + 1] for x in every])


@pytest.mark.clause("L3", "D6")
@pytest.mark.case("D01", "D02")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["k", "v", "both"])
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_lies_behind_the_visible_range_never_leaks(
    backend: Backend, layout: str, path: str, where: str, bad: float
) -> None:
    """V rows [1, 3] and equal keys give 2.0, whatever the rest of the block holds, written there through the door."""
    g = geometry(layout)
    with new_pool(backend, g, layout) as pool:
        tail = [slot(pool, 0, t) for t in range(2, 4)]
        k = np.full((2, g.num_kv_heads, g.key_dim), bad if where != "v" else 0, np.float32)
        v = np.full((2, g.num_kv_heads, g.value_dim), bad if where != "k" else 0, np.float32)
        if layout == "LATENT":
            k[..., : g.value_dim] = v
        put(backend, pool, tail, k, v)
        put_values(backend, pool, [slot(pool, 0), slot(pool, 0, 1)], [1, 3])
        q = np.zeros((1, g.num_kv_heads, g.key_dim), np.float32)
        out = backend.paged_decode(
            backend.to_device(q), pool, 0, int32([pool.first_block, -1]), int32(2), table_len=2, path=path
        )
        np.testing.assert_allclose(backend.to_host(out), 2.0, rtol=1e-6)


@pytest.mark.clause("L3")
def test_freed_blocks_may_hold_anything(backend: Backend) -> None:
    """The same rows in a pool of zeros and in one of poison: the same bits."""
    results = []
    for clean in (True, False):
        with scene(backend, (5, 17, 0), heads=4) as s:
            rows = oracle.stored(backend, s.pool, 0)
            if clean:
                for buffer, held in zip(s.pool.storage(0), rows, strict=True):
                    backend.upload(buffer, np.where(np.isfinite(held), held, 0).astype(np.float32))
            results.append(s.decode())
    same_arrays(results[0], results[1])


@pytest.mark.clause("D6")
@pytest.mark.parametrize("length", [17, 9000, 33000])
def test_one_key_that_outweighs_all_others(backend: Backend, length: int) -> None:
    """Scores of thousands overflow no exponential; the last key of a long sequence counts as one of a short one does."""
    blocks = -(-length // BLOCK_SIZE)
    with new_pool(backend, geometry(num_kv_heads=1, num_blocks=blocks + 1)) as pool:
        k = np.zeros((length, 1, HEAD_DIM), np.float32)
        k[2], k[-1] = 50, -50
        v = np.arange(length, dtype=np.float32)[:, None, None] * np.ones((length, 1, HEAD_DIM), np.float32)
        put(backend, pool, slot(pool, 0) + np.arange(length), k, v)
        table = int32(np.arange(pool.first_block, pool.first_block + blocks))
        for sign, want in ((1.0, 2.0), (-1.0, length - 1.0)):
            q = backend.to_device(np.full((1, 1, HEAD_DIM), sign * 50, np.float32))
            out = backend.paged_decode(q, pool, 0, table, int32(length), table_len=blocks)
            np.testing.assert_array_equal(backend.to_host(out), want)


@pytest.mark.clause("D6", "C3")
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE[1:])
def test_low_precision_kv_is_summed_in_float32(backend: Backend, dtype: str) -> None:
    """A query in float32 over KV of two bytes is as exact as over the same KV in float32.

    Every stored value is exact in float32, so products, sums, probabilities and the output are those of a float32 pool that holds these
    values, and so is their rounding: D6's limit for float32 holds. Probabilities or accumulators of two bytes are off by 2^-9
    (bfloat16) or 2^-12 (float16) relative, 400 or 50 times that limit.
    """
    limit = tolerance(backend, "float32")
    with scene(backend, (4097, 1030, 70, 5), heads=4, dtype=dtype, layer=1) as s:
        some: tuple[Params, ...] = ({}, {"window": 600})
        for params in some:
            want = s.expect(**params)
            for how in WAYS:
                out, lse = s.decode(how=how, **params)
                assert np.abs(out - want.out).max() <= limit * want.largest
                np.testing.assert_allclose(lse, want.lse, rtol=limit, atol=limit)


@pytest.mark.clause("D1", "D6")
@pytest.mark.parametrize("kv_dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("q_dtype", Q_DTYPES)
def test_the_output_has_the_dtype_of_q(backend: Backend, q_dtype: str, kv_dtype: str) -> None:
    with scene(backend, (5, 33, 0), heads=4, dtype=kv_dtype) as s:
        s.check(q_dtype=q_dtype)


@pytest.mark.clause("D6", "L2")
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_layers_are_apart(backend: Backend, layout: str | None) -> None:
    """Each layer of a pool answers with its own rows."""
    g = geometry(layout, num_blocks=3, num_kv_heads=1, num_layers=5)
    with new_pool(backend, g, layout) as pool:
        for layer in range(5):
            rows = np.full((1, 1, HEAD_DIM), 10.0 + layer, np.float32)
            put(backend, pool, [slot(pool, 0)], rows, rows[..., : g.value_dim], layer)
        q = backend.to_device(np.ones((1, 1, HEAD_DIM), np.float32))
        for layer in range(5):
            out = backend.paged_decode(q, pool, layer, int32([pool.first_block]), int32(1), table_len=1)
            np.testing.assert_array_equal(backend.to_host(out), 10.0 + layer)
        poison(backend, pool)
