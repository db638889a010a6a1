"""How the driver and its namespace call kernels: now, or onto the tape of the Segment that is being captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .tape import Recorder


class KernelCalls:
    """Kernels take memory by its address, which no torch mode sees; so every tensor they take passes here first.

    Attributes:
        recorder: records the Segment that is being captured; None outside of capture.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def issue(self, prepare: Callable[[], Callable[[], object]], *, pure: bool = False) -> None:
        """Prepare a call and run it, or put it on the tape.

        A ``pure`` call writes nothing but memory from :meth:`empty`; it also runs while it is recorded, as torch operations do.
        """
        if self.recorder is None:
            prepare()()
            return
        with self.recorder.pause():
            call = prepare()
            if pure:
                call()
        self.recorder.tape.operations.append(call)

    def check_held(self, act: str, *arrays: Tensor | None) -> None:
        """Refuse a closed-over array while recording: what a kernel takes as it is, no torch operation would see."""
        if self.recorder is not None:
            self.recorder.check_held(act, *arrays)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a kernel's output; while recording it belongs to the trace."""
        with self.unrecorded():
            made = torch.empty(tuple(shape), dtype=dtype)
        return made if self.recorder is None else self.recorder.adopt(made)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Code that is no part of the Segment."""
        if self.recorder is None:
            yield
        else:
            with self.recorder.pause():
                yield
