"""KV of preempted requests in host memory: bits, strides, partial blocks, and limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.runtime import Engine, Model, Request, SamplingParams
from forebay.runtime.host_kv import HostKV, block_slots
from forebay.specs import Backend, KVGeometry, Pool, WriteLoc
from forebay.specs.dtypes import BITS_DTYPE, HostArray, host_bits
from tests.runtime.books import check_books, check_empty
from tests.runtime.harness import ARMS, make_engine, prompt, tokens_of
from tests.runtime.plain import Plain

TYPES = ["float32", "bfloat16"]
NB, HKV, DIM, LAYERS = 9, 2, 3, 2


def filled_pool(backend: Backend, dtype: str, size: int, seed: int = 1) -> Pool:
    """A pool in which every row of every block but the sink holds something else, in K and in V."""
    pool = backend.create_pool(KVGeometry(NB, size, HKV, DIM, LAYERS, dtype))
    random = np.random.default_rng(seed)
    everything = WriteLoc.slots(np.arange(size, NB * size, dtype=np.int32), physical=True)
    for layer in range(LAYERS):
        k, v = (random.normal(0, 1, ((NB - 1) * size, HKV, DIM)).astype(np.float32) for _ in range(2))
        pool.write(layer, everything, backend.to_device(k), backend.to_device(v))
    return pool


def pool_bits(backend: Backend, pool: Pool, slots: HostArray) -> HostArray:
    """Bits of rows through the pool's door: ``[layers, 2, len(slots), Hkv, D]``."""
    loc = WriteLoc.slots(slots.astype(np.int32), physical=True)
    layers = range(pool.geometry.num_layers)
    return np.stack(
        [
            np.stack([host_bits(backend.to_host(x), pool.geometry.dtype)[0] for x in pool.read(layer, loc)])
            for layer in layers
        ]
    )


def all_slots(size: int) -> HostArray:
    return np.arange(size, NB * size, dtype=np.int32)


# -- one sequence out and in -------------------------------------------------------------------------------------------
@pytest.mark.clause("S1", "S3")
@pytest.mark.case("B05", "B06")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("garbage", [0, 1])
def test_k_and_v_are_strided_halves_of_one_array_and_bytes_nobody_asked_for_are_not_read(
    backend: Backend, dtype: str, garbage: int
) -> None:
    """K and V views as unbind(1) gives them; every bit behind the last token may be anything."""
    size, tokens, blocks = 4, 6, [6, 3]
    pool, other = filled_pool(backend, dtype, size), filled_pool(backend, dtype, size, seed=2)
    try:
        saved = HostKV.read(backend, pool, blocks, tokens)
        right = pool_bits(backend, pool, block_slots(blocks, size)[:tokens])
        for layer, stored in enumerate(saved.layers):
            assert (stored.shape, stored.dtype) == ((2, 2, size, HKV, DIM), BITS_DTYPE[dtype])
            k, v = stored[:, 0], stored[:, 1]
            assert not k.flags.c_contiguous
            assert not v.flags.c_contiguous
            assert k.strides == v.strides == stored.strides[:1] + stored.strides[2:]
            assert k.strides[0] == 2 * size * HKV * DIM * stored.itemsize, "a block of K and one of V apart"
            for half, view in enumerate((k, v)):
                rows = np.ascontiguousarray(view).reshape(-1, HKV, DIM)
                assert np.array_equal(rows[:tokens].view(right.dtype), right[layer, half])
                assert not rows[tokens:].any()
            if garbage:
                stored.view(np.uint8)[1, :, tokens - size :] = 0xFF  # NaN in either type
        before = pool_bits(backend, other, block_slots([1], size))
        saved.stage(backend, other, [5, 1])
        assert np.array_equal(pool_bits(backend, other, block_slots([5, 1], size)[:tokens]), right)
        assert np.array_equal(pool_bits(backend, other, block_slots([1], size))[:, :, 2:], before[:, :, 2:])
    finally:
        backend.release(pool)
        backend.release(other)


# -- in an engine ------------------------------------------------------------------------------------------------------
def pressed(model: Model, backend: Backend, **options: Any) -> Engine:
    """An engine in which two requests cannot both grow to their ends."""
    options = {"slots": 2, "block_size": 2, "num_blocks": 12, "max_len": 22, "preempt": "offload", **options}
    return make_engine(model, backend, **options)


def bits_of(engine: Engine, request: Request) -> HostArray:
    size = engine._parts.pool.geometry.block_size
    return pool_bits(engine.backend, engine._parts.pool, block_slots(request.blocks, size)[: request.computed])


@pytest.mark.clause("S1", "S2", "S3", "C6")
@pytest.mark.case("C07")
@pytest.mark.parametrize("kv_dtype", TYPES)
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("read_behind", [0, 2])
def test_offloaded_and_restored_kv_is_the_same_bits_in_other_blocks(
    tiny_model: Model, backend: Backend, arm: str, kv_dtype: str, read_behind: int
) -> None:
    """R gives way, S has its blocks and fills them; R comes back elsewhere and goes on with nothing computed again."""
    ids, params = prompt(5), SamplingParams(max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"arm": arm, "kv_dtype": kv_dtype, "read_behind": read_behind}
    with pressed(tiny_model, backend, **options) as engine:
        whole = engine.generate([ids], params)[0].token_ids
        computed = engine.report()["engine"]["prefill_tokens"]
        r = engine.add(ids, params)
        while len(r.token_ids) < 6:
            engine.step()
        engine._core._drain()
        before, blocks = bits_of(engine, r), list(r.blocks)
        engine._core._room._preempt(r)
        assert (r.blocks, r.slot, r.saved is not None) == ([], None, True)
        s = engine.add(prompt(9, seed=1), SamplingParams(max_tokens=6, ignore_eos=True), priority=1)
        while r.slot is None:
            engine.step()
            check_books(engine, [r, s])
        engine._core._drain()
        assert r.saved is None
        assert r.blocks[: len(blocks)] != blocks, "it came back elsewhere"
        assert np.array_equal(bits_of(engine, r)[:, :, : before.shape[2]], before)
        while engine.has_work:
            engine.step()
            check_books(engine, [r, s])
        assert tuple(r.token_ids) == whole
        report = engine.report()["engine"]
        assert report["offloaded"] == report["restored"] >= 1
        assert report["prefill_tokens"] == computed + 5 + 9, "nothing of R was computed twice"
        check_empty(engine)


@pytest.mark.clause("S1")
@pytest.mark.parametrize(("limit", "saved"), [(0, 0), (2, 0), (3, 1), (5, 1), (6, 2)])
def test_host_memory_is_bounded_and_what_does_not_fit_is_computed_again(
    tiny_model: Model, backend: Backend, plain: Plain, limit: int, saved: int
) -> None:
    """Two requests of three blocks each give way at once."""
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [prompt(5, seed=s) for s in range(2)]
    with pressed(tiny_model, backend, offload_blocks=limit) as engine:
        requests = [engine.add(p, params) for p in prompts]
        engine.step()
        for r in requests:
            assert r.computed in (5, 6)
            engine._core._room._preempt(r)
        report = engine.report()
        assert (report["engine"]["offloaded"], report["engine"]["offload_refused"]) == (saved, 2 - saved)
        assert report["memory"]["blocks_offloaded"] == 3 * saved
        check_books(engine, requests, plain)
        while engine.has_work:
            engine.step()
            check_books(engine, requests, plain)
        assert tokens_of(requests) == [plain.tokens(r) for r in requests]
        report = engine.report()
        assert (report["engine"]["restored"], report["memory"]["blocks_offloaded"]) == (saved, 0)
        assert report["engine"]["prefill_tokens"] == 5 + 5 + 6 * (2 - saved)
        check_empty(engine)


@pytest.mark.clause("S1")
@pytest.mark.parametrize("leaves_by", ["cancel", "deadline"])
def test_an_offloaded_request_that_ends_gives_its_host_memory_back(
    tiny_model: Model, backend: Backend, leaves_by: str
) -> None:
    now = [0.0]
    with pressed(tiny_model, backend, clock=lambda: now[0]) as engine:
        r = engine.add(prompt(5), SamplingParams(max_tokens=6, ignore_eos=True), deadline=5.0)
        engine.step()
        made = list(r.token_ids)
        engine._core._room._preempt(r)
        assert engine.report()["memory"]["blocks_offloaded"] == 3
        if leaves_by == "cancel":
            engine.cancel(r)
        else:
            now[0] = 5.0
            engine.step()
        assert r.finish_reason == {"cancel": "cancelled"}.get(leaves_by, leaves_by)
        assert r.token_ids == made
        assert engine.report()["engine"]["restored"] == 0
        check_books(engine, [r])
        check_empty(engine)
