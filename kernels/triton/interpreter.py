"""Mends of Triton's interpreter (``TRITON_INTERPRET=1``), which is silently wrong for bfloat16 and slow at launches.

What is mended, in ``triton.runtime.interpreter`` of Triton 3.4 to 3.7, and stays so for the process:

- ``tl.dot`` of bfloat16 multiplied the bit patterns as integers. Products run in float32 now, as on a device.
- float32 to bfloat16 rounded halves away from zero or not at all. Now to nearest, ties to even; a NaN stays a quiet NaN.
- ``tl.sum`` of bfloat16 added bit patterns. The sum runs in float32 and is rounded once.
- Any other arithmetic on bfloat16 is as wrong, and is refused: kernels convert to float32 first.
- BLAS cuts a long inner dimension of a product by the shape of the operands, so a row's bits would depend on how many rows the tile
  has. Products run over pieces of the inner dimension that BLAS takes whole.
- A launch copied every byte of the storages of its arguments onto themselves, and patched ``triton.language`` anew, as did every call
  of a function from within a kernel. The language is patched once, and tensors of the host are used where they lie.
- Sums and products of integers were computed twice to look for an overflow that nothing reported outside of debug builds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from .interpreter_speed import speed_up

Array = npt.NDArray[Any]
INNER = 256
"""The longest inner dimension of one BLAS product: below what OpenBLAS takes in one piece whatever the operands' shapes."""
QUIET_NAN = np.uint16(0x7FC0)
_MENDED = "_forebay_mended"
_EXPECTED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "InterpreterBuilder",
        ("create_dot", "cast_impl", "create_fp_to_fp", "binary_op", "unary_op", "set_grid_dim", "set_grid_idx"),
    ),
    ("ReduceOps", ("sum",)),
    ("InterpretedFunction", ("run", "rewrite", "__call__")),
    ("GridExecutor", ("__call__",)),
    ("TensorHandle", ()),
    ("InterpreterOptions", ()),
    ("InterpreterError", ()),
    ("interpreter_builder", ("options",)),
    ("_patch_lang", ()),
    ("_implicit_cvt", ()),
)


class NothingToRestore:
    """What patching the language answers once it is patched for good."""

    def restore(self) -> None:
        """Leave it patched: a process that interprets Triton compiles none."""


def widened(bits: Array) -> Array:
    """float32 of bfloat16 patterns (uint16), of the same shape; exact."""
    wide: Array = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def rounded(x: Array) -> Array:
    """bfloat16 patterns (uint16) nearest to float32 ``x``, of the same shape: ties to even, any NaN the quiet one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).reshape(x.shape)
    nearest = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), QUIET_NAN, nearest)


def mend() -> None:
    """Mend the interpreter of this process; a second call changes nothing.

    Raises:
        RuntimeError: the process does not interpret Triton, or its interpreter is not built as expected.
    """
    if not triton.knobs.runtime.interpret:
        raise RuntimeError(
            "the process compiles Triton; set TRITON_INTERPRET=1 before triton is imported to interpret it"
        )
    if getattr(interpreter, _MENDED, False):
        return
    compiled = not isinstance(tl.sum, interpreter.InterpretedFunction)
    if compiled:
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set; set it before the first import")
    missing = [
        f"{name}.{part}" if part else name
        for name, parts in _EXPECTED
        for part in ("", *parts)
        if not hasattr(interpreter, name) or (part and not hasattr(getattr(interpreter, name), part))
    ]
    if missing:
        raise RuntimeError(
            f"the interpreter of triton {triton.__version__} lacks {', '.join(missing)}; it was mended for triton 3.4 to 3.7"
        )
    _mend_bfloat16()
    _mend_launches()
    setattr(interpreter, _MENDED, True)


def _mend_bfloat16() -> None:
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, cast_rounded = builder.cast_impl, builder.create_fp_to_fp
    binary, unary, add_up = builder.binary_op, builder.unary_op, interpreter.ReduceOps.sum

    def as_float32(x: Any) -> Array:
        data: Array = widened(x.data) if x.dtype.scalar == tl.bfloat16 else x.data.astype(np.float32, copy=False)
        return data

    def create_dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        if d.data.dtype != np.float32 or not a.dtype.is_floating() or a.dtype.primitive_bitwidth == 8:
            raise NotImplementedError(
                f"dot of {a.dtype} and {b.dtype} into {d.dtype}: only float operands of 16 or 32 bits"
            )
        left, right = as_float32(a), as_float32(b)
        total = d.data
        for k in range(0, left.shape[-1], INNER):
            total = total + np.matmul(left[..., k : k + INNER], right[..., k : k + INNER, :])
        return handle(total, d.dtype.scalar)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.bfloat16 and target == tl.float32:
            return handle(widened(src.data), tl.float32)
        if source == tl.float32 and target == tl.bfloat16:
            return handle(rounded(src.data), tl.bfloat16)
        if tl.bfloat16 in (source, target) and source != target:
            raise NotImplementedError(f"conversion of {source} to {target}: go through float32")
        return cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return cast_impl(self, src, dst_type)
        return cast_rounded(self, src, dst_type, rounding_mode)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar == tl.bfloat16:
            raise NotImplementedError(f"{op.__name__} of bfloat16: convert to float32 first")
        return binary(self, lhs, rhs, op)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if arg.dtype.scalar == tl.bfloat16:
            raise NotImplementedError(f"{op.__name__} of bfloat16: convert to float32 first")
        return unary(self, arg, op)

    def sum_up(self: Any, given: Any) -> Any:
        if given.dtype.scalar != tl.bfloat16:
            return add_up(self, given)
        total = np.sum(widened(given.handle.data), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(rounded(np.asarray(total)), tl.bfloat16)

    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp
    builder.binary_op, builder.unary_op = binary_op, unary_op
    interpreter.ReduceOps.sum = sum_up


def _mend_launches() -> None:
    patch, run = interpreter._patch_lang, interpreter.InterpretedFunction.run  # noqa: SLF001
    speed_up()
    patch(mend)  # its module holds both triton.language and triton.language.core

    def patched(_: Any) -> NothingToRestore:
        return NothingToRestore()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    def run_in_place(self: Any, *args: Any, grid: Any, warmup: bool, **meta: Any) -> None:
        if warmup:
            return
        given = _bound(self, args, meta)
        if given is None or callable(grid) or self.pre_run_hooks:
            run(self, *args, grid=grid, warmup=warmup, **meta)
            return
        sizes = (*grid, 1, 1)[:3]
        builder, fn = interpreter.interpreter_builder, self.rewrite()
        builder.set_grid_dim(*sizes)
        try:
            with np.errstate(all="ignore"):  # a device does not tell of them
                for x in range(sizes[0]):
                    for y in range(sizes[1]):
                        for z in range(sizes[2]):
                            builder.set_grid_idx(x, y, z)
                            fn(**given)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = patched  # noqa: SLF001
    interpreter.InterpretedFunction.__call__ = call
    interpreter.InterpretedFunction.run = run_in_place
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


_POINTERS: dict[torch.dtype, Any] = {}
_CONSTANTS: dict[Callable[..., Any], tuple[dict[str, Any], frozenset[str]]] = {}


def _bound(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments by name as the interpreter takes them, or None where some are neither numbers nor tensors of the host."""
    if kernel.fn not in _CONSTANTS:
        parameters = inspect.signature(kernel.fn).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        constants = frozenset(p.name for p in parameters if "constexpr" in str(p.annotation))
        _CONSTANTS[kernel.fn] = defaults, constants
    defaults, constants = _CONSTANTS[kernel.fn]
    names = kernel.arg_names
    given = defaults | dict(zip(names, args, strict=False)) | {name: x for name, x in meta.items() if name in names}
    if len(args) > len(names) or len(given) != len(names):
        return None
    for name, x in given.items():
        if name in constants or x is None or isinstance(x, float):
            continue
        if isinstance(x, int):  # a bool as well
            given[name] = _scalar(x)
        elif isinstance(x, torch.Tensor) and x.device.type == "cpu":
            given[name] = _pointer(x)
        elif type(x) is tuple and all(type(part) is int for part in x):
            given[name] = _scalars(x)
        else:
            return None
    return given


@lru_cache(maxsize=4096)
def _scalar(x: int) -> Any:
    kind, dtype = (tl.int32, np.int32) if -(2**31) <= x < 2**31 else (tl.int64, np.int64)
    return tl.tensor(interpreter.TensorHandle(np.array([x], dtype), kind), kind)


@lru_cache(maxsize=4096)
def _scalars(x: tuple[int, ...]) -> Any:
    return tl.tuple([_scalar(part) for part in x])


def _pointer(x: torch.Tensor) -> Any:
    if x.dtype not in _POINTERS:
        _POINTERS[x.dtype] = interpreter._implicit_cvt(x).type  # noqa: SLF001
    kind = _POINTERS[x.dtype]
    return tl.tensor(interpreter.TensorHandle(np.array([x.data_ptr()], np.uint64), kind), kind)


_LANGUAGES = (tl, core)
"""The modules that :func:`_mend_launches` has patched, which it finds among the names of this one."""
