"""The prefix cache: tokens decide, not a hash of them; what was evicted is not found (clause L6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from forebay.specs import Backend

Made = tuple[Any, Any]
MakeEngine = Callable[..., Any]
PROMPT = [*range(3, 17)]


@pytest.fixture
def made(runtime: ModuleType, internals: ModuleType) -> Made:
    """An allocator of 5 usable blocks and a cache over it, two tokens a block."""
    allocator = runtime.BlockAllocator(6)
    return allocator, internals.PrefixCache(allocator, 2)


class SameHash(int):
    """A token whose hash is that of every other."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return int(self) == other


def publish(made: Made, tokens: list[Any], salt: str = "") -> list[int]:
    """Cache the full blocks of ``tokens`` and give up the own hold."""
    allocator, cache = made
    blocks: list[int] = allocator.allocate(len(tokens) // 2)
    cache.publish(tokens, blocks, salt)
    allocator.free(blocks)
    return blocks


@pytest.mark.clause("L6")
@pytest.mark.case("C01")
def test_tokens_are_compared_and_not_their_hash(made: Made) -> None:
    _, cache = made
    tokens = [SameHash(t) for t in (1, 2, 3, 4)]
    blocks = publish(made, tokens)
    assert cache.match([SameHash(t) for t in (5, 6, 7, 8)], "") == []
    assert cache.match([SameHash(t) for t in (1, 2, 3, 5)], "") == blocks[:1]
    assert cache.match([*tokens, 9], "") == blocks


@pytest.mark.clause("L6")
@pytest.mark.case("C01")
def test_namespaces_are_apart(made: Made) -> None:
    _, cache = made
    mine = publish(made, [1, 2, 3, 4], salt="a")
    assert cache.match([1, 2, 3, 4, 5], "b") == []
    assert cache.match([1, 2, 3, 4, 5], "") == []
    assert cache.match([1, 2, 3, 4, 5], "a") == mine


@pytest.mark.clause("L6")
def test_a_block_is_found_behind_its_own_beginning_only(made: Made) -> None:
    """[3, 4] follows [1, 2]; behind [5, 6] it is another block."""
    _, cache = made
    publish(made, [1, 2, 3, 4])
    other = publish(made, [5, 6])
    assert cache.match([5, 6, 3, 4, 7], "") == other
    assert cache.match([3, 4, 7], "") == []


@pytest.mark.clause("L6", "L5")
def test_the_last_token_is_never_cached_away(made: Made) -> None:
    allocator, cache = made
    blocks = publish(made, [1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4], "") == blocks[:1]
    assert [allocator.references(b) for b in blocks] == [2, 1]


@pytest.mark.clause("L6", "L5")
@pytest.mark.case("C02")
def test_what_was_evicted_is_not_found(made: Made) -> None:
    """The least recently used goes first, the end of a sequence before its beginning, and nothing that somebody holds."""
    allocator, cache = made
    old = publish(made, [1, 2, 3, 4])
    publish(made, [5, 6])
    held = cache.match([5, 6, 9], "")
    assert cache.can_evict(2)
    assert not cache.can_evict(3)
    assert cache.evict(1) == 1
    assert allocator.references(old[1]) == 0
    assert cache.match([1, 2, 3, 4, 9], "") == old[:1]
    allocator.free(old[:1])
    assert cache.evict(5) == 1
    assert cache.match([1, 2, 9], "") == []
    assert [allocator.references(b) for b in held] == [2]
    new = publish(made, [7, 8])
    assert [entry for entry in cache.entries() if entry[2] == new[0]] == [("", (7, 8), new[0])]
    assert len({block for *_, block in cache.entries()}) == len(cache)


@pytest.mark.clause("L6", "L5")
def test_an_engine_reuses_what_it_has_computed_and_copies_before_it_writes(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType
) -> None:
    """Prompts with a common beginning, then two samples of one prompt: the tokens of an engine that shares nothing."""
    prompts = [[*range(3, 38)], [*range(3, 35), 90, 91], [*range(3, 19), 99]]
    params = runtime.SamplingParams(max_tokens=5, ignore_eos=True)
    plain = [r.token_ids for r in make_engine(backend).generate(prompts, params)]
    engine = make_engine(backend, prefix_reuse=True)
    shared = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
    assert shared == plain
    assert engine.report()["engine"]["reused_tokens"] == 32 + 16
    fork = prompts[0][:22]
    (alone,) = make_engine(backend, slots=1).generate([fork], params)
    (twice,) = engine.generate([fork], runtime.SamplingParams(max_tokens=5, ignore_eos=True, n=2))
    assert [r.token_ids for r in twice.samples] == [alone.token_ids] * 2
    assert engine.report()["engine"]["block_copies"] >= 1


@pytest.mark.clause("L6", "L5")
def test_a_prefix_stays_in_the_block_it_has_and_is_held_once(made: Made) -> None:
    """The same tokens come again from other blocks, whole and longer: nobody keeps a hold on those, and nothing is left in the end."""
    allocator, cache = made
    first = publish(made, [1, 2, 3, 4])
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]):
        again = publish(made, tokens)
        assert cache.match([1, 2, 3, 4, 9], "") == first
        allocator.free(first)
        assert [allocator.references(b) for b in (*first, *again[:2])] == [1, 1, *[0] * len(again[:2])]
    assert cache.match([1, 2, 3, 4, 5, 6, 9], "") == [*first, again[2]]
    allocator.free([*first, again[2]])
    assert (len(cache), allocator.num_free) == (3, 2)
    cache.clear()
    assert (len(cache), allocator.num_free) == (0, 5)


@pytest.mark.clause("L6", "L5")
def test_equal_prompts_that_run_at_once_leave_no_block_behind(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType
) -> None:
    """Each fills its next block with tokens that the others have cached already, in a block of their own."""
    engine = make_engine(backend, prefix_reuse=True)
    free = engine.report()["memory"]["blocks_free"]
    for _ in range(2):
        results = engine.generate([PROMPT] * 3, runtime.SamplingParams(max_tokens=40, ignore_eos=True))
        assert len({r.token_ids for r in results}) == 1
    engine.reset_prefix_cache()
    assert engine.report()["memory"]["blocks_free"] == free


@pytest.mark.clause("L6")
@pytest.mark.parametrize("lengths", [(36, 60, 40, 61), (60, 36, 61, 40)])
def test_prompts_that_the_rotary_embedding_turns_otherwise_share_nothing(
    backend: Backend,
    make_engine: MakeEngine,
    runtime: ModuleType,
    internals: ModuleType,
    model: Any,
    lengths: tuple[int, ...],
) -> None:
    """Behind 48 tokens the embedding has other frequencies: the same first 32 tokens have other KV in a longer prompt."""
    rope = internals.LongRope(5000.0, original=48, scale=1.0, short_factor=(1.0,) * 32, long_factor=(8.0,) * 32)
    config = replace(model.config, rope=rope)
    turning = replace(model, folder=replace(model.folder, config=config))
    params = runtime.SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [[*range(3, 35), *range(120, 120 + n - 32)] for n in lengths]
    options = {"settings": runtime.Settings(), "slots": 1, "max_len": 96, "num_blocks": 30}
    with runtime.Engine(turning, backend, prefix_reuse=False, **options) as plain:
        right = [plain.generate([prompt], params)[0].token_ids for prompt in prompts]
    with runtime.Engine(turning, backend, prefix_reuse=True, **options) as engine:
        got, reused = [], []
        for prompt in prompts:
            before = engine.report()["engine"]["reused_tokens"]
            got.append(engine.generate([prompt], params)[0].token_ids)
            reused.append(engine.report()["engine"]["reused_tokens"] - before)
    assert reused == [{40: 32, 61: 48}.get(n, 0) for n in lengths]
    assert got == right


@pytest.mark.clause("L6")
def test_a_block_never_follows_whoever_has_its_parents_place(runtime: ModuleType, internals: ModuleType) -> None:
    """Its parent is not evicted before it, and a new owner of the parent's block is not its parent."""
    allocator = runtime.BlockAllocator(3)
    cache = internals.PrefixCache(allocator, 2)
    blocks = allocator.allocate(2)
    cache.publish([1, 2, 3, 4], blocks, "")
    allocator.free(blocks[:1])
    cache.evict(2)
    place = allocator.allocate(allocator.num_free)
    if place:
        cache.publish([7, 8], place, "")
    assert blocks[1] not in cache.match([7, 8, 3, 4, 9], "")
    assert place == []


@pytest.mark.clause("L6")
def test_a_block_whose_last_token_was_never_computed_is_not_cached(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType
) -> None:
    """The last token of an answer fills its block, but no step ever consumed it: the block has a row nobody wrote."""
    params = runtime.SamplingParams(max_tokens=18, ignore_eos=True)
    engine = make_engine(backend, prefix_reuse=True)
    first = engine.generate([PROMPT], params)[0].token_ids
    longer = [*PROMPT, *first, 99, 98]
    (plain,) = make_engine(backend).generate([longer], params)
    (shared,) = engine.generate([longer], params)
    assert engine.report()["engine"]["reused_tokens"] == 16
    assert shared.token_ids == plain.token_ids


@pytest.mark.clause("L6", "C5")
def test_prefixes_are_forgotten_once_a_row_wrote_out_of_its_place(
    backend: Backend, make_engine: MakeEngine, runtime: ModuleType, internals: ModuleType
) -> None:
    """A row whose table names a cached block writes into it: what is cached is not that prefix's KV any more."""
    params = runtime.SamplingParams(max_tokens=10, ignore_eos=True)
    cached, other = [*range(30, 70)], [50, 51]
    plain = make_engine(backend, slots=1).generate([cached], params)[0].token_ids
    engine = make_engine(backend, slots=1, prefix_reuse=True)
    assert engine.generate([cached], params)[0].token_ids == plain
    engine.add(other, params)
    for _ in range(3):
        engine.step()
    table = internals.parts_of(engine).device.table
    row = backend.fetch(table)[:1].copy()
    position = internals.parts_of(engine).core.decoder.ledger.next_position(0)
    row[0, position // 16] = internals.parts_of(engine).core.cache.prefix.entries()[0][2]
    backend.upload(table, row, 0)
    while engine.has_work:
        engine.step()
    assert engine.report()["engine"]["reseeds"] == 1
    reused = engine.report()["engine"]["reused_tokens"]
    assert engine.generate([cached], params)[0].token_ids == plain
    assert engine.report()["engine"]["reused_tokens"] == reused
