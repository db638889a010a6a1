"""The runtime: configuration, backend selection, block allocation, Lanes and the engine."""

from .allocator import BlockAllocator
from .engine import Engine
from .model import Model, load_model
from .request import GenerationResult, Request
from .sampling import SamplingParams
from .selection import open_backend
from .settings import Settings

__all__ = [
    "BlockAllocator",
    "Engine",
    "GenerationResult",
    "Model",
    "Request",
    "SamplingParams",
    "Settings",
    "load_model",
    "open_backend",
]
