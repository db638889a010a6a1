"""Buffers, Segments, Traces and Tickets: the nouns of a captured decode step (clauses C1 to C13)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .dtypes import Array, HostArray
from .errors import InvalidInput

if TYPE_CHECKING:
    from .backend import Backend
    from .backend_memory import BackendMemory
    from .pool import Pool

SegmentFn = Callable[["Backend"], tuple["Mapping[Buffer, Array]", "Mapping[str, Array]"]]
"""``fn(backend) -> (updates, emits)``: updates commit together at the end, emits leave through the Ticket."""

Fetch = Callable[[], dict[str, HostArray]]
"""Reads what one step emitted (bfloat16 as float32); waits for that step only, and gives its values however many steps follow."""


class Buffer:
    """A cell of device memory with an identity that lasts; made by ``backend.buffer`` or ``backend.reserve``.

    Attributes:
        name: for messages.
        shape, dtype: fixed for life.
        handle: what the driver keeps (its memory, or the array the cell holds now); nobody else looks at it.
        live: False once released.
        reserved: True for spare memory a device-side zero fill may take inside a captured step.
    """

    __slots__ = ("__weakref__", "_backend", "dtype", "handle", "live", "name", "reserved", "shape")

    def __init__(
        self, backend: BackendMemory, name: str, shape: tuple[int, ...], dtype: str, handle: Any, reserved: bool
    ) -> None:
        self._backend = backend
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.handle = handle
        self.reserved = reserved
        self.live = True

    def get(self) -> Array:
        """The device array the cell holds; inside a Segment only if the Segment declares the Buffer.

        Raises:
            CaptureViolation: the active Segment does not declare it.
            InvalidInput: it was released.
        """
        return self._backend.load(self)

    def belongs_to(self, backend: BackendMemory) -> bool:
        """True if ``backend`` made it."""
        return self._backend is backend

    def __repr__(self) -> str:
        return f"Buffer({self.name!r}, {self.dtype}{list(self.shape)}{'' if self.live else ', released'})"


@dataclass(frozen=True, eq=False)
class Segment:
    """A piece of the decode step: a function over declared Buffers. Its identity is the object itself.

    Attributes:
        name: for messages and trace keys.
        fn: ``fn(backend) -> (updates, emits)``; reads Buffers with ``buf.get()``, pools through their doors.
        key: bucket, table width if baked, dtype, options, pool generation (clause C7).
        reads: Buffers it reads and never changes.
        updates: Buffers it may change; it may read them too and sees the value before the step.
        pools: pools whose doors it uses.
    """

    name: str
    fn: SegmentFn
    key: tuple[Any, ...] = ()
    reads: tuple[Buffer, ...] = ()
    updates: tuple[Buffer, ...] = ()
    pools: tuple[Pool, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise InvalidInput(
                f"Segment {self.name!r} fn: got {type(self.fn).__name__}, expected a function of the backend"
            )
        for name in ("reads", "updates", "pools"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for buffer in (*self.reads, *self.updates):
            if not isinstance(buffer, Buffer):
                raise InvalidInput(f"Segment {self.name!r} declares {buffer!r}, expected Buffers")
        both = set(self.reads) & set(self.updates)
        if both:
            # A backend that donates updates would be handed the same memory twice.
            names = sorted(buffer.name for buffer in both)
            raise InvalidInput(
                f"Segment {self.name!r} declares {names} in reads and updates; updates may be read, so name them there"
            )

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Every declared Buffer once, pools' included."""
        return tuple(dict.fromkeys((*self.reads, *self.updates, *(b for pool in self.pools for b in pool.buffers))))

    def __str__(self) -> str:
        return f"{self.name}{list(self.key)}"


@dataclass
class Effects:
    """What one evaluation of a Segment asks for: simultaneous updates, then emits (device arrays, values before the commit).

    ``taken`` are the reserved Buffers it took; updates and emits may share memory with them and with the declared ones.
    """

    updates: list[tuple[Buffer, Array]]
    emits: dict[str, Array]
    taken: list[Buffer] = field(default_factory=list)


@dataclass
class Step:
    """A Segment made ready for the driver: calling it evaluates the function once, under the contract's checks.

    A driver may keep what one evaluation gave and not evaluate again (a compiled executable), as long as the Segment is the same.
    ``warm`` is False where ``capture`` is asked only to look for violations: what it records is released unused.
    """

    segment: Segment
    evaluate: Callable[[], Effects]
    capturing: bool
    warm: bool = True

    def __call__(self) -> Effects:
        """Evaluate the Segment's function; device operations go to the driver that called."""
        return self.evaluate()


@dataclass(eq=False)
class Trace:
    """A captured Segment. ``buffers`` are the Buffers it uses; none can be released while the trace lives (clause C7)."""

    segment: Segment
    payload: Any
    buffers: tuple[Buffer, ...]
    launches: Counter[str] = field(default_factory=Counter)
    live: bool = True


class Ticket:
    """What one step emitted, read behind the device. ``get`` waits for that step only, not for later ones.

    Attributes:
        serial: position in the backend's order of steps; a later step has a larger serial.
    """

    def __init__(
        self, serial: int, fetch: Fetch, on_read: Callable[[], None], check: Callable[[], None] = lambda: None
    ) -> None:
        self.serial = serial
        self._fetch: Fetch | None = fetch
        self._on_read = on_read
        self._check = check
        self._result: dict[str, HostArray] = {}

    @property
    def retired(self) -> bool:
        """True once the step is known to have ended on the device."""
        return self._fetch is None

    def get(self) -> dict[str, HostArray]:
        """The emits as numpy arrays (bfloat16 as float32); counts one download the first time.

        Raises:
            CaptureViolation: called inside a Segment.
        """
        self._check()
        if self._fetch is not None:
            self._on_read()
            self._result = self._fetch()
            self._fetch = None
        return self._result
