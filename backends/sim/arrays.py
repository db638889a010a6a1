"""Device arrays: names of places in device memory. The host can compute with them and slice them, and cannot look into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from forebay.specs.dtypes import BITS_DTYPE, HostArray

from .memory import Allocation

if TYPE_CHECKING:
    from .issue import Issuer


@dataclass(frozen=True)
class Place:
    """Where elements lie: an offset in bytes, sizes, and strides in bytes."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def dense(cls, offset: int, shape: tuple[int, ...], itemsize: int) -> Place:
        """Row-major from ``offset`` on."""
        strides, step = [], itemsize
        for n in reversed(shape):
            strides.append(step)
            step *= n
        return cls(offset, shape, tuple(reversed(strides)))

    def is_dense(self, itemsize: int) -> bool:
        """True if the elements lie one behind another in row-major order."""
        step = itemsize
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n > 1 and stride != step:
                return False
            step *= max(n, 1)
        return True

    def indexed(self, index: tuple[Any, ...]) -> Place:
        """Basic slicing: ints, slices, None and one Ellipsis.

        Raises:
            IndexError: an int out of range, too many of them, or another kind of index.
        """
        given = sum(i is not None and i is not Ellipsis for i in index)
        if given > len(self.shape) or sum(i is Ellipsis for i in index) > 1:
            raise IndexError(f"index {index} for shape {self.shape}")
        missing = (slice(None),) * (len(self.shape) - given)
        whole = (*index, Ellipsis) if not any(i is Ellipsis for i in index) else index
        at = next(n for n, i in enumerate(whole) if i is Ellipsis)
        offset, axis = self.offset, 0
        shape: list[int] = []
        strides: list[int] = []
        for part in (*whole[:at], *missing, *whole[at + 1 :]):
            if part is None:
                shape.append(1)
                strides.append(0)
                continue
            n, stride = self.shape[axis], self.strides[axis]
            axis += 1
            if isinstance(part, slice):
                start, stop, step = part.indices(n)
                count = len(range(start, stop, step))
                offset += start * stride if count else 0
                shape.append(count)
                strides.append(step * stride)
                continue
            if isinstance(part, bool | np.bool_) or not isinstance(part, int | np.integer) or not -n <= part < n:
                raise IndexError(f"index {part!r} for an axis of {n}")
            offset += (int(part) % n) * stride
        return Place(offset, tuple(shape), tuple(strides))


class SimArray:
    """An array on the simulated device: a dtype and a :class:`Place` in an :class:`~.memory.Allocation`.

    Operators launch kernels; slicing makes another name for the same memory. Everything that would need a value on the host, or
    would change an array in place, is refused (clause C2).
    """

    __slots__ = ("allocation", "dtype", "issuer", "place")
    __hash__ = None  # type: ignore[assignment]  # == compares elements

    def __init__(self, issuer: Issuer, allocation: Allocation, place: Place, dtype: str) -> None:
        self.issuer = issuer
        self.allocation = allocation
        self.place = place
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The static shape."""
        return self.place.shape

    def at(self, place: Place, dtype: str | None = None) -> SimArray:
        """Another name for this array's memory."""
        return SimArray(self.issuer, self.allocation, place, self.dtype if dtype is None else dtype)

    def memory(self) -> HostArray:
        """The elements' bytes as a numpy view: for what the queue executes alone."""
        place = self.place
        kind = BITS_DTYPE[self.dtype]
        if 0 in place.shape:
            return np.empty(place.shape, kind)
        return np.ndarray(place.shape, kind, self.allocation.data, place.offset, place.strides)

    def __getitem__(self, index: Any) -> SimArray:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, SimArray) for part in parts):
            masks = [part.dtype for part in parts if isinstance(part, SimArray)]
            kind = "a boolean mask" if "bool" in masks else "a device array (use xp.take)"
            self.issuer.refuse(f"an index by {kind} takes the shape or the place from device values")
        if any(isinstance(part, np.ndarray | list) for part in parts):
            self.issuer.refuse(
                "an index by a numpy array or a list: a host array; use xp.take with a Buffer of indices"
            )
        return self.at(self.place.indexed(parts))

    def __invert__(self) -> SimArray:
        return self.issuer.unary("invert", self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array of no axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[SimArray]:
        """Rows; their number is static."""
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"SimArray({self.dtype}{list(self.shape)} in {self.allocation.what})"

    # -- refused ---------------------------------------------------------------------------------------------------------
    def __setitem__(self, index: object, value: object) -> NoReturn:
        self.issuer.refuse("setting an item changes an array in place; return it as an update")

    def __contains__(self, item: object) -> NoReturn:
        self.issuer.refuse("a host read of a device value by 'in'")

    def __format__(self, spec: str) -> str:
        if spec:
            self.issuer.refuse("a host read of a device value by format")
        return repr(self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> SimArray:
        """``np.float32(2) * x`` arrives here; of numpy's own functions nothing else has a meaning on the device."""
        scalars = all(isinstance(x, SimArray | np.generic) for x in inputs)
        if method == "__call__" and not options and len(inputs) == 2 and scalars and ufunc.__name__ in _BY_UFUNC:
            return self.issuer.binary(_BY_UFUNC[ufunc.__name__], inputs[0], inputs[1])
        with_host = any(isinstance(x, np.ndarray) for x in inputs)
        act = "a numpy array (a host array) among device arrays" if with_host else "a host read of a device value"
        return self.issuer.refuse(f"{act} by numpy.{ufunc.__name__}")


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
ARITHMETIC: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor")
COMPARISONS: Final = ("lt", "le", "gt", "ge", "eq", "ne")
HOST_READS: Final = ("bool", "int", "float", "complex", "index", "array", "dlpack")


def _operator(name: str) -> Callable[[SimArray, Any], SimArray]:
    return lambda x, y: x.issuer.binary(name, x, y)


def _swapped(name: str) -> Callable[[SimArray, Any], SimArray]:
    return lambda x, y: x.issuer.binary(name, y, x)


def _in_place(name: str) -> Callable[[SimArray, Any], NoReturn]:
    return lambda x, _y: x.issuer.refuse(f"{name} changes an array in place; return it as an update")


def _host_read(name: str) -> Callable[..., NoReturn]:
    return lambda x, *_a, **_k: x.issuer.refuse(f"a host read of a device value by {name}")


def _install() -> None:
    for name in ARITHMETIC:
        setattr(SimArray, f"__{name}__", _operator(name))
        setattr(SimArray, f"__r{name}__", _swapped(name))
        setattr(SimArray, f"__i{name}__", _in_place(f"{name}="))
    for name in COMPARISONS:
        setattr(SimArray, f"__{name}__", _operator(name))
    for name in HOST_READS:
        setattr(SimArray, f"__{name}__", _host_read(f"__{name}__"))
    for name in ("item", "tolist", "numpy"):
        setattr(SimArray, name, _host_read(name))


_install()
