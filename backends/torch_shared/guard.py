"""What a captured step may not do, found while torch runs it (clause C2): shared by the backends over torch.

A Segment that is captured is evaluated under two of torch's modes: one sees the Python calls that read a tensor's values without an
operation, the other every operation. Both raise before anything is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from forebay.specs.errors import CaptureViolation

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


class HostReadGuard(TorchFunctionMode):
    """Refuses the Python calls that read a tensor's values without a torch operation (``.numpy()``, ``.tolist()``, ``bool()``)."""

    def __init__(self, guard: CaptureGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse a host read, let everything else through."""
        if not self._guard.paused:
            name = resolve_name(func)
            where = f"while capturing Segment {self._guard.segment}"
            by_tensor = name in SPLITS and any(isinstance(x, Tensor) for x in (*args[1:], *(kwargs or {}).values()))
            if name in HOST_READS or by_tensor:
                raise CaptureViolation(f"host read of a device value by {name} {where}")
            if name == "torch.Tensor.__setitem__":
                raise CaptureViolation(f"{name} changes an array in place {where}; return it as an update")
        return func(*args, **(kwargs or {}))


class CaptureGuard(TorchDispatchMode):
    """Sees the torch operations of one Segment and refuses what a captured step may not do.

    Args:
        segment: its name, for messages.
        declared: what its declared Buffers hold.
        memory_of: the identity of the memory behind a tensor; for tensors of a kind of their own.

    Attributes:
        paused: True while the driver's own code runs, which is neither refused nor seen.
    """

    def __init__(
        self, segment: str, declared: Sequence[Tensor], memory_of: Callable[[Tensor], int] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.segment = segment
        self.paused = False
        self._memory_of = storage_of if memory_of is None else memory_of
        self._declared = {self._memory_of(x) for x in declared}
        self._known = set(self._declared)
        self._alive: list[Tensor] = []

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let the driver's own code touch memory without being seen or refused."""
        self.paused = True
        try:
            with _disable_current_modes():
                yield
        finally:
            self.paused = False

    def adopt(self, x: Tensor) -> Tensor:
        """Make a tensor the driver allocated part of the arena."""
        self._known.add(self._memory_of(x))
        self._alive.append(x)
        return x

    def check_held(self, act: str, *arrays: Tensor | None) -> None:
        """Refuse arrays that neither a declared Buffer nor this trace holds (clause C2).

        Torch operations are checked as they come; this is for arrays that reach a kernel or the commit without one.
        """
        for x in arrays:
            if x is not None and self._memory_of(x) not in self._known:
                raise CaptureViolation(
                    f"{act} uses an array of shape {list(x.shape)} that no declared Buffer holds "
                    f"(closed over, or made on the host) while capturing Segment {self.segment}"
                )

    def is_declared(self, x: Tensor) -> bool:
        """True if ``x`` shares memory with a declared Buffer."""
        return self._memory_of(x) in self._declared

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check one operation, let torch run it, and let :meth:`_observe` see what it made."""
        kwargs = kwargs or {}
        name: str = func._schema.name  # noqa: SLF001  (the schema is how torch describes an operation to a dispatch mode)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._check(func, name, inputs)
        out = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        memory = {self._memory_of(x) for x in inputs}
        fresh = [x for x in outputs if self._memory_of(x) not in memory]
        for x in fresh:
            self.adopt(x)
        if inputs and fresh:
            self._observe(func, name, args, kwargs, fresh, outputs)
        return out

    def _observe(
        self,
        func: Any,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        fresh: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        """One operation ran, of whose ``outputs`` ``fresh`` have memory of their own."""

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


def storage_of(x: Tensor) -> int:
    """Identity of the memory behind a tensor; cast away torch-function handling, which would refuse it as a host read."""
    with torch._C.DisableTorchFunction():  # noqa: SLF001  (the documented way to reach a tensor under a function mode)
        return int(x.untyped_storage()._cdata)  # noqa: SLF001
