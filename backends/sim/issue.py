"""Launching: where operands are checked, outputs get their memory, and a kernel goes to the queue or to the Segment's record."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final, NoReturn

import numpy as np

from forebay.specs.dtypes import BITS_DTYPE, FLOAT_DTYPES, ITEMSIZE, HostArray
from forebay.specs.errors import CaptureViolation, InvalidInput, Unsupported

from . import dense
from .arrays import COMPARISONS, Place, SimArray
from .memory import Allocation, DeviceMemory
from .queue import Kernel, Launch, Queue, sizes
from .record import Record

Shape = tuple[int, ...]
_BOOLEAN: Final = ("and", "or", "xor")
_INTEGER: Final = (*_BOOLEAN, "lshift", "rshift")


class Issuer:
    """Hands kernels on.

    Attributes:
        record: the Segment that is being evaluated; None outside of one.
    """

    def __init__(self, memory: DeviceMemory, queue: Queue) -> None:
        self._memory = memory
        self._queue = queue
        self.record: Record | None = None

    # -- arrays ----------------------------------------------------------------------------------------------------------
    def new(self, shape: Shape, dtype: str, what: str) -> SimArray:
        """A poisoned array: of the trace's arena while one is recorded, else of its own allocation.

        Raises:
            Unsupported: the device's memory is used up.
        """
        size = prod(shape) * ITEMSIZE[dtype]
        record = self.record
        if record is not None and record.arena is not None:
            arena = record.arena
            return SimArray(self, arena, Place.dense(arena.grow(size), shape, ITEMSIZE[dtype]), dtype)
        try:
            made = self._memory.allocate(size, what)
        except MemoryError as error:
            raise Unsupported(str(error)) from error
        if record is not None:
            record.known.add(made)
        return self.of(made, shape, dtype)

    def of(self, allocation: Allocation, shape: Shape, dtype: str) -> SimArray:
        """The array that fills an allocation."""
        return SimArray(self, allocation, Place.dense(0, shape, ITEMSIZE[dtype]), dtype)

    def contiguous(self, x: SimArray) -> SimArray:
        """``x``, copied if its elements do not lie in row-major order."""
        if x.place.is_dense(ITEMSIZE[x.dtype]):
            self.check(x, "a reshape")
            return x
        return self.launch("copy", dense.copy, x.shape, x.dtype, (x,))

    # -- launching -------------------------------------------------------------------------------------------------------
    def launch(
        self,
        name: str,
        kernel: Kernel,
        shape: Shape,
        dtype: str,
        ins: Sequence[SimArray | None],
        constants: tuple[Any, ...] = (),
    ) -> SimArray:
        """A kernel with one new output."""
        for x in ins:
            self.check(x, f"xp.{name}")
        out = self.new(tuple(shape), dtype, f"the output of {name}")
        self.put(Launch(name, kernel, (out,), tuple(ins), constants))
        return out

    def put(self, launch: Launch) -> None:
        """Hand on a launch whose outputs exist.

        Raises:
            CaptureViolation: it uses an array that no declared Buffer of the Segment holds.
            InvalidInput: it uses memory that was given back.
            DeviceLost: the device is.
        """
        for x in (*launch.outs, *launch.ins):
            self.check(x, launch.name)
        if self.record is not None:
            self._queue.check()
            self.record.launches.append(launch)
            return
        self._queue.submit(launch)
        self.settle(launch)

    def settle(self, *launches: Launch) -> None:
        """Wait if foreign memory is touched: its owner may look at it as soon as the call returns."""
        if any(x is not None and x.allocation.foreign for one in launches for x in (*one.outs, *one.ins)):
            self._queue.drain()

    def check(self, x: SimArray | None, act: str) -> None:
        """Refuse an operand that is no array of this device, was given back, or is closed over by the Segment."""
        if x is None:
            return
        if not isinstance(x, SimArray):
            self.refuse(f"{act} got a host {type(x).__name__} among device arrays (a numpy or Python value)")
        if x.issuer is not self:
            raise InvalidInput(f"{act}: got {x!r} of another device")
        if x.allocation.freed:
            raise InvalidInput(f"{act}: got {x!r}, whose memory was given back; nothing was launched")
        if self.record is not None and x.allocation not in self.record.known:
            self.refuse(
                f"{act} uses an array of shape {list(x.shape)} that no declared Buffer holds (closed over, or made before)"
            )

    def refuse(self, act: str) -> NoReturn:
        """Raise for something an array cannot do: CaptureViolation inside a Segment, InvalidInput outside."""
        if self.record is not None:
            raise CaptureViolation(f"{act}, inside Segment {self.record.segment}; a captured step does no such thing")
        raise InvalidInput(f"{act}; read values with backend.to_host, make new arrays with backend.to_device or xp")

    # -- elementwise -----------------------------------------------------------------------------------------------------
    def unary(self, name: str, x: SimArray) -> SimArray:
        """``dense.UNARY[name]``."""
        self.check(x, f"xp.{name}")
        if name != "invert" and x.dtype not in FLOAT_DTYPES:
            raise InvalidInput(f"xp.{name}: got {x.dtype}, expected a float array")
        return self.launch(name, dense.unary, x.shape, x.dtype, (x,), (name,))

    def binary(self, name: str, a: Any, b: Any) -> SimArray:
        """``dense.BINARY[name]`` of two arrays of one dtype, or of an array and a number."""
        for x in (a, b):
            self.check_operand(x, name)
        arrays = [x for x in (a, b) if isinstance(x, SimArray)]
        kind = self.common_dtype(name, a, b)
        if name == "truediv" and kind not in FLOAT_DTYPES:
            kind = "float32"
        if (name in _INTEGER and kind in FLOAT_DTYPES) or (kind == "bool" and name not in (*_BOOLEAN, *COMPARISONS)):
            raise InvalidInput(f"operator {name}: got {sizes(arrays)}; it is not defined for {kind}")
        carrier = "float32" if kind in FLOAT_DTYPES else BITS_DTYPE[kind].name
        left, right = (None if isinstance(x, SimArray) else self.constant(x, kind, name) for x in (a, b))
        try:
            shape = np.broadcast_shapes(*(x.shape for x in arrays))
        except ValueError as error:
            raise InvalidInput(f"operator {name}: got {sizes(arrays)}: {error}") from error
        ins = tuple(x if isinstance(x, SimArray) else None for x in (a, b))
        result = "bool" if name in COMPARISONS else kind
        return self.launch(name, dense.binary, shape, result, ins, (name, left, right, carrier))

    def check_operand(self, x: object, act: str) -> None:
        """Refuse what is neither a device array nor a number."""
        if isinstance(x, SimArray):
            self.check(x, act)
        elif isinstance(x, np.ndarray) or not isinstance(x, int | float | np.generic):
            self.refuse(
                f"{act} got a host {type(x).__name__} among device arrays (numpy and Python arrays stay on the host)"
            )

    def common_dtype(self, act: str, a: Any, b: Any) -> str:
        """The dtype two operands have in common: arrays must agree; a number takes the array's, unless it is wider in kind."""
        arrays = [x for x in (a, b) if isinstance(x, SimArray)]
        dtypes = {x.dtype for x in arrays}
        if len(dtypes) > 1:
            raise InvalidInput(f"{act}: got {sizes(arrays)}, expected one dtype; convert with xp.astype")
        numbers = [x for x in (a, b) if not isinstance(x, SimArray)]
        dtype = dtypes.pop() if dtypes else "bool"
        for x in numbers:
            if isinstance(x, float | np.floating) and dtype not in FLOAT_DTYPES:
                dtype = "float32"
            elif not isinstance(x, bool | np.bool_) and dtype == "bool":
                dtype = "int32"
        return dtype

    def constant(self, x: Any, dtype: str, act: str) -> HostArray | Any:
        """A number as a constant of the program, in the type it is computed in.

        Raises:
            InvalidInput: an int that int32 does not hold.
        """
        if dtype in FLOAT_DTYPES:
            return np.float32(x)
        if dtype == "int32" and not -(2**31) <= int(x) < 2**31:
            raise InvalidInput(f"{act}: the number {x} does not fit int32")
        return BITS_DTYPE[dtype].type(x)
