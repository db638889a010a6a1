"""Faults of the device under an engine: each request ends or is retried with a true reason; no wrong token, no leak (clause C5)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from forebay.runtime import Model, Request
from forebay.specs import DeviceLost, ForebayError
from forebay.specs.errors import CaptureDeclined, Unsupported
from tests.backends_sim.opened import open_sim
from tests.runtime.harness import PARAMS, PROMPTS, make_engine

Tokens = list[tuple[int, ...]]
BUSY: dict[str, Any] = {
    "arm": "captured",
    "read_behind": 2,
    "preempt": "offload",
    "block_size": 4,
    "num_blocks": 12,
    "prefix_reuse": True,
}
"""Preemption, offload, read-behind and replays at once."""


@dataclass
class Ending:
    """How a run under a fault ended."""

    requests: list[Request] = field(default_factory=list)
    errors: list[ForebayError] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    struck: list[str] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)


def drive(model: Model, *inject: dict[str, Any], **options: Any) -> Ending:
    """Serve all prompts, going on after errors; whatever happens, blocks, slots and device memory come back."""
    ending = Ending()
    b = open_sim(inject=inject, stuck_timeout=0.01)
    driver = b._driver
    try:
        engine = make_engine(model, b, slots=3, max_len=64, **options)
        try:
            ending.requests = [engine.add(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
            for _ in range(400):
                if not engine.has_work:
                    break
                try:
                    engine.step()
                except ForebayError as error:
                    ending.errors.append(error)
            assert not engine.has_work, "it spins"
            allocator, prefix = engine._core.cache.allocator, engine._core.cache.prefix
            if prefix is not None:
                prefix.clear()
            ending.counts = engine._core.report()
            assert allocator.num_in_flight == 0
            assert allocator.num_allocated == 0
            assert allocator.num_free == engine._parts.pool.geometry.num_blocks - 1
            assert not engine._core.running
        finally:
            with suppress(DeviceLost):
                engine.close()
    except ForebayError as error:
        ending.errors.append(error)
    finally:
        ending.struck, ending.positions = driver.info["faults"], driver.info["positions"]
        with suppress(DeviceLost):
            b.close()
    assert driver.info["live_bytes"] == 0
    return ending


def never_wrong(ending: Ending, expected: Tokens) -> None:
    """What was released is how the right answer begins."""
    for request, want in zip(ending.requests, expected, strict=True):
        assert tuple(request.token_ids) == want[: len(request.token_ids)]


def ended_truly(ending: Ending, expected: Tokens, says: str) -> None:
    """A request is whole, or it ended with the device's own reason, which the engine's caller was told once."""
    never_wrong(ending, expected)
    assert [type(error) for error in ending.errors] == [DeviceLost]
    assert says in str(ending.errors[0])
    for request, want in zip(ending.requests, expected, strict=True):
        if request.finish_reason == "length":
            assert tuple(request.token_ids) == want
        else:
            assert request.finish_reason == "error"
            assert request.error is ending.errors[0]
    assert any(request.finish_reason == "error" for request in ending.requests)


@pytest.fixture(scope="module")
def healthy(model: Model, expected: Tokens) -> Ending:
    """Without a fault: where faults can strike."""
    ending = drive(model, **BUSY)
    assert not ending.errors
    assert [tuple(r.token_ids) for r in ending.requests] == expected
    assert ending.counts["restored"] > 0
    return ending


def spread(first: int, last: int, count: int) -> Sequence[int]:
    """So many positions, both ends among them."""
    return sorted({first + (last - first) * i // (count - 1) for i in range(count)})


@pytest.mark.clause("C5", "L4")
def test_a_device_lost_at_any_launch_ends_what_is_unfinished(model: Model, expected: Tokens, healthy: Ending) -> None:
    for at in spread(1, healthy.positions["at_launch"], 16):
        ending = drive(model, {"kind": "lost", "at_launch": at}, **BUSY)
        ended_truly(ending, expected, f"the device was lost at launch {at} (")
        assert ending.struck == [f"lost at_launch={at}"]


@pytest.mark.clause("C5", "L4")
@pytest.mark.parametrize("arm", ["eager", "hostfree"])
def test_a_device_lost_in_the_other_arms(model: Model, expected: Tokens, arm: str) -> None:
    for at in (1, 300, 900):
        ending = drive(model, {"kind": "lost", "at_launch": at}, arm=arm)
        ended_truly(ending, expected, f"the device was lost at launch {at} (")


@pytest.mark.clause("C5", "C8", "L4")
def test_a_stuck_queue_ends_what_is_unfinished(model: Model, expected: Tokens, healthy: Ending) -> None:
    for at in spread(1, healthy.positions["at_launch"], 6):
        ending = drive(model, {"kind": "stuck", "at_launch": at}, **BUSY)
        ended_truly(ending, expected, f"the queue is stuck: launch {at} (")


@pytest.mark.clause("C5", "L4")
def test_memory_used_up_once_is_told_and_tried_again(model: Model, expected: Tokens, healthy: Ending) -> None:
    """While the engine is made it is not made; later every request still gets all of its tokens."""
    retried = 0
    for at in spread(1, healthy.positions["at_allocation"], 16):
        ending = drive(model, {"kind": "memory", "at_allocation": at}, **BUSY)
        assert [type(error) for error in ending.errors] == [Unsupported]
        assert "injected exhaustion" in str(ending.errors[0])
        if ending.requests:
            retried += 1
            assert [tuple(r.token_ids) for r in ending.requests] == expected
    assert retried > 8


@pytest.mark.clause("C9", "C11", "L4")
@pytest.mark.parametrize("at", [1, 2])
def test_no_memory_at_capture(model: Model, expected: Tokens, at: int) -> None:
    """``auto`` goes on without the trace and captures later; ``required`` says so."""
    inject = {"kind": "memory", "at_capture": at}
    ending = drive(model, inject, **BUSY)
    assert not ending.errors
    assert [tuple(r.token_ids) for r in ending.requests] == expected
    strict = drive(model, inject, **BUSY, capture="required")
    assert [type(error) for error in strict.errors] == [CaptureDeclined]
    assert "the arena of Segment decode" in str(strict.errors[0])
    assert [tuple(r.token_ids) for r in strict.requests] == expected


@pytest.mark.clause("C5", "S4", "L4")
def test_a_torn_upload_never_gives_a_wrong_token(model: Model, expected: Tokens, healthy: Ending) -> None:
    """Rows of slot state are caught by their receipts and seeded again; everything else by the driver's checksum."""
    reseeds = lost = 0
    uploads = healthy.positions["at_upload"]
    for at in range(uploads - 120, uploads + 1, 3):
        ending = drive(model, {"kind": "torn", "at_upload": at}, **BUSY)
        assert ending.struck == [f"torn at_upload={at}"]
        if ending.errors:
            lost += 1
            ended_truly(ending, expected, "arrived torn")
        else:
            reseeds += ending.counts["reseeds"]
            assert [tuple(r.token_ids) for r in ending.requests] == expected
    assert min(reseeds, lost) > 2


@pytest.mark.clause("S4", "L4")
def test_a_torn_staging_ends_the_requests(model: Model, expected: Tokens) -> None:
    """KV computed on the host, of which half arrives, is never attended to."""
    options = {"arm": "captured", "prefill_on": "cpu"}
    whole = drive(model, **options)
    assert not whole.errors
    for at in range(30, whole.positions["at_upload"]):
        ending = drive(model, {"kind": "torn", "at_upload": at}, **options)
        never_wrong(ending, expected)
        if "staged rows" in str(ending.errors[:1]):
            ended_truly(ending, expected, "staged rows arrived torn in blocks")
            return
    pytest.fail("no staging was torn")


@pytest.mark.clause("C5")
def test_a_lost_device_refuses_later_requests_with_its_reason(model: Model) -> None:
    b = open_sim(inject=[{"kind": "lost", "at_launch": 200}])
    engine = make_engine(model, b, slots=2, max_len=64, arm="captured")
    with pytest.raises(DeviceLost, match="lost at launch 200"):
        engine.generate(PROMPTS, PARAMS)
    assert not engine.has_work
    late = engine.add(PROMPTS[0], PARAMS[0])
    with pytest.raises(DeviceLost, match="lost at launch 200"):
        engine.step()
    assert (late.finish_reason, late.token_ids) == ("error", [])
    assert "lost at launch 200" in str(late.error)
    for close in (engine.close, b.close):
        with suppress(DeviceLost):
            close()
