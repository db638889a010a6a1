"""What the driver asks of the thing that runs its work: a CUDA (or ROCm) device, or the stand-in for one in the interpreter.

Both are asynchronous: what is asked for is done in order, later, and the host learns of it by an event. Everything the driver does
is written once against this surface and torch's own operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A place in the order of work."""

    def done(self) -> bool:
        """Whether everything asked for before it has been done; does not wait."""

    def wait(self) -> None:
        """Wait until it has."""


class Graph(Protocol):
    """Recorded work, with the addresses it was recorded with."""

    def replay(self) -> None:
        """Ask for all of it once more."""

    def release(self) -> None:
        """Give back what recording it took."""


class Platform(Protocol):
    """One opened device. No method reads a value of the device but those that say so."""

    def owns(self, x: Tensor) -> bool:
        """True for tensors of this device."""

    def memory_of(self, x: Tensor) -> int:
        """Identity of the memory behind a tensor; the same for its views."""

    def address_of(self, x: Tensor) -> int:
        """The address of its first element, to tell whether memory overlaps."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory of undefined content.

        Raises:
            MemoryError: there is not that much.
        """

    def pinned(self, size: int) -> Tensor:
        """``size`` bytes of host memory, uint8, that copies which are asked for and not waited for may use."""

    def adopt(self, x: object, dtype: torch.dtype) -> Tensor | None:
        """Foreign memory, numpy's or a tensor of this device, as a tensor that shares it; None for anything else.

        Raises:
            ValueError: its strides or place are none that the device can use.
        """

    def forget(self, x: Tensor) -> None:
        """What :meth:`adopt` gave is used no more."""

    def settle(self) -> None:
        """Wait for what was asked for on memory that the host sees without asking."""

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Ask for a Triton kernel; one without programs is none."""

    def event(self) -> Event:
        """An event behind everything asked for so far."""

    def synchronize(self) -> None:
        """Wait for everything asked for."""

    def capture(self) -> AbstractContextManager[Graph]:
        """Work asked for inside is recorded and not done; memory taken inside belongs to the graph."""

    def lost(self, error: BaseException) -> bool:
        """Whether an error means that the device, and with it all of its memory, is lost."""

    def describe(self) -> Mapping[str, Any]:
        """Device, libraries, memory, for reports."""

    def close(self) -> None:
        """Give everything back."""
