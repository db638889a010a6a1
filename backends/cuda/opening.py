"""Opens the platform and makes the driver: the first place where torch and triton are imported."""

from __future__ import annotations

import os
import sys

from forebay.specs.driver import Driver
from forebay.specs.errors import BackendUnavailable

INTERPRET = "TRITON_INTERPRET"
"""Triton looks at this variable when it is imported, and each time a kernel is declared; nothing else makes it interpret."""


def open_interpreter() -> Driver:
    """A driver over the stand-in for a device.

    Raises:
        BackendUnavailable: this process has imported triton to compile; Triton can do only one of the two in a process.
    """
    if "triton" not in sys.modules:
        os.environ[INTERPRET] = "1"
    import triton.language as tl
    from triton import knobs
    from triton.runtime.interpreter import InterpretedFunction

    if not (knobs.runtime.interpret and isinstance(tl.sum, InterpretedFunction)):
        raise BackendUnavailable(
            f"cuda:interpret: triton was imported in this process before {INTERPRET}=1 was set, so it compiles; open cuda:interpret "
            f"before anything imports triton, or start the process with {INTERPRET}=1"
        )
    from forebay.kernels.triton.interpreter import mend

    mend()
    from .driver import CudaDriver
    from .standin import StandIn

    return CudaDriver(StandIn(), interpreted=True)


def open_device(index: int) -> Driver:
    """A driver for device ``index``.

    Raises:
        BackendUnavailable: no such device, or this process interprets Triton.
    """
    from triton import knobs

    if knobs.runtime.interpret:
        raise BackendUnavailable(
            f"cuda: this process interprets Triton ({INTERPRET} is set, or cuda:interpret was opened in it); use another process"
        )
    from .device import CudaPlatform
    from .driver import CudaDriver

    return CudaDriver(CudaPlatform(index), interpreted=False)
