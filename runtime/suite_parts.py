"""Parts of the runtime that the shared suite tests by themselves: one place that says which."""

from __future__ import annotations

from .host_kv import HostKV
from .kv_cache import KVCache
from .lanes import Lanes
from .ledger import Ledger
from .plugins import PluginManager
from .prefix_cache import PrefixCache
from .selection import Requirements
from .state import RECEIPT_FIELDS, DeviceState, SlotState
from .variants import GREEDY

__all__ = [
    "GREEDY",
    "RECEIPT_FIELDS",
    "DeviceState",
    "HostKV",
    "KVCache",
    "Lanes",
    "Ledger",
    "PluginManager",
    "PrefixCache",
    "Requirements",
    "SlotState",
]
