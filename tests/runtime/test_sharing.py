"""Shared and reassigned blocks: forks that write unlike tokens, and requests whose old blocks are somebody else's by now."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.runtime import BlockAllocator, Model, Request, SamplingParams
from forebay.runtime.host_kv import block_slots
from forebay.runtime.kv_cache import KVCache
from forebay.specs import Backend, KVGeometry, Ticket, WriteLoc
from tests.runtime.books import check_books, check_empty, read_rows
from tests.runtime.harness import ARMS, make_engine, prompt
from tests.runtime.plain import Plain
from tests.runtime.state_machine import diverging, first_token_of


def holding(blocks: list[int], computed: int) -> Request:
    """A request that holds blocks."""
    request = Request(0, tuple(range(computed)), SamplingParams(max_tokens=4), ())
    request.blocks, request.computed = blocks, computed
    return request


# -- one fork ------------------------------------------------------------------------------------------------------------
@pytest.mark.clause("L5")
@pytest.mark.case("C06")
@pytest.mark.parametrize("child_writes_first", [True, False])
@pytest.mark.parametrize("tokens", [5, 6, 7])
def test_the_first_of_two_forks_to_write_has_a_copy_of_the_tail_and_the_full_block_stays_shared(
    backend: Backend, tokens: int, child_writes_first: bool
) -> None:
    """Blocks of four tokens: A and B share a full block and a tail; A writes 100 behind it, B writes 200."""
    pool = backend.create_pool(KVGeometry(7, 4, 1, 1, 2))
    try:
        cache = KVCache(pool, BlockAllocator(7), None)
        a = holding(cache.allocator.allocate(2), tokens)
        b = holding([], 0)
        slots = block_slots(a.blocks, 4)

        def write(position: int, value: float, r: Request) -> None:
            loc = WriteLoc.slots(block_slots(r.blocks, 4)[position : position + 1], physical=True)
            for layer in range(2):
                k, v = (np.full((1, 1, 1), value + layer + part, np.float32) for part in (0.0, 0.5))
                pool.write(layer, loc, backend.to_device(k), backend.to_device(v))

        def values(r: Request, layer: int, part: int) -> list[float]:
            loc = WriteLoc.slots(block_slots(r.blocks, 4)[: tokens + 1], physical=True)
            return [float(x) for x in backend.to_host(pool.read(layer, loc)[part]).reshape(-1)]

        for position in range(tokens):
            write(position, 10.0 * position, a)
        cache.fork(a, b)
        assert (b.blocks, b.computed) == (a.blocks, tokens)
        for r, value in ((b, 200.0), (a, 100.0)) if child_writes_first else ((a, 100.0), (b, 200.0)):
            assert cache.make_private(r, tokens, None)
            write(tokens, value, r)
        assert cache.copies == 1
        assert a.blocks[0] == b.blocks[0]
        assert a.blocks[1] != b.blocks[1]
        assert [cache.allocator.references(x) for x in (*a.blocks, b.blocks[1])] == [2, 1, 1]
        for layer in range(2):
            for part in range(2):
                shared = [10.0 * p + layer + part / 2 for p in range(tokens)]
                assert values(a, layer, part) == [*shared, 100.0 + layer + part / 2]
                assert values(b, layer, part) == [*shared, 200.0 + layer + part / 2]
        assert len(slots) == 8
    finally:
        backend.release(pool)


@pytest.mark.clause("L5")
@pytest.mark.case("C06")
def test_without_a_block_for_the_copy_nothing_changes_and_the_old_tail_waits_for_the_step_in_flight(
    backend: Backend,
) -> None:
    pool = backend.create_pool(KVGeometry(4, 4, 1, 1))
    try:
        cache = KVCache(pool, BlockAllocator(4), None)
        a, b = holding(cache.allocator.allocate(2), 6), holding([], 0)
        cache.fork(a, b)
        spare = cache.allocator.allocate(1)
        assert not cache.make_private(b, 6, None)
        assert (b.blocks, cache.copies, [cache.allocator.references(x) for x in a.blocks]) == (a.blocks, 0, [2, 2])
        cache.allocator.free(spare)
        step = Ticket(3, dict, lambda: None)
        assert cache.make_private(b, 6, step)
        old = a.blocks[1]
        cache.release(a, None)
        assert cache.allocator.references(old) == 0
        assert cache.allocator.num_in_flight == 1, "b's last step may still touch it"
        step.get()
        cache.allocator.retire(step)
        assert cache.allocator.num_in_flight == 0
    finally:
        backend.release(pool)


# -- forks in an engine ------------------------------------------------------------------------------------------------
@pytest.mark.clause("L5", "C11")
@pytest.mark.case("C06")
@pytest.mark.parametrize("read_behind", [0, 2])
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("length", [1, 4, 6, 8])
def test_forks_that_write_unlike_tokens_equal_their_runs_alone(
    tiny_model: Model, backend: Backend, plain: Plain, arm: str, read_behind: int, length: int
) -> None:
    """Three samples of one prompt, each with a first token of its own: full blocks are shared, tails are not."""
    options: dict[str, Any] = {"slots": 3, "block_size": 4, "max_len": 24, "read_behind": read_behind}
    with make_engine(tiny_model, backend, arm=arm, **options) as engine:
        diverging(engine)
        root = engine.add(prompt(length), SamplingParams(max_tokens=9, ignore_eos=True, n=3))
        family = [root, *root.siblings]
        while not all(len(r.token_ids) >= 3 for r in family):
            engine.step()
            check_books(engine, family, plain)
        full = length // 4
        for index in range(max(len(r.blocks) for r in family)):
            blocks = [r.blocks[index] for r in family if index < len(r.blocks)]
            assert len(set(blocks)) == (1 if index < full else len(blocks))
        assert all(engine._core.cache.allocator.references(b) == 3 for b in root.blocks[:full])
        while engine.has_work:
            engine.step()
            check_books(engine, family, plain)
        first = root.token_ids[0]
        assert len({r.token_ids[0] for r in family}) == 3
        for r in family:
            assert tuple(r.token_ids) == plain.tokens(r, first_token_of(r, root, first))
        report = engine.report()["engine"]
        assert (report["forks"], report["block_copies"]) == (2, 2 if length % 4 else 0)
        assert report["prefill_tokens"] == length, "the prompt was computed once"
        check_empty(engine)


@pytest.mark.clause("L5", "L6")
@pytest.mark.case("C06")
@pytest.mark.parametrize("arm", ARMS)
def test_two_requests_of_one_prompt_share_its_full_blocks_and_no_tail(
    tiny_model: Model, backend: Backend, plain: Plain, arm: str
) -> None:
    """The second comes while the first decodes: its tail, though equal, is a block of its own."""
    options: dict[str, Any] = {"slots": 2, "block_size": 4, "max_len": 32, "prefix_reuse": True}
    with make_engine(tiny_model, backend, arm=arm, **options) as engine:
        ids = prompt(6)
        a = engine.add(ids, SamplingParams(max_tokens=12, ignore_eos=True))
        engine.step()
        b = engine.add(ids, SamplingParams(max_tokens=5, ignore_eos=True))
        engine.step()
        assert a.blocks[0] == b.blocks[0]
        assert engine._core.cache.allocator.references(a.blocks[0]) == 3, "a, b, and the cache"
        assert set(a.blocks[1:]).isdisjoint(b.blocks[1:])
        assert engine.report()["engine"]["reused_tokens"] == 4
        while engine.has_work:
            engine.step()
            check_books(engine, [a, b], plain)
        assert [tuple(r.token_ids) for r in (a, b)] == [plain.tokens(r) for r in (a, b)]
        check_empty(engine)


# -- blocks that are somebody else's by now ----------------------------------------------------------------------------
@pytest.mark.clause("C6", "L5", "C5")
@pytest.mark.case("C07")
@pytest.mark.parametrize("preempt", ["recompute", "offload"])
@pytest.mark.parametrize("read_behind", [0, 2])
@pytest.mark.parametrize("arm", ARMS)
def test_a_resumed_request_has_a_new_table_and_leaves_its_old_blocks_to_their_new_owner(
    tiny_model: Model, backend: Backend, plain: Plain, arm: str, read_behind: int, preempt: str
) -> None:
    """R gives way after each of its first steps, at first with blocks in hand that it has not written yet; S gets R's blocks."""
    pending = overlaps = 0
    options: dict[str, Any] = {"slots": 2, "block_size": 2, "num_blocks": 15, "max_len": 20, "preempt": preempt}
    options["max_step_tokens"] = 2
    for steps in range(1, 9):
        with make_engine(tiny_model, backend, arm=arm, read_behind=read_behind, **options) as engine:
            r = engine.add(prompt(5), SamplingParams(max_tokens=12, ignore_eos=True))
            for _ in range(steps):
                engine.step()
            engine._core._drain()
            old = list(r.blocks)
            pending += len(old) > -(-r.computed // 2)
            engine._core._room._preempt(r)
            s = engine.add(prompt(13, seed=1), SamplingParams(max_tokens=5, ignore_eos=True), priority=1)
            free = engine._core.cache.allocator._free
            free.rotate(len(old))
            assert list(free)[: len(old)] == old, "R's blocks are handed out next"
            engine.step()
            while r.slot is None:
                engine.step()
            overlaps += s.blocks[: len(old)] == old
            while engine.has_work:
                before = {x: (list(x.blocks), x.computed, known_rows(engine, x)) for x in (r, s) if x.slot is not None}
                engine.step()
                check_books(engine, [r, s], plain)
                for x, (blocks, computed, rows) in before.items():
                    if x.blocks[: len(blocks)] == blocks:
                        assert np.array_equal(known_rows(engine, x)[:, :, :computed], rows), "bytes of a neighbour"
            assert [tuple(x.token_ids) for x in (r, s)] == [plain.tokens(x) for x in (r, s)]
            assert engine.report()["engine"]["reseeds"] == 0
            check_empty(engine)
    assert pending, "R gave way with blocks it had not written"
    assert overlaps == 8, "S had all of R's blocks"


def known_rows(engine: Any, request: Request) -> Any:
    """Rows of what a request has computed."""
    size = engine._parts.pool.geometry.block_size
    return read_rows(engine, [int(s) for s in block_slots(request.blocks, size)[: request.computed]])
