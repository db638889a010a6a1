"""Latencies by a clock of the test's own: what is counted, what is kept, and who waited longest."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.runtime import Request, SamplingParams
from forebay.runtime import latency as latency_module
from forebay.runtime.latency import BOUNDS, Durations, Latencies


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def request(index: int = 0) -> Request:
    return Request(index, (5, 6), SamplingParams(max_tokens=9), ())


def test_a_request_is_timed_from_its_arrival(clock: Clock) -> None:
    latencies, one = Latencies(clock), request()
    latencies.arrived(one, step=7)
    clock.now += 0.25
    latencies.admitted(one, step=10)
    for seconds in (0.5, 0.125, 0.375):
        clock.now += seconds
        latencies.released(one)
    report = latencies.report([], step=20)
    assert (report["queue_wait_s"]["count"], report["queue_wait_s"]["max"]) == (1, 0.25)
    assert (report["time_to_first_token_s"]["count"], report["time_to_first_token_s"]["mean"]) == (1, 0.75)
    gaps = report["inter_token_s"]
    assert (gaps["count"], gaps["sum"], gaps["p50"], gaps["max"]) == (2, 0.5, 0.25, 0.375)
    assert (report["worst_wait_steps"], report["worst_wait_s"]) == (3, 0.25)


def test_the_gaps_of_two_requests_do_not_mix(clock: Clock) -> None:
    latencies, one, two = Latencies(clock), request(0), request(1)
    for member in (one, two):
        latencies.arrived(member, step=0)
        latencies.admitted(member, step=0)
    for member in (one, two, one, two):
        clock.now += 1.0
        latencies.released(member)
    report = latencies.report([], step=1)
    assert report["time_to_first_token_s"]["sum"] == 1.0 + 2.0
    assert (report["inter_token_s"]["count"], report["inter_token_s"]["sum"]) == (2, 4.0)


def test_the_wait_for_the_first_slot_is_the_queues_and_a_later_one_may_be_the_worst(clock: Clock) -> None:
    latencies, one = Latencies(clock), request()
    latencies.arrived(one, step=0)
    clock.now += 1.0
    latencies.admitted(one, step=1)
    clock.now += 50.0
    latencies.waits_from(one, step=80)  # it had to give way
    clock.now += 5.0
    latencies.admitted(one, step=90)
    report = latencies.report([], step=100)
    assert report["queue_wait_s"]["count"] == 1
    assert (report["worst_wait_steps"], report["worst_wait_s"]) == (10, 5.0)


@pytest.mark.parametrize("left", [True, False])
def test_who_gave_up_or_still_waits_counts_for_the_worst_wait(clock: Clock, left: bool) -> None:
    latencies, one, two = Latencies(clock), request(0), request(1)
    latencies.arrived(one, step=5)
    latencies.arrived(two, step=6)
    clock.now += 3.0
    latencies.admitted(two, step=9)
    clock.now += 1.0
    if left:
        latencies.left(one, step=25)
    report = latencies.report([] if left else [one], step=25)
    assert (report["worst_wait_steps"], report["worst_wait_s"]) == (20, 4.0)
    assert report["queue_wait_s"]["count"] == 1, "a wait that did not end in a slot is no queue wait"


def test_nothing_measured_says_so(clock: Clock) -> None:
    report = Latencies(clock).report([], step=0)
    for kind in ("queue_wait_s", "time_to_first_token_s", "inter_token_s"):
        assert report[kind] == {"count": 0, "sum": 0.0, "buckets": dict.fromkeys(map(str, BOUNDS), 0)}
    assert (report["worst_wait_steps"], report["worst_wait_s"]) == (0, 0.0)


@given(st.lists(st.sampled_from(BOUNDS) | st.floats(0.0, 1e4), min_size=1, max_size=50))
def test_counts_buckets_and_percentiles_are_those_of_the_values(values: list[float]) -> None:
    durations = Durations()
    for value in values:
        durations.add(value)
    report = durations.report()
    assert report["count"] == len(values)
    assert report["sum"] == pytest.approx(sum(values))
    assert report["mean"] == pytest.approx(sum(values) / len(values))
    assert report["max"] == max(values)
    for percent in (50, 90, 99):
        assert report[f"p{percent}"] == pytest.approx(np.quantile(values, percent / 100))
    assert report["buckets"] == {str(bound): sum(v <= bound for v in values) for bound in BOUNDS}
    assert all(a < b for a, b in pairwise(BOUNDS))


def test_memory_is_bounded_and_counts_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_module, "KEPT", 10)
    durations = Durations()
    for value in range(1, 101):
        durations.add(float(value))
    report = durations.report()
    assert (report["count"], report["sum"], report["max"]) == (100, 5050.0, 100.0)
    assert report["p50"] == np.median(range(91, 101)), "of the latest ten"
    assert len(durations._latest) == 10
