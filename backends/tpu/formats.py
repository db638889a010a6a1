"""How what a Buffer holds lies in memory: pages whole, one after the other, as the kernel fetches them.

Left to itself, XLA puts the blocks of a pool innermost where its last axis is no multiple of 128 or the one before is short, and copies
the pool whenever a kernel asks for pages. So every program is told.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout


def cell_format(shape: tuple[int, ...], sharding: Any) -> Format:
    """The format of an array of a Buffer; one of four axes may be a layer of a pool, which is ``[NB, BS, 1, D]`` in LATENT.

    Memory of the host has no tiles, and rows lie one after the other there as they are.
    """
    if len(shape) != 4 or next(iter(sharding.device_set)).platform == "cpu":
        return Format(None, sharding)
    return Format(Layout((0, 2, 1, 3) if shape[2] == 1 else (0, 1, 2, 3)), sharding)


def described(cell: Any) -> jax.ShapeDtypeStruct:
    """The array of a Buffer without its data, for a program to be compiled for it."""
    return jax.ShapeDtypeStruct(cell.shape, cell.dtype, sharding=cell_format(cell.shape, cell.sharding))


def zeros(shape: tuple[int, ...], dtype: str, device: Any) -> jax.Array:
    """What a new Buffer holds."""
    form = cell_format(shape, jax.sharding.SingleDeviceSharding(device))
    if form.layout is not None:
        made: jax.Array = _zeros(shape, dtype, form)()
        return made
    # Not by a program of XLA: it would be another one for each shape.
    placed: jax.Array = jax.device_put(np.zeros(shape, np.dtype(dtype)), device, may_alias=False)
    return placed


@lru_cache(maxsize=64)
def _zeros(shape: tuple[int, ...], dtype: str, form: Format) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=form)
