"""Where rows lie: layouts as tags, sizes with their limits, the sink (clauses L1, L2, L4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, ForebayError, InvalidLayout, KVGeometry, WriteLoc
from forebay.specs.geometry import INT32_MAX
from forebay.specs.suite import attention, oracle
from forebay.specs.suite.attention import Array
from forebay.specs.suite.kv import (
    BLOCK_SIZE,
    EACH_KV_DTYPE,
    HEAD_DIM,
    LAYOUTS,
    Sizes,
    as_stored,
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
    slot,
    storage,
)
from forebay.specs.suite.scenes import scene
from forebay.specs.suite.staging import stage


@pytest.mark.clause("L1", "L2", "W6")
@pytest.mark.smoke("L1", "L2")
@pytest.mark.case("B09")
@pytest.mark.parametrize(("heads", "block_size"), [(2, 16), (16, 32), (32, 16), (16, 16), (1, 16), (2, 1), (8, 4)])
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_a_row_lands_where_its_layout_says(backend: Backend, layout: str | None, heads: int, block_size: int) -> None:
    """One token, head h holding h + 1; heads and block size trade places, so a layout guessed from the shape shows."""
    g = geometry(layout, num_blocks=3, num_kv_heads=heads, block_size=block_size)
    offset = block_size // 2
    with new_pool(backend, g, layout) as pool:
        before = oracle.stored(backend, pool, 0)
        k = np.broadcast_to(
            np.arange(1, g.num_kv_heads + 1, dtype=np.float32)[None, :, None], (1, g.num_kv_heads, g.key_dim)
        )
        put(backend, pool, [slot(pool, 1, offset)], k.copy(), -k)
        after = oracle.stored(backend, pool, 0)
        at = (np.array([1 + pool.first_block]), np.array([offset]))
        same_bits(np.ascontiguousarray(oracle.rows_at(pool.layout, after, g, *at)[0]), k.copy())
        if layout != "LATENT":
            same_bits(np.ascontiguousarray(oracle.rows_at(pool.layout, after, g, *at)[1]), -k)
        written = sum(int((a.view(np.uint32) != b.view(np.uint32)).sum()) for a, b in zip(before, after, strict=True))
        assert written == g.num_kv_heads * g.key_dim * (1 if layout == "LATENT" else 2)


@pytest.mark.clause("L2", "L1")
@pytest.mark.smoke("L2")
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
def test_every_layout_answers_alike(backend: Backend, dtype: str) -> None:
    """The same rows in every layout the backend makes, in blocks that ascend and that descend: each layout's places, the same bits."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, 3 * BLOCK_SIZE, 2, HEAD_DIM)).astype(np.float32)
    answers: dict[bool, list[Array]] = {True: [], False: []}  # LATENT has values of its own
    for layout in backend.capabilities.layouts:
        g = geometry(layout, dtype=dtype)
        k, v = rows[:, :, : g.num_kv_heads]
        with new_pool(backend, g, layout) as pool:
            for blocks in ((0, 1, 2), (2, 1, 0)):
                block = pool.first_block + np.repeat(blocks, BLOCK_SIZE)
                offset = np.arange(len(block)) % BLOCK_SIZE
                slots = block * BLOCK_SIZE + offset
                put(backend, pool, slots, k, v)
                wanted = [attention.nearest(x, dtype) for x in (k, k[..., : g.value_dim] if layout == "LATENT" else v)]
                stored = oracle.rows_at(layout, oracle.stored(backend, pool, 0), g, block, offset)
                read = [backend.to_host(x) for x in pool.read(0, WriteLoc.slots(slots, physical=True))]
                for found in (stored, read):
                    same_arrays([np.ascontiguousarray(x, np.float32) for x in found], wanted)
                ids = [pool.first_block + b for b in blocks]
                answers[layout == "LATENT"].append(decode_bits(backend, pool, *ids, visible=2 * BLOCK_SIZE + 3))
            assert pool.layout == layout
    for alike in answers.values():
        for answer in alike[1:]:
            same_bits(answer, alike[0])


@pytest.mark.clause("L2", "L3")
@pytest.mark.beyond_core
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
def test_lanes_beside_fused_rows_decide_nothing(backend: Backend, dtype: str) -> None:
    """Rows of 2 * 40 of 128 lanes answer as the oracle says, with the same bits whatever the other lanes hold."""
    with scene(backend, (21, 0, 5), layout="FUSED", head_dim=40, dtype=dtype) as s:
        (buffer,) = s.pool.storage(0)
        answers = []
        for spare in (np.nan, np.inf, 0, 3):
            held = backend.fetch(buffer)
            assert held.shape == (s.pool.geometry.num_blocks, s.pool.geometry.num_kv_heads, BLOCK_SIZE, 128)
            held[..., 80:] = spare
            backend.upload(buffer, held)
            rows = WriteLoc.slots(s.pool.first_block * BLOCK_SIZE + np.arange(s.pool.capacity), physical=True)
            read = [backend.to_host(x) for x in s.pool.read(0, rows)]
            answers.append([*s.check(), *s.check(path="gather"), *read])
        for answer in answers[1:]:
            same_arrays(answer, answers[0])


@pytest.mark.clause("L2", "L3")
@pytest.mark.beyond_core
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("act", ["write", "copy", "stage"])
def test_lanes_beside_fused_rows_change_with_their_row_only(backend: Backend, act: str, dtype: str) -> None:
    """Three tokens of the third block and no lane of any other, K and V and those of nobody alike."""
    g = geometry("FUSED", head_dim=40, dtype=dtype)
    rows = np.random.default_rng(0).standard_normal((2, BLOCK_SIZE, 2, 40)).astype(np.float32)
    k, v = rows[:, :3]
    block, offset = np.full(3, 3), np.arange(3)
    with new_pool(backend, g, "FUSED") as pool:
        source, target = BLOCK_SIZE + offset, block * BLOCK_SIZE + offset
        put(backend, pool, source, k, v)
        (before,) = oracle.stored(backend, pool, 0)
        if act == "write":
            put(backend, pool, target, k, v)
        elif act == "copy":
            pool.copy(WriteLoc.slots(source, physical=True), WriteLoc.slots(target, physical=True))
        else:
            k_view, v_view = (as_stored(attention.nearest(x, dtype)[None], dtype) for x in rows)
            stage(backend, k_view, v_view, pool, [0], [3], 3)
        (after,) = oracle.stored(backend, pool, 0)
        wanted = [attention.nearest(x, dtype) for x in (k, v)]
        found = oracle.rows_at("FUSED", [after], g, block, offset)
        same_arrays([np.ascontiguousarray(x, np.float32) for x in found], wanted)
        others = np.ones(after.shape[:3], bool)
        others[block, :, offset] = False
        same_bits(after[others], before[others])


@pytest.mark.clause("L7")
def test_manager_blocks_that_are_multiples_of_kernel_blocks(backend: Backend) -> None:
    """A manager hands out blocks of 32 tokens to a pool of blocks of 16: its table, expanded, finds the rows it wrote."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 77, 2, HEAD_DIM)).astype(np.float32)
    table, token = [3, 1, 4], np.arange(77)
    slots = np.array(table)[token // 32] * 32 + token % 32
    answers = []
    for block_size, blocks in ((32, table), (16, [2 * block + part for block in table for part in range(2)])):
        with new_pool(backend, geometry(num_blocks=5 * 32 // block_size, block_size=block_size)) as pool:
            put(backend, pool, slots, k, v)
            answers.append([decode_bits(backend, pool, *blocks, visible=seen) for seen in (1, 31, 32, 33, 77)])
    for kernels, managers in zip(*answers, strict=True):
        same_bits(kernels, managers)


@pytest.mark.clause("L2", "B4")
def test_the_backend_chooses_a_layout_it_supports(backend: Backend) -> None:
    for layout in (None, *backend.capabilities.layouts):
        g = geometry(layout or "NHD")
        with new_pool(backend, g, layout) as pool:
            assert pool.layout == (layout or pool.layout)
            assert pool.layout in backend.capabilities.layouts
            put_values(backend, pool, [slot(pool, 0)], [3])
            assert mean_of_values(backend, pool, int32([pool.first_block]), [1])[0] == 3


@pytest.mark.refuses("L2", "D8")
@pytest.mark.parametrize(
    ("layout", "sizes", "says"),
    [
        ("NDH", {}, "got 'NDH', expected one of NHD, HND"),
        ("nhd", {}, "got 'nhd', expected one of"),
        ("LATENT", {}, "num_kv_heads=2.*expected num_kv_heads=1"),
        ("LATENT", {"num_kv_heads": 1}, "value_head_dim=None; expected num_kv_heads=1 and value_head_dim=Dc"),
        ("NHD", {"value_head_dim": 4}, "value_head_dim=4 differs from head_dim=64"),
        ("TOKEN_MAJOR", {}, "belongs to the unified pool"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(backend: Backend, layout: str, sizes: Sizes, says: str) -> None:
    g = replace(geometry(), **sizes)
    with refused(backend, InvalidLayout, says):
        backend.create_pool(g, layout)


@pytest.mark.refuses("L1")
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
def test_a_created_pool_keeps_block_0_for_itself(backend: Backend) -> None:
    g = geometry()
    with new_pool(backend, g) as pool:
        assert (pool.first_block, pool.capacity, pool.num_slots) == (1, 3 * BLOCK_SIZE, 4 * BLOCK_SIZE)
        put_values(backend, pool, [slot(pool, 0)], [5])
        assert mean_of_values(backend, pool, int32([1]), [1])[0] == 5
        assert mean_of_values(backend, pool, int32([0]), [3])[0] == 0
        assert pool.invalid == 1


@pytest.mark.clause("L4")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_0_is_the_sink_of_created_pools_only(backend: Backend, layout: str) -> None:
    g = geometry(layout)
    with new_pool(backend, g, layout) as pool:
        assert (pool.first_block, pool.capacity, pool.num_slots) == (1, 48, 64)
        assert mean_of_values(backend, pool, int32([0]), [3])[0] == 0
        assert pool.invalid == 1
    wrapped = backend.wrap_pool(storage(layout, g), layout=layout, geometry=g)
    assert (wrapped.first_block, wrapped.capacity, wrapped.num_slots) == (0, 64, 64)
    put_values(backend, wrapped, [0, 1], [2, 4])
    assert mean_of_values(backend, wrapped, int32([0]), [2])[0] == 3
    assert (wrapped.invalid, wrapped.dropped) == (0, 0)
    backend.release(wrapped)


@pytest.mark.refuses("L1")
def test_a_pool_of_no_geometry_is_refused(backend: Backend) -> None:
    sizes: Any = {"num_blocks": 4}  # a type checker would refuse it first
    with refused(backend, ForebayError, "got dict, expected KVGeometry"):
        backend.create_pool(sizes)
