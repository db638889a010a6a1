"""Blocks that two requests hold, and blocks that have become somebody else's (clauses L5, C6, C5, C13)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, Pool
from forebay.specs.suite.attention import Array
from forebay.specs.suite.kv import (
    BLOCK_SIZE as BS,
)
from forebay.specs.suite.kv import (
    LAYOUTS,
    changed_slots,
    geometry,
    int32,
    mean_of_values,
    new_pool,
    put_values,
    row_bits,
)

MakeEngine = Callable[..., Any]


def prompt(length: int, first: int = 3) -> list[int]:
    """A prompt of so many tokens."""
    return list(range(first, first + length))


# -- one block, two holders ------------------------------------------------------------------------------------------------


@dataclass
class Holder:
    """What the cache knows a request by: the blocks it holds, and how many positions of them are computed."""

    blocks: list[int] = field(default_factory=list)
    computed: int = 0


@pytest.mark.clause("L5", "C13")
@pytest.mark.case("C06")
@pytest.mark.parametrize("tail", [1, 2, 15])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_writes_behind_a_shared_beginning_gets_a_copy_of_its_tail(
    backend: Backend, internals: ModuleType, runtime: ModuleType, layout: str, tail: int
) -> None:
    """A and B hold a full block and a tail together; A goes on with 100, B with 200, either of them first."""
    g = geometry(layout, num_blocks=7)
    size = g.block_size
    tokens = size + tail
    for order in ("ab", "ba"):
        with new_pool(backend, g, layout) as pool:
            cache = internals.KVCache(pool, runtime.BlockAllocator(7), None)
            a, b = Holder(cache.allocator.allocate(2), tokens), Holder()
            old = list(a.blocks)
            slots = [old[t // size] * size + t % size for t in range(tokens)]
            put_values(backend, pool, slots, [10.0 * t for t in range(tokens)])
            cache.fork(a, b)
            assert (b.blocks, b.computed) == (old, tokens)
            for holder, value in [{"a": (a, 100.0), "b": (b, 200.0)}[name] for name in order]:
                before = row_bits(backend, pool)
                assert cache.make_private(holder, tokens, None)
                own, after = holder.blocks[1], row_bits(backend, pool)
                moved = [own * size + t for t in range(tail)]
                assert changed_slots(before, after) == ([] if own == old[1] else moved)
                np.testing.assert_array_equal(after[moved], before[slots[size:]])
                put_values(backend, pool, [own * size + tail], [value])
            assert a.blocks[0] == b.blocks[0]
            assert a.blocks[1] != b.blocks[1]
            assert [cache.allocator.references(x) for x in (*a.blocks, b.blocks[1])] == [2, 1, 1]
            assert cache.copies == 1
            sums = 10.0 * sum(range(tokens)) + np.array([100.0, 200.0])
            means = mean_of_values(backend, pool, int32(a.blocks, b.blocks), [tokens + 1] * 2)
            np.testing.assert_allclose(means, sums / (tokens + 1), rtol=1e-6)


@pytest.mark.clause("L5", "L6", "C6")
@pytest.mark.case("C06")
@pytest.mark.parametrize("arm", ["eager", "captured"])
def test_two_requests_of_one_prompt_share_its_full_block_and_no_tail(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, internals: ModuleType, arm: str
) -> None:
    """The second comes while the first decodes: its tail, though equal, is a block of its own."""
    params = [runtime.SamplingParams(max_tokens=n, ignore_eos=True) for n in (12, 5)]
    right = list(make_engine(backend, arm="eager", slots=1).generate([prompt(24)], params[0])[0].token_ids)
    assert len(set(right)) > 3
    engine = make_engine(backend, arm=arm, prefix_reuse=True)
    a = engine.add(prompt(24), params[0])
    engine.step()
    b = engine.add(prompt(24), params[1])
    engine.step()
    assert a.blocks[0] == b.blocks[0]
    assert internals.parts_of(engine).core.cache.allocator.references(a.blocks[0]) == 3, "a, b, and the cache"
    assert set(a.blocks[1:]).isdisjoint(b.blocks[1:])
    assert engine.report()["engine"]["reused_tokens"] == BS
    while engine.has_work:
        engine.step()
    assert (list(a.token_ids), list(b.token_ids)) == (right, right[:5])


@pytest.mark.clause("L5", "C6", "C11")
@pytest.mark.case("C06")
@pytest.mark.parametrize(
    ("arm", "options"),
    [("captured", {}), ("captured", {"num_blocks": 7, "preempt": "offload"}), ("eager", {"num_blocks": 7})],
)
def test_each_sample_of_a_prompt_is_what_its_seed_gives_alone(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, arm: str, options: dict[str, Any]
) -> None:
    """Samples begin with the prompt's blocks, the partial last one too, and copy it before they write unlike tokens behind it."""
    drawn = {"max_tokens": 28, "ignore_eos": True, "temperature": 1.0}
    engine = make_engine(backend, arm=arm, max_len=64, **options)
    (result,) = engine.generate([prompt(24)], runtime.SamplingParams(seed=9, n=3, **drawn))
    done = engine.report()
    assert (done["memory"]["blocks_allocated"], done["engine"]["forks"]) == (0, 2)
    assert done["engine"]["block_copies"] > 0
    assert (done["engine"]["preemptions"] > 0) == ("num_blocks" in options)
    alone = make_engine(backend, arm="eager", slots=1, max_len=64)
    for sample in result.samples:
        (apart,) = alone.generate([prompt(24)], runtime.SamplingParams(seed=sample.seed, **drawn))
        assert sample.token_ids == apart.token_ids
    assert len({sample.token_ids for sample in result.samples}) == 3


# -- blocks that are somebody else's by now --------------------------------------------------------------------------------


def computed_rows(engine: Any, pool: Pool, request: Any) -> Array:
    """The bytes of every layer at the positions a request has computed, in their order."""
    size = pool.geometry.block_size
    slots = [request.blocks[p // size] * size + p % size for p in range(request.computed)]
    return np.concatenate([row_bits(engine.backend, pool, n)[slots] for n in range(pool.geometry.num_layers)], axis=1)


@pytest.mark.clause("C6", "L5", "C5", "S1")
@pytest.mark.case("C07")
@pytest.mark.parametrize(
    ("arm", "read_behind", "preempt"),
    [("eager", 0, "recompute"), ("captured", 2, "recompute"), ("captured", 0, "offload")],
)
def test_a_resumed_request_has_a_new_table_and_its_old_blocks_are_their_new_owners(
    backend: Backend,
    make_engine: MakeEngine,
    runtime: ModuleType,
    internals: ModuleType,
    arm: str,
    read_behind: int,
    preempt: str,
) -> None:
    """R gives way after its first steps, also with blocks in hand that it has not written yet; S gets every block R had."""
    settings = {"max_len": 96}
    requests = {
        name: (ids, runtime.SamplingParams(max_tokens=n, ignore_eos=True))
        for name, ids, n in (("R", prompt(40), 20), ("S", prompt(72, 40), 10))
    }
    alone = make_engine(backend, arm="eager", slots=1, **settings)
    right = {name: list(alone.generate([ids], params)[0].token_ids) for name, (ids, params) in requests.items()}
    assert len({*right["R"], *right["S"]}) > 3
    pending = 0
    options = {"slots": 2, "num_blocks": 10, "preempt": preempt, "read_behind": read_behind, "max_step_tokens": BS}
    engine = make_engine(backend, arm=arm, **options, **settings)
    parts = internals.parts_of(engine)
    core, device, pool = parts.core, parts.device, parts.pool
    for steps in (1, 4):
        r = engine.add(*requests["R"])
        for _ in range(steps):
            engine.step()
        internals.drain(engine)
        old = list(r.blocks)
        pending += len(old) > -(-r.computed // BS)
        internals.preempt(engine, r)
        s = engine.add(*requests["S"], priority=1)
        internals.reuse_first(engine, len(old))
        engine.step()
        assert s.blocks[: len(old)] == old, "S has R's blocks"
        while engine.has_work:
            before = {x: (list(x.blocks), computed_rows(engine, pool, x)) for x in (r, s) if x.slot is not None}
            engine.step()
            for x, (blocks, rows) in before.items():
                if x.blocks[: len(blocks)] == blocks:
                    np.testing.assert_array_equal(computed_rows(engine, pool, x)[: len(rows)], rows)
            for x in (r, s):
                if arm != "eager" and x.slot is not None and core.decoder.ledger.holds(x.slot):
                    row = backend.fetch(device.table)[x.slot, :-1]
                    assert row.tolist() == [*x.blocks, *[0] * (len(row) - len(x.blocks))]
            assert set(r.blocks).isdisjoint(s.blocks)
        assert {"R": list(r.token_ids), "S": list(s.token_ids)} == right
        assert engine.report()["engine"]["reseeds"] == 0
        assert engine.report()["memory"]["blocks_allocated"] == 0
    assert pending, "R gave way with blocks it had not written"
