"""The runtime: configuration, backend selection, block allocation, Lanes and the engine.

The public names are imported when first used, so that a command that needs none of them starts at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .allocator import BlockAllocator
    from .async_engine import AsyncEngine
    from .engine import Engine
    from .model import Model, load_model
    from .request import GenerationResult, Request
    from .sampler import TokenLogprobs
    from .sampling import SamplingParams
    from .selection import open_backend
    from .settings import Settings
    from .streaming import Piece

__all__ = [
    "AsyncEngine",
    "BlockAllocator",
    "Engine",
    "GenerationResult",
    "Model",
    "Piece",
    "Request",
    "SamplingParams",
    "Settings",
    "TokenLogprobs",
    "load_model",
    "open_backend",
]

_HOMES: Final = {
    "AsyncEngine": "async_engine",
    "BlockAllocator": "allocator",
    "Engine": "engine",
    "GenerationResult": "request",
    "Model": "model",
    "Piece": "streaming",
    "Request": "request",
    "SamplingParams": "sampling",
    "Settings": "settings",
    "TokenLogprobs": "sampler",
    "load_model": "model",
    "open_backend": "selection",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*globals(), *_HOMES})
