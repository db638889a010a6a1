"""The allocator: all or nothing, never twice, freed behind the steps in flight (clauses L4, L5)."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from forebay.specs import Backend, DoubleFree, InvalidInput, OutOfBlocks, Segment, Ticket


@pytest.mark.clause("L4", "L5")
def test_the_sink_is_never_handed_out_and_no_block_twice(runtime: ModuleType) -> None:
    for sink, usable in ((True, range(1, 6)), (False, range(6))):
        allocator = runtime.BlockAllocator(6, sink=sink)
        blocks = allocator.allocate(2) + allocator.allocate(len(usable) - 2)
        assert sorted(blocks) == list(usable)
        assert allocator.num_free == 0
        allocator.free(blocks)
        assert allocator.num_free == len(usable)


@pytest.mark.clause("L5")
@pytest.mark.refuses("L5")
def test_allocation_is_all_or_nothing(runtime: ModuleType) -> None:
    allocator = runtime.BlockAllocator(5)
    held = allocator.allocate(2)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 free"):
        allocator.allocate(3)
    assert allocator.num_free == 2
    assert not set(allocator.allocate(2)) & set(held)


@pytest.mark.refuses("L5")
@pytest.mark.case("C05")
def test_a_double_free_raises_and_frees_nothing(runtime: ModuleType) -> None:
    allocator = runtime.BlockAllocator(3)
    a, b = allocator.allocate(2)
    allocator.free([a])
    for wrong in ([a], [b, a], [b, b]):
        with pytest.raises(DoubleFree, match="nothing was changed"):
            allocator.free(wrong)
    assert (allocator.num_free, allocator.references(b)) == (1, 1)
    assert allocator.allocate(1) == [a]
    with pytest.raises(OutOfBlocks):
        allocator.allocate(1)


@pytest.mark.clause("L5")
def test_sharing_is_counted(runtime: ModuleType) -> None:
    allocator = runtime.BlockAllocator(3)
    (a,) = allocator.allocate(1)
    allocator.share([a])
    assert allocator.is_shared(a)
    allocator.free([a])
    assert (allocator.references(a), allocator.num_free, allocator.is_shared(a)) == (1, 1, False)
    allocator.free([a])
    assert (allocator.references(a), allocator.num_free) == (0, 2)
    with pytest.raises(DoubleFree):
        allocator.share([a])


def ticket(backend: Backend) -> Ticket:
    """A step that nobody has read yet."""
    x = backend.buffer("x", np.zeros(1, np.float32))
    made = backend.run(Segment("step", lambda _: ({x: x.get() + 1}, {"x": x.get()}), updates=(x,)))
    backend.release(x)
    return made


@pytest.mark.clause("L5")
@pytest.mark.refuses("L5")
@pytest.mark.case("C03")
def test_a_block_is_free_once_the_last_step_that_could_touch_it_has_retired(
    runtime: ModuleType, backend: Backend
) -> None:
    """Step 2 can still write to the blocks that went when step 1 was read; an earlier holder's step counts as well."""
    allocator = runtime.BlockAllocator(4)
    first, second = ticket(backend), ticket(backend)
    mine, shared = allocator.allocate(2)
    allocator.share([shared])
    allocator.free([mine], after=second)
    allocator.free([shared], after=second)
    allocator.free([shared], after=first)
    assert (allocator.num_free, allocator.num_in_flight) == (1, 2)
    with pytest.raises(InvalidInput, match="not known to have ended"):
        allocator.retire(first)
    first.get()
    allocator.retire(first)
    assert (allocator.num_free, allocator.num_in_flight) == (1, 2)
    with pytest.raises(OutOfBlocks, match="2 waiting for a step to retire"):
        allocator.allocate(2)
    second.get()
    allocator.retire(second)
    assert (allocator.num_free, allocator.num_in_flight) == (3, 0)
