"""The prefix cache: what matches, what is counted, who keeps a block, what is evicted first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.runtime import BlockAllocator, Model, SamplingParams
from forebay.runtime.prefix_cache import PrefixCache
from forebay.specs import Backend
from tests.runtime.books import check_books, check_empty
from tests.runtime.harness import ARMS, make_engine, prompt, tokens_of


class Colliding(int):
    """A token id whose hash is that of every other."""

    def __hash__(self) -> int:
        return 1


def cache_of(num_blocks: int, size: int) -> tuple[BlockAllocator, PrefixCache]:
    allocator = BlockAllocator(num_blocks)
    return allocator, PrefixCache(allocator, size)


def put(allocator: BlockAllocator, cache: PrefixCache, tokens: Sequence[int], size: int, salt: str = "") -> list[int]:
    """Blocks that held ``tokens``, published and given up by their first holder."""
    blocks = allocator.allocate(-(-len(tokens) // size))
    cache.publish(tokens, blocks, salt)
    allocator.free(blocks)
    return blocks


def alone(model: Model, backend: Backend, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    """Tokens of each prompt in an engine of its own, without reuse."""
    with make_engine(model, backend, arm="eager", slots=1, max_len=64) as plain:
        return [plain.generate([p], params)[0].token_ids for p in prompts]


# -- content, not hashes -----------------------------------------------------------------------------------------------
@pytest.mark.clause("L6")
@pytest.mark.case("C01")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_blocks_match_by_their_tokens_when_every_hash_is_the_same(size: int) -> None:
    allocator, cache = cache_of(20, size)
    first, second = ([Colliding(t) for t in range(base, base + 4)] for base in (1, 5))
    assert len({hash(tuple(x)) for x in (first, second)}) == 1, "the injected hashes collide"
    held = put(allocator, cache, first, size)
    assert cache.match([*second, Colliding(9)], "") == []
    assert cache.match([*first, Colliding(9)], "") == held
    mine = put(allocator, cache, second, size)
    assert set(mine).isdisjoint(held)
    assert cache.match([*second, Colliding(9)], "") == mine
    mixed = [*first[:2], *second[2:], Colliding(9)]
    assert cache.match(mixed, "") == held[: 2 // size], "only what is equal from the start"


@pytest.mark.clause("L6")
@pytest.mark.case("C01")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_salt_shares_with_itself_alone_also_where_it_looks_like_a_serial(size: int) -> None:
    allocator, cache = cache_of(60, size)
    tokens = list(range(8))
    salts = ["", "a", "1", "2", "A"]
    held = {salt: put(allocator, cache, tokens, size, salt) for salt in salts}
    assert len({b for blocks in held.values() for b in blocks}) == len(salts) * (8 // size)
    for salt in salts:
        assert cache.match([*tokens, 9], salt) == held[salt]
    assert cache.match([*tokens, 9], "b") == []
    assert cache.match([*tokens[size:], 9], "") == [], "tokens in the middle of a sequence begin none"


@pytest.mark.clause("L6")
@pytest.mark.case("C01")
@pytest.mark.parametrize("arm", ARMS)
def test_requests_whose_tokens_collide_or_whose_salts_differ_share_nothing(
    tiny_model: Model, backend: Backend, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    """Keys are cut from tokens that all have one hash: blocks are told apart by what they hold."""
    whole = PrefixCache._full
    monkeypatch.setattr(
        PrefixCache, "_full", lambda self, tokens: (tuple(Colliding(t) for t in key) for key in whole(self, tokens))
    )
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [prompt(9, seed=1), prompt(9, seed=2), prompt(5, seed=3)]
    right = alone(tiny_model, backend, prompts, params)
    with make_engine(tiny_model, backend, arm=arm, slots=2, block_size=4, max_len=64, prefix_reuse=True) as engine:
        for salt in ("", "other"):
            assert tokens_of(engine.generate(prompts, params, cache_salt=salt)) == right
            assert engine.report()["engine"]["reused_tokens"] == 0
        assert tokens_of(engine.generate(prompts, params, cache_salt="other")) == right
        assert engine.report()["engine"]["reused_tokens"] == 8 + 8 + 4


# -- evicted blocks ----------------------------------------------------------------------------------------------------
@pytest.mark.clause("L6")
@pytest.mark.case("C02")
def test_an_evicted_block_is_found_no_more_and_can_be_cached_again() -> None:
    """Two blocks of two tokens: A is cached and given up, C and D take both blocks; then A is asked for again."""
    allocator, cache = cache_of(3, 2)
    put(allocator, cache, [1, 2], 2)
    assert cache.evict(1) == 1
    taken = allocator.allocate(2)
    for block, tokens in zip(taken, ([3, 4], [5, 6]), strict=True):
        cache.publish(tokens, [block], "")
    allocator.free(taken)
    assert cache.match([1, 2, 9], "") == []
    assert sorted(cache.entries()) == [("", (3, 4), taken[0]), ("", (5, 6), taken[1])]
    assert cache.evict(5) == 2
    assert len(cache) == 0
    again = put(allocator, cache, [1, 2], 2)
    assert cache.match([1, 2, 9], "") == again


@pytest.mark.clause("L6")
@pytest.mark.case("C02")
def test_blocks_behind_an_evicted_one_never_follow_its_successor() -> None:
    """The middle of a sequence cannot go before its end; a beginning that comes again has nothing behind it."""
    allocator, cache = cache_of(9, 2)
    chain = put(allocator, cache, [1, 2, 3, 4, 5, 6], 2)
    gone = []
    for _ in chain:
        assert cache.evict(1) == 1
        gone.append(next(b for b in reversed(chain) if b not in gone))
        assert [b for _, _, b in cache.entries()] == [b for b in reversed(chain) if b not in gone]
    first = put(allocator, cache, [1, 2], 2)
    assert cache.match([1, 2, 3, 4, 5, 6, 7], "") == first


class PrefixTable:
    """A prefix cache as a table from (salt, all tokens from the start) to a block, least recently used first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.table: dict[tuple[str, tuple[int, ...]], int] = {}

    def chain(self, tokens: list[int], salt: str) -> list[tuple[str, tuple[int, ...]]]:
        return [(salt, tuple(tokens[:stop])) for stop in range(self.size, len(tokens) + 1, self.size)]

    def touch(self, keys: list[tuple[str, tuple[int, ...]]]) -> None:
        for key in reversed(keys):
            self.table[key] = self.table.pop(key)


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "match", "give back", "evict", "clear"]),
        st.lists(st.integers(0, 1), min_size=0, max_size=9),
        st.sampled_from(["", "x"]),
    ),
    max_size=40,
)


@pytest.mark.clause("L6")
@pytest.mark.case("C01", "C02")
@given(acts=ACTS, size=st.sampled_from([1, 2, 3]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_index_and_blocks_agree_with_a_table_of_whole_prefixes_after_every_act(
    acts: list[tuple[str, list[int], str]], size: int
) -> None:
    """The table says which blocks match, which is evicted next, and how many holds each block has."""
    allocator, cache = cache_of(13, size)
    model, in_use = PrefixTable(size), Counter[int]()

    def evictable() -> list[tuple[str, tuple[int, ...]]]:
        parents = {(salt, tokens[:-size]) for salt, tokens in model.table}
        return [k for k, b in model.table.items() if k not in parents and not in_use[b]]

    for act, tokens, salt in acts:
        keys = model.chain(tokens, salt)
        if act == "put" and len(keys) <= allocator.num_free:
            blocks = allocator.allocate(len(keys))
            cache.publish(tokens, blocks, salt)
            for key, block in zip(keys, blocks, strict=True):
                model.table.setdefault(key, block)
            model.touch(keys)
            allocator.free(blocks)
        elif act == "match":
            found = []
            for key in keys:
                if key not in model.table or len(key[1]) == len(tokens):
                    break
                found.append(key)
            assert cache.match(tokens, salt) == [model.table[k] for k in found]
            model.touch(found)
            in_use.update(model.table[k] for k in found)
        elif act == "give back" and +in_use:
            block = min(+in_use)
            allocator.free([block])
            in_use[block] -= 1
        elif act == "evict":
            for _ in tokens:
                wanted = evictable()[:1]
                assert cache.evict(1) == len(wanted)
                for key in wanted:
                    del model.table[key]
        elif act == "clear":
            cache.clear()
            model.table.clear()
        assert {(salt, tokens): block for salt, tokens, block in cache.entries()} == model.table
        holds = Counter(model.table.values()) + in_use
        assert {b: allocator.references(b) for b in range(13)} == {b: holds[b] for b in range(13)}
        assert allocator.num_free == 12 - len(+holds)


# -- what a match gives ------------------------------------------------------------------------------------------------
@pytest.mark.clause("L6")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_last_token_is_never_matched(size: int) -> None:
    allocator, cache = cache_of(30, size)
    held = put(allocator, cache, list(range(12)), size)
    for asked in range(14):
        tokens = list(range(asked))
        got = cache.match(tokens, "")
        assert got == held[: max(min(asked - 1, 12), 0) // size]
        allocator.free(got)


@pytest.mark.clause("L6")
def test_only_full_blocks_are_cached_and_an_equal_prefix_keeps_its_first_block() -> None:
    allocator, cache = cache_of(30, 4)
    first = put(allocator, cache, list(range(10)), 4)
    assert [b for _, _, b in cache.entries()] == [first[1], first[0]]
    assert allocator.references(first[2]) == 0
    second = put(allocator, cache, list(range(12)), 4)
    assert cache.match(list(range(13)), "") == [*first[:2], second[2]]
    assert [allocator.references(b) for b in second[:2]] == [0, 0]


@pytest.mark.clause("L6", "L5")
def test_a_prefix_in_use_is_not_evicted_and_the_least_recently_used_goes_first() -> None:
    allocator, cache = cache_of(10, 2)
    a, b, c = (put(allocator, cache, [n, n], 2)[0] for n in (1, 2, 3))
    assert cache.match([1, 1, 9], "") == [a], "used last, and in use"
    assert [cache.evict(1), [x for _, _, x in cache.entries()]] == [1, [c, a]]
    assert [cache.evict(9), [x for _, _, x in cache.entries()]] == [1, [a]]
    allocator.free([a])
    assert [cache.evict(9), allocator.num_free] == [1, 9]
    assert b != c


# -- hits in an engine -------------------------------------------------------------------------------------------------
@pytest.mark.clause("L6", "C11")
@pytest.mark.parametrize("read_behind", [0, 2])
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_hits_are_counted_exactly_and_change_no_token(
    tiny_model: Model, backend: Backend, arm: str, read_behind: int, block_size: int
) -> None:
    """A prompt again, longer, shorter, with another end: full blocks that are equal from the start, never the last token."""
    base = prompt(13, seed=4)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    (whole,) = alone(tiny_model, backend, [base], params)
    asked = [base, base, base[:8], [*base[:9], *prompt(4, seed=5)], [*base, *whole], [*base, *whole[:2], 7, 8]]
    equal = [0, 12, 7, 9, 17, 15]  # the KV of the last token made is never computed
    right = alone(tiny_model, backend, asked, params)
    options: dict[str, Any] = {"slots": 1, "block_size": block_size, "max_len": 64, "read_behind": read_behind}
    with make_engine(tiny_model, backend, arm=arm, prefix_reuse=True, **options) as engine:
        requests, computed = [], 0
        for ids, same in zip(asked, equal, strict=True):
            before = Counter(engine.report()["engine"])
            requests.append(engine.add(ids, params))
            while engine.has_work:
                engine.step()
            gained = Counter(engine.report()["engine"]) - before
            assert gained["reused_tokens"] == same // block_size * block_size
            assert gained["prefill_tokens"] == len(ids) - gained["reused_tokens"]
            computed += gained["prefill_tokens"]
            check_books(engine, requests)
        assert tokens_of(requests) == right
        check_empty(engine)


@pytest.mark.clause("L6", "L5")
def test_an_engine_evicts_the_least_recently_used_prefix_and_none_in_use(tiny_model: Model, backend: Backend) -> None:
    """Room for three prompts of two blocks: the one asked for again stays, the oldest other one goes."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    a, b, c, d = (prompt(8, seed=s) for s in range(4))
    with make_engine(tiny_model, backend, slots=2, block_size=4, num_blocks=7, max_len=24, prefix_reuse=True) as engine:
        for ids in (a, b, c, a):
            engine.generate([ids], params)
        held = engine.add(a, SamplingParams(max_tokens=8, ignore_eos=True))
        engine.step()
        assert held.blocks
        engine.generate([d], params)
        cached = {tokens for _, tokens, _ in engine._core.cache.prefix.entries()}  # type: ignore[union-attr]
        assert {tuple(a[:4]), tuple(d[:4])} <= cached
        assert tuple(b) not in cached, "the least recently used"
        assert engine.generate([[*a, 5]], params)[0].token_ids
        check_books(engine, [held])
