"""Vector arithmetic in LLVM IR: a thin layer over a builder, with 16 float32 lanes a vector.

LLVM lowers the vectors to what the machine has (one AVX-512 register, two AVX2 registers). Nothing here may be
reassociated, so results have the same bits wherever fused multiply-add exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir

from numba.core import cgutils

LANES: Final = 16
BF16_LANES: Final = 2 * LANES

F32: Final = ir.FloatType()
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)
I16: Final = ir.IntType(16)
VF32: Final = ir.VectorType(F32, LANES)
VI32: Final = ir.VectorType(I32, LANES)
VI16: Final = ir.VectorType(I16, LANES)
_BYTES: Final = ir.IntType(8).as_pointer()

# 2**f on [-1/2, 1/2] by a polynomial of degree 6 (relative error below 2e-8 before rounding): ln(2)**k / k!, the last
# one adjusted.
_EXP2: Final = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
# tanh(x) = x + x**3 * P(x**2) for |x| < 0.625: coefficients of Cephes' tanhf (S. Moshier, netlib).
_TANH: Final = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
# log(1 + x) = x - x**2 / 2 + x**3 * P(x) for 1 + x between sqrt(1/2) and sqrt(2): coefficients of Cephes' logf.
_LOG: Final = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_LN2: Final = (0.693359375, -2.12194440e-4)
"""The natural logarithm of 2 in two parts: whole multiples of the first are exact."""
_ROOT_HALF_BITS: Final = 0x3F3504F3
_LOG2E: Final = 1.4426950408889634


def int64(value: int) -> Any:
    """A 64-bit constant."""
    return ir.Constant(I64, value)


def splat_constant(value: float) -> Any:
    """The same float32 constant in every lane."""
    return ir.Constant(VF32, [value] * LANES)


class Lanes:
    """Emits vector operations with ``builder``; values are LLVM values, addresses are 64-bit integers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def offset(self, address: Any, count: int, *, size: int = 4) -> Any:
        """``address + count * size``."""
        return self.builder.add(address, int64(count * size)) if count else address

    def index(self, address: Any, index: Any, *, size: int) -> Any:
        """``address + index * size`` with an index known at run time."""
        return self.builder.add(address, self.builder.mul(index, int64(size)))

    def load(self, address: Any, kind: Any = VF32) -> Any:
        """A vector or scalar from an address aligned to 2 bytes at least."""
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=2)

    def store(self, value: Any, address: Any) -> None:
        """Write a vector or scalar of 4-byte elements."""
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=4)

    def splat(self, scalar: Any) -> Any:
        """A scalar in every lane."""
        blank = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        vector = self.builder.insert_element(blank, scalar, I32(0))
        return self.builder.shuffle_vector(vector, vector, ir.Constant(VI32, [0] * LANES))

    def shuffle(self, x: Any, y: Any, lanes: Sequence[int]) -> Any:
        """Lanes of ``x`` (0 to 15) and ``y`` (16 to 31)."""
        return self.builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def call(self, name: str, *args: Any) -> Any:
        """An LLVM intrinsic on whole vectors."""
        kind = ir.FunctionType(VF32, [arg.type for arg in args])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, f"{name}.v{LANES}f32"), args)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """``x * y + z``, rounded once."""
        return self.call("llvm.fma", x, y, z)

    def load_kv(self, address: Any, *, bf16: bool) -> list[Any]:
        """The next 64 bytes of a KV row: 16 float32, or 32 bfloat16 as two vectors (even elements, odd elements)."""
        if not bf16:
            return [self.load(address)]
        return self.split_bf16(self.load(address, VI32))

    def split_bf16(self, pairs: Any) -> list[Any]:
        """32 bfloat16, two in each of 16 integers, as two vectors (even elements, odd elements)."""
        even = self.builder.shl(pairs, ir.Constant(VI32, [16] * LANES))
        odd = self.builder.and_(pairs, ir.Constant(VI32, [0xFFFF0000] * LANES))
        return [self.builder.bitcast(even, VF32), self.builder.bitcast(odd, VF32)]

    def first(self, count: Any, width: int = LANES) -> Any:
        """A mask of ``width`` lanes: the first ``count`` of them, which is at least 0."""
        order = ir.VectorType(I32, width)
        one = self.builder.insert_element(ir.Constant(order, ir.Undefined), self.builder.trunc(count, I32), I32(0))
        counts = self.builder.shuffle_vector(one, one, ir.Constant(order, [0] * width))
        return self.builder.icmp_signed("<", ir.Constant(order, list(range(width))), counts)

    def load_masked(self, address: Any, mask: Any, kind: Any) -> Any:
        """A vector of which only the lanes of ``mask`` are read; the others are zero."""
        load = self._masked("load", ir.FunctionType(kind, [kind.as_pointer(), I32, mask.type, kind]), kind)
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.call(load, [pointer, I32(2), mask, ir.Constant(kind, None)])

    def store_masked(self, value: Any, address: Any, mask: Any) -> None:
        """Write the lanes of ``mask`` and nothing else."""
        kind = value.type
        store = self._masked("store", ir.FunctionType(ir.VoidType(), [kind, kind.as_pointer(), I32, mask.type]), kind)
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        self.builder.call(store, [value, pointer, I32(2), mask])

    def _masked(self, verb: str, signature: Any, kind: Any) -> Any:
        name = f"v{kind.count}{'f32' if kind.element == F32 else 'i16'}"
        return cgutils.get_or_insert_function(self.builder.module, signature, f"llvm.masked.{verb}.{name}.p0{name}")

    def from_bf16(self, bits: Any) -> Any:
        """16 bfloat16 as float32."""
        wide = self.builder.zext(bits, VI32)
        return self.builder.bitcast(self.builder.shl(wide, ir.Constant(VI32, [16] * LANES)), VF32)

    def to_bf16(self, values: Any) -> Any:
        """The nearest 16 bfloat16, ties to even; a NaN stays a NaN and becomes quiet."""
        builder = self.builder
        bits = builder.bitcast(values, VI32)
        upper = builder.lshr(bits, ir.Constant(VI32, [16] * LANES))
        odd = builder.and_(upper, ir.Constant(VI32, [1] * LANES))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(VI32, [0x7FFF] * LANES)))
        rounded = builder.lshr(rounded, ir.Constant(VI32, [16] * LANES))
        quiet = builder.or_(upper, ir.Constant(VI32, [0x40] * LANES))
        return builder.trunc(builder.select(builder.fcmp_unordered("uno", values, values), quiet, rounded), VI16)

    def prefetch(self, address: Any, count: int) -> None:
        """Ask for ``count`` bytes from ``address`` on, into the second-level cache."""
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, I32, I32, I32])
        ask = self.builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], kind)
        for byte in range(0, count, 64):
            self.builder.call(
                ask, [self.builder.inttoptr(self.offset(address, byte, size=1), _BYTES), I32(0), I32(2), I32(1)]
            )

    def largest(self, vector: Any) -> Any:
        """The largest lane."""
        return self._fold(vector, lambda x, y: self.call("llvm.maxnum", x, y))

    def total(self, vector: Any) -> Any:
        """The sum of the lanes, by halves."""
        return self._fold(vector, self.builder.fadd)

    def _fold(self, vector: Any, combine: Any) -> Any:
        for distance in (8, 4, 2, 1):
            vector = combine(vector, self.shuffle(vector, vector, [lane ^ distance for lane in range(LANES)]))
        return self.builder.extract_element(vector, I32(0))

    def totals(self, vectors: Sequence[Any]) -> Any:
        """Sums of the lanes of up to 16 vectors: lane ``i`` is ``total(vectors[i])``, bit for bit.

        At each distance two vectors share one: of each, the lanes that the other leaves free.
        """
        groups = [(vector, [index] * LANES) for index, vector in enumerate(vectors)]
        for distance in (8, 4, 2, 1):
            pairs = [(groups[i], groups[min(i + 1, len(groups) - 1)]) for i in range(0, len(groups), 2)]
            groups = [self._halve(x, y, distance) for x, y in pairs]
        vector, owners = groups[0]
        order = [owners.index(index) if index in owners else 0 for index in range(LANES)]
        return self.shuffle(vector, vector, order)

    def _halve(self, x: tuple[Any, list[int]], y: tuple[Any, list[int]], distance: int) -> tuple[Any, list[int]]:
        low = [not lane & distance for lane in range(LANES)]
        kept = self.shuffle(x[0], y[0], [lane if low[lane] else LANES + lane for lane in range(LANES)])
        moved = self.shuffle(x[0], y[0], [(lane if low[lane] else LANES + lane) ^ distance for lane in range(LANES)])
        owners = [x[1][lane] if low[lane] else y[1][lane] for lane in range(LANES)]
        return self.builder.fadd(kept, moved), owners

    def exp2(self, x: Any) -> Any:
        """``2**x`` for ``x <= 0``, relative error below 2e-7; below -126 it stays at ``2**-126``; NaN stays NaN."""
        builder = self.builder
        bounded = self.call("llvm.maxnum", x, splat_constant(-126.0))
        whole = self.call("llvm.rint", bounded)
        rest = builder.fsub(bounded, whole)
        power = splat_constant(_EXP2[0])
        for coefficient in _EXP2[1:]:
            power = self.fma(power, rest, splat_constant(coefficient))
        exponent = builder.add(builder.fptosi(whole, VI32), ir.Constant(VI32, [127] * LANES))
        value = builder.fmul(power, builder.bitcast(builder.shl(exponent, ir.Constant(VI32, [23] * LANES)), VF32))
        return builder.select(builder.fcmp_unordered("uno", x, x), x, value)

    def tanh(self, x: Any) -> Any:
        """``tanh(x)``, relative error below 3e-7; NaN stays NaN."""
        builder = self.builder
        one, two = splat_constant(1.0), splat_constant(2.0)
        size = self.call("llvm.fabs", x)
        square = builder.fmul(x, x)
        series = splat_constant(_TANH[0])
        for coefficient in _TANH[1:]:
            series = self.fma(series, square, splat_constant(coefficient))
        near = self.fma(builder.fmul(series, square), x, x)
        decay = self.exp2(builder.fmul(size, splat_constant(-2.0 * _LOG2E)))
        far = builder.fsub(one, builder.fmul(two, builder.fdiv(decay, builder.fadd(one, decay))))
        far = self.call("llvm.copysign", far, x)
        return builder.select(builder.fcmp_ordered("<", size, splat_constant(0.625)), near, far)

    def log(self, x: Any) -> Any:
        """``ln(x)`` of normal positive numbers, relative error below 2e-7, absolute near 1; nothing is promised for others."""
        builder = self.builder

        def whole(value: int) -> Any:
            return ir.Constant(VI32, [value] * LANES)

        # The exponent is counted from sqrt(1/2), so that what is left lies around 1.
        above = builder.sub(builder.bitcast(x, VI32), whole(_ROOT_HALF_BITS))
        exponent = builder.sitofp(builder.ashr(above, whole(23)), VF32)
        rest = builder.add(builder.and_(above, whole(0x7FFFFF)), whole(_ROOT_HALF_BITS))
        small = builder.fsub(builder.bitcast(rest, VF32), splat_constant(1.0))
        square = builder.fmul(small, small)
        series = splat_constant(_LOG[0])
        for coefficient in _LOG[1:]:
            series = self.fma(series, small, splat_constant(coefficient))
        tail = self.fma(exponent, splat_constant(_LN2[1]), builder.fmul(builder.fmul(series, small), square))
        tail = builder.fsub(tail, builder.fmul(square, splat_constant(0.5)))
        return self.fma(exponent, splat_constant(_LN2[0]), builder.fadd(small, tail))
