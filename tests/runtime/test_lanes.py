"""Lanes: when a bucket's step is run, captured or replayed, counted exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np
import pytest

from forebay.runtime.lanes import Lanes
from forebay.runtime.variants import GREEDY, Variant
from forebay.specs import Backend, Buffer, Segment
from forebay.specs.errors import CaptureDeclined, StaleTrace
from tests.runtime.harness import TestDriver, backend_of

SLOTS = 6
Open = Callable[..., Backend]


@pytest.fixture
def opened() -> Iterator[Open]:
    """A function that opens a backend over a :class:`TestDriver`."""
    with ExitStack() as stack:

        def open_one(**options: Any) -> Backend:
            return stack.enter_context(backend_of(TestDriver(**options)))

        yield open_one


class Counting:
    """Lanes whose step adds 1 to the first rows of a Buffer and emits what they were."""

    def __init__(
        self, backend: Backend, mode: Literal["off", "auto", "required"] = "auto", max_rewarm: int = 3
    ) -> None:
        self.backend = backend
        self.rows = backend.buffer("rows", np.zeros(SLOTS, np.int32))
        self.lanes = Lanes(backend, self.segment, SLOTS, mode, max_rewarm)

    def segment(self, bucket: int, variant: Variant) -> Segment:
        def fn(b: Backend) -> tuple[dict[Buffer, Any], dict[str, Any]]:
            old = b.xp.head(self.rows.get(), bucket)
            return {self.rows: old + 1}, {"old": old}

        return Segment("count", fn, key=(bucket, variant), updates=(self.rows,))

    def step(self, bucket: int = 1, variant: Variant = GREEDY) -> str:
        """One step; the acts of the backend it took, in the order they must come in."""
        before = self.acts()
        expected = self.backend.fetch(self.rows)[:bucket]
        ticket = self.lanes.step(bucket, variant)
        assert ticket.get()["old"].tolist() == expected.tolist()
        assert self.backend.fetch(self.rows)[:bucket].tolist() == (expected + 1).tolist()
        after = self.acts()
        return " ".join(name for name in after for _ in range(after[name] - before[name]))

    def acts(self) -> dict[str, int]:
        c = self.backend.counters
        return {"declined": c.declined, "capture": c.capture, "run": c.run, "replay": c.replay}

    def report(self, lane: int = 0) -> dict[str, Any]:
        return self.lanes.report()[lane]


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 4, 8, 8, 8, 8]),
        (11, [1, 2, 4, 4, 8, 8, 8, 8, 11, 11, 11]),
    ],
)
@pytest.mark.clause("C7")
def test_a_bucket_is_the_smallest_power_of_two_that_has_the_slot(
    backend: Backend, slots: int, expected: list[int]
) -> None:
    lanes = Lanes(backend, lambda bucket, variant: Segment("none", lambda b: ({}, {})), slots, "off", 0)
    assert [lanes.bucket_for(slot) for slot in range(slots)] == expected


@pytest.mark.clause("C1", "C11", "C12")
def test_the_first_step_runs_the_second_captures_and_replays_the_rest_replay(opened: Open) -> None:
    counting = Counting(opened())
    assert [counting.step() for _ in range(5)] == ["run", "capture replay", "replay", "replay", "replay"]
    assert counting.report() == {
        "bucket": 1,
        "variant": "greedy",
        "run": 1,
        "replay": 4,
        "capture": 1,
        "declined": 0,
        "released": 0,
        "eager_reason": "",
    }


@pytest.mark.clause("C7", "C11")
def test_each_bucket_has_its_own_trace(opened: Open) -> None:
    counting = Counting(opened())
    acts = [counting.step(bucket) for bucket in (1, 4, 1, 4, 2, 4, 1, 2, 2)]
    assert acts == [
        "run",
        "run",
        "capture replay",
        "capture replay",
        "run",
        "replay",
        "replay",
        "capture replay",
        "replay",
    ]
    assert [r["bucket"] for r in counting.lanes.report()] == [1, 2, 4]
    assert counting.backend.counters.recapture == 0


@pytest.mark.clause("C7")
def test_each_variant_of_a_bucket_has_its_own_trace(opened: Open) -> None:
    counting = Counting(opened())
    drawn = Variant(sampled=True)
    acts = [counting.step(2, v) for v in (GREEDY, drawn, GREEDY, drawn, GREEDY, Variant(True, 5), drawn)]
    assert acts == ["run", "run", "capture replay", "capture replay", "replay", "run", "replay"]
    reported = [(r["bucket"], r["variant"]) for r in counting.lanes.report()]
    assert reported == [(2, "greedy"), (2, "sampled"), (2, "sampled+logprobs5")]


@pytest.mark.clause("C11")
def test_capture_off_never_captures_and_says_so(opened: Open) -> None:
    counting = Counting(opened(), mode="off")
    assert [counting.step() for _ in range(6)] == ["run"] * 6
    assert counting.report()["eager_reason"] == "capture is off"


@pytest.mark.clause("C8", "C9", "C11")
@pytest.mark.parametrize("max_rewarm", [0, 1, 3])
def test_a_lane_whose_capture_is_always_declined_stays_hostfree_after_max_rewarm_new_tries(
    opened: Open, max_rewarm: int
) -> None:
    counting = Counting(opened(declines=10**9), max_rewarm=max_rewarm)
    tries = max_rewarm + 1
    assert [counting.step() for _ in range(tries + 6)] == ["run", *["declined run"] * tries, *["run"] * 5]
    report = counting.report()
    assert (report["declined"], report["capture"], report["run"]) == (tries, 0, tries + 6)
    assert report["eager_reason"] == f"capture declined {tries} times in a row: no room for a trace"


@pytest.mark.clause("C8", "C9")
def test_declines_that_end_in_time_end_in_replay(opened: Open) -> None:
    counting = Counting(opened(declines=2), max_rewarm=2)
    acts = ["run", "declined run", "declined run", "capture replay", "replay", "replay"]
    assert [counting.step() for _ in acts] == acts
    report = counting.report()
    assert (report["declined"], report["capture"], report["eager_reason"]) == (2, 1, "")


@pytest.mark.clause("C8")
def test_one_lane_that_gave_up_leaves_the_others_alone(opened: Open) -> None:
    counting = Counting(opened(declines=1), max_rewarm=0)
    assert [counting.step(1) for _ in range(3)] == ["run", "declined run", "run"]
    assert [counting.step(2) for _ in range(3)] == ["run", "capture replay", "replay"]
    assert [bool(r["eager_reason"]) for r in counting.lanes.report()] == [True, False]


@pytest.mark.clause("C8")
def test_the_bound_is_on_declines_in_a_row(opened: Open) -> None:
    """A replay between two spells of declines starts the count anew."""
    backend = opened(declines=2, recapture_at_boundary=True)
    driver = backend._driver
    assert isinstance(driver, TestDriver)
    counting = Counting(backend, max_rewarm=2)
    first = [counting.step() for _ in range(4)]
    driver.declines = 2
    counting.lanes.boundary()
    second = [counting.step() for _ in range(4)]
    assert first == second == ["run", "declined run", "declined run", "capture replay"]


@pytest.mark.clause("C11")
def test_capture_required_raises_on_a_decline_but_not_on_a_keys_first_run(opened: Open) -> None:
    counting = Counting(opened(declines=1), mode="required")
    assert counting.step() == "run"
    with pytest.raises(CaptureDeclined, match="no room for a trace"):
        counting.lanes.step(1)
    assert counting.acts() == {"declined": 1, "capture": 0, "run": 1, "replay": 0}
    assert counting.backend.fetch(counting.rows).tolist() == [1] + [0] * (SLOTS - 1)


@pytest.mark.clause("C11")
def test_capture_required_on_a_device_that_captures_nothing_raises_at_the_second_step(opened: Open) -> None:
    counting = Counting(opened(capture=False), mode="required")
    assert counting.step() == "run"
    with pytest.raises(CaptureDeclined, match="does not capture"):
        counting.lanes.step(1)


# -- request boundaries ------------------------------------------------------------------------------------------------
@pytest.mark.clause("C6")
def test_a_boundary_leaves_the_trace_of_an_ordinary_backend_alone(opened: Open) -> None:
    counting = Counting(opened())
    acts = []
    for _ in range(6):
        counting.lanes.boundary()
        acts.append(counting.step())
    assert acts == ["run", "capture replay", *["replay"] * 4]
    assert counting.backend.counters.recapture == 0


@pytest.mark.clause("C6", "C9")
def test_a_backend_that_recaptures_at_a_boundary_releases_runs_once_and_captures_on_the_next(opened: Open) -> None:
    counting = Counting(opened(recapture_at_boundary=True))
    for boundary in range(3):
        assert [counting.step() for _ in range(4)] == ["run", "capture replay", "replay", "replay"]
        assert counting.backend.counters.recapture == boundary
        counting.lanes.boundary()
        assert counting.report()["released"] == boundary + 1
        assert counting.lanes._lanes[1, GREEDY]._trace is None


@pytest.mark.clause("C6")
def test_a_boundary_between_the_eager_step_and_the_capture_asks_for_another_eager_step(opened: Open) -> None:
    """What is captured must have run on the state of the *last* boundary."""
    counting = Counting(opened(recapture_at_boundary=True))
    acts = [counting.step()]
    for _ in range(3):
        counting.lanes.boundary()
        acts.append(counting.step())
    acts += [counting.step(), counting.step()]
    assert acts == ["run", "run", "run", "run", "capture replay", "replay"]


@pytest.mark.clause("C6")
def test_two_boundaries_at_once_are_one(opened: Open) -> None:
    counting = Counting(opened(recapture_at_boundary=True))
    for _ in range(3):
        counting.step()
    counting.lanes.boundary()
    counting.lanes.boundary()
    assert counting.report()["released"] == 1
    assert [counting.step() for _ in range(3)] == ["run", "capture replay", "replay"]


@pytest.mark.clause("C10")
def test_close_releases_every_trace_and_twice_is_harmless(opened: Open) -> None:
    counting = Counting(opened())
    for bucket in (1, 2, 1, 2, 1, 2):
        counting.step(bucket)
    traces = [lane._trace for lane in counting.lanes._lanes.values()]
    counting.lanes.close()
    counting.lanes.close()
    assert [r["released"] for r in counting.lanes.report()] == [1, 1]
    for trace in traces:
        assert trace is not None
        with pytest.raises(StaleTrace):
            counting.backend.replay(trace)
    counting.backend.release(counting.rows)
