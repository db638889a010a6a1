"""Puts an engine together: pool, weights, slot state, lanes and the parts that decide who uses them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from forebay.specs.backend import Backend
from forebay.specs.pool import Pool

from .admission import MAX_STOP_TOKENS
from .allocator import BlockAllocator
from .core import EngineCore
from .decode_step import decode_segment
from .decoder import Decoder
from .forward import HostForward
from .kv_cache import KVCache
from .lanes import Lanes, capture_mode
from .latency import Latencies
from .model import Model
from .models.llama import Llama, LoadProgress
from .offload import Offload
from .prefill import DevicePrefill, HostPrefill, Prefill
from .prefix_cache import PrefixCache
from .sampler import HostSampler
from .sampling_rows import SamplingState
from .selection import open_backend
from .settings import Settings
from .sizing import check_windows, longest_sequence, pool_geometry, pool_room
from .state import DeviceState
from .stop_strings import StopStrings
from .waiting import WaitingQueue

HOST_BACKEND = "cpu"
"""The backend that computes prompts with ``prefill_on = "cpu"``."""


@dataclass(frozen=True)
class Parts:
    """What an engine is made of; whoever has the ExitStack frees it."""

    arm: str
    max_len: int
    pool: Pool
    model: Llama
    device: DeviceState
    core: EngineCore
    offload: Offload | None
    latencies: Latencies


def assemble(
    model: Model,
    backend: Backend,
    settings: Settings,
    made: ExitStack,
    *,
    clock: Callable[[], float],
    progress: LoadProgress | None,
) -> Parts:
    """Make the parts of an engine; everything put on a device is freed by ``made``.

    Raises:
        InvalidInput, InvalidLayout, Unsupported: before anything is put on the device.
    """
    arm = settings.arm or ("hostfree" if settings.capture == "off" else "captured")
    max_len = longest_sequence(settings, model)
    check_windows(backend, model, max_len)
    geometry = pool_geometry(settings, model, max_len, pool_room(backend, model))
    table_len = -(-max_len // geometry.block_size)
    on_host = settings.prefill_on == HOST_BACKEND

    pool = backend.create_pool(geometry)
    made.callback(backend.release, pool)
    llama = bind(model, backend, max_len, made, progress)
    device = DeviceState(backend, settings.slots, table_len, MAX_STOP_TOKENS, model.config.vocab_size)
    for buffer in device.buffers:
        made.callback(backend.release, buffer)
    forward = HostForward(backend, llama, pool, HostSampler(backend, device.sampling), table_len, settings.attention)
    lanes = Lanes(
        backend,
        lambda bucket, variant: decode_segment(llama, pool, device, bucket, settings.attention, variant),
        settings.slots,
        capture_mode(arm, settings.capture),
        settings.max_rewarm,
    )
    made.callback(lanes.close)
    prefill: Prefill = DevicePrefill(forward)
    if on_host:
        prefill = _host_prefill(model, backend, llama, pool, settings, made, max_len)

    allocator = BlockAllocator(geometry.num_blocks)
    # The host computes whole prompts, so it has no use for what the device has cached.
    prefix = PrefixCache(allocator, geometry.block_size) if settings.prefix_reuse and not on_host else None
    waiting = WaitingQueue(settings.max_waiting, settings.priority_steps)
    offload = None
    if settings.preempt == "offload":
        limit = geometry.num_blocks if settings.offload_blocks is None else settings.offload_blocks
        offload = Offload(backend, pool, limit, lambda: waiting)
    latencies = Latencies(clock)
    core = EngineCore(
        Decoder(device, lanes, forward, eager=arm == "eager"),
        KVCache(pool, allocator, prefix),
        prefill,
        waiting,
        offload,
        StopStrings(model.tokenizer),
        latencies,
        slots=settings.slots,
        budget=settings.max_step_tokens,
        read_behind=settings.read_behind,
        eager=arm == "eager",
        clock=clock,
    )
    return Parts(arm, max_len, pool, llama, device, core, offload, latencies)


def bind(model: Model, backend: Backend, max_len: int, made: ExitStack, progress: LoadProgress | None) -> Llama:
    """Put a model's weights on ``backend``; ``made`` frees them."""
    llama = model.bind(backend, max_len=max_len, progress=progress)
    for buffer in llama.buffers:
        made.callback(backend.release, buffer)
    return llama


def _host_prefill(
    model: Model, device: Backend, llama: Llama, pool: Pool, settings: Settings, made: ExitStack, max_len: int
) -> HostPrefill:
    """Prompts on the ``cpu`` backend: the engine's own if it is that one, else one opened for it with its own weights."""
    host, weights = device, llama
    if device.name != HOST_BACKEND:
        host = made.enter_context(open_backend(HOST_BACKEND, threads=settings.threads))
        weights = bind(model, host, max_len, made, None)
    table_len = -(-max_len // pool.geometry.block_size)
    host_pool = host.create_pool(replace(pool.geometry, num_blocks=table_len + 1))
    made.callback(host.release, host_pool)
    sampling = SamplingState(host, 1, model.config.vocab_size)
    for buffer in (*sampling.reads, *sampling.updates):
        made.callback(host.release, buffer)
    forward = HostForward(host, weights, host_pool, HostSampler(host, sampling), table_len, settings.attention)
    return HostPrefill(forward, host, host_pool, device, pool)
