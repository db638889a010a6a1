"""Tells Forebay about the ``cpu`` backend; torch and numba are imported only once it has been chosen."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import pluggy

from forebay.specs.descriptor import HOOK_PROJECT, Availability, BackendDescriptor, ModeDescriptor

if TYPE_CHECKING:
    from forebay.specs.driver import Driver

hookimpl: Final = pluggy.HookimplMarker(HOOK_PROJECT)
INSTALL: Final = "pip install 'forebay[cpu]'"
LIBRARIES: Final = ("torch", "numba")


@hookimpl
def forebay_backend() -> BackendDescriptor:
    """The embedded default: torch for dense work, numba for paged attention, on the host's cores."""
    mode = ModeDescriptor(
        name="",
        kind="host",
        load=load,
        probe=probe,
        supports={"kv_dtype": ("float32", "bfloat16")},
    )
    return BackendDescriptor(
        name="cpu",
        summary="the host's cores: torch for dense work, numba for paged attention",
        modes=(mode,),
        install_hint=INSTALL,
    )


def load(*, threads: int | None = None) -> Driver:
    """Make the driver; ``threads`` is the number of worker threads, None for as many as there are cores."""
    from forebay.backends.cpu.driver import CpuDriver

    return CpuDriver(threads=threads)


def probe() -> Availability:
    """Look for torch and numba without importing them."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        return Availability(usable=False, reason=f"not installed: {', '.join(missing)}", hint=INSTALL)
    return Availability(usable=True, reason=", ".join(f"{name} {version(name)}" for name in LIBRARIES))
