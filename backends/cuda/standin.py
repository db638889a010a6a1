"""A stand-in for a CUDA device, for kernels that Triton interprets: memory of its own, a stream, graphs, and CUDA's rules.

Its tensors have sizes and strides but no data the host could read. An operation on them is put on the stream and done when somebody
waits; until then its result is poison. While a graph is recorded nothing is done, and waiting, reading and blocking copies are errors,
as on a device (CUDA C++ Programming Guide, "CUDA Graphs"). A copy from host memory takes what lies there when its turn comes, so
that memory which is used again too early shows as wrong values. torch does the dense work, on the host's cores.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

import numpy as np
import torch
import triton
from torch import Tensor

from forebay.backends.torch_shared.guard import DATA_DEPENDENT, storage_of

from .nested import kinds, leaves, mapped

Work = Callable[[], object]

QUEUE_LIMIT: Final = 4096
"""Entries beyond which the oldest half is done: results that nobody waits for would pile up."""
HOST: Final = torch.device("cpu")


class StandInTensor(torch.Tensor):
    """Sizes and strides of device memory; whatever is done with it goes to the stream.

    Attributes:
        memory: the host tensor that stands for the device's memory; only work of the stream touches it.
        stream: where operations go.
    """

    memory: Tensor
    stream: Stream

    @staticmethod
    def __new__(cls, memory: Tensor, stream: Stream) -> Self:
        """A handle to ``memory``."""
        made = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001  (torch's way to such tensors)
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=HOST,
        )
        made.memory, made.stream = memory, stream
        return made

    # Operations are seen one level below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"StandInTensor({str(self.dtype).removeprefix('torch.')}{list(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hand an operation to the stream of its first tensor."""
        kwargs = kwargs or {}
        first = next(x for x in leaves((*args, *kwargs.values())) if isinstance(x, StandInTensor))
        return first.stream.operate(func, args, kwargs)


class StandInEvent:
    """A place in the stream."""

    def __init__(self, stream: Stream, serial: int) -> None:
        self._stream = stream
        self._serial = serial

    def done(self) -> bool:
        """Whether the stream got there."""
        return self._stream.finished >= self._serial

    def wait(self) -> None:
        """Do the work up to there."""
        self._stream.finish(self._serial)


class StandInGraph:
    """Recorded work."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.work: list[Work] = []

    def replay(self) -> None:
        """Put all of it on the stream."""
        for entry in self.work:
            self._stream.put(entry)

    def release(self) -> None:
        """Drop it."""
        self.work = []


class Shape:
    """What a result will be, as the arguments of :meth:`Stream.new`."""

    def __init__(self, x: Tensor) -> None:
        self.kind = tuple(x.shape), x.dtype, x.stride()


class Stream:
    """Work in the order it was asked for.

    Attributes:
        finished: how many entries were done.
        graph: records what is asked for, instead of doing it; None outside of capture.
        lost: why the device is lost, ``""`` while it is not.
    """

    def __init__(self) -> None:
        self.finished = 0
        self.graph: StandInGraph | None = None
        self.lost = ""
        self._entries: deque[Work] = deque()
        self._shapes: dict[Any, Any] = {}

    @property
    def asked(self) -> int:
        """How many entries were put."""
        return self.finished + len(self._entries)

    def put(self, work: Work) -> None:
        """Ask for work; while a graph is recorded it only remembers it."""
        self._check()
        if self.graph is not None:
            self.graph.work.append(work)
            return
        self._entries.append(work)
        if len(self._entries) > QUEUE_LIMIT:
            self.finish(self.asked - QUEUE_LIMIT // 2)

    def finish(self, serial: int) -> None:
        """Do the first ``serial`` entries of all.

        Raises:
            RuntimeError: a graph is being recorded, or the device is lost; an entry that fails loses it.
        """
        self._check()
        if self.graph is not None:
            raise RuntimeError("CUDA's rules: waiting is not permitted while a stream is captured")
        with np.errstate(all="ignore"), torch.no_grad():
            while self.finished < serial:
                try:
                    self._entries.popleft()()
                except BaseException as error:
                    self.lost = f"{type(error).__name__}: {error}"
                    self._entries.clear()
                    if not isinstance(error, Exception):
                        raise
                    raise RuntimeError(f"the stand-in for a device is lost: {self.lost}") from error
                self.finished += 1

    def synchronize(self) -> None:
        """Do everything."""
        self.finish(self.asked)

    def new(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> StandInTensor:
        """Poisoned memory."""
        made = (
            torch.empty(tuple(shape), dtype=dtype)
            if strides is None
            else torch.empty_strided(shape, strides, dtype=dtype)
        )
        made.view(torch.uint8).fill_(0xFF) if made.is_contiguous() and made.dim() else made.fill_(_poison(dtype))
        return StandInTensor(made, self)

    def operate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One operation of torch: views at once, everything else on the stream.

        Raises:
            RuntimeError: it mixes memory of host and device, or reads values on the host while a graph is recorded.
        """
        name = func._schema.name  # noqa: SLF001  (the schema is how torch describes an operation)
        if name == "aten::copy_":
            return self._copy(*args, **kwargs)
        if name == "aten::_to_copy" and kwargs.get("device") is not None:
            raise RuntimeError("a tensor of the stand-in reaches the host by copy_ into pinned memory only")
        _check_places(name, leaves((*args, *kwargs.values())))
        raw_args, raw = mapped(_memory, args), {key: mapped(_memory, x) for key, x in kwargs.items()}
        at_once = func.is_view
        if not at_once and not DATA_DEPENDENT.isdisjoint(func.tags) and name != "aten::index":
            self.synchronize()
            at_once = True
        if at_once:
            return mapped(lambda x: StandInTensor(x, self) if isinstance(x, Tensor) else x, func(*raw_args, **raw))
        if func._schema.is_mutable:  # noqa: SLF001
            self.put(lambda: func(*raw_args, **raw))
            return kwargs.get("out", args[0])
        made = mapped(lambda x: self.new(*x.kind) if isinstance(x, Shape) else x, self._shapes_of(func, args, kwargs))
        targets = [x.memory for x in leaves((made,)) if isinstance(x, StandInTensor)]

        def work() -> None:
            results = [x for x in leaves((func(*raw_args, **raw),)) if isinstance(x, Tensor)]
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)

        self.put(work)
        return made

    def _shapes_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operation returns, with a :class:`Shape` for each tensor: asked of torch once for each kind of operands."""
        known = (func, kinds(args), tuple((key, kinds((x,))) for key, x in kwargs.items()))
        if known not in self._shapes:
            result = func(*mapped(_without_data, args), **{key: mapped(_without_data, x) for key, x in kwargs.items()})
            self._shapes[known] = mapped(lambda x: Shape(x) if isinstance(x, Tensor) else x, result)
        return self._shapes[known]

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """``target.copy_(source)``; between host and device it is done at once unless it is asked for only."""
        crosses = any(type(x) is Tensor and x.dim() for x in (target, source))
        into, out_of = _memory(target), _memory(source)
        if crosses and not non_blocking:
            self.synchronize()
            into.copy_(out_of)
        else:
            self.put(lambda: into.copy_(out_of))
        return target

    def _check(self) -> None:
        if self.lost:
            raise RuntimeError(f"the stand-in for a device is lost: {self.lost}")


class StandIn:
    """The platform of mode ``interpret``."""

    def __init__(self) -> None:
        self._stream = Stream()
        self._foreign: list[Tensor] = []
        self._taken = 0

    def owns(self, x: Tensor) -> bool:
        """Its own tensors, and those without data in which a step is rehearsed."""
        return isinstance(x, StandInTensor) or x.is_meta

    def memory_of(self, x: Tensor) -> int:
        """That of the memory it stands for."""
        return storage_of(x.memory if isinstance(x, StandInTensor) else x)

    def address_of(self, x: Tensor) -> int:
        """That of the memory it stands for."""
        return (x.memory if isinstance(x, StandInTensor) else x).data_ptr()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that the system commits when it is touched; poison where it is small enough to be filled."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size <= POISONED_BYTES:
            made = self._stream.new(shape, dtype)
            self._count(made.memory, size)
            return made
        whole = np.empty(size, np.uint8)
        self._count(whole, size)
        return StandInTensor(torch.from_numpy(whole).view(dtype).reshape(tuple(shape)), self._stream)

    def _count(self, memory: object, size: int) -> None:
        """Count memory as taken while anything, a view or work of the stream, holds it."""
        self._taken += size
        weakref.finalize(memory, self._give_back, size).atexit = False

    def _give_back(self, size: int) -> None:
        self._taken -= size

    def pinned(self, size: int) -> Tensor:
        """Host memory."""
        return torch.empty(size, dtype=torch.uint8)

    def adopt(self, x: object, dtype: torch.dtype) -> Tensor | None:
        """numpy's memory, which the host goes on seeing, or a tensor of this stream."""
        if isinstance(x, StandInTensor):
            return x.detach()
        if not isinstance(x, np.ndarray):
            return None
        shared = torch.from_numpy(x.view(np.int16) if dtype == torch.bfloat16 else x).view(dtype)
        self._foreign.append(shared)
        return StandInTensor(shared, self._stream)

    def forget(self, x: Tensor) -> None:
        """Forget the memory."""
        known = self.memory_of(x)
        self._foreign = [memory for memory in self._foreign if storage_of(memory) != known]

    def settle(self) -> None:
        """Do everything, if the host sees any of the memory."""
        if self._foreign and self._stream.graph is None:
            self._stream.synchronize()

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Put a kernel on the stream.

        Raises:
            RuntimeError: a tensor among its arguments is the host's.
        """
        if 0 in grid:
            return
        _check_places(f"kernel {kernel.fn.__name__}", args)
        raw = mapped(_memory, args)
        self._stream.put(lambda: kernel[grid](*raw, **constants))

    def event(self) -> StandInEvent:
        """Behind everything put so far."""
        return StandInEvent(self._stream, self._stream.asked)

    def synchronize(self) -> None:
        """Do everything."""
        self._stream.synchronize()

    @contextmanager
    def capture(self) -> Iterator[StandInGraph]:
        """Record what is put."""
        if self._stream.graph is not None:
            raise RuntimeError("CUDA's rules: a stream that is captured cannot be captured again")
        self._stream.graph = graph = StandInGraph(self._stream)
        try:
            yield graph
        finally:
            self._stream.graph = None

    def lost(self, error: BaseException) -> bool:
        """Once an entry failed."""
        return bool(self._stream.lost)

    def describe(self) -> Mapping[str, Any]:
        """What is interpreted, and what has been asked for."""
        return {
            "device": "Triton's interpreter on the host, behind a stand-in for a stream",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "numpy": np.__version__,
            "free_bytes": max(ARENA_BYTES - self._taken, 0),
            "total_bytes": ARENA_BYTES,
        }

    def close(self) -> None:
        """Drop what is queued."""
        self._foreign.clear()
        self._stream = Stream()


ARENA_BYTES: Final = 8 << 30
"""What the device says it has, so that an engine sizes its pool as on a device: less what Buffers, uploads and outputs of kernels take.
It refuses nothing: memory that is not touched costs nothing, and results of torch's operations are left out."""
POISONED_BYTES: Final = 64 << 20
"""Larger memory is left to the system, so that a pool larger than the machine's memory can be addressed."""


def _memory(x: Any) -> Any:
    return x.memory if isinstance(x, StandInTensor) else x


def _without_data(x: Any) -> Any:
    """A tensor's sizes and strides; torch's way to ask an operation what it would return."""
    if isinstance(x, StandInTensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return x


def _check_places(name: str, operands: Iterable[Any]) -> None:
    for x in operands:
        if isinstance(x, Tensor) and not isinstance(x, StandInTensor) and x.dim() and not x.is_meta:
            raise RuntimeError(f"{name}: a host tensor of shape {list(x.shape)} among tensors of the device")


def _poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else (1 if dtype == torch.bool else -1)
