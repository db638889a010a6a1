"""Shared blocks: forks that write unlike tokens, and a copy that finds no room (clause L5)."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.runtime import BlockAllocator, Model, Request, SamplingParams
from forebay.runtime.kv_cache import KVCache
from forebay.specs import Backend, KVGeometry, Ticket
from tests.runtime.books import check_books, check_empty
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
