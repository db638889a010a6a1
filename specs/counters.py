"""Exact, public counts of what a backend did (clause C9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counters:
    """Counts since the backend was opened. ``dropped`` and ``invalid`` live on the device, one Buffer a pool; reading them syncs.

    Attributes:
        run, capture, replay, recapture, declined: Segment runs, captures, replays, captures of a Segment captured before, and
            captures the device declined.
        uploads, upload_bytes: host writes to device memory, Buffer creation from host values included.
        downloads: host reads of device memory (Tickets included).
        syncs: explicit waits for the device.
        launches: the backend's own kernels by operation, replays included. An operation is counted where it is handed to the driver;
            that the driver did it shows by the values, which the suite holds against its own. ``gather`` gives the same bits as no
            gather, so the driver itself reports it (:class:`~.attention.DecodeCall`).
        delegated: operations done by the numpy defaults because the port has no kernel for them.
    """

    run: int = 0
    capture: int = 0
    replay: int = 0
    recapture: int = 0
    declined: int = 0
    uploads: int = 0
    upload_bytes: int = 0
    downloads: int = 0
    syncs: int = 0
    launches: Counter[str] = field(default_factory=Counter)
    delegated: Counter[str] = field(default_factory=Counter)
    device_counts: Callable[[], tuple[int, int]] = field(default=lambda: (0, 0), repr=False)

    @property
    def dropped(self) -> int:
        """Rows that doors dropped and counted, over all pools."""
        return self.device_counts()[0]

    @property
    def invalid(self) -> int:
        """Invalid table entries met inside visible ranges, over all pools."""
        return self.device_counts()[1]

    def as_dict(self) -> dict[str, Any]:
        """All counts as plain data, for reports."""
        names = ("run", "capture", "replay", "recapture", "declined", "uploads", "upload_bytes", "downloads", "syncs")
        dropped, invalid = self.device_counts()
        counts: dict[str, Any] = {name: getattr(self, name) for name in names}
        return counts | {
            "dropped": dropped,
            "invalid": invalid,
            "launches": dict(self.launches),
            "delegated": dict(self.delegated),
        }
