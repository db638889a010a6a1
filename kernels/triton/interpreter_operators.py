"""Operators of tensors in Triton's interpreter as one numpy call each, and so are its loads and stores.

Triton checks, promotes, spreads and wraps the operands of each operator anew, which takes longer than numpy's work on them. Here plain
operands (integers of 32 and 64 bits, float32, bool, pointers with integers; tensors of one rank, or scalars) go to numpy at once. Any
others, and whatever is an error, take Triton's way.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

_INTEGERS: Final = frozenset((tl.int32.name, tl.int64.name))
_NUMBERS: Final = _INTEGERS | {tl.float32.name}
_BITS: Final = _INTEGERS | {tl.int1.name}
_NUMPY: Final = {tl.int32.name: np.int32, tl.int64.name: np.int64, tl.float32.name: np.float32}
_RANGE: Final = {tl.int32.name: (-(2**31), 2**31), tl.int64.name: (-(2**63), 2**63)}
_EXACT: Final = (-(2**24), 2**24)
"""Integers that float32 holds."""
_MOST_CONSTANTS: Final = 4096
_FEW: Final = 48
"""Elements below which Triton's own loop is done sooner."""
_ADDRESSES: Final = 2**47
"""What a process can address, in bytes."""


def _quotient(a: Any, b: Any) -> Any:
    """Rounded towards zero, as devices divide integers."""
    return (a - np.fmod(a, b)) // b


_OPERATORS: Final[dict[str, tuple[Callable[[Any, Any], Any], frozenset[str], bool]]] = {
    "__add__": (np.add, _NUMBERS, False),
    "__sub__": (np.subtract, _NUMBERS, False),
    "__mul__": (np.multiply, _NUMBERS, False),
    "__truediv__": (np.divide, frozenset((tl.float32.name,)), False),
    "__floordiv__": (_quotient, _INTEGERS, False),
    "__mod__": (np.fmod, _INTEGERS, False),
    "__and__": (np.bitwise_and, _BITS, False),
    "__or__": (np.bitwise_or, _BITS, False),
    "__lt__": (np.less, _NUMBERS, True),
    "__le__": (np.less_equal, _NUMBERS, True),
    "__gt__": (np.greater, _NUMBERS, True),
    "__ge__": (np.greater_equal, _NUMBERS, True),
    "__eq__": (np.equal, _NUMBERS, True),
    "__ne__": (np.not_equal, _NUMBERS, True),
}
"""The numpy function of an operator, the element types it is taken for, and whether it gives truth values."""
_SWAPPED: Final = {"__radd__": "__add__", "__rmul__": "__mul__", "__rsub__": "__sub__"}


class Constants:
    """Numbers as tensors of one element, made once each."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, str], Any] = {}

    def like(self, x: Any, other: Any) -> Any:
        """``x`` in the element type of the tensor ``other``, or None where Triton has to decide."""
        if type(x) is core.constexpr:
            x = x.value
        name = other.dtype.name
        if type(x) is int:
            low, high = _RANGE.get(name, _EXACT)
            if name not in _NUMPY or not low <= x < high:
                return None
        elif type(x) is not float or name != tl.float32.name:
            return None
        if x == 0.0 and math.copysign(1.0, x) < 0.0:
            return None  # as a key it would be the other zero
        key = (x, name)
        if key not in self._known:
            if len(self._known) >= _MOST_CONSTANTS:
                self._known.clear()
            handle = interpreter.TensorHandle(np.array([x], _NUMPY[name]), other.dtype)
            self._known[key] = core.tensor(handle, other.dtype)
        return self._known[key]


constants: Final = Constants()


def short_operator(name: str, long: Callable[..., Any]) -> Callable[..., Any]:
    """The operator ``name`` of ``tensor``; ``long`` is Triton's."""
    swapped = name in _SWAPPED
    if not swapped and name not in _OPERATORS:
        return _short_index(long) if name == "__getitem__" else long
    operate, kinds, compares = _OPERATORS[_SWAPPED.get(name, name)]
    adds, truth, tensor = operate is np.add, tl.int1, core.tensor

    def short(lhs: Any, rhs: Any, **kwargs: Any) -> Any:
        other = rhs if type(rhs) is tensor else constants.like(rhs, lhs)
        if other is None:
            return long(lhs, rhs, **kwargs)
        one, two = lhs.dtype, other.dtype
        kind = one.name
        left, right = lhs.type.forebay_shape, other.type.forebay_shape
        if left and right and len(left) != len(right):
            return long(lhs, rhs, **kwargs)
        a, b = lhs.handle.data, other.handle.data
        if kind in kinds and (kind == two.name or (kind in _INTEGERS and two.name in _INTEGERS)):
            data = operate(b, a) if swapped else operate(a, b)
            if compares:
                kept = truth
            else:
                kept = one if kind == two.name else tl.int64
        elif adds and not swapped and two.name in _INTEGERS and one.is_ptr() and one.element_ty.name != tl.int1.name:
            data, kept = a + (one.element_ty.primitive_bitwidth // 8) * b.astype(np.uint64), one
        else:
            return long(lhs, rhs, **kwargs)
        return made(data, kept, data.shape if left or right else ())

    return short


def _short_index(long: Callable[..., Any]) -> Callable[..., Any]:
    """``x[:, None]`` and the like."""
    whole = slice(None)

    def short(x: Any, places: Any, **kwargs: Any) -> Any:
        shape = x.type.forebay_shape
        if (
            type(places) is not tuple
            or not shape
            or sum(place is not None for place in places) != len(shape)
            or any(place is not None and place != whole for place in places)
        ):
            return long(x, places, **kwargs)
        data = x.handle.data[places]
        return made(data, x.dtype, data.shape)

    return short


_BLOCKS: dict[tuple[Any, tuple[int, ...]], Any] = {}


def made(data: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """A tensor of ``data``, a block of ``shape`` or, without one, a scalar."""
    if not shape:
        kind = dtype
    else:
        key = (dtype.name, shape)
        kind = _BLOCKS.get(key)
        if kind is None:
            kind = _BLOCKS[key] = core.block_type(dtype, list(shape))
    handle = object.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    return core.tensor(handle, kind)


def _all_memory(size: int) -> Any:
    """The process's memory as an array of unsigned integers of ``size`` bytes, from address ``size`` on; nothing of it is touched."""
    kind = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}[size]
    return np.ctypeslib.as_array((kind * (_ADDRESSES // size - 1)).from_address(size))


_MEMORY: Final = {size: _all_memory(size) for size in (1, 2, 4, 8)}


def _places(pointers: Any, size: int) -> Any:
    """Where ``pointers`` point to in the array of elements of ``size`` bytes, or None if one of them lies between two."""
    if size > 1 and (pointers & np.uint64(size - 1)).any():
        return None
    return (pointers >> np.uint64(size.bit_length() - 1)).view(np.int64) - 1


def load_by_index(load: Callable[..., Any]) -> Callable[..., Any]:
    """``create_masked_load`` by one look-up of numpy's, as Triton's loop over elements takes ten times longer; ``load`` is Triton's."""
    handle = interpreter.TensorHandle

    def create_masked_load(builder: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        pointers, live = ptrs.data, mask.data
        if pointers.size < _FEW or live.shape != pointers.shape:
            return load(builder, ptrs, mask, other, *rest)
        dtype = ptrs.get_element_ty()
        kind = interpreter._get_np_dtype(dtype)  # noqa: SLF001
        whole = bool(live.all())
        places = _places(pointers if whole else pointers[live], kind.itemsize)
        if places is None:
            return load(builder, ptrs, mask, other, *rest)
        found = _MEMORY[kind.itemsize][places].view(kind)
        if whole:
            return handle(found, dtype)
        filled = np.zeros(pointers.shape, kind) if other is None else np.empty(pointers.shape, kind)
        if other is not None:
            filled[...] = other.data
        filled[live] = found
        return handle(filled, dtype)

    return create_masked_load


def store_by_index(store: Callable[..., Any]) -> Callable[..., Any]:
    """The same of ``create_masked_store``; of lanes that store to one address the last one wins, as in Triton's loop."""

    def create_masked_store(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        pointers, live, data = ptrs.data, mask.data, value.data
        size = data.dtype.itemsize
        if pointers.size < _FEW or live.shape != pointers.shape or data.shape != pointers.shape:
            return store(builder, ptrs, value, mask, *rest)
        if not live.all():
            pointers, data = pointers[live], data[live]
        places = _places(pointers, size)
        if places is None:
            return store(builder, ptrs, value, mask, *rest)
        _MEMORY[size][places] = np.ascontiguousarray(data).view(f"u{size}")
        return None

    return create_masked_store
