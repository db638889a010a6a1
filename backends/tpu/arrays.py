"""Device arrays over JAX, and what a captured step may not do with them (clause C2).

JAX itself lets much of it pass: ``y += 1`` binds another array, a numpy operand is uploaded, an array made before is baked into the
program. So what a Segment sees is a wrapper, which has the operators of :mod:`forebay.specs.array_namespace` and refuses the rest
by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import jax
import numpy as np
from jax.core import Tracer

from forebay.specs.dtypes import FLOAT_DTYPES
from forebay.specs.errors import CaptureViolation, InvalidInput

from . import elementwise

_BOOLEAN: Final = ("and", "or", "xor")
_INTEGER: Final = (*_BOOLEAN, "lshift", "rshift")
_COMPARISONS: Final = ("lt", "le", "gt", "ge", "eq", "ne")
_ARITHMETIC: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", *_INTEGER)
_HOST_READS: Final = ("bool", "int", "float", "complex", "index", "array", "dlpack")
_BY_UFUNC: Final = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "truediv",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "equal": "eq",
    "not_equal": "ne",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "left_shift": "lshift",
    "right_shift": "rshift",
}


class TraceScope:
    """Which Segment a backend is tracing, and what its arrays may do meanwhile.

    Attributes:
        segment: the name of the Segment that is being traced; None outside of a trace.
    """

    def __init__(self) -> None:
        self.segment: str | None = None
        self._trace: object | None = None

    @property
    def trace(self) -> object | None:
        """What the arrays of the present trace have in common with each other and with no array made before."""
        return self._trace

    @contextmanager
    def tracing(self, segment: str) -> Iterator[None]:
        """Arrays that are wrapped inside belong to a trace of ``segment``; others are refused there, and they are refused after it."""
        before = self.segment, self._trace
        self.segment, self._trace = segment, object()
        try:
            yield
        finally:
            self.segment, self._trace = before

    def wrap(self, value: jax.Array) -> DeviceArray:
        """A JAX array, or a tracer of the trace that goes on, as an array for the user."""
        return DeviceArray(self, value)

    def unwrap(self, act: str, x: object) -> jax.Array:
        """What an array holds, for JAX.

        Args:
            act: what is to be done with it, for messages.

        Raises:
            CaptureViolation: a Segment is traced, and ``x`` is a host value or an array that the trace did not make.
            InvalidInput: outside of a trace: ``x`` is no array of this backend, belongs to a trace, or was given back.
        """
        if not isinstance(x, DeviceArray):
            self.refuse(f"{act} got a host {type(x).__name__} among device arrays (a numpy or Python value)")
        if x.scope is not self:
            raise InvalidInput(f"{act}: got {x!r} of another backend; hand it over by to_host and to_device")
        value = x.value
        if self.segment is not None:
            if x.trace is not self._trace or not isinstance(value, Tracer):
                raise CaptureViolation(
                    f"{act} uses an array of shape {list(x.shape)} that no declared Buffer holds "
                    f"(closed over, or made on the host) while capturing Segment {self.segment}"
                )
        elif isinstance(value, Tracer):
            raise InvalidInput(f"{act}: got {x!r} of a Segment that was captured; return it as an update or emit it")
        elif value.is_deleted():
            raise InvalidInput(f"{act}: got {x!r}, whose memory was given back; nothing was launched")
        return value

    def refuse(self, act: str) -> NoReturn:
        """Raise for something an array cannot do: CaptureViolation inside a trace, InvalidInput outside."""
        if self.segment is not None:
            raise CaptureViolation(f"{act} while capturing Segment {self.segment}")
        raise InvalidInput(f"{act}; read values with backend.to_host, make new arrays with backend.to_device or xp")

    # -- operands: arrays and numbers -----------------------------------------------------------------------------------------
    def operands(self, act: str, *given: object) -> tuple[list[Any], str]:
        """Arrays and numbers that one operation has in common, as JAX takes them, and the dtype it is done in.

        Arrays must be of one dtype; a number takes theirs, unless its kind is wider: then it is int32 or float32. A number is a
        constant of the program; bfloat16 and float16 have it in float32, so that it is not rounded before the result is.

        Raises:
            CaptureViolation, InvalidInput: as :meth:`unwrap`; an operand that is no number; dtypes that differ; a number that int32
                does not hold.
        """
        values: list[Any] = []
        arrays: list[jax.Array] = []
        for x in given:
            if isinstance(x, DeviceArray):
                arrays.append(self.unwrap(act, x))
                values.append(arrays[-1])
            elif isinstance(x, bool | int | float | np.bool_ | np.integer | np.floating):
                values.append(x)
            else:
                self.refuse(
                    f"{act} got a host {type(x).__name__} among device arrays (numpy and Python arrays stay on the host)"
                )
        numbers = [x for x, source in zip(values, given, strict=True) if not isinstance(source, DeviceArray)]
        kind = _common_dtype(act, arrays, numbers)
        return [x if isinstance(x, jax.Array) else number(act, x, kind) for x in values], kind

    def binary(self, name: str, a: object, b: object) -> DeviceArray:
        """An operator by its name (``add`` for ``+``) of two arrays, or of an array and a number.

        Raises:
            CaptureViolation, InvalidInput: as :meth:`operands`; shapes that do not fit; a dtype that has no such operator.
        """
        (left, right), kind = self.operands(f"operator {name}", a, b)
        if (name in _INTEGER and kind in FLOAT_DTYPES) or (kind == "bool" and name not in (*_BOOLEAN, *_COMPARISONS)):
            raise InvalidInput(f"operator {name}: got {sizes(left, right)}; it is not defined for {kind}")
        if name == "truediv" and kind not in FLOAT_DTYPES:
            kind = "float32"
        if isinstance(left, jax.Array) and isinstance(right, jax.Array) and left.shape != right.shape:
            fits(f"operator {name}", left, right)
        return self.wrap(elementwise.binary(left, right, name=name, kind=kind))


def sizes(*values: Any) -> str:
    """Dtypes and shapes of arrays, for messages; numbers are left out."""
    return ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in values if isinstance(x, jax.Array))


def fits(act: str, *values: Any) -> tuple[int, ...]:
    """The shape that arrays have after broadcasting.

    Raises:
        InvalidInput: there is none.
    """
    try:
        return np.broadcast_shapes(*(x.shape for x in values if isinstance(x, jax.Array)))
    except ValueError as error:
        raise InvalidInput(f"{act}: got {sizes(*values)}, whose shapes do not fit each other") from error


def number(act: str, x: Any, dtype: str) -> np.generic:
    """A number as a constant of the program, in the type it is computed in.

    Raises:
        InvalidInput: an int that int32 does not hold.
    """
    if dtype in FLOAT_DTYPES:
        return np.float32(x)
    if dtype == "int32":
        if not -(2**31) <= int(x) < 2**31:
            raise InvalidInput(f"{act}: the number {x} does not fit int32")
        return np.int32(x)
    return np.bool_(x)


def _common_dtype(act: str, arrays: Sequence[jax.Array], numbers: Sequence[Any]) -> str:
    dtypes = {x.dtype.name for x in arrays}
    if len(dtypes) > 1:
        raise InvalidInput(f"{act}: got {sizes(*arrays)}, expected one dtype; convert with xp.astype")
    dtype = dtypes.pop() if dtypes else "bool"
    for x in numbers:
        if isinstance(x, float | np.floating) and dtype not in FLOAT_DTYPES:
            dtype = "float32"
        elif not isinstance(x, bool | np.bool_) and dtype == "bool":
            dtype = "int32"
    return dtype


class DeviceArray:
    """An array of a backend: what it holds for JAX, and the operators a step may use.

    Everything that would need a value on the host, or would change an array in place, is refused.

    Attributes:
        scope: the backend's.
        value: a jax.Array, or a tracer of the trace in which it was made.
        trace: that trace; None outside of one.
    """

    __slots__ = ("scope", "trace", "value")
    __hash__ = None  # type: ignore[assignment]  # == compares elements

    def __init__(self, scope: TraceScope, value: jax.Array) -> None:
        self.scope = scope
        self.value = value
        self.trace = scope.trace

    @property
    def shape(self) -> tuple[int, ...]:
        """The static shape."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> str:
        """The dtype's name."""
        return str(self.value.dtype.name)

    def __jax_array__(self) -> jax.Array:
        """For ``jnp.asarray``, where :meth:`TraceScope.unwrap` lets it; other functions of JAX refuse what is no array of theirs."""
        return self.scope.unwrap("a JAX function", self)

    def __getitem__(self, index: Any) -> DeviceArray:
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            if isinstance(part, DeviceArray):
                kind = "a boolean mask" if part.dtype == "bool" else "a device array (use xp.take)"
                self.scope.refuse(f"an index by {kind} takes the shape or the place from device values")
            if isinstance(part, np.ndarray | list | jax.Array):
                self.scope.refuse(
                    "an index by a numpy array or a list: a host array; use xp.take with a Buffer of indices"
                )
        value = self.scope.unwrap("slicing", self)
        return self.scope.wrap(elementwise.sliced(value, cut=elementwise.Cut.of(parts, value.shape)))

    def __invert__(self) -> DeviceArray:
        value = self.scope.unwrap("operator invert", self)
        if value.dtype.name in FLOAT_DTYPES:
            raise InvalidInput(f"operator invert: got {sizes(value)}; it is not defined for floats")
        return self.scope.wrap(elementwise.inverted(value))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array of no axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[DeviceArray]:
        """Rows; their number is static."""
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype}{list(self.shape)})"

    # -- refused ---------------------------------------------------------------------------------------------------------
    def __setitem__(self, index: object, value: object) -> NoReturn:
        self.scope.refuse("setting an item changes an array in place; return it as an update")

    def __contains__(self, item: object) -> NoReturn:
        self.scope.refuse("a host read of a device value by 'in'")

    def __format__(self, spec: str) -> str:
        if spec:
            self.scope.refuse("a host read of a device value by format")
        return repr(self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> DeviceArray:
        """``np.float32(2) * x`` arrives here; of numpy's own functions nothing else has a meaning on the device."""
        operator = _BY_UFUNC.get(ufunc.__name__, "")
        if operator in _COMPARISONS:  # numpy hands on the scalar of a comparison as an array of no axes
            inputs = tuple(x[()] if isinstance(x, np.ndarray) and x.ndim == 0 else x for x in inputs)
        numbers = all(isinstance(x, DeviceArray | np.generic) for x in inputs)
        if operator and method == "__call__" and not options and len(inputs) == 2 and numbers:
            return self.scope.binary(operator, inputs[0], inputs[1])
        with_host = any(isinstance(x, np.ndarray) for x in inputs)
        act = "a numpy array (a host array) among device arrays" if with_host else "a host read of a device value"
        return self.scope.refuse(f"{act} by numpy.{ufunc.__name__}")


def _operator(name: str) -> Callable[[DeviceArray, object], DeviceArray]:
    return lambda x, y: x.scope.binary(name, x, y)


def _swapped(name: str) -> Callable[[DeviceArray, object], DeviceArray]:
    return lambda x, y: x.scope.binary(name, y, x)


def _in_place(name: str) -> Callable[[DeviceArray, object], NoReturn]:
    return lambda x, _y: x.scope.refuse(f"{name} changes an array in place; return it as an update")


def _host_read(name: str) -> Callable[..., NoReturn]:
    return lambda x, *_a, **_k: x.scope.refuse(f"a host read of a device value by {name}")


def _install() -> None:
    for name in _ARITHMETIC:
        setattr(DeviceArray, f"__{name}__", _operator(name))
        setattr(DeviceArray, f"__r{name}__", _swapped(name))
        setattr(DeviceArray, f"__i{name}__", _in_place(f"{name}="))
    for name in _COMPARISONS:
        setattr(DeviceArray, f"__{name}__", _operator(name))
    for name in _HOST_READS:
        setattr(DeviceArray, f"__{name}__", _host_read(f"__{name}__"))
    for name in ("item", "tolist", "numpy"):
        setattr(DeviceArray, name, _host_read(name))


_install()
