"""Faults of the device under an engine: each request ends or is retried with a true reason; no wrong token, no leak (clause C5)."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from forebay.runtime import Model, Settings, open_backend
from forebay.specs.errors import CaptureDeclined, Unsupported
from tests.backends_sim.driven import (
    ARMS,
    HAPPENS,
    Acts,
    Places,
    Tokens,
    alone,
    drive,
    ended_truly,
    served_whole,
    some_of_each,
    spread,
    watched,
)

RUNS: dict[str, dict[str, Any]] = {
    **ARMS,
    "recapture": {**ARMS["captured"], "read_behind": 0, "recapture": True},
    "prefill on the host": {**ARMS["captured"], "prefill_on": "cpu"},
}
MOVES = ("copy_kv", "read_kv", "stage")
"""Kernels that move KV: a copy of a shared block, an offload, and a restore or a prompt from the host."""
ROWS = ("state.seed", "state.write_table", "state.idle", "sampling_rows.seed", "sampling_rows.idle")
"""Who uploads rows of slot state, which have no checksum: receipts tell what they held."""


@pytest.fixture(scope="module")
def right(model: Model) -> Tokens:
    """What each request gives by itself on the cpu backend."""
    with open_backend("cpu", settings=Settings(), threads=1) as cpu:
        return alone(model, cpu)


@pytest.fixture(scope="module")
def whole(model: Model, right: Tokens) -> dict[str, Acts]:
    """What each run does without a fault: all that an engine can do, and every request whole."""
    done = {}
    for name, options in RUNS.items():
        with watched() as acts:
            ending = drive(model, **options)
        assert not ending.errors
        served_whole(ending, right)
        # KV that is on the host's backend is not reused.
        assert [what for what in HAPPENS if not ending.counts[what]] == ["reused_tokens"] * ("prefill_on" in options)
        assert set(MOVES) <= acts.launches.keys()
        done[name] = acts
    return done


def moves_and_others(acts: Acts, moves: int, others: int) -> list[int]:
    """Launches: so many of each kernel that moves KV, and so many of all, spread over the run."""
    moving: Places = {name: acts.launches[name] for name in MOVES}
    every = sorted(at for found in acts.launches.values() for at in found)
    return sorted({*some_of_each(moving, moves), *spread(every, others)})


@pytest.mark.clause("C5", "L4")
@pytest.mark.parametrize("run", RUNS)
def test_a_device_lost_at_any_launch_ends_what_is_unfinished(
    model: Model, right: Tokens, whole: dict[str, Acts], run: str
) -> None:
    """In the middle of prompts, steps and replays, of an offload, a restore and the copy of a shared block; a new device serves."""
    for at in moves_and_others(whole[run], 3, 8):
        ending = drive(model, {"kind": "lost", "at_launch": at}, **RUNS[run])
        ended_truly(ending, right, f"the device was lost at launch {at} (")
        assert ending.struck == [f"lost at_launch={at}"]
    served_whole(drive(model, **RUNS[run]), right)


@pytest.mark.clause("C5", "L4")
def test_a_device_lost_at_each_kind_of_kernel(model: Model, right: Tokens, whole: dict[str, Acts]) -> None:
    for at in some_of_each({name: found[len(found) // 2 :] for name, found in whole["captured"].launches.items()}, 1):
        ending = drive(model, {"kind": "lost", "at_launch": at}, **RUNS["captured"])
        ended_truly(ending, right, f"the device was lost at launch {at} (")


@pytest.mark.clause("C5", "C6", "L4")
@pytest.mark.parametrize("kind", ["lost", "stuck"])
def test_a_device_that_fails_around_a_recapture(model: Model, right: Tokens, whole: dict[str, Acts], kind: str) -> None:
    """In the last kernel before each capture, which runs on freshly seeded state, and in the first of its replay."""
    captures = whole["recapture"].captures
    assert len(captures) > 3
    for at in (*captures, *(before + 1 for before in captures)):
        ending = drive(model, {"kind": kind, "at_launch": at}, **RUNS["recapture"])
        ended_truly(ending, right, f"launch {at} (")
        assert ending.struck == [f"{kind} at_launch={at}"]


@pytest.mark.clause("C5", "C8", "L4")
@pytest.mark.parametrize("run", RUNS)
def test_a_stuck_queue_ends_what_is_unfinished(model: Model, right: Tokens, whole: dict[str, Acts], run: str) -> None:
    """Whoever waits is told in time, in every arm."""
    for at in moves_and_others(whole[run], 1, 5):
        begun = time.monotonic()
        ending = drive(model, {"kind": "stuck", "at_launch": at}, **RUNS[run])
        assert time.monotonic() - begun < 30
        ended_truly(ending, right, f"the queue is stuck: launch {at} (")


@pytest.mark.clause("C5", "L4")
@pytest.mark.parametrize("run", ["captured", "eager"])
def test_memory_used_up_once_is_told_and_tried_again(
    model: Model, right: Tokens, whole: dict[str, Acts], run: str
) -> None:
    """Wherever memory is asked for: while the engine is made it is not made; later every request still gets all of its tokens."""
    kinds = whole[run].allocations
    arenas, retried = kinds.get("lanes._try_capture", []), 0
    late = {name: found[-1 - len(found) // 2 :] for name, found in kinds.items()}
    for at in some_of_each(late, 1):
        ending = drive(model, {"kind": "memory", "at_allocation": at}, **RUNS[run])
        assert ending.struck == [f"memory at_allocation={at}"]
        if at in arenas:
            assert not ending.errors, "capture declines, and the step runs"
        else:
            assert [type(error) for error in ending.errors] == [Unsupported]
            assert "injected exhaustion" in str(ending.errors[0])
        if ending.requests:
            retried += 1
            served_whole(ending, right)
    assert retried > 10


# -- capture -----------------------------------------------------------------------------------------------------------
@pytest.mark.clause("C9", "C11", "L4")
@pytest.mark.parametrize("run", ["captured", "recapture"])
def test_no_memory_at_one_capture(model: Model, right: Tokens, whole: dict[str, Acts], run: str) -> None:
    """At each capture, first or again: ``auto`` goes on without the trace and captures later; ``required`` says so."""
    for at in range(1, len(whole[run].captures) + 1):
        inject = {"kind": "memory", "at_capture": at}
        ending = drive(model, inject, **RUNS[run])
        assert not ending.errors
        served_whole(ending, right)
        assert sum(lane["declined"] for lane in ending.lanes) == 1
        assert not any(lane["eager_reason"] for lane in ending.lanes)
        strict = drive(model, inject, **RUNS[run], capture="required")
        assert [type(error) for error in strict.errors] == [CaptureDeclined]
        assert "the arena of Segment decode" in str(strict.errors[0])
        served_whole(strict, right)


@pytest.mark.clause("C8", "C9", "C11", "L4")
@pytest.mark.parametrize("run", ["captured", "recapture"])
@pytest.mark.parametrize("max_rewarm", [0, 1, 3])
def test_no_memory_at_any_capture(model: Model, right: Tokens, run: str, max_rewarm: int) -> None:
    """After the attempts that it may make in a row at one boundary a lane stays hostfree and says so; no token is wrong or late."""
    never = [{"kind": "memory", "at_capture": at} for at in range(1, 100)]
    ending = drive(model, *never, **RUNS[run], max_rewarm=max_rewarm)
    assert not ending.errors
    served_whole(ending, right)
    assert not any(lane["capture"] or lane["replay"] for lane in ending.lanes)
    given_up = [lane for lane in ending.lanes if lane["eager_reason"]]
    for lane in given_up:
        assert f"declined {max_rewarm + 1} times in a row" in lane["eager_reason"]
        assert "the arena of Segment decode" in lane["eager_reason"]
        assert run == "recapture" or lane["declined"] == max_rewarm + 1
    assert given_up or max_rewarm == 3
    assert sum(lane["declined"] for lane in ending.lanes) == len(ending.struck)


# -- torn uploads ------------------------------------------------------------------------------------------------------
def torn_ends_truly(model: Model, right: Tokens, uploads: Places, run: str, positions: list[int]) -> Counter[str]:
    """Tear each of these uploads; how the runs ended.

    Rows of slot state are caught by their receipts and seeded again, and every request is whole; everything else is caught by the
    driver's checksum.
    """
    ends: Counter[str] = Counter()
    rows = {at for kind, found in uploads.items() if kind.startswith(ROWS) for at in found}
    for at in positions:
        ending = drive(model, {"kind": "torn", "at_upload": at}, **RUNS[run])
        assert ending.struck == [f"torn at_upload={at}"]
        if at in rows:
            assert not ending.errors
            served_whole(ending, right)
            ends["reseeded"] += ending.counts["reseeds"]
        else:
            ended_truly(ending, right, "arrived torn")
            ends["lost"] += 1
    return ends


@pytest.mark.clause("C5", "C6", "S4", "L4")
def test_a_torn_row_is_found_by_its_receipt(model: Model, right: Tokens, whole: dict[str, Acts]) -> None:
    uploads = whole["captured"].uploads
    rows = {kind: found for kind, found in uploads.items() if kind.startswith(ROWS)}
    assert len(rows) == 20
    tables = rows["state.write_table: store slot.table"]
    ends = torn_ends_truly(model, right, uploads, "captured", sorted({*some_of_each(rows, 3), *tables}))
    assert ends["reseeded"] > 10


@pytest.mark.clause("C5", "S4", "L4")
@pytest.mark.parametrize(("run", "each"), [("captured", 2), ("eager", 2), ("recapture", 1), ("prefill on the host", 1)])
def test_every_kind_of_torn_upload_ends_truly(
    model: Model, right: Tokens, whole: dict[str, Acts], run: str, each: int
) -> None:
    """Weights, state before the first step, ids and tables of prompts, rows of slots, ids of an offload, KV that is brought back."""
    uploads = whole[run].uploads
    made_once = {kind: found for kind, found in uploads.items() if ": store " in kind and not kind.startswith(ROWS)}
    later = {kind: found for kind, found in uploads.items() if kind not in made_once}
    if run != "recapture":
        later = {kind: found for kind, found in later.items() if not kind.startswith(ROWS)}
    positions = [*spread(sorted(at for found in made_once.values() for at in found), 6), *some_of_each(later, each)]
    assert torn_ends_truly(model, right, uploads, run, positions)["lost"] >= 8
