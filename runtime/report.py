"""What an engine says about itself, as plain data."""

from __future__ import annotations

from typing import Any

from forebay.specs.backend import Backend
from forebay.specs.pool import Pool

from .kv_cache import KVCache
from .model import Model
from .offload import Offload
from .settings import Settings


def describe(settings: Settings, arm: str, backend: Backend, model: Model, max_len: int) -> dict[str, Any]:
    """Configuration with sources, the arm, the backend with how it was chosen, and the model."""
    selection = backend.selection
    return {
        "configuration": settings.as_report(),
        "arm": arm,
        "backend": {
            "name": backend.name,
            "mode": backend.mode,
            "requested": selection.requested,
            "source": selection.source,
            "origin": selection.origin,
            "distribution": selection.distribution,
            "version": selection.version,
            "considered": {candidate.name: candidate.passed_over for candidate in selection.considered},
            "info": backend.info,
        },
        "model": {"name": model.name, "dtype": model.dtype, "max_len": max_len},
    }


def describe_memory(pool: Pool, cache: KVCache, model: Model, offload: Offload | None) -> dict[str, Any]:
    """Bytes of KV and weights, blocks by state, and the pool's layout and capacity. Cached blocks are among the allocated ones."""
    geometry, allocator = pool.geometry, cache.allocator
    cached = 0 if cache.prefix is None else len(cache.prefix)
    return {
        "layout": pool.layout,
        "kv_dtype": geometry.dtype,
        "kv_bytes": geometry.layer_bytes * geometry.num_layers,
        "capacity_tokens": pool.capacity,
        "blocks_free": allocator.num_free,
        "blocks_allocated": allocator.num_allocated,
        "blocks_in_flight": allocator.num_in_flight,
        "blocks_cached": cached,
        "blocks_offloaded": 0 if offload is None else offload.blocks,
        "weight_bytes": model.folder.weights.nbytes,
    }
