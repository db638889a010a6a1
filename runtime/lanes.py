"""Lanes: for each bucket and variant, whether its step is run, captured or replayed (clauses C1, C6 to C11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from forebay.specs.backend import Backend
from forebay.specs.errors import CaptureDeclined, ColdCapture
from forebay.specs.segment import Segment, Ticket, Trace

from .variants import GREEDY, Variant

CaptureMode = Literal["off", "auto", "required"]


def capture_mode(arm: str, capture: str) -> CaptureMode:
    """How lanes treat capture in an arm: only ``captured`` captures, and ``required`` does not take no for an answer."""
    if arm != "captured":
        return "off"
    return "required" if capture == "required" else "auto"


@dataclass
class LaneReport:
    """What one lane did. ``eager_reason`` says why it stays hostfree, ``""`` while it does not."""

    bucket: int
    variant: str
    run: int = 0
    replay: int = 0
    capture: int = 0
    declined: int = 0
    released: int = 0
    eager_reason: str = ""


class Lane:
    """The Segment of one bucket and variant, with its trace."""

    def __init__(
        self, backend: Backend, segment: Segment, bucket: int, variant: Variant, mode: CaptureMode, max_rewarm: int
    ) -> None:
        self._backend = backend
        self._segment = segment
        self._mode = mode
        self._max_rewarm = max_rewarm
        self._trace: Trace | None = None
        self._warm = False
        self._attempts = 0
        self.report = LaneReport(bucket, str(variant), eager_reason="capture is off" if mode == "off" else "")

    def step(self) -> Ticket:
        """One step by the cheapest way that is sound now.

        Raises:
            CaptureDeclined: ``capture = "required"`` and the device declined.
        """
        if self._trace is None and self._warm and not self.report.eager_reason:
            self._trace = self._try_capture()
        if self._trace is not None:
            self.report.replay += 1
            self._attempts = 0
            return self._backend.replay(self._trace)
        self.report.run += 1
        self._warm = True
        return self._backend.run(self._segment)

    def boundary(self) -> None:
        """A slot was re-seeded: a backend that must re-capture lets go of its trace and runs once on the seeded state (C6, C8)."""
        if self._backend.capabilities.recapture_at_boundary:
            self.release()
            self._warm = False
            self._attempts = 0

    def release(self) -> None:
        """Release the trace."""
        if self._trace is not None:
            self._backend.release(self._trace)
            self._trace = None
            self.report.released += 1

    def _try_capture(self) -> Trace | None:
        self._attempts += 1
        try:
            trace = self._backend.capture(self._segment)
        except (CaptureDeclined, ColdCapture) as declined:
            self.report.declined += 1
            if self._mode == "required":
                raise
            self._warm = False
            if self._attempts > self._max_rewarm:
                self.report.eager_reason = f"capture declined {self._attempts} times in a row: {declined}"
            return None
        self.report.capture += 1
        return trace


class Lanes:
    """Lanes by bucket and variant; a bucket is the first B slots, B a power of two or the number of slots.

    Args:
        make_segment: the Segment of a bucket and variant.
        max_rewarm: captures that may be declined in a row before a lane stays hostfree.
    """

    def __init__(
        self,
        backend: Backend,
        make_segment: Callable[[int, Variant], Segment],
        slots: int,
        mode: CaptureMode,
        max_rewarm: int,
    ) -> None:
        self._backend = backend
        self._make_segment = make_segment
        self._mode: CaptureMode = mode
        self._max_rewarm = max_rewarm
        self._buckets: list[int] = [*(2**i for i in range(slots.bit_length()) if 2**i < slots), slots]
        self._lanes: dict[tuple[int, Variant], Lane] = {}

    def bucket_for(self, highest_slot: int) -> int:
        """The smallest bucket that has ``highest_slot``."""
        return next(b for b in self._buckets if b > highest_slot)

    def step(self, bucket: int, variant: Variant = GREEDY) -> Ticket:
        """One step of a bucket in a variant."""
        key = (bucket, variant)
        if key not in self._lanes:
            segment = self._make_segment(bucket, variant)
            self._lanes[key] = Lane(self._backend, segment, bucket, variant, self._mode, self._max_rewarm)
        return self._lanes[key].step()

    def boundary(self) -> None:
        """A request started in some slot."""
        for lane in self._lanes.values():
            lane.boundary()

    def close(self) -> None:
        """Release every trace."""
        for lane in self._lanes.values():
            lane.release()

    def report(self) -> list[dict[str, Any]]:
        """One record a lane, by bucket and variant."""
        return [asdict(self._lanes[key].report) for key in sorted(self._lanes)]
