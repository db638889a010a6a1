"""Attention in float64 over the KV that a pool stores, found by each layout's own index formula."""

from __future__ import annotations

from forebay.specs import Backend, KVGeometry, Pool
from forebay.specs.suite import attention
from forebay.specs.suite.attention import Array, Attention


def rows_at(layout: str, arrays: list[Array], g: KVGeometry, block: Array, offset: Array) -> tuple[Array, Array]:
    """K ``[n, Hkv, D]`` and V ``[n, Hkv, Dv]`` of the tokens at ``(block [n], offset [n])``, by each layout's own index formula.

    Raises:
        ValueError: the layout has no formula here.
    """
    if layout == "NHD":
        return arrays[0][block, offset], arrays[1][block, offset]
    if layout == "HND":
        return arrays[0][block, :, offset], arrays[1][block, :, offset]
    if layout == "KV2":
        return arrays[0][block, 0, offset], arrays[0][block, 1, offset]
    if layout == "PACKED":
        both = arrays[0][block, offset]
        return both[..., : g.head_dim], both[..., g.head_dim :]
    if layout == "FUSED":
        lanes = arrays[0][block, :, offset]
        return lanes[..., : g.head_dim], lanes[..., g.head_dim : 2 * g.head_dim]
    if layout == "LATENT":
        entry = arrays[0][block, offset]
        return entry, entry[..., : g.value_dim]
    raise ValueError(f"the oracle has no formula for layout {layout}")


def stored(backend: Backend, pool: Pool, layer: int) -> list[Array]:
    """What the device holds of one layer, as numpy (bfloat16 as exact float32)."""
    return [backend.fetch(buffer) for buffer in pool.storage(layer)]


def attend(
    pool: Pool,
    arrays: list[Array],
    q: Array,
    table: Array,
    visible: Array,
    *,
    table_len: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Attention:
    """Attention of ``q [B, T, Hq, D]`` over ``arrays``, what one layer of the pool holds (see :func:`stored`).

    ``table`` int32 ``[B, any]`` names physical blocks, ``visible`` int32 ``[B]`` counts tokens, ``sinks`` is ``[Hq]``; all are numpy.
    ``scale`` None is 1/sqrt(D). See :func:`.attention.attend`.
    """
    g = pool.geometry
    return attention.attend(
        q,
        lambda block, offset: rows_at(pool.layout, arrays, g, block, offset),
        table,
        visible,
        kv_heads=g.num_kv_heads,
        value_dim=g.value_dim,
        table_len=table_len,
        first_block=pool.first_block,
        num_blocks=g.num_blocks,
        block_size=g.block_size,
        scale=g.head_dim**-0.5 if scale is None else scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
