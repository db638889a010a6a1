"""Foreign strided memory as a pool: written, read and decoded by its own strides (clauses L1, L2, L3, L7)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import Backend, InvalidLayout, KVGeometry, Segment, Unsupported, WriteLoc
from forebay.specs.geometry import storage_shapes
from forebay.specs.suite import attention
from forebay.specs.suite.attention import Array
from forebay.specs.suite.kv import (
    EACH_KV_DTYPE,
    HEAD_DIM,
    KV_DTYPES,
    LAYOUTS,
    as_stored,
    claimed,
    decode_bits,
    geometry,
    int32,
    mean_of_values,
    new_pool,
    put,
    put_values,
    refused,
    same_arrays,
    same_bits,
    storage,
)
from forebay.specs.testing import claiming

pytestmark = pytest.mark.beyond_core


def parts(arrays: Any) -> list[Array]:
    return list(arrays) if isinstance(arrays, tuple) else [arrays]


@pytest.mark.clause("L1", "L2")
@pytest.mark.case("B09")
def test_the_head_major_cache_of_the_report(backend: Backend) -> None:
    for layout, shape in (("HND", (2, 4, 8, 4)), ("NHD", (2, 8, 4, 4))):
        k, v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        pool = backend.wrap_pool((k, v), layout=layout, geometry=KVGeometry(2, 8, 4, 4))
        rows = np.arange(1, 5, dtype=np.float32)[None, :, None] * np.ones((1, 4, 4), np.float32)
        put(backend, pool, [9], rows, rows)
        want = np.zeros((2, 8, 4, 4), np.float32)
        want[1, 1] = rows[0]
        np.testing.assert_array_equal(k.swapaxes(1, 2) if layout == "HND" else k, want)
        np.testing.assert_array_equal(v, k)
        backend.release(pool)


@pytest.mark.clause("L1")
@pytest.mark.case("B05")
def test_a_read_follows_the_stride_of_an_unbound_view(backend: Backend) -> None:
    store = np.zeros((3, 2, 2, 1, 1), np.float32)
    store[:, 1, :, 0, 0] = [[0, 1], [10, 11], [20, 21]]
    copies = tuple(np.ascontiguousarray(store[:, part]) for part in (0, 1))
    answers = []
    for arrays, layout in ((store, "KV2"), ((store[:, 0], store[:, 1]), "NHD"), (copies, "NHD")):
        pool = backend.wrap_pool(arrays, layout=layout, geometry=KVGeometry(3, 2, 1, 1))
        assert mean_of_values(backend, pool, int32([1, 2]), [4])[0] == 15.5
        answers.append(decode_bits(backend, pool, 1, 2))
        backend.release(pool)
    same_bits(answers[0], answers[1])
    same_bits(answers[0], answers[2])


@pytest.mark.clause("L1")
@pytest.mark.case("B06")
def test_a_write_follows_the_stride_of_an_unbound_view(backend: Backend) -> None:
    for layout in ("KV2", "NHD"):
        store = np.full((3, 2, 2, 1, 1), -1, np.float32)
        arrays = store if layout == "KV2" else (store[:, 0], store[:, 1])
        pool = backend.wrap_pool(arrays, layout=layout, geometry=KVGeometry(3, 2, 1, 1))
        put(
            backend,
            pool,
            [2, 3],
            np.array([5, 6], np.float32).reshape(2, 1, 1),
            np.array([7, 8], np.float32).reshape(2, 1, 1),
        )
        want = np.full((3, 2, 2, 1, 1), -1, np.float32)
        want[1, 0, :, 0, 0], want[1, 1, :, 0, 0] = [5, 6], [7, 8]
        np.testing.assert_array_equal(store, want)
        backend.release(pool)


@dataclass
class Carved:
    """A view into larger memory, and where that memory lies outside the view."""

    view: Array
    memory: Array
    outside: Array


def carve(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> Carved:
    """A poisoned view of ``shape`` with drawn strides: axes in any memory order, gaps after any axis, an odd start."""
    order = draw(st.permutations(range(4)))
    step, strides = 1, [0] * 4
    for axis in order:
        step *= draw(st.integers(1, 3))
        strides[axis] = step
        step *= shape[axis]
    start = draw(st.integers(0, 9))
    memory = as_stored(np.full(start + step, np.nan, np.float32), dtype)
    outside = np.ones(len(memory), bool)
    np.lib.stride_tricks.as_strided(outside[start:], shape, strides)[...] = False
    view = np.lib.stride_tricks.as_strided(memory[start:], shape, [step * memory.itemsize for step in strides])
    return Carved(view, memory, outside)


@st.composite
def foreign(draw: st.DrawFn, backend: Backend) -> tuple[KVGeometry, list[tuple[Carved, Carved]]]:
    """A geometry, and K and V of each of its layers."""
    g = KVGeometry(
        draw(st.integers(1, 5)),
        draw(claimed(backend, "block_sizes", range(1, 6))),
        draw(st.integers(1, 3)),
        draw(claimed(backend, "head_dims", range(1, 21))),
        draw(st.integers(1, 3)),
        dtype=draw(claimed(backend, "kv_dtypes", KV_DTYPES)),
    )
    shape = storage_shapes("NHD", g)[0]
    return g, [(carve(draw, shape, g.dtype), carve(draw, shape, g.dtype)) for _ in range(g.num_layers)]


@pytest.mark.clause("L1", "L3", "W6")
@pytest.mark.case("B05", "B06")
@given(data=st.data(), seed=st.integers(0, 99))
def test_any_strides_are_written_read_copied_and_decoded(backend: Backend, data: st.DataObject, seed: int) -> None:
    """Whatever the strides, the pool acts as a contiguous one, and no byte between its elements changes."""
    g, layers = data.draw(foreign(backend))
    rng = np.random.default_rng(seed)
    plain = replace(g, num_blocks=g.num_blocks + 1)
    wrapped = backend.wrap_pool([(k.view, v.view) for k, v in layers], layout="NHD", geometry=g)
    with new_pool(backend, plain, "NHD") as pool:
        n = g.num_slots
        ids = rng.permutation(n)
        src, dst = rng.permutation(n)[: n // 2], rng.permutation(n)[: n // 2]
        rows = rng.standard_normal((g.num_layers, 2, n, g.num_kv_heads, g.head_dim)).astype(np.float32)
        answers = []
        for p, shift in ((wrapped, 0), (pool, g.block_size)):
            for layer, (k_rows, v_rows) in enumerate(rows):
                put(backend, p, ids + shift, k_rows, v_rows, layer)
            p.copy(WriteLoc.slots(src + shift), WriteLoc.slots(dst + shift))
            blocks = range(p.first_block, p.geometry.num_blocks)
            for layer in range(g.num_layers):
                read = p.read(layer, WriteLoc.slots(np.arange(n) + shift))
                answers.append([decode_bits(backend, p, *blocks, layer=layer), *(backend.to_host(x) for x in read)])
        for mine, other in zip(answers[: g.num_layers], answers[g.num_layers :], strict=True):
            same_arrays(mine, other)
    backend.release(wrapped)
    for carved in (each for pair in layers for each in pair):
        untouched = carved.memory[carved.outside]
        same_bits(untouched, as_stored(np.full(len(untouched), np.nan, np.float32), g.dtype))


@pytest.mark.clause("L1", "L2")
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrapped_memory_is_the_pool(backend: Backend, layout: str, dtype: str) -> None:
    """Nothing is copied: a write shows in the foreign array, and a change of the array shows in the pool, in a trace as well."""
    g = geometry(layout, dtype=dtype, num_layers=2)
    layers = [storage(layout, g) for _ in range(2)]
    pool = backend.wrap_pool(layers, layout=layout, geometry=g)
    put_values(backend, pool, [16, 17], [1, 3])
    assert mean_of_values(backend, pool, int32([1]), [2])[0] == 2
    for array in parts(layers[0]):
        assert np.isfinite(attention.values(array)).sum() in (
            2 * g.num_kv_heads * n for n in (g.key_dim, 2 * g.key_dim)
        )
        array[...] = 0
    assert mean_of_values(backend, pool, int32([1]), [2])[0] == 0
    cells = {"q": np.zeros((1, g.num_kv_heads, g.key_dim), np.float32), "table": int32([1]), "visible": int32(2)}
    buffers = {name: backend.buffer(name, x) for name, x in cells.items()}

    def fn(b: Backend) -> Any:
        q, table, visible = (buffer.get() for buffer in buffers.values())
        return {}, {f"out {layer}": b.paged_decode(q, pool, layer, table, visible, table_len=1) for layer in range(2)}

    segment = Segment("attend", fn, reads=tuple(buffers.values()), pools=(pool,))
    backend.run(segment)
    trace = backend.capture(segment)
    for value in (3.0, 5.0):
        for layer, arrays in enumerate(layers):
            for array in parts(arrays):
                array[...] = as_stored(np.full(array.shape, value + layer, np.float32), dtype)
        for layer, out in enumerate(backend.replay(trace).get().values()):
            np.testing.assert_allclose(out, value + layer, rtol=1e-6)
    backend.release(trace)
    backend.release(pool)
    for buffer in buffers.values():
        backend.release(buffer)


@pytest.mark.clause("L7")
def test_one_memory_seen_in_two_block_sizes(backend: Backend) -> None:
    """A manager hands out blocks of 32 tokens; the pool sees the same memory as blocks of 16, with no multiplier."""
    k, v = np.random.default_rng(0).standard_normal((2, 5, 32, 2, HEAD_DIM)).astype(np.float32)
    managed = backend.wrap_pool((k, v), layout="NHD", geometry=geometry(num_blocks=5, block_size=32))
    views = tuple(x.reshape(10, 16, 2, HEAD_DIM) for x in (k, v))
    pool = backend.wrap_pool(views, layout="NHD", geometry=geometry(num_blocks=10))
    table = [3, 0, 4]
    expanded = [2 * block + part for block in table for part in range(2)]
    for visible in (1, 31, 32, 33, 96):
        same_bits(
            decode_bits(backend, pool, *expanded, visible=visible),
            decode_bits(backend, managed, *table, visible=visible),
        )
    backend.release(pool)
    backend.release(managed)


@pytest.mark.refuses("L7")
@pytest.mark.parametrize("block_size", [15, 16, 64])
def test_another_block_size_than_the_memory_has_is_refused(backend: Backend, block_size: int) -> None:
    k = np.zeros((5, 32, 2, HEAD_DIM), np.float32)
    with refused(backend, InvalidLayout, rf"got shape \[5, 32, 2, 64\], layout NHD expects \[5, {block_size}, 2, 64\]"):
        backend.wrap_pool((k, k.copy()), layout="NHD", geometry=geometry(num_blocks=5, block_size=block_size))


def strided(*strides: int) -> Array:
    return np.lib.stride_tricks.as_strided(np.zeros(4096, np.float32), (4, 4, 2, 8), [4 * s for s in strides])


SOUND = np.zeros((4, 4, 2, 8), np.float32)


@pytest.mark.refuses("L1", "L2")
@pytest.mark.parametrize(
    ("arrays", "layout", "says"),
    [
        ((SOUND, strided(64, 16, 8, 0)), "NHD", "overlap"),
        ((SOUND, strided(0, 16, 8, 1)), "NHD", "overlap"),
        ((SOUND, strided(16, 16, 8, 1)), "NHD", "overlap"),
        ((SOUND, strided(63, 16, 8, 1)), "NHD", "overlap"),
        (
            (SOUND, np.zeros(4 * 4 * 2 * 8 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(4, 4, 2, 8)[::-1]),
            "NHD",
            "strides",
        ),
        ((SOUND, SOUND.copy()[:, :3]), "NHD", r"got shape \[4, 3, 2, 8\], layout NHD expects \[4, 4, 2, 8\]"),
        ((SOUND, SOUND.copy().swapaxes(1, 2)), "NHD", r"layout NHD expects \[4, 4, 2, 8\]"),
        ((SOUND, SOUND), "HND", r"layout HND expects \[4, 2, 4, 8\]"),
        (SOUND, "NHD", "takes a list of 1 .*, 2 array"),
        (SOUND.copy().swapaxes(1, 2), "FUSED", r"got shape \[4, 2, 4, 8\], layout FUSED expects \[4, 2, 4, 128\]"),
        ((SOUND, SOUND), "KV2", "takes a list of 1 .*, 1 array"),
        ([(SOUND, SOUND), (SOUND, SOUND)], "NHD", "got 2 layers"),
        ((SOUND, SOUND.astype(np.float64)), "NHD", "got numpy float64, a float32 pool takes float32"),
        ((SOUND, SOUND.astype(np.uint16)), "NHD", "got numpy uint16"),
        ((SOUND, np.broadcast_to(np.float32(0), SOUND.shape)), "NHD", "read-only"),
        ((SOUND, SOUND.tolist()), "NHD", "got list, expected a numpy array"),
        ((SOUND, None), "NHD", "got NoneType"),
    ],
)
def test_memory_that_does_not_fit_is_refused(backend: Backend, arrays: Any, layout: str, says: str) -> None:
    with refused(backend, InvalidLayout, says):
        backend.wrap_pool(arrays, layout=layout, geometry=KVGeometry(4, 4, 2, 8))


@pytest.mark.refuses("B4")
def test_foreign_memory_that_is_not_claimed_is_refused_by_name(backend: Backend) -> None:
    g = geometry()
    array = np.zeros(storage_shapes("KV2", g)[0], np.float32)
    with claiming(backend, addressable=False), refused(backend, Unsupported, "does not take foreign memory"):
        backend.wrap_pool(array, layout="KV2", geometry=g)
