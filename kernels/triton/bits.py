"""Floats as integers: moves that keep every bit, and rounding to bfloat16 that is the same in the interpreter as on a device.

A float32 to bfloat16 cast is wrong in Triton 3.7's interpreter, and a float move may quieten a NaN; integers do neither."""

from __future__ import annotations

import triton.language as tl

from .jit import jit


@jit
def as_integers(pointer: tl.tensor) -> tl.tensor:
    """A pointer, or a block of them, to elements of 4 or 2 bytes as pointers to int32 or int16."""
    if pointer.dtype.element_ty.primitive_bitwidth == 32:
        return pointer.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        return pointer.to(tl.pointer_type(tl.int16), bitcast=True)


@jit
def float32_of(bits: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Bits of float32, bfloat16 or float16 (int32 or int16) as float32 values, exactly."""
    if TYPE == tl.bfloat16:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif TYPE == tl.float16:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return bits.to(tl.float32, bitcast=True)


@jit
def bits_of(values: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """float32 values rounded to nearest even, as bits of ``TYPE`` (int32 or int16); a NaN stays one, and in bfloat16 becomes quiet."""
    if TYPE == tl.bfloat16:
        wide = values.to(tl.int32, bitcast=True)
        half = 0x7FFF + ((wide >> 16) & 1)
        rounded = tl.add(wide, half, sanitize_overflow=False) >> 16  # only bits of a NaN overflow
        is_nan = (wide & 0x7FFFFFFF) > 0x7F800000
        return tl.where(is_nan, (wide >> 16) | 0x40, rounded).to(tl.int16)
    elif TYPE == tl.float16:
        return values.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        return values.to(tl.int32, bitcast=True)


@jit
def recast(bits: tl.tensor, SOURCE: tl.constexpr, TARGET: tl.constexpr) -> tl.tensor:
    """Bits of one float type as bits of another; the same type keeps its bits."""
    if SOURCE == TARGET:
        return bits
    else:
        return bits_of(float32_of(bits, SOURCE), TARGET)
