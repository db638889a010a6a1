"""What an engine says about itself, as plain data.

Keys of ``Engine.report()``. Counts grow from the making of the engine on, those of the backend from its opening on.

``configuration``
    Each setting: ``value``, ``source`` (call, environment, file, default), ``origin`` (a variable, or ``path:line``).
``arm``
    ``eager``, ``hostfree`` or ``captured``.
``backend``
    ``name``, ``mode``, ``requested``, ``source``, ``origin``, ``distribution``, ``version``, ``considered`` (what was passed over, and
    why), ``info`` (of the device).
``model``
    ``name``, ``dtype``, ``max_len`` (tokens).
``counters``
    The backend's, by the names of ``forebay.specs.counters.Counters``.
``engine``
    ``steps``, ``eager_steps`` (decode steps), ``tokens`` (released), ``prefills`` (prompts computed to the end), ``prefill_tokens``
    (computed), ``reused_tokens`` (found in the prefix cache), ``forks``, ``reseeds``, ``preemptions``, ``block_copies``,
    ``offloaded``, ``restored``, ``offload_refused``; requests that ended: ``finished``, ``cancelled``, ``deadline``, ``error``.
``requests``
    Now: ``waiting``, ``running``.
``lanes``
    For each bucket of slots and variant of the step: ``bucket``, ``variant``, ``run``, ``replay``, ``capture``, ``declined``,
    ``released``, ``eager_reason``.
``memory``
    ``layout``, ``kv_dtype``, ``kv_bytes``, ``capacity_tokens``, ``blocks_free``, ``blocks_allocated``, ``blocks_in_flight`` (freed,
    and a step on its way may touch them), ``blocks_cached`` (among the allocated ones), ``blocks_offloaded``, ``weight_bytes``.
``latencies``
    ``queue_wait_s`` (arrival to first slot), ``time_to_first_token_s`` (arrival to first token), ``inter_token_s`` (between two tokens
    of a request): each with ``count``, ``sum``, ``buckets``, ``mean``, ``max``, ``p50``, ``p90``,
    ``p99``, in seconds. ``worst_wait_steps``, ``worst_wait_s``: the longest wait for a first slot, of those still waiting too.
"""

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
