"""How the tests of the simulated device open it: through the plugin, with a plugin manager of their own."""

from __future__ import annotations

from typing import Any

from forebay.backends.sim import plugin
from forebay.runtime import open_backend
from forebay.runtime.plugins import PluginManager
from forebay.specs import Backend


def open_sim(**options: Any) -> Backend:
    """A device with these options."""
    manager = PluginManager()
    manager.register(plugin)
    return open_backend("sim", manager=manager, **options)
