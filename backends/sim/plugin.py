"""Tells Forebay about the ``sim`` backend. It needs nothing but numpy, so it can run wherever Forebay is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import pluggy

from forebay.specs.descriptor import HOOK_PROJECT, Availability, BackendDescriptor, ModeDescriptor

if TYPE_CHECKING:
    from forebay.specs.driver import Driver

hookimpl: Final = pluggy.HookimplMarker(HOOK_PROJECT)


@hookimpl
def forebay_backend() -> BackendDescriptor:
    """A strict double of an accelerator, for tests and for those who write a port."""
    mode = ModeDescriptor(
        name="",
        kind="simulated",
        load=load,
        probe=probe,
        supports={"kv_dtype": ("float32", "bfloat16", "float16")},
    )
    return BackendDescriptor(
        name="sim",
        summary="a strict simulated accelerator in numpy: poisoned memory, a deferred queue, injected faults",
        modes=(mode,),
        install_hint="pip install forebay",
    )


def load(
    *,
    recapture_at_boundary: bool = False,
    memory_limit: int | None = None,
    queue_limit: int = 4096,
    stuck_timeout: float = 0.05,
    inject: Sequence[Mapping[str, Any]] = (),
) -> Driver:
    """Make the driver; the options are those of :class:`.driver.SimDriver`."""
    from .driver import SimDriver

    return SimDriver(
        recapture_at_boundary=recapture_at_boundary,
        memory_limit=memory_limit,
        queue_limit=queue_limit,
        stuck_timeout=stuck_timeout,
        inject=inject,
    )


def probe() -> Availability:
    """It can always run."""
    return Availability(usable=True, reason=f"numpy {version('numpy')}")
