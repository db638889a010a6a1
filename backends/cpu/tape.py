"""Capture on the CPU: a tape of torch operations with fixed outputs, replayed without the Segment's Python.

While a Segment is recorded every functional torch operation runs once, so that its output exists: those outputs are the trace's
arena, and the tape replays the operation into them through its ``out=`` form. Operations that change memory (doors, attention
kernels, updates) are recorded only, so that capturing changes no Buffer (clause C12). The measurement behind this choice is
:mod:`.bench_capture`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from forebay.backends.torch_shared.guard import CaptureGuard

Operation = Callable[[], object]


class Tape:
    """Recorded operations. ``replay`` runs them in order; ``copied`` counts operations without an ``out=`` form."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.copied: Counter[str] = Counter()

    def replay(self) -> None:
        """Run every recorded operation once."""
        for operation in self.operations:
            operation()


class Recorder(CaptureGuard):
    """Records the torch operations of one Segment onto a tape, and refuses what a captured step may not do (clause C2)."""

    def __init__(self, segment: str, declared: Sequence[Tensor]) -> None:
        super().__init__(segment, declared)
        self.tape = Tape()

    def _observe(
        self,
        func: Any,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        fresh: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
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
