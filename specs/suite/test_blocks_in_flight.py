"""Blocks of steps that are on their way: nobody gets one before the step is known to have ended (clause L5)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from forebay.specs import Backend, Ticket
from forebay.specs.suite.kv import geometry, new_pool
from forebay.specs.suite.stepping import Clock, step_until

MakeEngine = Callable[..., Any]
READ_BEHIND = 3
PROMPT, OTHER, LONG = [*range(3, 23)], [*range(30, 44)], [*range(50, 120)]
BUDGET = 10
"""Tokens a step: the prompt ``LONG`` is computed over some steps beside two rows that decode."""
LATE = 5.0


# -- the cache by itself ---------------------------------------------------------------------------------------------------


class Held:
    """What the cache knows a request by."""

    def __init__(self, blocks: list[int], computed: int) -> None:
        self.blocks, self.computed = blocks, computed


def give_up(cache: Any, held: Held, how: str, ticket: Ticket | None) -> list[int]:
    """Let the request give up blocks behind ``ticket``, in one of the three ways there are; which."""
    before = list(held.blocks)
    if how == "release":
        cache.release(held, ticket)
    elif how == "distrust":
        cache.distrust([held], ticket)
    else:
        assert cache.make_private(held, held.computed, ticket)
    return [block for block in before if block not in held.blocks]


@pytest.mark.clause("L5")
@pytest.mark.parametrize(
    ("how", "alone"),
    [("release", False), ("release", True), ("distrust", False), ("distrust", True), ("make private", False)],
)
def test_given_up_blocks_wait_for_the_last_step_that_could_touch_them(
    backend: Backend, internals: ModuleType, runtime: ModuleType, how: str, alone: bool
) -> None:
    """A step in flight reads the blocks of one request; another one that holds them too gives them up before or behind it."""
    g = geometry("NHD", num_blocks=7)
    with new_pool(backend, g, "NHD") as pool:
        allocator = runtime.BlockAllocator(7)
        cache = internals.KVCache(pool, allocator, None)
        first, ticket = Held(allocator.allocate(2), g.block_size + 3), Ticket(5, dict, lambda: None)
        second = Held(list(first.blocks), first.computed)
        allocator.share(second.blocks)
        tail = first.blocks[1]
        if alone:
            cache.release(second, None)
        left = give_up(cache, first, how, ticket)
        assert tail in left
        if not alone:
            cache.release(second, None)
        free = allocator.allocate(allocator.num_free)
        assert not {*left} & {*free}
        assert allocator.num_in_flight == len(left)
        ticket.get()
        allocator.retire(ticket)
        assert {*allocator.allocate(allocator.num_free)} == {*left}


# -- an engine -------------------------------------------------------------------------------------------------------------


class Steps:
    """The steps an engine has sent, each with the blocks that the device's own rows let it touch."""

    def __init__(self, engine: Any, internals: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        parts = internals.parts_of(engine)
        self._backend, self._device = engine.backend, parts.device
        self._allocator = parts.core.cache.allocator
        self._sent: list[tuple[Ticket, set[int]]] = []
        whole = internals.Lanes.step

        def step(lanes: Any, bucket: int, *variant: Any) -> Ticket:
            blocks = self._rows(bucket)
            ticket: Ticket = whole(lanes, bucket, *variant)
            self._sent.append((ticket, blocks))
            return ticket

        monkeypatch.setattr(internals.Lanes, "step", step)

    def _rows(self, bucket: int) -> set[int]:
        """Blocks in the tables of the rows that act, the sink among them."""
        position = self._backend.fetch(self._device.scalars["position"])[:bucket]
        table = self._backend.fetch(self._device.table)[:bucket, :-1]
        return {int(block) for row in table[position >= 0] for block in row}

    def check(self) -> int:
        """No block that a step in flight can touch is free; how many such blocks nobody holds any more."""
        touched = {block for ticket, blocks in self._sent if not ticket.retired for block in blocks} - {0}
        free = self._allocator.allocate(self._allocator.num_free)
        self._allocator.free(free)
        assert not touched & {*free}, "a step in flight can touch a block that is free"
        return sum(self._allocator.references(block) == 0 for block in touched)


def damage(backend: Backend, device: Any, slot: int, name: str) -> None:
    """Let a row consume another token than the ledger has."""
    row = backend.fetch(device.scalars[name])[slot : slot + 1] ^ 1
    backend.upload(device.scalars[name], row, slot)


def point_at(backend: Backend, device: Any, slot: int, block: int) -> None:
    """Let a row read and write another's block in the place of its own."""
    row = backend.fetch(device.table)[slot : slot + 1].copy()
    row[0, :-1] = block
    backend.upload(device.table, row, slot)


@pytest.mark.clause("L5", "C5")
@pytest.mark.parametrize("how", ["cancelled", "deadline", "stop string", "last token", "mismatch", "astray"])
def test_no_block_of_a_step_in_flight_is_free(
    backend: Backend,
    make_engine: MakeEngine,
    runtime: ModuleType,
    internals: ModuleType,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """A request gives its blocks up while three steps with it are on their way; what it held waits for them."""
    clock, tokens = Clock(), 28
    alone = make_engine(backend, slots=1, arm="eager")
    (right,) = alone.generate([PROMPT], runtime.SamplingParams(max_tokens=tokens, ignore_eos=True))
    letters = model.tokenizer.decode(list(right.token_ids))
    stop = next(x for i, x in enumerate(letters) if i > 11 and x.isascii() and x not in letters[:i])
    options = {"max_step_tokens": BUDGET, "read_behind": READ_BEHIND, "num_blocks": 30, "clock": clock}
    engine = make_engine(backend, **options)
    steps, device = Steps(engine, internals, monkeypatch), internals.parts_of(engine).device
    ends: dict[str, Any] = {"stop": (stop,)} if how == "stop string" else {}
    most = 12 if how == "last token" else tokens
    deadline = LATE if how == "deadline" else None
    gone = engine.add(PROMPT, runtime.SamplingParams(max_tokens=most, ignore_eos=True, **ends), deadline=deadline)
    stays = engine.add(OTHER, runtime.SamplingParams(max_tokens=tokens, ignore_eos=True))
    waited = 0
    for _ in range(10):
        engine.step()
        steps.check()
    computing = engine.add(LONG, runtime.SamplingParams(max_tokens=4, ignore_eos=True))
    step_until(engine, lambda: computing.computed)
    clock.now = LATE
    if how == "cancelled":
        engine.cancel(gone)
    elif how == "mismatch":
        damage(backend, device, gone.slot, "token")
    elif how == "astray":
        point_at(backend, device, gone.slot, computing.blocks[0])
    waited = max(waited, steps.check())
    while engine.has_work:
        engine.step()
        waited = max(waited, steps.check())
    assert waited or how == "last token", "a row that has retired itself touches nothing; some blocks had to wait else"
    assert all(r.finish_reason for r in (gone, stays, computing))
    assert steps.check() == 0
    assert engine.report()["memory"]["blocks_allocated"] == 0
