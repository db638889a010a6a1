"""Tells Forebay about the ``sample`` backend; the entry point names this module, and a vendor library would not be imported here."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import pluggy

from forebay.specs.descriptor import HOOK_PROJECT, Availability, BackendDescriptor, ModeDescriptor

if TYPE_CHECKING:
    from forebay.specs.driver import Driver

hookimpl: Final = pluggy.HookimplMarker(HOOK_PROJECT)


@hookimpl
def forebay_backend() -> BackendDescriptor:
    """One mode, which ``auto`` never takes: its kind is ``reference``."""
    dtypes = ("float32", "bfloat16", "float16")
    mode = ModeDescriptor(name="", kind="reference", load=load, probe=probe, supports={"kv_dtype": dtypes})
    return BackendDescriptor("sample", "a sample port over numpy", (mode,), "pip install forebay-sample")


def load() -> Driver:
    """Make the driver: the first place where a vendor library is imported."""
    from .driver import SampleDriver

    return SampleDriver()


def probe() -> Availability:
    """Say whether it can run here, without allocating device memory."""
    return Availability(usable=True, reason=f"numpy {version('numpy')}")
