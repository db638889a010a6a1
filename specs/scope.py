"""The Segment that is being evaluated: what it may touch, and what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from .array_namespace import ArrayNamespace
from .dtypes import Array
from .errors import CaptureViolation, InvalidInput
from .pool import Pool
from .segment import Buffer, Effects, Segment


@dataclass(frozen=True)
class Evaluation:
    """What the latest evaluation of a Segment used; it stands for later runs in which a driver does not evaluate again."""

    launches: Counter[str]
    taken: tuple[Buffer, ...]


@dataclass
class Scope:
    """Book-keeping of one evaluation of a Segment's function.

    Attributes:
        zeroed: declared updates that ``backend.zero`` asked to clear; they commit with the other updates.
        taken: reserved Buffers that a device-side zero fill took; they read as zeros from then on.
        launches: the Segment's kernels, counted at each run and replay.
    """

    segment: Segment
    capturing: bool
    zeroed: list[Buffer] = field(default_factory=list)
    taken: list[Buffer] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._declared = frozenset(self.segment.buffers)

    def check_declared(self, buffer: Buffer) -> None:
        """Raise CaptureViolation unless the Segment declares ``buffer`` or took it from the reserve."""
        if buffer not in self._declared and buffer not in self.taken:
            raise CaptureViolation(
                f"Segment {self.segment} uses Buffer {buffer.name!r}, which it does not declare in reads, updates or pools"
            )

    def check_pool(self, pool: Pool) -> None:
        """Raise CaptureViolation unless the Segment declares ``pool``."""
        if pool not in self.segment.pools:
            raise CaptureViolation(f"Segment {self.segment} uses a pool it does not declare in pools")

    def effects(self, result: object, xp: ArrayNamespace) -> Effects:
        """Check what the function returned: updates of declared Buffers in their dtype and shape (or first rows), named emits.

        Raises:
            CaptureViolation: an update of an undeclared Buffer, or a host array among the results.
            InvalidInput: a wrong type, dtype or shape.
        """
        if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, Mapping) for part in result)):
            raise InvalidInput(
                f"Segment {self.segment}: fn returned {type(result).__name__}, expected ({{Buffer: array}}, {{name: array}})"
            )
        updates, emits = result
        checked: list[tuple[Buffer, Array]] = []
        for buffer, value in updates.items():
            self._check_update(buffer, value, xp)
            checked.append((buffer, value))
        for buffer in self.zeroed:
            if buffer in updates:
                raise InvalidInput(
                    f"Segment {self.segment}: Buffer {buffer.name!r} is both zeroed and updated in one step"
                )
            zeros = xp.astype(xp.where(buffer.get() == buffer.get(), 0, 0), buffer.dtype)
            self._check_update(buffer, zeros, xp)
            checked.append((buffer, zeros))
        for name, value in emits.items():
            if not xp.is_array(value):
                raise CaptureViolation(
                    f"Segment {self.segment}: emit {name!r} is a host {type(value).__name__}, expected a device array"
                )
        return Effects(checked, dict(emits), list(self.taken))

    def _check_update(self, buffer: Buffer, value: Array, xp: ArrayNamespace) -> None:
        if buffer not in self.segment.updates:
            raise CaptureViolation(f"Segment {self.segment}: update of {buffer!r}, which is not declared in updates")
        if not xp.is_array(value):
            raise CaptureViolation(
                f"Segment {self.segment}: update of {buffer.name!r} by a host {type(value).__name__}"
            )
        shape = xp.shape(value)
        if xp.dtype(value) != buffer.dtype:
            raise InvalidInput(
                f"Segment {self.segment}: update of {buffer!r} by {xp.dtype(value)}, expected {buffer.dtype}"
            )
        rows_fit = len(shape) == len(buffer.shape) > 0 and shape[1:] == buffer.shape[1:] and shape[0] <= buffer.shape[0]
        if shape != buffer.shape and not rows_fit:
            raise InvalidInput(
                f"Segment {self.segment}: update of {buffer!r} by shape {list(shape)}, expected its shape or its first rows"
            )
