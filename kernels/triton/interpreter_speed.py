"""What makes Triton's interpreter cheaper an operation and changes no result: types are made once, operands that fit need no check.

Nearly all the time of an operation went into building types and shapes anew. Here a block type is made once for its element type
and shape, operands of one type skip the promotion rules, and constants and broadcasts are views instead of filled arrays. Each shortcut
covers the plain cases (32- and 64-bit integers, float32, bool, pointers with integers) and leaves all others to Triton.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from .interpreter_operators import constants, load_by_index, short_operator, store_by_index

_ASSUMED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (interpreter._patch_attr, ("obj", "name", "member", "builder", "scope")),  # noqa: SLF001
    (core.block_type.__init__, ("self", "element_ty", "shape")),
    (core.tensor.__init__, ("self", "handle", "type")),
    (interpreter._get_np_dtype, ("tt_dtype",)),  # noqa: SLF001
    (interpreter.interpreter_semantic.cast, ("input", "dst_ty", "fp_downcast_rounding")),
    (interpreter.interpreter_semantic.broadcast_impl_value, ("lhs", "rhs")),
    (interpreter.interpreter_semantic.expand_dims, ("input", "axis")),
    (
        interpreter.interpreter_semantic.binary_op_type_checking_impl,
        ("lhs", "rhs", "allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check", "div_or_mod"),
    ),
)
_INTEGERS = {tl.int32.name: np.int32, tl.int64.name: np.int64}
_PLAIN = frozenset((*_INTEGERS, tl.float32.name, tl.int1.name))


def speed_up() -> bool:
    """Take the shortcuts, before the interpreter patches the language; False where Triton is built otherwise: it stays as it is."""
    if any(tuple(inspect.signature(function).parameters) != names for function, names in _ASSUMED):
        return False
    _make_types_once()
    _call_builtins_directly()
    _fit_operands()
    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = load_by_index(builder.create_masked_load)
    builder.create_masked_store = store_by_index(builder.create_masked_store)
    return True


def _make_types_once() -> None:
    make_type, make_tensor, equal = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(s.value if isinstance(s, core.constexpr) else s for s in shape))
        if key not in made:
            make_type(self, element_ty, list(key[1:]))
            first = object.__new__(core.tensor)
            make_tensor(first, None, self)
            self.forebay_kept = first.shape, first.numel, first.dtype
            self.forebay_shape = key[1:]
            made[key] = dict(self.__dict__)
        self.__dict__.update(made[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  # Triton passes it by name
        kept = type.__dict__.get("forebay_kept")
        if kept is None:
            make_tensor(self, handle, type)
            type.forebay_kept = self.shape, self.numel, self.dtype
            return
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = kept

    def same(self: Any, other: Any) -> bool:
        return self is other or bool(equal(self, other))

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    core.dtype.__eq__ = same
    core.dtype.forebay_shape = ()
    core.block_type.to_ir = lambda self, _: self
    _look_up_numpy_types_once()


def _look_up_numpy_types_once() -> None:
    look_up, known = interpreter._get_np_dtype, {}  # noqa: SLF001

    def numpy_type(tt_dtype: Any) -> Any:
        name = tt_dtype.name
        if name not in known:
            known[name] = look_up(tt_dtype)
        return known[name]

    interpreter._get_np_dtype = numpy_type  # noqa: SLF001


def _call_builtins_directly() -> None:
    """Builtins with their ``_semantic`` bound, without the wrapper that checks for it."""
    semantic = interpreter.interpreter_semantic

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:  # noqa: ARG001
        inner = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, short_operator(name, call) if obj is core.tensor else call)

    interpreter._patch_attr = patch_attr  # noqa: SLF001


def _fit_operands() -> None:
    semantic, handle, tensor, block = (
        interpreter.interpreter_semantic,
        interpreter.TensorHandle,
        core.tensor,
        core.block_type,
    )
    check, broadcast, expand, cast = (
        semantic.binary_op_type_checking_impl,
        semantic.broadcast_impl_value,
        semantic.expand_dims,
        semantic.cast,
    )

    def spread(x: Any, shape: tuple[int, ...]) -> Any:
        return tensor(handle(np.broadcast_to(x.handle.data, shape), x.dtype), block(x.dtype, shape))

    def broadcast_impl_value(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type.forebay_shape, rhs.type.forebay_shape
        if left == right:
            return lhs, rhs
        if not left:
            return spread(lhs, right), rhs
        if not right:
            return lhs, spread(rhs, left)
        if len(left) != len(right):
            return broadcast(lhs, rhs)  # type: ignore[no-any-return]
        shape = tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))
        if any(b not in (1, s) for b, s in zip(right, shape, strict=True)):
            return broadcast(lhs, rhs)  # type: ignore[no-any-return]
        return lhs if left == shape else spread(lhs, shape), rhs if right == shape else spread(rhs, shape)

    def fitted(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """As :func:`broadcast_impl_value`, but in types alone: numpy spreads the data itself in the operation that follows."""
        left, right = lhs.type.forebay_shape, rhs.type.forebay_shape
        if left == right:
            return lhs, rhs
        if not left:
            return tensor(lhs.handle, block(lhs.dtype, right)), rhs
        if not right:
            return lhs, tensor(rhs.handle, block(rhs.dtype, left))
        return broadcast_impl_value(lhs, rhs)

    def binary_op_type_checking_impl(
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        a, b = lhs, rhs
        if type(a) is tensor:
            if type(b) is not tensor:
                b = constants.like(b, a)
        elif type(b) is tensor:
            a = constants.like(a, b)
        if type(a) is tensor and type(b) is tensor:
            one, other = a.dtype.name, b.dtype.name
            if one == other and one in _PLAIN:
                return fitted(a, b)
            if other in _INTEGERS and allow_lhs_ptr and a.dtype.is_ptr():
                return fitted(a, b)
            if one in _INTEGERS and other in _INTEGERS:  # of 32 and of 64 bits
                return fitted(cast_impl(a, tl.int64), cast_impl(b, tl.int64))
        return check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)  # type: ignore[no-any-return]

    def cast_impl(input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:  # noqa: A002  # Triton's name
        source, target = input.dtype, dst_ty.scalar
        if source is target:
            return input
        if source.name not in _INTEGERS or target.name not in _INTEGERS:
            return cast(input, dst_ty, fp_downcast_rounding)
        shape = input.type.forebay_shape
        data = input.handle.data.astype(_INTEGERS[target.name])
        return tensor(handle(data, target), block(target, shape) if shape else target)

    def expand_dims(input: Any, axis: int) -> Any:  # noqa: A002  # Triton's name
        shape = input.type.forebay_shape
        if not shape or not 0 <= axis <= len(shape):
            return expand(input, axis)
        data = np.expand_dims(input.handle.data, axis)
        return tensor(handle(data, input.dtype), block(input.dtype, (*shape[:axis], 1, *shape[axis:])))

    semantic.broadcast_impl_value, semantic.expand_dims = broadcast_impl_value, expand_dims
    semantic.cast = cast_impl
    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl
