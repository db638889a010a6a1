"""Sizes an engine derives from its settings and model, before anything is put on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from forebay.specs.backend import Backend
from forebay.specs.dtypes import ITEMSIZE
from forebay.specs.errors import InvalidInput, Unsupported
from forebay.specs.geometry import KVGeometry

from .model import Model
from .settings import Settings

DEFAULT_POOL_BYTES: Final = 4 << 30
"""A pool sized by default holds every slot at full length, or this much if that is less and the device does not say what is free."""

FREE_SHARE: Final = 0.9
"""Of a device's free memory, what weights and a pool sized by default may take; the rest is for a step's temporaries and traces."""

DEFAULT_MAX_LEN: Final = 32768
"""Longest sequence by default, for models that name an enormous number of positions."""

MAX_SLOTS: Final = 65536


def longest_sequence(settings: Settings, model: Model) -> int:
    """``max_len`` of the settings, by default the model's number of positions.

    Raises:
        InvalidInput: it is beyond the model's positions.
    """
    limit = model.config.max_positions
    if settings.slots > MAX_SLOTS:
        raise InvalidInput(f"slots: got {settings.slots}, expected at most {MAX_SLOTS}")
    wanted = settings.max_len or min(limit, DEFAULT_MAX_LEN)
    if wanted > limit:
        raise InvalidInput(f"max_len: got {wanted}, the model {model.name!r} has {limit} positions")
    return wanted


def check_windows(backend: Backend, model: Model, max_len: int) -> None:
    """Check that ``backend`` has sliding windows if sequences of ``max_len`` tokens need them.

    Raises:
        Unsupported: they do and it has not.
    """
    config = model.config
    windows = [w for w in (config.window(layer, max_len) for layer in range(config.num_layers)) if w is not None]
    if windows and not backend.capabilities.window:
        raise Unsupported(
            f"model {model.name!r}: {len(windows)} of {config.num_layers} layers have a sliding window of {min(windows)} "
            f"tokens, which backend {backend.name!r} does not support; lower max_len from {max_len} to {min(windows)} or "
            "choose another backend"
        )


@dataclass(frozen=True)
class PoolRoom:
    """Bytes that a pool may take.

    Attributes:
        default: of one sized by default.
        largest: of any, beside the model's weights; None where the device does not say what it has free.
    """

    default: int
    largest: int | None


def pool_room(backend: Backend, model: Model) -> PoolRoom:
    """Bytes that the engine's pool may take: of the device's free memory what the model's weights leave.

    A driver says what is free now as ``free_bytes`` of its ``info``, or not at all.
    """
    free = backend.info.get("free_bytes")
    if free is None:
        return PoolRoom(DEFAULT_POOL_BYTES, None)
    weights = model.config.matrix_elements * ITEMSIZE[model.dtype]
    return PoolRoom(max(int(free * FREE_SHARE) - weights, 0), max(int(free) - weights, 0))


def pool_geometry(settings: Settings, model: Model, max_len: int, room: PoolRoom) -> KVGeometry:
    """Geometry of the engine's pool; by default every slot fits at ``max_len`` tokens, within ``room``.

    Raises:
        InvalidLayout: the model's heads do not divide, or slot ids would not fit.
        InvalidInput: the settings ask for more blocks than the device has memory free for.
    """
    config = model.config
    one_block = KVGeometry(
        num_blocks=1,
        block_size=settings.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_layers=config.num_layers,
        dtype=settings.kv_dtype or model.dtype,
    )
    one_block.check_query_heads(config.num_heads, f"model {model.name!r}")
    full = settings.slots * -(-max_len // settings.block_size)
    block_bytes = one_block.layer_bytes * one_block.num_layers
    by_default = min(full, max(room.default // block_bytes, 1)) + 1
    blocks = settings.num_blocks or by_default
    if room.largest is not None and blocks * block_bytes > room.largest:
        fits = by_default * block_bytes <= room.largest
        raise InvalidInput(
            f"num_blocks: got {blocks}{'' if settings.num_blocks else ' by default, the least there can be'}, {blocks * block_bytes} "
            f"bytes of KV; the device has memory for {room.largest // block_bytes} blocks of {block_bytes} bytes beside the weights of "
            f"model {model.name!r}; {f'lower it, or leave it out for {by_default}' if fits else 'free some, or take smaller blocks'}"
        )
    return replace(one_block, num_blocks=blocks)
