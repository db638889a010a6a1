"""What must be true of an engine between any two acts: who holds which block, and what is in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from forebay.runtime import Engine, Request
from forebay.runtime.host_kv import block_slots
from forebay.runtime.prefix_cache import CachedBlock
from forebay.runtime.state import IDLE
from forebay.specs import WriteLoc
from tests.runtime.harness import FloatArray
from tests.runtime.plain import ROUNDING, Plain, rows_of


def check_books(engine: Engine, requests: Iterable[Request], plain: Plain | None = None) -> None:
    """Every account of ``engine`` agrees with every other one; ``requests`` are all that it was ever given, siblings included.

    With ``plain`` the KV in the blocks is compared too: of cached blocks, of running and parked requests, and of offloaded ones.
    """
    requests = list(requests)
    check_places(engine, requests)
    check_blocks(engine, requests)
    check_index(engine)
    check_rows(engine)
    if plain is not None:
        check_contents(engine, requests, plain)


def check_places(engine: Engine, requests: Sequence[Request]) -> None:
    """Each request is in exactly one place; who waits stands in order; who has ended holds nothing."""
    core = engine._core
    waiting = list(core.waiting)
    assert waiting == sorted(waiting, key=lambda r: r.place), "the queue is out of order"
    assert all(core.running[s].slot == s for s in core.running)
    assert all(r.slot is None for r in waiting)
    unborn = [s for r in requests if not r.finished and not r.token_ids for s in r.siblings if not s.finished]
    for r in requests:
        there = [
            r.slot is not None and core.running.get(r.slot) is r,
            r in waiting,
            any(s is r for s in unborn),
            r.finished,
        ]
        assert sum(there) == 1, f"request {r.index}: runs, waits, is to be forked, has ended: {there}"
        if r.finished:
            assert (r.slot, r.blocks, r.saved, r.computed) == (None, [], None, 0), f"request {r.index} holds something"
        assert r.saved is None or (r in waiting and not r.blocks and r.saved.tokens == r.computed)
    assert len(core.running) + len(waiting) == sum(not r.finished and not any(s is r for s in unborn) for r in requests)


def check_blocks(engine: Engine, requests: Sequence[Request]) -> None:
    """Holds are counted for each block; every block but the sink is free, in flight or held, and only one of them."""
    cache, blocks = engine._core.cache, range(engine._parts.pool.geometry.num_blocks)
    allocator = cache.allocator
    holders = Counter(b for r in requests for b in r.blocks)
    assert all(len(set(r.blocks)) == len(r.blocks) for r in requests), "a request holds a block twice"
    if cache.prefix is not None:
        cached = [block for _, _, block in cache.prefix.entries()]
        assert len(set(cached)) == len(cached), "two entries of the prefix cache name one block"
        holders.update(cached)
    assert {b: allocator.references(b) for b in blocks} == {b: holders[b] for b in blocks}, "holds are miscounted"
    free, coming = list(allocator._free), [b for _, b in allocator._in_flight]
    assert sorted([*free, *coming, *(b for b in blocks if holders[b])]) == list(blocks)[1:], (
        "a block is lost or in two places"
    )
    assert allocator.num_free + allocator.num_in_flight + allocator.num_allocated == len(blocks) - 1
    steps = engine._core.decoder.ledger._pending
    touched = {b for step in steps for _, held in step.slots.values() for b in held}
    assert touched.isdisjoint(free), "a step in flight may still write a block that is free"
    offload = engine._parts.offload
    assert offload is None or offload.blocks <= offload._limit


def check_index(engine: Engine) -> None:
    """The index of the prefix cache names each entry by its own key, each parent is in it, and children are counted."""
    prefix = engine._core.cache.prefix
    if prefix is None:
        return
    entries = list(prefix._blocks.values())
    children: Counter[int] = Counter()
    for key, entry in prefix._blocks.items():
        assert entry.key == key
        if entry.parent is not None:
            assert prefix._blocks.get(entry.parent.key) is entry.parent, "an entry hangs on one that is not there"
            assert key[0] == entry.parent.serial
            children[entry.parent.serial] += 1
        assert len(key[1]) == engine._parts.pool.geometry.block_size
    assert all(children[e.serial] == e.children for e in entries)
    assert len({e.serial for e in entries}) == len(entries)
    assert _order_allows_eviction_from_the_end(entries), "a block stands before one that hangs on it"


def _order_allows_eviction_from_the_end(entries: Sequence[CachedBlock]) -> bool:
    places = {e.serial: i for i, e in enumerate(entries)}
    return all(e.parent is None or places[e.serial] < places[e.parent.serial] for e in entries)


def check_rows(engine: Engine) -> None:
    """Exactly the seeded requests are in the ledger, each with its own state; the device's rows are theirs, the others are idle."""
    core, device, backend = engine._core, engine._parts.device, engine.backend
    eager = engine._parts.arm == "eager"
    table, position, epoch = (
        backend.fetch(x) for x in (device.table, device.scalars["position"], device.scalars["epoch"])
    )
    for slot in range(engine.settings.slots):
        request = core.running.get(slot)
        if not core.decoder.ledger.holds(slot):
            # A small budget may have had no room for the row of a request whose prompt is computed.
            ready = request is not None and request.computed == request.to_compute
            assert not ready or engine.settings.max_step_tokens <= 64, f"slot {slot} was not seeded"
            idle = position[slot] == IDLE["position"] or slot in core.decoder._dirty
            assert eager or idle, f"slot {slot} is idle, and its row neither is nor will be before the next step"
            continue
        assert request is not None, f"slot {slot} is in the ledger and nobody runs in it"
        assert request.computed == request.to_compute
        state = core.decoder.ledger.state(slot)
        assert (state.token, state.position) == (request.token_ids[-1], request.computed)
        assert (state.limit, state.seed, state.stop) == (request.final_position, request.seed, request.stop)
        assert list(state.blocks) == request.blocks
        if not eager:
            assert epoch[slot] == state.epoch
            assert list(table[slot]) == [*device.table_row(state), state.epoch], f"slot {slot}: another table row"


def check_contents(engine: Engine, requests: Sequence[Request], plain: Plain) -> None:
    """KV in blocks is that of the tokens they are held for, in every layer."""
    size, prefix = engine._parts.pool.geometry.block_size, engine._core.cache.prefix
    wanted: list[tuple[str, list[int], FloatArray]] = []
    for _, tokens, block in [] if prefix is None else prefix.entries():
        wanted.append((f"cached {tokens}", _slots([block], size), plain.kv(tokens)[:, :, -size:]))
    for r in requests:
        if r.saved is not None:
            there, right = rows_of(r.saved), plain.kv(r.known[: r.saved.tokens])
            assert np.abs(there - right).max() < ROUNDING, f"offloaded KV of request {r.index}"
        elif r.blocks and r.computed and (engine._core._prefill.keeps_chunks or r.computed == r.to_compute):
            slots = _slots(r.blocks, size)[: r.computed]
            wanted.append((f"request {r.index}", slots, plain.kv(r.known[: r.computed])))
    if not wanted:
        return
    there = read_rows(engine, [s for _, slots, _ in wanted for s in slots])
    right = np.concatenate([kv for _, _, kv in wanted], axis=2)
    wrong = np.flatnonzero(np.abs(there - right).max(axis=(0, 1, 3, 4)) >= ROUNDING)
    names = [what for what, slots, _ in wanted for _ in slots]
    assert not wrong.size, f"KV of other tokens: {sorted({names[i] for i in wrong})}"


def read_rows(engine: Engine, slots: Sequence[int]) -> FloatArray:
    """Rows of the pool through its door: ``[layers, 2, len(slots), Hkv, D]``."""
    pool, backend = engine._parts.pool, engine.backend
    loc = WriteLoc.slots(np.asarray(slots, np.int32), physical=True)
    layers = range(pool.geometry.num_layers)
    return np.stack([np.stack([backend.to_host(x) for x in pool.read(layer, loc)]) for layer in layers])


def _slots(blocks: Sequence[int], size: int) -> list[int]:
    return [int(s) for s in block_slots(blocks, size)]


def check_empty(engine: Engine) -> None:
    """Nobody is in the engine: once the cached prefixes are forgotten, its memory is as it was at the start."""
    core = engine._core
    assert not engine.has_work
    core._drain()
    if core.cache.prefix is not None:
        core.cache.prefix.clear()
    memory = engine.report()["memory"]
    names = ("blocks_free", "blocks_allocated", "blocks_in_flight", "blocks_cached", "blocks_offloaded")
    assert [memory[n] for n in names] == [engine._parts.pool.geometry.num_blocks - 1, 0, 0, 0, 0]
    assert not any(core.decoder.ledger.holds(s) for s in range(engine.settings.slots))
