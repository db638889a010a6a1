"""Host KV and how the staging tests hand it over."""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay.specs import Backend, KVGeometry, Pool
from forebay.specs.suite.attention import Array
from forebay.specs.suite.kv import as_stored, geometry

G = geometry(num_blocks=8, num_layers=2)


def host_kv(g: KVGeometry = G, blocks: int = 6, seed: int = 0) -> tuple[Array, Array]:
    """Host K and V, each ``[blocks, block_size, Hkv, D]``, as the device will hold it, drawn from ``seed``.

    float32 or float16 values, or uint16 bit patterns of bfloat16, by ``g.dtype``.
    """
    shape = (2, blocks, g.block_size, g.num_kv_heads, g.head_dim)
    both = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    k, v = as_stored(both, g.dtype)
    return k, v


def stage(
    b: Backend, k: Any, v: Any, shadow: Pool, src: Any, dst: Any, tokens: Any, layer: Any = 0, **options: Any
) -> None:
    """Stage host blocks ``src`` of ``k`` and ``v`` (see :func:`host_kv`) into blocks ``dst`` of one layer, ``tokens`` of them valid.

    With the shadow's own dtype unless ``options`` name another; untyped, for wrong types are refused as well. Raises what
    ``Backend.stage`` raises.
    """
    options.setdefault("dtype", shadow.geometry.dtype)
    b.stage(k, v, shadow, layer, src_blocks=src, dst_blocks=dst, tokens=tokens, **options)
