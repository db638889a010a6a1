"""What one evaluation of a Segment asks for, and the trace that comes of it (clauses C1, C2, C12)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.specs.errors import CaptureViolation, ColdCapture

from .arrays import SimArray
from .memory import Allocation
from .queue import Launch


@dataclass
class Record:
    """The launches of a Segment while its function runs; nothing is computed meanwhile.

    Attributes:
        segment: for messages.
        declared: memory of the Buffers it declares, and of the reserved ones it has filled.
        arena: the trace's memory; None where the step is run, and each array has its own.
        launches: so far, in order.
        known: memory it may touch: what is declared, and its own.
    """

    segment: str
    declared: set[Allocation]
    arena: Allocation | None = None
    launches: list[Launch] = field(default_factory=list)
    known: set[Allocation] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.known |= self.declared
        if self.arena is not None:
            self.known.add(self.arena)

    def declare(self, allocation: Allocation) -> None:
        """A reserved Buffer was filled: it belongs to the Segment from now on."""
        self.declared.add(allocation)
        self.known.add(allocation)


Program = list[tuple[tuple[object, ...], str]]
"""What a device would have compiled: each launch's shape of program, and its constants."""


def program_of(launches: Sequence[Launch]) -> Program:
    """The program of a step."""
    return [(launch.program, repr(launch.constants)) for launch in launches]


def check_warm(segment: str, ran: Program, recorded: Program) -> None:
    """Hold the program that is to be recorded against the one that ran.

    Raises:
        CaptureViolation: only constants differ: a host value that changes from one evaluation to the next (a random draw, a clock)
            would be frozen in the trace.
        ColdCapture: another program than the one that is warm.
    """
    if ran == recorded:
        return
    for n, (old, new) in enumerate(zip(ran, recorded, strict=False)):
        if old[0] == new[0] and old[1] != new[1]:
            raise CaptureViolation(
                f"launch {n} ({new[0][0]}) of Segment {segment} bakes a host value that is not the same at every evaluation: "
                f"{old[1]} when it ran, {new[1]} now (a random draw, a clock, a counter); keep it in a Buffer"
            )
        if old[0] != new[0]:
            raise ColdCapture(
                f"Segment {segment} evaluates to another program than the one that ran: launch {n} is {new[0]}, not {old[0]}; "
                "run it once before capture"
            )
    raise ColdCapture(
        f"Segment {segment} evaluates to {len(recorded)} launches, {len(ran)} ran; run it once before capture"
    )


@dataclass
class SimTrace:
    """A recorded step: its launches over Buffers and the arena, and where its emits lie."""

    arena: Allocation | None
    launches: tuple[Launch, ...]
    emits: dict[str, SimArray]
