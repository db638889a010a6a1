"""A device of CUDA or ROCm by way of torch: its memory, one stream, graphs. Not run on hardware yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
import triton
from torch import Tensor

from forebay.backends.torch_shared.guard import storage_of
from forebay.specs.errors import BackendUnavailable, InvalidInput

from .registers import launch_options

MAPPED: Final = 2
"""``cudaHostRegisterMapped``: page-locked host memory that the device addresses."""
LOST: Final = ("CUDA error", "HIP error", "device-side assert", "illegal memory access")
"""What torch's messages say when the device's context is of no use any more."""


class CudaEvent:
    """A place in the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def done(self) -> bool:
        """Whether the stream got there."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Wait until it does."""
        self._event.synchronize()


class CudaPlatform:
    """One device. All work goes to torch's current stream, and so does every replay; graphs share one pool of memory, which is sound
    because they run one after the other.

    Args:
        index: of the device.

    Raises:
        InvalidInput: ``index`` is no index.
        BackendUnavailable: torch sees no such device.
    """

    def __init__(self, index: int) -> None:
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise InvalidInput(f"cuda option device: got {index!r}, expected an int from 0 on")
        count = torch.cuda.device_count()
        if index >= count:
            raise BackendUnavailable(
                f"cuda option device: got {index}, torch {torch.__version__} sees {count} device(s)"
            )
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        self._allows_tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False  # clause D6: float32 products are float32's
        self._compiler = "hip" if torch.version.hip else "cuda"
        self._pool = torch.cuda.graph_pool_handle()
        self._registered: dict[int, int] = {}

    def owns(self, x: Tensor) -> bool:
        """Tensors on it, and those without data in which a step is rehearsed."""
        return x.device == self._device or x.is_meta

    def memory_of(self, x: Tensor) -> int:
        """That of its storage."""
        return storage_of(x)

    def address_of(self, x: Tensor) -> int:
        """The device's address."""
        return x.data_ptr()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Of torch's caching allocator.

        Raises:
            MemoryError: with what is free on the device.
        """
        try:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self._device)
            raise MemoryError(f"{free} of {total} bytes are free on {self._device}: {error}") from error

    def pinned(self, size: int) -> Tensor:
        """Page-locked memory; torch uses it again once the copies from and to it are done."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def adopt(self, x: object, dtype: torch.dtype) -> Tensor | None:
        """A tensor of the device as it is; numpy's memory page-locked and mapped, so that the device addresses it where it lies.

        Raises:
            ValueError: strides that are no multiple of the element, or memory that cannot be page-locked.
        """
        if isinstance(x, Tensor):
            return x.detach() if self.owns(x) else None
        if not isinstance(x, np.ndarray):
            return None
        host = torch.from_numpy(x.view(np.int16) if dtype == torch.bfloat16 else x).view(dtype)
        return self._mapped(host)

    def _mapped(self, host: Tensor) -> Tensor:
        storage = host.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._registered:
            status = int(torch.cuda.cudart().cudaHostRegister(address, size, MAPPED))
            if status != 0:
                raise ValueError(f"{size} bytes of host memory cannot be page-locked: status {status} of the runtime")
        self._registered[address] = self._registered.get(address, 0) + 1
        # Under unified addressing a mapped address is the device's as well; torch makes a storage of an address by this one function.
        on_device = torch._C._construct_storage_from_data_pointer(address, self._device, size)  # noqa: SLF001
        return torch.empty(0, dtype=host.dtype, device=self._device).set_(
            on_device, host.storage_offset(), host.shape, host.stride()
        )

    def forget(self, x: Tensor) -> None:
        """Unlock host memory that nothing uses any more."""
        address = x.untyped_storage().data_ptr()
        if address in self._registered:
            self._registered[address] -= 1
            if self._registered[address] == 0:
                torch.cuda.synchronize(self._device)
                del self._registered[address]
                torch.cuda.cudart().cudaHostUnregister(address)

    def settle(self) -> None:
        """Wait, if the host sees any of the memory."""
        if self._registered and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self._device)

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """On the current stream, with the options that the ahead-of-time gate compiles with."""
        if 0 not in grid:
            options = launch_options(kernel.fn.__name__, args, constants, self._compiler)
            kernel[grid](*args, **{**constants, **options})

    def event(self) -> CudaEvent:
        """Behind everything asked for so far."""
        return CudaEvent()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    @contextmanager
    def capture(self) -> Iterator[CudaGraph]:
        """Record on a stream of its own.

        Raises:
            MemoryError: not enough for what is recorded.
        """
        graph = CudaGraph()
        try:
            with torch.cuda.graph(graph.graph, pool=self._pool):
                yield graph
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{error}") from error

    def lost(self, error: BaseException) -> bool:
        """What torch says of an error that the device does not recover from."""
        return not isinstance(error, torch.OutOfMemoryError) and any(text in str(error) for text in LOST)

    def describe(self) -> Mapping[str, Any]:
        """Device, versions, memory."""
        known = torch.cuda.get_device_properties(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        # What torch keeps for later is free to whoever asks torch.
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return {
            "device": known.name,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
            "driver": _driver_version(),
            "multiprocessors": known.multi_processor_count,
            "free_bytes": free,
            "total_bytes": total,
        }

    def close(self) -> None:
        """Unlock what is locked, and give torch its setting back."""
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()
        torch.backends.cuda.matmul.allow_tf32 = self._allows_tf32


class CudaGraph:
    """A graph of torch."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()

    def replay(self) -> None:
        """On the current stream."""
        self.graph.replay()

    def release(self) -> None:
        """Give its memory back to the pool; work that still uses it is done first."""
        torch.cuda.synchronize()
        self.graph.reset()


def _driver_version() -> str:
    read = getattr(torch._C, "_cuda_getDriverVersion", None)  # noqa: SLF001  (torch shows it nowhere else)
    return str(read()) if read is not None else "unknown"
