"""How the tests of the simulated device open it: through the plugin, with a plugin manager of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay.backends.sim import plugin
from forebay.runtime import Settings, open_backend
from forebay.runtime.plugins import PluginManager
from forebay.specs import Backend, Buffer, Segment


def open_sim(**options: Any) -> Backend:
    """A device with these options."""
    manager = PluginManager()
    manager.register(plugin)
    return open_backend("sim", settings=Settings(), manager=manager, **options)


def launched(backend: Backend) -> int:
    """Kernels the device has done so far, not those that are queued."""
    return sum(backend.info["launches"].values())


def counter(backend: Backend) -> tuple[Buffer, Segment]:
    """A Buffer of two zeros, and a step that emits it and adds one."""
    x = backend.buffer("x", np.zeros(2, np.float32))
    return x, Segment("count", lambda _: ({x: x.get() + 1}, {"x": x.get()}), updates=(x,))
