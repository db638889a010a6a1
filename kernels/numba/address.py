"""Loads, stores and copies at plain 64-bit addresses, for compiled code.

KV memory comes with arbitrary strides. Addresses keep the compiled key free of an array's layout, and all arithmetic
on them is 64-bit: shapes decide nothing (clause L1). None of these functions checks a bound; their callers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from llvmlite import ir

from numba import types

from .compiled import emitted

_I64: Final = ir.IntType(64)
_BYTES: Final = ir.IntType(8).as_pointer()


def _loader(result: Any, element: ir.Type, alignment: int) -> Callable[[int], Any]:
    @emitted
    def load(_typing: Any, _address: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.load(builder.inttoptr(args[0], element.as_pointer()), align=alignment)

        return result(types.int64), generate

    return cast("Callable[[int], Any]", load)


def _storer(argument: Any, element: ir.Type, alignment: int) -> Callable[[int, Any], None]:
    @emitted
    def store(_typing: Any, _address: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            builder.store(args[1], builder.inttoptr(args[0], element.as_pointer()), align=alignment)
            return context.get_dummy_value()

        return types.void(types.int64, argument), generate

    return cast("Callable[[int, Any], None]", store)


load_u16 = _loader(types.uint16, ir.IntType(16), 2)
load_u32 = _loader(types.uint32, ir.IntType(32), 4)
load_i32 = _loader(types.int32, ir.IntType(32), 4)
load_i64 = _loader(types.int64, _I64, 8)
load_f32 = _loader(types.float32, ir.FloatType(), 4)
store_u16 = _storer(types.uint16, ir.IntType(16), 2)
store_u32 = _storer(types.uint32, ir.IntType(32), 4)
store_i32 = _storer(types.int32, ir.IntType(32), 4)
store_i64 = _storer(types.int64, _I64, 8)
store_f32 = _storer(types.float32, ir.FloatType(), 4)


@emitted
def move_bytes(_typing: Any, _target: Any, _source: Any, _count: Any) -> Any:
    """Copy ``count`` bytes from ``source`` to ``target``; the ranges may overlap."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(address, _BYTES) for address in args[:2])
        move = builder.module.declare_intrinsic("llvm.memmove", [_BYTES, _BYTES, _I64])
        builder.call(move, [target, source, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@emitted
def clear_bytes(_typing: Any, _target: Any, _count: Any) -> Any:
    """Set ``count`` bytes from ``target`` on to zero."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        clear = builder.module.declare_intrinsic("llvm.memset", [_BYTES, _I64])
        zero = ir.Constant(ir.IntType(8), 0)
        builder.call(clear, [builder.inttoptr(args[0], _BYTES), zero, args[1], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@emitted
def atomic_add_i64(_typing: Any, _address: Any, _value: Any) -> Any:
    """Add ``value`` to the ``int64`` at ``address`` and return what it held before; sequentially consistent."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@emitted
def exchange_i64(_typing: Any, _address: Any, _value: Any) -> Any:
    """Replace the ``int64`` at ``address`` by ``value`` and return what it held before; sequentially consistent."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate
