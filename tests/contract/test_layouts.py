"""Where rows lie: layouts, foreign strides, 64-bit addresses, the sink (clauses L1, L2, L4, L7)."""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import Backend, ForebayError, InvalidLayout, KVGeometry, Pool, Unsupported, WriteLoc
from forebay.specs.geometry import INT32_MAX, storage_shapes
from tests.contract import oracle
from tests.contract.kv import (
    KV_DTYPES,
    LAYOUTS,
    Sizes,
    geometry,
    int32,
    mean_of_values,
    new_pool,
    put,
    put_values,
    refused,
    same_bits,
    slot,
)
from tests.contract.oracle import Array

BITS = {"float32": np.float32, "bfloat16": np.uint16}


def storage(layout: str, g: KVGeometry, fill: float = np.nan) -> Any:
    """Foreign memory for one layer, as ``wrap_pool`` takes it: an array, or a pair."""
    arrays = tuple(np.full(shape, fill, np.float32).astype(np.float32) for shape in storage_shapes(layout, g))
    if g.dtype == "bfloat16":
        arrays = tuple((a.view(np.uint32) >> np.uint32(16)).astype(np.uint16) for a in arrays)
    return arrays if len(arrays) > 1 else arrays[0]


def parts(arrays: Any) -> list[Array]:
    return list(arrays) if isinstance(arrays, tuple) else [arrays]


def decode_bits(backend: Backend, pool: Pool, *blocks: int, visible: int | None = None) -> Array:
    """The bits of a row over ``blocks`` under a fixed query."""
    g = pool.geometry
    q = np.linspace(-1, 1, 2 * g.num_kv_heads * g.key_dim, dtype=np.float32).reshape(1, -1, g.key_dim)
    visible = len(blocks) * g.block_size if visible is None else visible
    out, lse = backend.paged_decode(
        backend.to_device(q), pool, 0, int32(blocks), int32(visible), table_len=len(blocks), return_lse=True
    )
    return np.append(backend.to_host(out), backend.to_host(lse))


# -- tags, not shapes ------------------------------------------------------------------------------------------------------


@pytest.mark.clause("L1", "L2", "W6")
@pytest.mark.case("B09")
@pytest.mark.parametrize(("heads", "block_size"), [(4, 8), (8, 4), (8, 8), (1, 8), (2, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_lands_where_its_layout_says(backend: Backend, layout: str, heads: int, block_size: int) -> None:
    """One token, head h holding h + 1; heads and block size trade places, so a layout guessed from the shape shows."""
    g = geometry(layout, num_blocks=3, num_kv_heads=heads, block_size=block_size, head_dim=4)
    offset = block_size // 2
    with new_pool(backend, g, layout) as pool:
        before = oracle.stored(backend, pool, 0)
        k = np.broadcast_to(np.arange(1, g.num_kv_heads + 1, dtype=np.float32)[None, :, None], (1, g.num_kv_heads, 4))
        put(backend, pool, [slot(pool, 1, offset)], k.copy(), -k)
        after = oracle.stored(backend, pool, 0)
        at = (np.array([1 + pool.first_block]), np.array([offset]))
        same_bits(np.ascontiguousarray(oracle.rows_at(layout, after, g, *at)[0]), k.copy())
        if layout != "LATENT":
            same_bits(np.ascontiguousarray(oracle.rows_at(layout, after, g, *at)[1]), -k)
        written = sum(int((a.view(np.uint32) != b.view(np.uint32)).sum()) for a, b in zip(before, after, strict=True))
        assert written == g.num_kv_heads * 4 * (1 if layout == "LATENT" else 2)


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


@pytest.mark.clause("L2")
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_every_layout_answers_alike(backend: Backend, dtype: str) -> None:
    """The same rows in every layout the backend makes: the same bits."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 7, 2, 24)).astype(np.float32)
    answers = []
    layouts = [layout for layout in backend.capabilities.layouts if layout != "LATENT"]
    for layout in layouts:
        with new_pool(backend, geometry(head_dim=24, dtype=dtype), layout) as pool:
            put(backend, pool, [slot(pool, t // 4 * 2, t % 4) for t in range(7)], k, v)
            answers.append(decode_bits(backend, pool, pool.first_block, pool.first_block + 2, visible=7))
            assert pool.layout == layout
    for answer in answers[1:]:
        same_bits(answer, answers[0])


@pytest.mark.clause("L2", "B4")
def test_the_backend_chooses_a_layout_it_supports(backend: Backend) -> None:
    for layout in (None, *backend.capabilities.layouts):
        g = geometry(layout or "NHD")
        with new_pool(backend, g, layout) as pool:
            assert pool.layout == (layout or pool.layout)
            assert pool.layout in backend.capabilities.layouts


@pytest.mark.clause("L2", "D8")
@pytest.mark.parametrize(
    ("layout", "sizes", "says"),
    [
        ("NDH", {}, "got 'NDH', expected one of NHD, HND"),
        ("nhd", {}, "got 'nhd', expected one of"),
        ("LATENT", {}, "num_kv_heads=2.*expected num_kv_heads=1"),
        ("LATENT", {"num_kv_heads": 1}, "value_head_dim=None; expected num_kv_heads=1 and value_head_dim=Dc"),
        ("NHD", {"value_head_dim": 4}, "value_head_dim=4 differs from head_dim=8"),
        ("TOKEN_MAJOR", {}, "belongs to the unified pool"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(backend: Backend, layout: str, sizes: Sizes, says: str) -> None:
    g = replace(KVGeometry(4, 4, 2, 8), **sizes)
    with refused(backend, InvalidLayout, says):
        backend.create_pool(g, layout)


@pytest.mark.clause("L2", "B4")
def test_a_dtype_beyond_the_backend_is_refused_with_those_it_has(backend: Backend) -> None:
    beyond = [dtype for dtype in ("float32", "bfloat16", "float16") if dtype not in backend.capabilities.kv_dtypes]
    for dtype in beyond:
        with refused(backend, Unsupported, f"KV dtype '{dtype}': .* supports {backend.capabilities.kv_dtypes[0]}"):
            backend.create_pool(geometry(dtype=dtype))
    for dtype in backend.capabilities.kv_dtypes:
        with new_pool(backend, geometry(dtype=dtype)) as pool:
            put_values(backend, pool, [slot(pool, 0)], [3])
            assert mean_of_values(backend, pool, int32([pool.first_block]), [1])[0] == 3


@pytest.mark.clause("L1")
@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"num_blocks": 0}, "num_blocks: got 0, expected a positive int"),
        ({"block_size": -4}, "block_size: got -4"),
        ({"head_dim": 1.5}, "head_dim: got 1.5"),
        ({"num_kv_heads": True}, "num_kv_heads: got True"),
        ({"num_layers": "2"}, "num_layers: got '2'"),
        ({"dtype": "float64"}, "got 'float64', expected one of float32"),
        ({"num_blocks": 2**27, "block_size": 16}, rf"at most {INT32_MAX // 16} blocks of this size"),
        ({"value_head_dim": 9}, "value_head_dim: got 9, expected 1 to head_dim=8"),
    ],
)
def test_impossible_sizes_are_refused_with_the_limit(sizes: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {"num_blocks": 4, "block_size": 4, "num_kv_heads": 2, "head_dim": 8}
    assert KVGeometry(**good).num_slots == 16
    with pytest.raises(InvalidLayout, match=says):
        KVGeometry(**(good | sizes))


@pytest.mark.clause("L4")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_0_is_the_sink_of_created_pools_only(backend: Backend, layout: str) -> None:
    g = geometry(layout)
    with new_pool(backend, g, layout) as pool:
        assert (pool.first_block, pool.capacity, pool.num_slots) == (1, 12, 16)
        assert mean_of_values(backend, pool, int32([0]), [3])[0] == 0
        assert pool.invalid == 1
    wrapped = backend.wrap_pool(storage(layout, g), layout=layout, geometry=g)
    assert (wrapped.first_block, wrapped.capacity, wrapped.num_slots) == (0, 16, 16)
    put_values(backend, wrapped, [0, 1], [2, 4])
    assert mean_of_values(backend, wrapped, int32([0]), [2])[0] == 3
    assert (wrapped.invalid, wrapped.dropped) == (0, 0)
    backend.release(wrapped)


# -- foreign strided memory ------------------------------------------------------------------------------------------------


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


def carve(draw: st.DrawFn, shape: tuple[int, ...], dtype: Any) -> Carved:
    """A poisoned view of ``shape`` with drawn strides: axes in any memory order, gaps after any axis, an odd start."""
    order = draw(st.permutations(range(4)))
    step, strides = 1, [0] * 4
    for axis in order:
        step *= draw(st.integers(1, 3))
        strides[axis] = step
        step *= shape[axis]
    start = draw(st.integers(0, 9))
    memory = np.full(start + step, 0x7FC0 if dtype == np.uint16 else np.nan, dtype)
    outside = np.ones(len(memory), bool)
    np.lib.stride_tricks.as_strided(outside[start:], shape, strides)[...] = False
    view = np.lib.stride_tricks.as_strided(memory[start:], shape, [step * memory.itemsize for step in strides])
    return Carved(view, memory, outside)


@st.composite
def foreign(draw: st.DrawFn) -> tuple[KVGeometry, Carved, Carved]:
    g = KVGeometry(
        draw(st.integers(1, 5)),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 20)),
        dtype=draw(st.sampled_from(KV_DTYPES)),
    )
    shape = storage_shapes("NHD", g)[0]
    return g, carve(draw, shape, BITS[g.dtype]), carve(draw, shape, BITS[g.dtype])


@pytest.mark.clause("L1", "L3", "W6")
@pytest.mark.case("B05", "B06")
@given(memory=foreign(), seed=st.integers(0, 99))
def test_any_strides_are_written_read_copied_and_decoded(
    backend: Backend, memory: tuple[KVGeometry, Carved, Carved], seed: int
) -> None:
    """Whatever the strides, the pool acts as a contiguous one, and no byte between its elements changes."""
    g, k, v = memory
    rng = np.random.default_rng(seed)
    plain = replace(g, num_blocks=g.num_blocks + 1)
    wrapped = backend.wrap_pool((k.view, v.view), layout="NHD", geometry=g)
    with new_pool(backend, plain, "NHD") as pool:
        n = g.num_slots
        ids = rng.permutation(n)
        rows = rng.standard_normal((2, n, g.num_kv_heads, g.head_dim)).astype(np.float32)
        src, dst = rng.permutation(n)[: n // 2], rng.permutation(n)[: n // 2]
        answers = []
        for p, shift in ((wrapped, 0), (pool, g.block_size)):
            put(backend, p, ids + shift, rows[0], rows[1])
            p.copy(WriteLoc.slots(src + shift), WriteLoc.slots(dst + shift))
            read = p.read(0, WriteLoc.slots(np.arange(n) + shift))
            blocks = range(p.first_block, p.geometry.num_blocks)
            answers.append([decode_bits(backend, p, *blocks), *(backend.to_host(x) for x in read)])
        for mine, other in zip(*answers, strict=True):
            same_bits(mine, other)
    backend.release(wrapped)
    for carved in (k, v):
        untouched = carved.memory[carved.outside]
        same_bits(untouched, np.full(len(untouched), 0x7FC0 if g.dtype == "bfloat16" else np.nan, BITS[g.dtype]))


@pytest.mark.clause("L1", "L2")
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrapped_memory_is_the_pool(backend: Backend, layout: str, dtype: str) -> None:
    """Nothing is copied: a write shows in the foreign array, and a change of the array shows in the pool."""
    g = geometry(layout, dtype=dtype)
    arrays = storage(layout, g)
    pool = backend.wrap_pool(arrays, layout=layout, geometry=g)
    put_values(backend, pool, [4, 5], [1, 3])
    assert mean_of_values(backend, pool, int32([1]), [2])[0] == 2
    for array in parts(arrays):
        values = (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array
        assert np.isfinite(values).sum() in (2 * g.num_kv_heads * n for n in (g.key_dim, 2 * g.key_dim))
        array[...] = 0
    assert mean_of_values(backend, pool, int32([1]), [2])[0] == 0
    backend.release(pool)


@pytest.mark.clause("L7")
def test_manager_blocks_that_are_multiples_of_kernel_blocks(backend: Backend) -> None:
    """A manager hands out blocks of 12 tokens; the pool sees the same memory as blocks of 4, with no multiplier."""
    k, v = np.random.default_rng(0).standard_normal((2, 5, 12, 2, 8)).astype(np.float32)
    managed = backend.wrap_pool((k, v), layout="NHD", geometry=KVGeometry(5, 12, 2, 8))
    views = tuple(x.reshape(15, 4, 2, 8) for x in (k, v))
    pool = backend.wrap_pool(views, layout="NHD", geometry=KVGeometry(15, 4, 2, 8))
    table = [3, 0, 4]
    expanded = [3 * block + part for block in table for part in range(3)]
    for visible in (1, 11, 12, 13, 36):
        same_bits(
            decode_bits(backend, pool, *expanded, visible=visible),
            decode_bits(backend, managed, *table, visible=visible),
        )
    backend.release(pool)
    backend.release(managed)


@pytest.mark.clause("L7", "L1")
@pytest.mark.parametrize("block_size", [5, 8, 24])
def test_another_block_size_than_the_memory_has_is_refused(backend: Backend, block_size: int) -> None:
    k = np.zeros((5, 12, 2, 8), np.float32)
    with refused(backend, InvalidLayout, rf"got shape \[5, 12, 2, 8\], layout NHD expects \[5, {block_size}, 2, 8\]"):
        backend.wrap_pool((k, k.copy()), layout="NHD", geometry=KVGeometry(5, block_size, 2, 8))


def strided(*strides: int) -> Array:
    return np.lib.stride_tricks.as_strided(np.zeros(4096, np.float32), (4, 4, 2, 8), [4 * s for s in strides])


SOUND = np.zeros((4, 4, 2, 8), np.float32)


@pytest.mark.clause("L1", "L2")
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


# -- beyond 32 bits --------------------------------------------------------------------------------------------------------


MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # Python 3.11 has no name for it


def lazy_memory(count: int) -> Array:
    """``count`` uint16 elements that the system commits when they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, 2 * count, flags=flags), np.uint16)


def sweep(backend: Backend, pool: Pool, ids: list[int], tokens: int) -> None:
    """The same rows written to each block answer with the same bits, and read back whole; block by block, then copied."""
    g = pool.geometry
    rows = np.random.default_rng(7).standard_normal((2, tokens, g.num_kv_heads, g.head_dim)).astype(np.float32)
    offsets = np.arange(tokens)
    for block in ids:
        put(backend, pool, block * g.block_size + offsets, rows[0], rows[1])
    want = [oracle.round_to_bfloat16(x) for x in rows]
    for block in ids:
        read = pool.read(0, WriteLoc.slots(block * g.block_size + offsets))
        for held, x in zip(read, want, strict=True):
            same_bits(backend.to_host(held), x)
        same_bits(decode_bits(backend, pool, block, visible=tokens), decode_bits(backend, pool, ids[0], visible=tokens))
    low = 5
    for block in ids[1:]:
        pool.copy(WriteLoc.slots(block * g.block_size + offsets), WriteLoc.slots(low * g.block_size + offsets))
        same_bits(decode_bits(backend, pool, low, visible=tokens), decode_bits(backend, pool, ids[0], visible=tokens))
        put(backend, pool, low * g.block_size + offsets, 0 * rows[0], 0 * rows[1])


@pytest.mark.clause("L1")
@pytest.mark.case("B01")
@pytest.mark.parametrize("layout", ["KV2", "PACKED", "NHD"])
def test_block_offsets_beyond_two_to_the_31_elements(backend: Backend, layout: str) -> None:
    """K and V packed, so half the expected number of blocks reaches the limit: block stride 16384, 131074 blocks."""
    g = KVGeometry(131074, 32, 4, 64, dtype="bfloat16")
    memory = lazy_memory(131074 * 16384)
    if layout == "NHD":
        both = memory.reshape(131074, 2, 32, 4, 64)
        arrays: Any = (both[:, 0], both[:, 1])
    else:
        arrays = memory.reshape(storage_shapes(layout, g)[0])
    pool = backend.wrap_pool(arrays, layout=layout, geometry=g)
    sweep(backend, pool, [0, 131071, 131072, 131073], 32)
    same_bits(decode_bits(backend, pool, 131071, 131072), decode_bits(backend, pool, 0, 131073))
    backend.release(pool)


@pytest.mark.clause("L1")
@pytest.mark.case("B02")
def test_page_times_page_stride_beyond_32_bits(backend: Backend) -> None:
    """One head, D = 512, BS = 256: page stride 131072, so page 16384 starts at 2^31 elements."""
    g = KVGeometry(16386, 256, 1, 512, dtype="bfloat16")
    k, v = (lazy_memory(16386 * 131072).reshape(16386, 256, 1, 512) for _ in range(2))
    pool = backend.wrap_pool((k, v), layout="NHD", geometry=g)
    sweep(backend, pool, [0, 16383, 16384, 16385], 40)
    backend.release(pool)


@pytest.mark.clause("L1")
@pytest.mark.case("B04")
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_small_pool_across_a_4_gib_boundary_of_addresses(backend: Backend, dtype: str) -> None:
    g = KVGeometry(64, 4, 1, 8, dtype=dtype)
    memory = lazy_memory(2**31 + 2**20)
    start = memory.ctypes.data
    size = 2 * 64 * 4 * 8 * (4 if dtype == "float32" else 2)
    at = (-start) % 2**32 - size // 2 - size // 8
    at += 2**32 if at < 0 else 0
    low = (start + at) % 2**32
    assert low + size > 2**32
    high = memory[at // 2 : (at + size) // 2].view(BITS[dtype]).reshape(64, 2, 4, 1, 8)
    answers = []
    rows = np.random.default_rng(3).standard_normal((2, 256, 1, 8)).astype(np.float32)
    for array in (high, np.zeros_like(high)):
        pool = backend.wrap_pool(array, layout="KV2", geometry=g)
        put(backend, pool, range(256), rows[0], rows[1])
        answers.append(decode_bits(backend, pool, *range(64)))
        read = pool.read(0, WriteLoc.slots(np.arange(256)))
        answers[-1] = np.concatenate([answers[-1], *(backend.to_host(x).reshape(-1) for x in read)])
        backend.release(pool)
    same_bits(*answers)


@pytest.mark.clause("B4", "L1")
def test_foreign_memory_is_a_capability(backend: Backend) -> None:
    """Works if claimed; refused by name if not."""
    array = np.zeros((4, 2, 4, 2, 8), np.float32)
    g = KVGeometry(4, 4, 2, 8)
    if not backend.capabilities.addressable:
        with refused(backend, Unsupported, "does not take foreign memory"):
            backend.wrap_pool(array, layout="KV2", geometry=g)
        return
    pool = backend.wrap_pool(array, layout="KV2", geometry=g)
    put_values(backend, pool, [0], [7])
    assert (array[0, 1, 0] == 7).all()
    backend.release(pool)


@pytest.mark.clause("L1")
def test_a_pool_of_no_geometry_is_refused(backend: Backend) -> None:
    with refused(backend, ForebayError, "got dict, expected KVGeometry"):
        backend.create_pool({"num_blocks": 4})  # type: ignore[arg-type]
