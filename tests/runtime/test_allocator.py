"""The block allocator: exact, all-or-nothing, and safe against steps still in flight."""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Values
from hypothesis.stateful import RuleBasedStateMachine, consumes, invariant, precondition, rule

from forebay.runtime import BlockAllocator
from forebay.specs import DoubleFree, OutOfBlocks, Ticket
from forebay.specs.errors import InvalidInput


def ticket(serial: int) -> Ticket:
    """A step in flight; ``get`` shows that it has ended."""
    return Ticket(serial, dict, lambda: None)


def ended(serial: int) -> Ticket:
    made = ticket(serial)
    made.get()
    return made


def counts(allocator: BlockAllocator) -> tuple[int, int, int]:
    """Blocks free, in flight and held."""
    return allocator.num_free, allocator.num_in_flight, allocator.num_allocated


# -- a lost device -----------------------------------------------------------------------------------------------------
@pytest.mark.clause("L5")
def test_no_block_waits_for_a_lost_device() -> None:
    """Steps that will never end hold nothing back: neither what was freed behind them, nor what is freed from now on."""
    allocator = BlockAllocator(5)
    blocks = allocator.allocate(4)
    allocator.share(blocks[3:])
    allocator.free(blocks[1:], after=ticket(7))
    assert counts(allocator) == (0, 2, 2)
    allocator.retire_all()
    assert counts(allocator) == (2, 0, 2)
    allocator.free([blocks[0], blocks[3]], after=ticket(9))
    assert counts(allocator) == (4, 0, 0)


# -- a shared block waits for every holder's last step ---------------------------------------------------------------
@pytest.mark.clause("L5")
@pytest.mark.parametrize("order", [(9, 3), (3, 9), (9, None), (None, 9)])
def test_a_shared_block_waits_for_the_last_step_of_every_holder(order: tuple[int | None, int | None]) -> None:
    """Whoever gives it up first may have the later step in flight."""
    allocator = BlockAllocator(3)
    (block,) = allocator.allocate(1)
    allocator.share([block])
    for serial in order:
        allocator.free([block], after=None if serial is None else ticket(serial))
    assert counts(allocator) == (1, 1, 0)
    allocator.retire(ended(8))
    assert counts(allocator) == (1, 1, 0)
    allocator.retire(ended(9))
    assert counts(allocator) == (2, 0, 0)


# -- what is handed out ------------------------------------------------------------------------------------------------
@pytest.mark.clause("L4")
@pytest.mark.parametrize(("sink", "first"), [(True, 1), (False, 0)])
def test_every_block_but_the_sink_is_handed_out_once(sink: bool, first: int) -> None:
    allocator = BlockAllocator(9, sink=sink)
    taken = [block for n in (2, 0, 3, 9 - first - 5) for block in allocator.allocate(n)]
    assert sorted(taken) == list(range(first, 9))
    assert counts(allocator) == (0, 0, 9 - first)


@pytest.mark.clause("L4", "L5")
def test_the_sink_stays_out_however_often_blocks_come_back() -> None:
    allocator = BlockAllocator(4)
    for turn in range(20):
        blocks = allocator.allocate(1 + turn % 3)
        assert 0 not in blocks
        allocator.free(blocks)
    with pytest.raises(DoubleFree, match="free: block 0 is held 0 time"):
        allocator.free([0])
    assert counts(allocator) == (3, 0, 0)


@pytest.mark.clause("L5")
def test_allocation_is_all_or_nothing_and_says_the_numbers() -> None:
    allocator = BlockAllocator(6)
    held = allocator.allocate(2)
    allocator.free(allocator.allocate(1), after=ticket(1))
    says = "allocate: 3 blocks wanted, 2 free, 1 waiting for a step to retire, 2 in use of 5"
    with pytest.raises(OutOfBlocks, match=re.escape(says)):
        allocator.allocate(3)
    assert counts(allocator) == (2, 1, 2)
    assert set(allocator.allocate(2)).isdisjoint(held)


@pytest.mark.clause("L5")
@pytest.mark.parametrize("blocks", [0, -1, True, 2.0, "4", None])
def test_a_pool_needs_a_positive_number_of_blocks(blocks: Any) -> None:
    with pytest.raises(InvalidInput, match=r"BlockAllocator num_blocks: got .*, expected a positive int"):
        BlockAllocator(blocks)


@pytest.mark.clause("L5")
@pytest.mark.parametrize("n", [-1, True, 1.0, "1", None])
def test_a_count_is_a_non_negative_int(n: Any) -> None:
    allocator = BlockAllocator(3)
    with pytest.raises(InvalidInput, match=r"allocate: got .*, expected a non-negative int"):
        allocator.allocate(n)
    assert counts(allocator) == (2, 0, 0)


# -- what comes back ---------------------------------------------------------------------------------------------------
@pytest.mark.clause("L5")
@pytest.mark.case("C05")
@pytest.mark.parametrize(("num_blocks", "sink"), [(3, True), (2, False)])
def test_a_double_free_raises_and_no_page_gets_two_owners(num_blocks: int, sink: bool) -> None:
    allocator = BlockAllocator(num_blocks, sink=sink)
    a = allocator.allocate(1)
    allocator.free(a)
    with pytest.raises(DoubleFree, match=f"free: block {a[0]} is held 0 time"):
        allocator.free(a)
    assert allocator.num_free == 2
    b, c = allocator.allocate(1), allocator.allocate(1)
    assert b != c
    with pytest.raises(OutOfBlocks):
        allocator.allocate(1)


@pytest.mark.clause("L5")
@pytest.mark.case("C05")
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("bad", ["named twice", "never held", "held by nobody now"])
def test_a_free_with_one_bad_block_frees_nothing(bad: str, waits: bool) -> None:
    allocator = BlockAllocator(8)
    held = allocator.allocate(3)
    gone = allocator.allocate(1)
    allocator.free(gone, after=ticket(1) if waits else None)
    before = counts(allocator)
    wrong = {"named twice": [*held, held[0]], "never held": [*held, 7], "held by nobody now": [*held, *gone]}[bad]
    with pytest.raises(DoubleFree, match="nothing was changed"):
        allocator.free(wrong)
    assert counts(allocator) == before
    assert [allocator.references(b) for b in held] == [1, 1, 1]


@pytest.mark.clause("L5")
def test_a_shared_block_is_free_after_its_last_holder() -> None:
    allocator = BlockAllocator(4)
    one, two = allocator.allocate(2)
    allocator.share([one, one, two])
    assert [allocator.references(b) for b in (one, two)] == [3, 2]
    assert [allocator.is_shared(b) for b in (one, two)] == [True, True]
    allocator.free([one, two, one])
    assert [allocator.references(b) for b in (one, two)] == [1, 1]
    assert not allocator.is_shared(one)
    assert counts(allocator) == (1, 0, 2)
    allocator.free([one, two])
    assert counts(allocator) == (3, 0, 0)
    with pytest.raises(DoubleFree):
        allocator.free([one])


@pytest.mark.clause("L5")
def test_a_block_nobody_holds_cannot_be_shared() -> None:
    allocator = BlockAllocator(4)
    held = allocator.allocate(1)
    for wrong in ([*held, 3], [0], [99], [-1]):
        with pytest.raises(DoubleFree, match="share: block"):
            allocator.share(wrong)
    assert allocator.references(held[0]) == 1


# -- steps in flight ---------------------------------------------------------------------------------------------------
@pytest.mark.clause("L5")
@pytest.mark.case("C03")
@pytest.mark.parametrize("leaves_by", ["end", "abort", "preemption"])
def test_a_block_is_not_handed_out_while_a_dispatched_step_can_still_write_it(leaves_by: str) -> None:
    """The device is a queue: a write happens when its step is retired, not when it is dispatched."""
    memory: dict[int, int] = {}
    allocator = BlockAllocator(4)
    r = allocator.allocate(3)
    steps = [(ticket(1), r[0], 1), (ticket(2), r[2], 9)]

    def retire() -> None:
        step, block, value = steps.pop(0)
        step.get()
        memory[block] = value
        allocator.retire(step)

    last = steps[-1][0]
    if leaves_by == "end":
        retire()
    allocator.free(r, after=last)
    with pytest.raises(OutOfBlocks, match="3 waiting for a step to retire"):
        allocator.allocate(1)
    while steps[1:]:
        retire()
    assert allocator.num_free == 0, "only the last step says that nothing can write any more"
    retire()
    s = allocator.allocate(1)
    memory[s[0]] = 5
    assert (memory[s[0]], steps) == (5, [])


@pytest.mark.clause("L5")
def test_blocks_wait_for_their_own_step_and_no_longer() -> None:
    allocator = BlockAllocator(4)
    a, b, c = (allocator.allocate(1) for _ in range(3))
    allocator.free(a, after=ticket(5))
    allocator.free(b, after=ticket(7))
    allocator.free(c, after=ended(6))
    assert counts(allocator) == (1, 2, 0)
    allocator.retire(ended(4))
    assert counts(allocator) == (1, 2, 0)
    allocator.retire(ended(6))
    assert counts(allocator) == (2, 1, 0)
    allocator.retire(ended(6))
    assert counts(allocator) == (2, 1, 0)
    allocator.retire(ended(9))
    assert counts(allocator) == (3, 0, 0)


@pytest.mark.clause("L5")
def test_a_step_that_was_not_read_shows_nothing() -> None:
    allocator = BlockAllocator(2)
    step = ticket(3)
    allocator.free(allocator.allocate(1), after=step)
    with pytest.raises(
        InvalidInput, match=re.escape("retire: step 3 is not known to have ended; call ticket.get() first")
    ):
        allocator.retire(step)
    assert counts(allocator) == (0, 1, 0)
    step.get()
    allocator.retire(step)
    assert counts(allocator) == (1, 0, 0)


@pytest.mark.clause("L5")
def test_a_step_that_a_later_one_has_outlived_is_waited_for_no_more() -> None:
    allocator = BlockAllocator(2)
    allocator.retire(ended(8))
    allocator.free(allocator.allocate(1), after=ticket(5))
    assert counts(allocator) == (1, 0, 0)


@pytest.mark.clause("L5")
def test_a_shared_block_waits_for_the_last_holders_step() -> None:
    allocator = BlockAllocator(2)
    block = allocator.allocate(1)
    allocator.share(block)
    first, second = ticket(1), ticket(2)
    allocator.free(block, after=first)
    first.get()
    allocator.retire(first)
    assert counts(allocator) == (0, 0, 1)
    allocator.free(block, after=second)
    assert counts(allocator) == (0, 1, 0)
    second.get()
    allocator.retire(second)
    assert counts(allocator) == (1, 0, 0)


# -- any order of all of it --------------------------------------------------------------------------------------------
NUM_BLOCKS = 7


class Allocations(RuleBasedStateMachine):
    """Owners take, share and free blocks while steps of a queued device are dispatched and retired.

    A step writes its owner's mark into that owner's blocks *when it retires*. Whatever the order, every live owner finds its own
    mark in its own blocks.
    """

    held = Values("held")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.holds: Counter[int] = Counter()
        self.memory: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.queue: deque[tuple[Ticket, dict[int, int]]] = deque()
        self.marks = 0
        self.serial = 0

    @property
    def free_blocks(self) -> int:
        return NUM_BLOCKS - 1 - len(self.holds) - len(self.waiting)

    @rule(target=held, n=st.integers(0, NUM_BLOCKS))
    def allocate(self, n: int) -> tuple[int, ...]:
        if n > self.free_blocks:
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate(n)
            return ()
        blocks = self.allocator.allocate(n)
        assert len(set(blocks)) == n
        assert all(1 <= b < NUM_BLOCKS and b not in self.holds and b not in self.waiting for b in blocks)
        self.marks += 1
        self.memory.update(dict.fromkeys(blocks, self.marks))
        self.holds.update(blocks)
        return tuple(blocks)

    @rule(target=held, blocks=held)
    def share(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        if not all(self.holds[b] for b in blocks):
            with pytest.raises(DoubleFree):
                self.allocator.share(blocks)
            return ()
        self.allocator.share(blocks)
        self.holds.update(blocks)
        return blocks

    @rule(blocks=consumes(held))
    def free(self, blocks: tuple[int, ...]) -> None:
        last = self.queue[-1][0] if self.queue else None
        self.allocator.free(blocks, after=last)
        self.holds = self.holds - Counter(blocks)
        if last is not None:
            self.waiting.update({b: last.serial for b in blocks if not self.holds[b]})

    @rule(block=st.integers(-1, NUM_BLOCKS))
    def free_once_too_often(self, block: int) -> None:
        with pytest.raises(DoubleFree):
            self.allocator.free([block] * (self.holds[block] + 1))

    @rule()
    def dispatch(self) -> None:
        self.serial += 1
        self.queue.append((ticket(self.serial), {b: self.memory[b] for b in self.holds}))

    @precondition(lambda self: bool(self.queue))
    @rule(n=st.integers(1, 3))
    def retire(self, n: int) -> None:
        """Read up to ``n`` steps and tell the allocator of the last."""
        for _ in range(min(n, len(self.queue))):
            step, writes = self.queue.popleft()
            step.get()
            for block, mark in writes.items():
                assert block not in self.holds or self.memory[block] == mark, (
                    "a dispatched step wrote a new owner's block"
                )
                self.memory[block] = mark
        self.allocator.retire(step)
        self.waiting = {b: serial for b, serial in self.waiting.items() if serial > step.serial}

    @invariant()
    def counts_agree(self) -> None:
        assert counts(self.allocator) == (self.free_blocks, len(self.waiting), len(self.holds))
        assert {b: self.allocator.references(b) for b in range(NUM_BLOCKS)} == {
            b: self.holds[b] for b in range(NUM_BLOCKS)
        }


TestAllocations = pytest.mark.clause("L4", "L5")(Allocations.TestCase)
TestAllocations.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)
