"""Parts of the runtime that the shared suite tests by themselves: one place that says which."""

from __future__ import annotations

from .host_kv import HostKV
from .kv_cache import KVCache
from .lanes import Lanes
from .plugins import PluginManager
from .prefix_cache import PrefixCache
from .selection import Requirements
from .state import DeviceState
from .variants import GREEDY

__all__ = ["GREEDY", "DeviceState", "HostKV", "KVCache", "Lanes", "PluginManager", "PrefixCache", "Requirements"]
