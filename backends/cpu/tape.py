"""Capture on the CPU: a tape of torch operations with fixed outputs, replayed without the Segment's Python.

While a Segment is recorded every functional torch operation runs once, so that its output exists: those outputs are the trace's
arena, and the tape replays the operation into them through its ``out=`` form. Operations that change memory (doors, attention
kernels, updates) are recorded only, so that capturing changes no Buffer (clause C12). The measurement behind this choice is
:mod:`.bench_capture`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from forebay.specs.errors import CaptureViolation

Operation = Callable[[], object]

HOST_READS: Final = frozenset(
    f"torch.Tensor.{name}"
    for name in (
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
        "__array__",
        "__contains__",
        "__dlpack__",
        "__repr__",
        "__format__",
        "data_ptr",
        "untyped_storage",
    )
)
SPLITS: Final = ("torch.tensor_split", "torch.Tensor.tensor_split")
"""Composite operations that read a tensor of indices on the host without an operation of their own."""

DATA_DEPENDENT: Final = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
"""torch's own marks of operations that read values on the host, or whose output's shape depends on values."""


class Tape:
    """Recorded operations. ``replay`` runs them in order; ``copied`` counts operations without an ``out=`` form."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.copied: Counter[str] = Counter()

    def replay(self) -> None:
        """Run every recorded operation once."""
        for operation in self.operations:
            operation()


class HostReadGuard(TorchFunctionMode):
    """Refuses the Python calls that read a tensor's values without a torch operation (``.numpy()``, ``.tolist()``, ``bool()``)."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse a host read, let everything else through."""
        if not self._recorder.paused:
            name = resolve_name(func)
            where = f"while capturing Segment {self._recorder.segment}"
            by_tensor = name in SPLITS and any(isinstance(x, Tensor) for x in (*args[1:], *(kwargs or {}).values()))
            if name in HOST_READS or by_tensor:
                raise CaptureViolation(f"host read of a device value by {name} {where}")
            if name == "torch.Tensor.__setitem__":
                raise CaptureViolation(f"{name} changes an array in place {where}; return it as an update")
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Records the torch operations of one Segment onto a tape, and refuses what a captured step may not do (clause C2)."""

    def __init__(self, segment: str, declared: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.segment = segment
        self.tape = Tape()
        self.paused = False
        self._declared = {_storage(x) for x in declared}
        self._known = set(self._declared)
        self._alive: list[Tensor] = []

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let the driver's own code touch memory without being recorded or refused."""
        self.paused = True
        try:
            with _disable_current_modes():
                yield
        finally:
            self.paused = False

    def adopt(self, x: Tensor) -> Tensor:
        """Make a tensor the driver allocated part of the arena."""
        self._known.add(_storage(x))
        self._alive.append(x)
        return x

    def check_held(self, act: str, *arrays: Tensor | None) -> None:
        """Refuse arrays that neither a declared Buffer nor this trace holds (clause C2).

        Torch operations are checked as they come; this is for arrays that reach a kernel or the commit without one.
        """
        for x in arrays:
            if x is not None and _storage(x) not in self._known:
                raise CaptureViolation(
                    f"{act} uses an array of shape {list(x.shape)} that no declared Buffer holds "
                    f"(closed over, or made on the host) while capturing Segment {self.segment}"
                )

    def is_declared(self, x: Tensor) -> bool:
        """True if ``x`` shares memory with a declared Buffer."""
        return _storage(x) in self._declared

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record one operation; see the module's docstring."""
        kwargs = kwargs or {}
        name: str = func._schema.name  # noqa: SLF001  (the schema is how torch describes an operation to a dispatch mode)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._check(func, name, inputs)
        out = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not inputs:
            for x in outputs:
                self.adopt(x)
            return out
        memory = {_storage(x) for x in inputs}
        fresh = [x for x in outputs if _storage(x) not in memory]
        if fresh:
            self._record(func, name, args, kwargs, fresh, outputs)
        return out

    def _check(self, func: Any, name: str, inputs: list[Tensor]) -> None:
        where = f"while capturing Segment {self.segment}"
        by_mask = any(x.dtype in (torch.bool, torch.uint8) for x in inputs[1:])
        if not DATA_DEPENDENT.isdisjoint(func.tags) and (name != "aten::index" or by_mask):
            raise CaptureViolation(
                f"{name}{' by a mask' if by_mask else ''} reads device values on the host, or takes its shape from them, {where}"
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureViolation(f"{name} draws random numbers {where}; draw them from a seed and a position")
        if func._schema.is_mutable:  # noqa: SLF001
            raise CaptureViolation(f"{name} changes an array in place {where}; return it as an update")
        if not inputs and name != "aten::scalar_tensor":
            raise CaptureViolation(f"{name} creates an array {where}; constants are Buffers made before capture")
        self.check_held(name, *inputs)

    def _record(
        self,
        func: Any,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        fresh: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        for x in fresh:
            self.adopt(x)
        if name in ("aten::_to_copy", "aten::clone"):
            self.tape.operations.append(partial(_copy, fresh[0], args[0]))
            return
        into = _out_form(func)
        if into is not None and len(outputs) == 1:
            accepted = {a.name for a in into._schema.arguments}  # noqa: SLF001
            kept = {k: v for k, v in kwargs.items() if k in accepted}
            self.tape.operations.append(partial(into, *args, **kept, out=fresh[0]))
            return
        self.tape.copied[name] += 1
        self.tape.operations.append(partial(_recompute, func, args, kwargs, outputs))


def _storage(x: Tensor) -> int:
    """Identity of the memory behind a tensor; cast away torch-function handling, which would refuse it as a host read."""
    with torch._C.DisableTorchFunction():  # noqa: SLF001  (the documented way to reach a tensor under a function mode)
        return int(x.untyped_storage()._cdata)  # noqa: SLF001


def _out_form(func: Any) -> Any | None:
    """The ``out=`` overload of an operation: ``add.Tensor`` has ``add.out``, ``lt.Scalar`` has ``lt.Scalar_out``."""
    packet, overload = func.overloadpacket, func._overloadname  # noqa: SLF001
    for name in (f"{overload}_out", "out"):
        form = getattr(packet, name, None)
        if form is not None and _same_arguments(func, form):
            return form
    return None


def _same_arguments(func: Any, form: Any) -> bool:
    """True if ``form`` takes the positional arguments of ``func`` with the same types, then ``out``."""
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if not a.kwarg_only]  # noqa: SLF001
    given = [(a.name, str(a.type)) for a in form._schema.arguments if not a.kwarg_only]  # noqa: SLF001
    return wanted == given and any(a.name == "out" for a in form._schema.arguments)  # noqa: SLF001


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _recompute(func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
    result = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
    for target, value in zip(outputs, result, strict=True):
        target.copy_(value)
