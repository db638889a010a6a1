"""Staging: strided host KV to the device, bit for bit, and refused before a byte changes (clauses S1 to S4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import (
    Backend,
    BlockTable,
    InvalidInput,
    InvalidLayout,
    KVGeometry,
    Pool,
    Shadow,
    StaleShadow,
    UnmarkedWriteLoc,
    WriteLoc,
)
from forebay.specs.suite import attention, oracle
from forebay.specs.suite.attention import Array
from forebay.specs.suite.fixtures import Another
from forebay.specs.suite.kv import (
    EACH_KV_DTYPE,
    claimed,
    geometry,
    int32,
    new_pool,
    poison,
    refused,
    same_bits,
    storage,
)
from forebay.specs.suite.staging import G, host_kv, stage


def content(b: Backend, pool: Pool, block: int, tokens: int, layer: int = 0) -> tuple[Array, Array]:
    """What the device holds of the first rows of a block, not through a door."""
    offsets = np.arange(tokens)
    arrays = oracle.stored(b, pool, layer)
    k, v = oracle.rows_at(pool.layout, arrays, pool.geometry, np.full(tokens, block), offsets)
    return np.ascontiguousarray(k), np.ascontiguousarray(v)


# -- S1, S2 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("S1", "S2")
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("target", ["shadow", "NHD", "HND", "KV2", "PACKED", "FUSED"])
@given(data=st.data())
def test_any_view_is_staged_bit_for_bit(backend: Backend, target: str, dtype: str, data: st.DataObject) -> None:
    """Sliced, transposed, unbound views; any blocks in any order; a partial last block; nothing else changes."""
    stage_any_view(backend, target, dtype, data.draw)


@pytest.mark.clause("S1", "S2", "L1")
@pytest.mark.beyond_core
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@given(data=st.data())
def test_any_view_is_staged_into_foreign_memory(backend: Backend, dtype: str, data: st.DataObject) -> None:
    stage_any_view(backend, "wrapped", dtype, data.draw)


def stage_any_view(backend: Backend, target: str, dtype: str, draw: Any) -> None:
    """Stage drawn views to drawn blocks of a new pool, and hold every byte of both of its layers against what was staged."""
    block_size = draw(claimed(backend, "block_sizes", range(1, 6)))
    head_dim = draw(claimed(backend, "head_dims", range(1, 10)))
    num_blocks = draw(st.sampled_from([8, 8, 45]))
    g = KVGeometry(num_blocks, block_size, draw(st.integers(1, 3)), head_dim, 2, dtype)
    pool = pool_of(backend, g, target)
    poison(backend, pool)
    k, v = host_kv(g, seed=draw(st.integers(0, 99)))
    k_view, v_view = draw(st.sampled_from(VIEWS))(k, v)
    n = draw(st.integers(0, 5)) if num_blocks == 8 else draw(st.integers(9, 44))
    src = draw(st.lists(st.integers(0, len(k_view) - 1), min_size=n, max_size=n))
    dst = draw(st.permutations(range(pool.first_block, num_blocks)))[:n]
    tokens = n * g.block_size - (draw(st.integers(0, g.block_size - 1)) if n else 0)
    layer = draw(st.integers(0, 1))
    before = [oracle.stored(backend, pool, each) for each in range(2)]
    stage(backend, k_view, v_view, pool, src, dst, tokens, layer=layer, accept_strided=True)
    after = [oracle.stored(backend, pool, each) for each in range(2)]
    for old, new in zip(before[1 - layer], after[1 - layer], strict=True):
        same_bits(old, new)
    block, offset = (x.reshape(-1) for x in np.meshgrid(np.arange(num_blocks), np.arange(g.block_size), indexing="ij"))
    expected = [x.copy() for x in oracle.rows_at(pool.layout, before[layer], g, block, offset)]
    for i, (source, to) in enumerate(zip(src, dst, strict=True)):
        rows = min(g.block_size, tokens - i * g.block_size)
        at = to * g.block_size
        expected[0][at : at + rows] = attention.values(np.ascontiguousarray(k_view[source, :rows]))
        expected[1][at : at + rows] = attention.values(np.ascontiguousarray(v_view[source, :rows]))
    for got, want in zip(oracle.rows_at(pool.layout, after[layer], g, block, offset), expected, strict=True):
        same_bits(np.ascontiguousarray(got), np.ascontiguousarray(want))
    backend.release(pool)


def pool_of(backend: Backend, g: KVGeometry, target: str) -> Pool:
    """A shadow, a pool of its own memory in a layout, or one of two layers of foreign memory."""
    if target == "wrapped":
        return backend.wrap_pool([storage("NHD", g) for _ in range(g.num_layers)], layout="NHD", geometry=g)
    return backend.create_shadow(g) if target == "shadow" else backend.create_pool(g, target)


def unbound(k: Array, v: Array) -> tuple[Array, Array]:
    both = np.stack([k, v], axis=1)
    return both[:, 0], both[:, 1]


def packed(k: Array, v: Array) -> tuple[Array, Array]:
    both = np.concatenate([k, v], axis=-1)
    return both[..., : k.shape[-1]], both[..., k.shape[-1] :]


def head_major(k: Array, v: Array) -> tuple[Array, Array]:
    k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (k, v))
    return k, v


def backwards(k: Array, v: Array) -> tuple[Array, Array]:
    return k[::-1, :, ::-1], v[::-1, :, ::-1]


def read_only(k: Array, v: Array) -> tuple[Array, Array]:
    k, v = k.copy(), v.copy()
    k.flags.writeable = v.flags.writeable = False
    return k, v


VIEWS: tuple[Callable[[Array, Array], tuple[Array, Array]], ...] = (
    lambda k, v: (k, v),
    lambda k, v: (k[::2], v[1::2]),
    lambda k, v: (np.broadcast_to(k[:1], k.shape), v),
    unbound,
    packed,
    head_major,
    backwards,
    read_only,
)


@pytest.mark.clause("S1", "S2")
@pytest.mark.parametrize("target", ["shadow", "NHD"])
@pytest.mark.parametrize("count", [63, 64, 65, 129, 300, 1100])
def test_many_blocks_are_staged_whole(backend: Backend, target: str, count: int) -> None:
    """A long prompt in one call, in any order: every row of it and none behind its end."""
    g, layer = geometry(num_blocks=count + 2, num_kv_heads=1, num_layers=2), count % 2
    pool = pool_of(backend, g, target)
    poison(backend, pool)
    k, v = host_kv(g, blocks=count)
    rng = np.random.default_rng(0)
    src, dst = rng.permutation(count), pool.first_block + rng.permutation(count)
    tokens = count * g.block_size - 3
    stage(backend, k, v, pool, src, dst, tokens, layer=layer)
    arrays = oracle.stored(backend, pool, layer)
    for sent, got in zip(
        (k, v), oracle.rows_at(pool.layout, arrays, g, dst.repeat(16), np.tile(range(16), count)), strict=True
    ):
        same_bits(got[:tokens], sent[src].reshape(-1, 1, g.head_dim)[:tokens])
        assert not np.isfinite(got[tokens:]).any()
    backend.release(pool)


@pytest.mark.clause("S1")
@pytest.mark.smoke("S1")
@pytest.mark.refuses("S1")
@pytest.mark.parametrize("view", [unbound, packed, head_major, backwards])
def test_a_strided_view_needs_the_callers_word(backend: Backend, shadow: Shadow, view: Any) -> None:
    k, v = host_kv()
    k_view, v_view = view(k, v)
    for k_given, v_given in ((k_view, v), (k, v_view), (k_view, v_view)):
        with refused(backend, InvalidLayout, r"a non-contiguous view .*pass accept_strided=True", shadow):
            stage(backend, k_given, v_given, shadow, [0], [1], 16)
    stage(backend, k_view, v_view, shadow, [3], [1], 16, accept_strided=True)
    got = content(backend, shadow, 1, 16)
    same_bits(got[0], np.ascontiguousarray(k_view[3]))
    same_bits(got[1], np.ascontiguousarray(v_view[3]))
    stage(backend, k[2:4], v[2:4], shadow, [1], [2], 16)
    same_bits(content(backend, shadow, 2, 16)[0], k[3])


@pytest.mark.clause("S1", "S2")
def test_special_bits_survive_staging(backend: Backend) -> None:
    """NaN payloads, infinities, minus zero and denormals, in both dtypes."""
    for dtype, patterns in (
        ("float32", np.array([0x7FC12345, 0xFF800000, 0x80000000, 1, 0x7F800001, 0x007FFFFF], np.uint32)),
        ("bfloat16", np.array([0x7FC1, 0xFF80, 0x8000, 1, 0x7F81, 0x007F], np.uint16)),
    ):
        g = geometry(num_kv_heads=1, dtype=dtype)
        made = backend.create_shadow(g)
        row = np.resize(patterns.view(np.float32) if dtype == "float32" else patterns, g.head_dim)
        k = np.broadcast_to(row, (1, g.block_size, 1, g.head_dim)).copy()
        stage(backend, k, k[:, ::-1].copy(), made, [0], [3], g.block_size)
        for got in content(backend, made, 3, g.block_size):
            same_bits(got, np.ascontiguousarray(attention.values(k)[0]))
        backend.release(made)


@pytest.mark.clause("S1", "L2")
@pytest.mark.refuses("S1")
def test_latent_kv_is_staged_without_v(backend: Backend) -> None:
    g = geometry("LATENT")
    with new_pool(backend, g, "LATENT") as pool:
        k = np.random.default_rng(0).standard_normal((3, g.block_size, 1, g.head_dim)).astype(np.float32)
        with refused(backend, InvalidInput, "layout LATENT keeps V inside K, so pass None", pool):
            stage(backend, k, k, pool, [0], [1], 16)
        stage(backend, k, None, pool, [2], [1], 3)
        got = content(backend, pool, 1, 3)
        same_bits(got[0], np.ascontiguousarray(k[2, :3]))
        same_bits(got[1], np.ascontiguousarray(k[2, :3, :, : g.value_dim]))


# -- S3 and other refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.refuses("S3")
def test_the_dtype_is_named(backend: Backend, shadow: Shadow) -> None:
    """Float32 and two bfloat16 have the same bytes; nothing is guessed from a size."""
    k, v = host_kv()
    for dtype, says in (
        ("bfloat16", "dtype 'bfloat16' named, the shadow holds float32"),
        ("float16", "dtype 'float16' named"),
        ("float64", "got 'float64', expected one of float32"),
        (None, "got None, expected one of float32"),
        (np.float32, "got <class 'numpy.float32'>, expected one of"),
        (4, "got 4, expected one of"),
    ):
        with refused(backend, InvalidInput, says, shadow):
            stage(backend, k, v, shadow, [0], [1], 16, dtype=dtype)
    for wrong in (k.view(np.uint32), k.view(np.int32), k.astype(np.float64), k.view(np.uint16), k.astype(np.float16)):
        with refused(
            backend, InvalidInput, f"dtype 'float32' named, got numpy {wrong.dtype}; expected float32", shadow
        ):
            stage(backend, wrong, v, shadow, [0], [1], 16)
        with refused(backend, InvalidInput, f"v_view: dtype 'float32' named, got numpy {wrong.dtype}", shadow):
            stage(backend, k, wrong, shadow, [0], [1], 16)
    untyped: Any = backend.stage  # a type checker would miss the dtype first
    with pytest.raises(TypeError, match="dtype"):
        untyped(k, v, shadow, 0, src_blocks=[0], dst_blocks=[1], tokens=4)
    half = backend.create_shadow(geometry(num_blocks=8, dtype="bfloat16"))
    with refused(backend, InvalidInput, r"got numpy float32; expected uint16 \(bfloat16 as uint16 bits\)", half):
        stage(backend, k, v, half, [0], [1], 16)
    backend.release(half)


@pytest.mark.refuses("S1", "S2")
@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"src": [6]}, InvalidInput, "src_blocks: got 6 to 6, expected 0 to 5"),
        ({"src": [-1]}, InvalidInput, "src_blocks: got -1"),
        ({"dst": [0]}, InvalidInput, "dst_blocks: got 0 to 0, expected 1 to 7"),
        ({"dst": [8]}, InvalidInput, "dst_blocks: got 8"),
        ({"dst": [-1]}, InvalidInput, "dst_blocks: got -1"),
        ({"src": [0, 1], "dst": [3, 3], "tokens": 32}, InvalidInput, "names a block twice"),
        ({"src": [0, 1]}, InvalidInput, "2 source and 1 target blocks for tokens=16 in blocks of 16; expected 1"),
        ({"src": [0, 1], "dst": [1, 2]}, InvalidInput, "expected 1 blocks in both"),
        ({"tokens": 17}, InvalidInput, "tokens=17 in blocks of 16; expected 2"),
        ({"tokens": 0}, InvalidInput, "expected 0 blocks in both"),
        ({"tokens": -1}, InvalidInput, "tokens=-1.*a non-negative int"),
        ({"tokens": 4.0}, InvalidInput, "tokens=4.0"),
        ({"tokens": True}, InvalidInput, "tokens=True"),
        ({"src": [0.5]}, InvalidInput, "src_blocks: got float64"),
        ({"src": [[0]]}, InvalidInput, r"src_blocks: got int64\[1, 1\], expected a list of block ids"),
        ({"k": np.zeros((6, 16, 2, 63), np.float32)}, InvalidLayout, r"k_view: got shape \(6, 16, 2, 63\)"),
        ({"k": np.zeros((6, 15, 2, 64), np.float32)}, InvalidLayout, r"expected \[NB, 16, 2, 64\]"),
        ({"v": np.zeros((6, 2, 16, 64), np.float32)}, InvalidLayout, r"v_view: got shape \(6, 2, 16, 64\)"),
        ({"v": np.zeros((16, 2, 64), np.float32)}, InvalidLayout, r"v_view: got shape \(16, 2, 64\)"),
        (
            {"v": np.zeros((1, 16, 2, 64), np.float32), "src": [1]},
            InvalidInput,
            "src_blocks: got 1 to 1, expected 0 to 0",
        ),
        ({"v": None}, InvalidInput, "needs v_view"),
        ({"k": [[1.0]]}, InvalidInput, "k_view: got list, expected a numpy view"),
        ({"layer": 2}, InvalidInput, "got layer 2, expected 0 to 1"),
        ({"layer": -1}, InvalidInput, "got layer -1"),
    ],
)
def test_a_wrong_request_stages_nothing(
    backend: Backend, shadow: Shadow, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    k, v = host_kv()
    request: dict[str, Any] = {"k": k, "v": v, "src": [0], "dst": [1], "tokens": 16, "layer": 0} | changes
    with refused(backend, error, says, shadow):
        stage(
            backend,
            request["k"],
            request["v"],
            shadow,
            request["src"],
            request["dst"],
            request["tokens"],
            layer=request["layer"],
        )
    with pytest.raises(StaleShadow):
        shadow.read(0, WriteLoc.slots(int32(16)))


@pytest.mark.refuses("S1", "B5")
def test_another_backends_shadow_is_refused(backend: Backend, another: Another) -> None:
    k, v = host_kv()
    with another() as other:
        foreign = other.create_shadow(G)
        with pytest.raises(InvalidInput, match="a pool of another backend"):
            stage(backend, k, v, foreign, [0], [1], 16)


# -- S4 --------------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("S4", "S1")
def test_host_arrays_may_be_reused_at_once(backend: Backend, shadow: Shadow) -> None:
    """The same host memory carries every block in turn; each consumer sees whole rows."""
    k, v = (np.empty((1, G.block_size, 2, G.head_dim), np.float32) for _ in range(2))
    for block in range(1, 8):
        k[:], v[:] = block, -block
        stage(backend, k, v, shadow, [0], [block], 16)
        k[:], v[:] = np.nan, np.inf
        got = backend.to_host(shadow.read(0, WriteLoc.slots(np.arange(block * 16, block * 16 + 16)))[1])
        assert (got == -block).all()
    q = backend.to_device(np.zeros((7, 2, G.head_dim), np.float32))
    table = np.arange(1, 8, dtype=np.int32)[:, None]
    out = backend.to_host(backend.paged_decode(q, shadow, 0, table, int32(*[16] * 7), table_len=1))
    np.testing.assert_array_equal(out[:, 0, 0], -np.arange(1.0, 8.0, dtype=np.float32))


@pytest.mark.clause("S4", "C9")
def test_staging_counts_what_it_uploads(backend: Backend, shadow: Shadow) -> None:
    k, v = host_kv()
    uploads, nbytes = backend.counters.uploads, backend.counters.upload_bytes
    stage(backend, k, v, shadow, [0, 1], [1, 2], 17)
    assert backend.counters.uploads > uploads
    assert backend.counters.upload_bytes - nbytes >= 17 * 2 * G.head_dim * 4 * 2
    same_bits(content(backend, shadow, 1, 16)[0], k[0])


@pytest.mark.clause("S1", "W3")
@pytest.mark.refuses("W3")
def test_staging_into_a_pool_that_translates_needs_the_mark(backend: Backend) -> None:
    pool = backend.create_pool(G, requires_physical_write_loc=True)
    k, v = host_kv()
    blocks = np.array([1], np.int32)
    for bare in ([1], blocks, BlockTable(blocks)):
        with refused(backend, UnmarkedWriteLoc, "physical=True", pool):
            stage(backend, k, v, pool, [0], bare, 16)
    stage(backend, k, v, pool, [0], BlockTable(blocks, physical=True), 16)
    same_bits(backend.to_host(pool.read(0, WriteLoc.slots(int32(16), physical=True))[0])[0], k[0, 0])
    backend.release(pool)
