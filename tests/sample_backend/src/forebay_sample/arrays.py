"""Device arrays, and the device that computes them: at once, or onto a tape while a step is captured."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, Final, NoReturn

import numpy as np

from forebay.specs.dtypes import BITS_DTYPE, HostArray, bfloat16_bits, bfloat16_values
from forebay.specs.errors import CaptureViolation, InvalidInput

Compute = Callable[..., HostArray]


def values_of(bits: HostArray, dtype: str) -> HostArray:
    """Numbers to compute with: bfloat16 and float16 as float32."""
    if dtype == "bfloat16":
        return bfloat16_values(bits)
    return bits.astype(np.float32) if dtype == "float16" else bits


def bits_of(values: HostArray, dtype: str) -> HostArray:
    """Numbers as the bytes of a dtype, rounded to the nearest even."""
    return bfloat16_bits(values) if dtype == "bfloat16" else values.astype(BITS_DTYPE[dtype], copy=False)


class Tape:
    """The operations of one captured step, in order; its arrays are the trace's own memory, written anew by each replay."""

    def __init__(self, segment: str) -> None:
        self.segment = segment
        self.operations: list[Callable[[], None]] = []


class SampleArray:
    """An array of the device. It shares memory with the array or Buffer it is a view of; nothing here lets the host read it.

    Attributes:
        bits: its memory, in the numpy type of its bytes.
        dtype: the name of its element type.
        tape: the captured step it was made in, None outside of one.
    """

    __slots__ = ("bits", "device", "dtype", "tape")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, device: Device, bits: HostArray, dtype: str, tape: Tape | None) -> None:
        self.device, self.bits, self.dtype, self.tape = device, bits, dtype, tape

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> SampleArray:
        parts = index if isinstance(index, tuple) else (index,)
        if not all(part is None or isinstance(part, int | slice | EllipsisType) for part in parts):
            raise CaptureViolation(f"index by a mask or an array{self._where()}; use xp.where or xp.take")
        return self.view(self.bits[(*parts, ...) if ... not in parts else index])

    def view(self, bits: HostArray, dtype: str | None = None) -> SampleArray:
        """Another array over the same memory."""
        return SampleArray(self.device, bits, dtype or self.dtype, self.tape)

    def _read(self, *_: object, **__: object) -> NoReturn:
        raise CaptureViolation(
            f"host read of a device value{self._where()}; backend.to_host reads arrays between steps"
        )

    def _change(self, *_: object) -> NoReturn:
        raise CaptureViolation(f"an array changed in place{self._where()}; return an update of a Buffer")

    def _where(self) -> str:
        return "" if self.tape is None else f" while capturing Segment {self.tape.segment}"

    __bool__ = __int__ = __float__ = __index__ = __format__ = item = tolist = _read
    __array__ = __array_ufunc__ = __array_function__ = _read
    __setitem__ = __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = _change
    __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _change

    def __invert__(self) -> SampleArray:
        return self.device.apply(np.invert, self.dtype, self)


class Device:
    """Runs operations when they are asked for; while a tape is set, records them too."""

    def __init__(self) -> None:
        self.tape: Tape | None = None

    def check(self, x: object, act: str) -> SampleArray:
        """``x`` as an array this device may use now.

        Raises:
            CaptureViolation: a host array, or inside a captured step one that was made outside of it.
        """
        if not isinstance(x, SampleArray) or x.device is not self:
            where = "" if self.tape is None else f" while capturing Segment {self.tape.segment}"
            raise CaptureViolation(f"{act}: got a host {type(x).__name__}, expected an array of this device{where}")
        if self.tape is not None and x.tape is not self.tape:
            raise CaptureViolation(
                f"{act} uses an array of shape {list(x.shape)} that no declared Buffer holds (closed over) while capturing "
                f"Segment {self.tape.segment}"
            )
        return x

    def new(self, shape: Sequence[int], dtype: str) -> SampleArray:
        """Memory for the output of a kernel."""
        return SampleArray(self, np.zeros(tuple(shape), BITS_DTYPE[dtype]), dtype, self.tape)

    def issue(self, kernel: Callable[[], None]) -> None:
        """Launch a kernel that writes memory: now, or, since a capture changes no Buffer, at each replay only."""
        if self.tape is None:
            kernel()
        else:
            self.tape.operations.append(kernel)

    def apply(self, compute: Compute, dtype: str, *operands: Any) -> SampleArray:
        """A new array: ``compute`` of the operands' values (numbers stay numbers), in ``dtype``.

        A captured step computes it once, for its shape, and again at each replay.
        """
        ins = [x if isinstance(x, int | float | np.generic) else self.check(x, "an operation") for x in operands]

        def result() -> HostArray:
            with np.errstate(all="ignore"):
                given = [values_of(x.bits, x.dtype) if isinstance(x, SampleArray) else x for x in ins]
                return bits_of(np.asarray(compute(*given)), dtype)

        made = SampleArray(self, result().copy(), dtype, self.tape)
        if self.tape is not None:
            self.tape.operations.append(lambda: np.copyto(made.bits, result()))
        return made


# -- the operators of arrays -----------------------------------------------------------------------------------------------
COMPARISONS: Final = ("lt", "le", "gt", "ge", "eq", "ne")
ARITHMETIC: Final = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor",
)  # fmt: skip


def _operator(compute: Callable[[Any, Any], Any], result: str | None) -> Any:
    def method(self: SampleArray, other: Any) -> SampleArray:
        if isinstance(other, SampleArray) and other.dtype != self.dtype:
            raise InvalidInput(f"operands of {self.dtype} and {other.dtype}; convert one with xp.astype")
        number = values_of(np.zeros(0, BITS_DTYPE[self.dtype]), self.dtype).dtype.type
        operand = number(other) if isinstance(other, bool | int | float | np.generic) else other
        return self.device.apply(compute, result or self.dtype, self, operand)

    return method


def _swapped(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: compute(y, x)


for _name in ARITHMETIC:
    setattr(SampleArray, f"__{_name}__", _operator(getattr(operator, f"__{_name}__"), None))
    setattr(SampleArray, f"__r{_name}__", _operator(_swapped(getattr(operator, f"__{_name}__")), None))
for _name in COMPARISONS:
    setattr(SampleArray, f"__{_name}__", _operator(getattr(operator, f"__{_name}__"), "bool"))
