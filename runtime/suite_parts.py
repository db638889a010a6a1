"""Parts of the runtime that the shared suite tests by themselves: one place that says which."""

from __future__ import annotations

from .lanes import Lanes
from .ledger import Ledger
from .plugins import PluginManager
from .prefix_cache import PrefixCache
from .state import RECEIPT_FIELDS, DeviceState, SlotState
from .variants import GREEDY

__all__ = [
    "GREEDY",
    "RECEIPT_FIELDS",
    "DeviceState",
    "Lanes",
    "Ledger",
    "PluginManager",
    "PrefixCache",
    "SlotState",
]
