"""Parts of the runtime that the shared suite tests by themselves, and its ways into an engine: one place that says which."""

from __future__ import annotations

from .assembly import Parts
from .engine import Engine
from .host_kv import HostKV
from .kv_cache import KVCache
from .lanes import Lanes
from .ledger import Ledger
from .models.rope import LongRope
from .plugins import PluginManager
from .prefix_cache import PrefixCache
from .request import Request
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
    "LongRope",
    "PluginManager",
    "PrefixCache",
    "Requirements",
    "SlotState",
    "drain",
    "parts_of",
    "preempt",
    "reuse_first",
]


def parts_of(engine: Engine) -> Parts:
    """What an engine is made of: device state, pool, core with its decoder and cache."""
    return engine._parts  # noqa: SLF001


def drain(engine: Engine) -> None:
    """Read every step that is in flight."""
    parts_of(engine).core._drain()  # noqa: SLF001


def preempt(engine: Engine, request: Request) -> None:
    """Make a running request give way, as one of higher priority would."""
    parts_of(engine).core._room._preempt(request)  # noqa: SLF001


def reuse_first(engine: Engine, count: int) -> None:
    """Make the ``count`` blocks that were freed last the next to be handed out."""
    parts_of(engine).core.cache.allocator._free.rotate(count)  # noqa: SLF001
