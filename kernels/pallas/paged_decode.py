"""Paged decode attention over pages ``[NB, Hkv, BS, lanes]``, by the Pallas kernel or by a loop in XLA of the same mathematics."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp

from . import decode_kernel, decode_loop
from .decode_kernel import Walk
from .pages import MOST_SCALARS, PageFormat, pages_of_chunk, queries_of_block, rows_of_tile, scalars_of
from .softmax import Softmax

NO_WINDOW: Final = 2**31 - 1
"""A window that all keys are in."""


def paged_decode(
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    visible: jax.Array,
    sinks: jax.Array | None = None,
    *,
    page: PageFormat,
    table_len: int,
    first_block: int,
    scale: jax.Array | float,
    window: jax.Array | int = NO_WINDOW,
    softcap: jax.Array | float | None = None,
    by: str = "pallas",
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of ``q [B, T, Hq, D]``; query t of row b sees keys up to ``visible[b] - (T-1-t)``.

    A block outside ``first_block`` to ``NB - 1``, and a column from ``table_len`` on, stands for keys and values of 0 that take part in
    the softmax; nothing is read there, behind the visible keys, or before a window. A row without keys is 0 with LSE -inf, also
    beside a sink.

    Args:
        q: float32, bfloat16 or float16.
        pages: ``[NB, Hkv, BS, lanes]``, float32 or bfloat16.
        table: int32 ``[B, at least table_len]``.
        visible: int32 ``[B]``; negative ones count as 0.
        sinks: float32 ``[Hq]``, or None.
        page: where K and V lie in the lanes.
        table_len, first_block: as the contract says.
        scale, window, softcap: the same; Python's numbers or scalars of the device.
        by: ``"pallas"``, or ``"xla"`` for the loop.
        interpret: False on a device, True or ``pltpu.InterpretParams`` elsewhere.

    Returns:
        Output ``[B, T, Hq, Dv]`` in q's dtype and natural-log LSE, float32 ``[B, T, Hq]``.

    Raises:
        ValueError: more table entries than scalar memory holds.
    """
    kind = q.dtype
    if kind == jnp.float16:  # which the kernel cannot load, and which is computed in float32 in any case
        q = q.astype(jnp.float32)
    batch, query_len, query_heads, _ = q.shape
    _, heads, block_size, lanes = pages.shape
    if scalars_of(batch, table_len) > MOST_SCALARS and by == "pallas":
        raise ValueError(
            f"paged_decode: {batch} rows of {table_len} table columns are {scalars_of(batch, table_len)} scalars, scalar memory holds "
            f"{MOST_SCALARS}; decode fewer rows at a time, or take larger blocks"
        )
    group = query_heads // heads
    queries = queries_of_block(query_len, group)
    softmax = Softmax(page, group, queries, softcap is not None)
    blocks = -(-query_len // queries)
    walk = Walk(
        softmax,
        heads,
        block_size,
        pages_of_chunk(block_size, heads, lanes, pages.dtype.itemsize),
        blocks,
        query_len,
        table_len,
        first_block,
        pages.shape[0],
        sinks is not None,
        block_size % rows_of_tile(pages.dtype.itemsize) == 0,
    )
    width = page.value_slice[1]
    if batch == 0:
        return jnp.zeros((*q.shape[:3], page.value_dim), kind), jnp.zeros(q.shape[:3], jnp.float32)
    # [B, T, Hkv, G, D] to [B, blocks, Hkv, queries * G, key_lanes], with zeros for queries and lanes that are none.
    spare = blocks * queries - query_len
    grouped = jnp.pad(
        q.reshape(batch, query_len, heads, group, page.key_dim),
        ((0, 0), (0, spare), (0, 0), (0, 0), (0, page.key_lanes - page.key_dim)),
    )
    grouped = grouped.reshape(batch, blocks, queries, heads, group, page.key_lanes).transpose(0, 1, 3, 2, 4, 5)
    grouped = grouped.reshape(batch, blocks, heads, softmax.rows, page.key_lanes)
    by_row = None if sinks is None else jnp.tile(sinks.reshape(heads, group), (1, queries))
    flat = table[:, :table_len].reshape(-1)
    if table_len == 0:  # scalar memory of no size is none; no column is ever looked at
        flat = jnp.zeros((1,), jnp.int32)
    seen = jnp.maximum(visible, 0)
    width_of_window = jnp.asarray(window, jnp.int32)
    numbers = (jnp.asarray(scale, jnp.float32), jnp.asarray(1.0 if softcap is None else softcap, jnp.float32))
    if by == "xla":
        out, lse = decode_loop.run(walk, grouped, pages, flat, seen, by_row, width_of_window, numbers)
    else:
        out, lse = decode_kernel.launch(walk, grouped, pages, flat, seen, by_row, width_of_window, numbers, interpret)
    out = out.reshape(batch, blocks, heads, queries, group, width).transpose(0, 1, 3, 2, 4, 5)
    out = out.reshape(batch, blocks * queries, query_heads, width)[:, :query_len]
    low = page.value_offset - page.value_slice[0]
    lse = lse.reshape(batch, blocks, heads, queries, group).transpose(0, 1, 3, 2, 4)
    return out[..., low : low + page.value_dim].astype(kind), lse.reshape(batch, blocks * queries, query_heads)[
        :, :query_len
    ]


def count_invalid(
    table: jax.Array,
    visible: jax.Array,
    *,
    table_len: int,
    first_block: int,
    num_blocks: int,
    block_size: int,
    query_len: int,
    window: jax.Array | int = NO_WINDOW,
) -> jax.Array:
    """Table columns that stand for no block among those that a row's queries see, scalar int32; more than int32 holds is its largest.

    Args: as in :func:`paged_decode`.
    """
    seen = jnp.maximum(visible, 0)
    low = jnp.maximum(jnp.maximum(seen - (query_len - 1), 0) - window, 0)
    first, end = low // block_size, seen // block_size + (seen % block_size > 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (table.shape[0], table_len), 1)
    blocks = table[:, :table_len]
    bad = (blocks < first_block) | (blocks >= num_blocks)
    inside = (column >= first[:, None]) & (column < end[:, None])
    behind = jnp.maximum(end - jnp.maximum(first, table_len), 0)
    return _sum_to_most(jnp.sum((bad & inside).astype(jnp.int32), axis=1) + behind)


def _sum_to_most(counts: jax.Array) -> jax.Array:
    """The sum of counts that are not negative, or the largest int32 where it is beyond."""
    most = jnp.int32(2**31 - 1)
    total: jax.Array = jax.lax.fori_loop(
        0, counts.shape[0], lambda i, s: s + jnp.minimum(counts[i], most - s), jnp.int32(0)
    )
    return total
