"""Segments as compiled programs: what Buffers hold becomes donated inputs and outputs, and a trace is an executable (clauses C1 to C3).

A Segment is traced once for its Python and its violations; which Buffers it changes is known then. Those are donated, so their memory
is reused and a pool is never copied; the others are read. Programs of the same operations share one executable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from forebay.specs.errors import CaptureViolation
from forebay.specs.segment import Buffer, Step

from .arrays import TraceScope
from .calls import Recent
from .formats import cell_format
from .likeness import likeness

_HOST_READS: Final = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.UnexpectedTracerError,
)


@dataclass
class Program:
    """A compiled Segment.

    Attributes:
        executable: takes what ``inputs`` hold, gives what ``outputs`` hold from then on, and the emits.
        inputs, outputs: Buffers.
        emits: names.
        kernels: the kernels in it, by name.
    """

    executable: Any
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    emits: tuple[str, ...]
    kernels: Counter[str]
    _trusted: list[Any] = field(default_factory=list)

    def run(self) -> dict[str, jax.Array]:
        """One step on what the Buffers hold; the emits.

        Raises:
            CaptureViolation: a Buffer holds anything but a device array of its shape and dtype; nothing was run.
        """
        held = [buffer.handle for buffer in self.inputs]
        for i, (value, seen) in enumerate(zip(held, self._trusted or [None] * len(held), strict=True)):
            if value is not seen:
                _check_held(self.inputs[i], value)
        with jax.transfer_guard("disallow"):
            changed, emits = self.executable(*held)
        for buffer, value in zip(self.outputs, changed, strict=True):
            buffer.handle = value
        self._trusted = [buffer.handle for buffer in self.inputs]
        return dict(zip(self.emits, emits, strict=True))


def _check_held(buffer: Buffer, value: object) -> None:
    """An executable would upload a numpy array without a word."""
    if not isinstance(value, jax.Array) or value.shape != buffer.shape or str(value.dtype) != buffer.dtype:
        kind = f"{value.dtype}{list(value.shape)}" if isinstance(value, jax.Array) else f"a host {type(value).__name__}"
        raise CaptureViolation(
            f"replay: Buffer {buffer.name!r} holds {kind}, expected a device array {buffer.dtype}{list(buffer.shape)}; "
            "change a Buffer by backend.upload or an update"
        )


@dataclass(frozen=True)
class Traced:
    """A Segment's evaluation: its operations, and what goes in and out.

    Attributes:
        jaxpr: takes what every declared Buffer holds.
        read: which of them it uses.
        inputs: those.
        outputs: Buffers that hold something else behind it.
        emits: names.
        kernels: the kernels in it, by name.
    """

    jaxpr: Any
    read: tuple[bool, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    emits: tuple[str, ...]
    kernels: Counter[str]


class Programs:
    """Traces and compiles Segments for one device.

    Args:
        scope: of the backend's arrays.
        device: the JAX device.
        options: of XLA.

    Attributes:
        cells: what Buffers hold inside the trace that goes on; None outside of one.
        kernels: counts kernels that are asked for in it.
    """

    def __init__(self, scope: TraceScope, device: Any, options: dict[str, Any] | None) -> None:
        self._scope = scope
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self._options = options
        self._kept: Recent[Any] = Recent()
        self.cells: dict[Buffer, jax.Array] | None = None
        self.kernels: Counter[str] = Counter()

    @contextmanager
    def _holding(self, segment: str, cells: dict[Buffer, jax.Array]) -> Iterator[None]:
        self.cells, self.kernels = cells, Counter()
        try:
            with self._scope.tracing(segment):
                yield
        finally:
            self.cells = None

    def trace(self, step: Step) -> Traced:
        """Evaluate a step's function on tracers; nothing is computed.

        Raises:
            CaptureViolation: an act a captured step may not do, named.
        """
        name, declared = str(step.segment), step.segment.buffers
        outputs: list[Buffer] = []
        names: list[str] = []

        def lifted(*values: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
            before = dict(zip(declared, values, strict=True))
            cells = dict(before)
            with self._holding(name, cells):
                effects = step()
                updates = [
                    (buffer, _as_whole(before[buffer], self._scope.unwrap(f"update of {buffer.name!r}", x)))
                    for buffer, x in effects.updates
                ]
                emits = {k: self._scope.unwrap(f"emit {k!r}", x) for k, x in effects.emits.items()}
            cells.update(updates)
            outputs[:] = [buffer for buffer, x in cells.items() if x is not before.get(buffer)]
            names[:] = emits
            # An emit must outlive the step: it may share memory neither with what a Buffer held nor with what one holds from now on.
            shared = [*values, *(cells[buffer] for buffer in outputs)]
            apart = (jnp.copy(x) if any(x is y for y in shared) else x for x in emits.values())
            return tuple(cells[buffer] for buffer in outputs), tuple(apart)

        try:
            jaxpr = jax.make_jaxpr(lifted)(*(self._struct(buffer) for buffer in declared))
        except _HOST_READS as error:
            reason = str(error).partition("\n")[0]
            raise CaptureViolation(f"a host read of a device value while capturing Segment {name}: {reason}") from error
        if jaxpr.consts:
            shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in jaxpr.consts)
            raise CaptureViolation(
                f"constants {shapes} that no declared Buffer holds (closed over, or made on the host, by numpy or JAX) while "
                f"capturing Segment {name}; make them Buffers before capture"
            )
        # What the step does not use is no input: two programs of one text would differ by which of theirs that are.
        used = {id(v) for v in jaxpr.jaxpr.outvars} | {id(v) for eqn in jaxpr.jaxpr.eqns for v in eqn.invars}
        read = tuple(id(v) in used for v in jaxpr.jaxpr.invars)
        inputs = tuple(buffer for buffer, wanted in zip(declared, read, strict=True) if wanted)
        return Traced(jaxpr, read, inputs, tuple(outputs), tuple(names), Counter(self.kernels))

    def compile(self, traced: Traced) -> Program:
        """The program of a trace, with the memory of what it changes donated."""
        donated = tuple(i for i, buffer in enumerate(traced.inputs) if buffer in set(traced.outputs))
        flat, outputs = jaxpr_as_fun(traced.jaxpr), len(traced.outputs)

        def step(*values: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
            given = iter(values)
            found = flat(*(next(given) if wanted else None for wanted in traced.read))
            return tuple(found[:outputs]), tuple(found[outputs:])

        key = (donated, traced.read, outputs, likeness(traced.jaxpr))
        executable = self._kept.get(key)
        if executable is None:
            structs = [self._struct(buffer) for buffer in traced.inputs]
            formats = tuple(self._struct(buffer).format for buffer in traced.outputs)
            jitted = jax.jit(step, donate_argnums=donated, keep_unused=True, out_shardings=(formats, None))
            executable = self._kept.put(key, jitted.lower(*structs).compile(compiler_options=self._options))
        return Program(executable, traced.inputs, traced.outputs, traced.emits, traced.kernels)

    def clear(self) -> None:
        """Forget every executable."""
        self._kept.clear()

    def _struct(self, buffer: Buffer) -> jax.ShapeDtypeStruct:
        form = cell_format(buffer.shape, self._sharding)
        return jax.ShapeDtypeStruct(buffer.shape, jnp.dtype(buffer.dtype), sharding=form)


def _as_whole(before: jax.Array, value: jax.Array) -> jax.Array:
    """An update's value in the shape of its Buffer: it may be the first rows."""
    if value.shape == before.shape:
        return value
    return lax.dynamic_update_slice(before, value, (0,) * before.ndim)
