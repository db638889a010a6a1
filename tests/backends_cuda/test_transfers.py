"""Copies between host and device that nobody waits for never see memory that is used again (clauses D7, S4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.backends.cuda.platform import Event
from forebay.backends.cuda.standin import StandIn
from forebay.backends.cuda.transfers import ALIGNMENT, Counts, Readback, StagingRing

RING = 4 * ALIGNMENT


def sent(sizes: list[int], counts: Counts) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """What was sent through a small ring, and what arrived once all of it was asked for."""
    device = StandIn()
    ring = StagingRing(device, counts, RING)
    rng = np.random.default_rng(0)
    sources, targets = [], []
    for size in sizes:
        bits = rng.integers(0, 255, size).astype(np.uint8)
        sources.append(bits.copy())
        targets.append(device.empty((size,), torch.uint8))
        ring.send(bits, targets[-1])
        bits[:] = 0
    return sources, [Readback(device, Counts(), {"x": target}).bits()["x"] for target in targets]


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(0, 3 * RING), min_size=1, max_size=12))
def test_every_byte_arrives_whatever_the_sizes(sizes: list[int]) -> None:
    counts = Counts()
    sources, arrived = sent(sizes, counts)
    for source, got in zip(sources, arrived, strict=True):
        np.testing.assert_array_equal(got, source)
    assert (counts.waits > 0) >= (sum(sizes) > 2 * RING)


def test_without_waiting_for_a_piece_the_bytes_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def hurried(self: Counts, event: Event) -> None:
        """Use the piece at once."""

    monkeypatch.setattr(Counts, "wait", hurried)
    device, counts = StandIn(), Counts()
    ring = StagingRing(device, counts, RING)
    targets = [device.empty((RING,), torch.uint8) for _ in range(2)]
    for value, target in enumerate(targets):
        ring.send(np.full(RING, value, np.uint8), target)
    device.synchronize()
    assert [int(target.memory[0]) for target in targets] == [1, 1]  # type: ignore[attr-defined]


def test_what_is_read_back_is_what_was_there_when_it_was_asked_for() -> None:
    device, counts = StandIn(), Counts()
    x, flags = device.empty((2, 3), torch.bfloat16), device.empty((), torch.bool)
    x.fill_(1.5)
    flags.fill_(True)
    readback = Readback(device, counts, {"x": x[:, :2], "flags": flags, "none": x[:0]})
    x.fill_(4)
    values = readback.values()
    np.testing.assert_array_equal(values["x"], np.full((2, 2), 1.5, np.float32))
    assert values["flags"].shape == ()
    assert values["flags"]
    assert values["none"].shape == (0, 3)
    assert (counts.bytes_down, counts.waits) == (2 * 2 * 2 + 1, 1)
