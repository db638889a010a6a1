"""Faults a test injects into the simulated device: ``open_backend("sim", inject=[{"kind": "lost", "at_launch": 17}])``.

Every position is counted from 1 and from the opening of the device. Kinds and their fields:

=========  ============================  ==================================================================================
kind       where                         what happens
=========  ============================  ==================================================================================
lost       ``at_launch``                 the device is lost when that kernel begins, for good
stuck      ``at_launch``                 that kernel never ends; whoever waits for it is told after ``stuck_timeout`` seconds
memory     ``at_allocation``             that allocation finds the memory used up, once
memory     ``at_capture``                the arena of that capture finds no memory, once
torn       ``at_upload``                 the first half of that transfer to the device never arrives
=========  ============================  ==================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forebay.specs.errors import InvalidInput

PLACES: Final[Mapping[str, tuple[str, ...]]] = {
    "lost": ("at_launch",),
    "stuck": ("at_launch",),
    "memory": ("at_allocation", "at_capture"),
    "torn": ("at_upload",),
}
"""The fields that say where a fault of each kind strikes."""


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, the count that triggers it and the number at which it does."""

    kind: str
    place: str
    number: int

    @classmethod
    def checked(cls, given: object) -> Fault:
        """A fault from plain data.

        Raises:
            InvalidInput: no mapping, an unknown kind or field, or a position that is no positive int.
        """
        what = "sim option inject"
        if not isinstance(given, Mapping):
            raise InvalidInput(f"{what}: got {given!r}, expected mappings such as {{'kind': 'lost', 'at_launch': 17}}")
        kind = given.get("kind")
        if not isinstance(kind, str) or kind not in PLACES:
            raise InvalidInput(f"{what}: got kind {kind!r}, expected one of {', '.join(PLACES)}")
        fields = [str(name) for name in given if name != "kind"]
        if len(fields) != 1 or fields[0] not in PLACES[kind]:
            raise InvalidInput(f"{what}: {kind} got {fields}, expected one of {', '.join(PLACES[kind])}")
        number = given[fields[0]]
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InvalidInput(f"{what}: {kind} {fields[0]} got {number!r}, expected an int from 1 on")
        return cls(kind, fields[0], number)


class Faults:
    """Counts what the device does and says when a fault strikes.

    Attributes:
        counts: launches, allocations, captures and uploads so far.
        struck: the faults that have struck.
    """

    def __init__(self, inject: Sequence[Mapping[str, Any]] = ()) -> None:
        if isinstance(inject, str | bytes | Mapping) or not isinstance(inject, Sequence):
            raise InvalidInput(f"sim option inject: got {inject!r}, expected a list of mappings")
        self._pending = [Fault.checked(fault) for fault in inject]
        self.counts: Final[Counter[str]] = Counter()
        self.struck: Final[list[Fault]] = []

    def launch(self) -> str:
        """A kernel begins: ``lost``, ``stuck`` or ``""``."""
        return self._count("at_launch")

    def allocation(self) -> bool:
        """Memory is asked for; True if there is to be none."""
        return self._count("at_allocation") != ""

    def capture(self) -> bool:
        """An arena is asked for; True if there is to be none."""
        return self._count("at_capture") != ""

    def upload(self) -> bool:
        """Bytes go to the device; True if half of them are to be lost."""
        return self._count("at_upload") != ""

    def _count(self, place: str) -> str:
        self.counts[place] += 1
        for fault in self._pending:
            if fault.place == place and fault.number == self.counts[place]:
                self._pending.remove(fault)
                self.struck.append(fault)
                return fault.kind
        return ""
