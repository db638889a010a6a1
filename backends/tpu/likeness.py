"""Whether two traces are the same program, found without lowering either: lowering takes longer than tracing."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

_PLAIN: Final = (str, int, float, bool, bytes, type(None), np.dtype)


class _Same:
    """Equal to itself alone; keeps what it stands for, so that nothing else gets its identity."""

    def __init__(self, thing: object) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._thing is other._thing

    def __hash__(self) -> int:
        return id(self._thing)


def likeness(traced: ClosedJaxpr) -> Hashable:
    """What is equal for traces of the same operations on the same operands, in the same order.

    Functions inside (loops, kernels, compiled parts) count as the same where they are the same object, which JAX's caches of traces
    make them; so equal means the same program, and the same program may be unequal.
    """
    numbers: dict[Any, int] = {}

    def operand(x: Any) -> Hashable:
        if isinstance(x, Literal):
            value = np.asarray(x.val)
            return (str(value.dtype), value.shape, value.tobytes(), str(x.aval))
        return numbers.setdefault(x, len(numbers))

    inputs = tuple((operand(x), str(x.aval)) for x in traced.jaxpr.invars)
    operations = tuple(
        (
            eqn.primitive.name,
            tuple(operand(x) for x in eqn.invars),
            tuple((operand(x), str(x.aval)) for x in eqn.outvars),
            tuple((name, _parameter(value)) for name, value in sorted(eqn.params.items())),
        )
        for eqn in traced.jaxpr.eqns
    )
    return inputs, operations, tuple(operand(x) for x in traced.jaxpr.outvars)


def _parameter(value: Any) -> Hashable:
    if type(value) in _PLAIN:
        return (type(value).__name__, repr(value) if type(value) is float else value)  # 0.0 equals -0.0
    if type(value) is tuple:
        return tuple(_parameter(part) for part in value)
    if (
        type(value).__hash__ is not None
        and type(value).__eq__ is not object.__eq__  # type: ignore[comparison-overlap]
        and not isinstance(value, ClosedJaxpr)
    ):
        try:
            hash(value)
        except TypeError:
            return _Same(value)
        return (type(value).__qualname__, value)
    return _Same(value)
