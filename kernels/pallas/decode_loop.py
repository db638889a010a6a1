"""The same attention as a loop in XLA: a program a query block, a chunk of pages gathered at a time. For hosts without a TPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .decode_kernel import Walk
from .softmax import Numbers, absorb, begin, finish, ranges


def run(
    walk: Walk,
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    visible: jax.Array,
    sinks: jax.Array | None,
    window: jax.Array,
    numbers: Numbers,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as of :func:`.decode_kernel.launch`; rows one after the other, so that none depends on another."""
    batch, blocks, heads, _, _ = q.shape
    softmax, lanes = walk.softmax, pages.shape[3]

    def program(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        row, block = index // blocks, index % blocks
        queries = lax.dynamic_index_in_dim(q.reshape(batch * blocks, *q.shape[2:]), index, keepdims=False)
        start, end = ranges(
            visible[row], block * softmax.queries, softmax=softmax, query_len=walk.query_len, window=window
        )
        peak, total = begin(start, end, walk.most, sinks if sinks is None else sinks[..., None], heads)
        seen_end = jnp.minimum(end, walk.most)
        low = jnp.min(jnp.where(end > start, start, walk.most)) // walk.chunk_tokens
        high = (jnp.max(seen_end) + walk.chunk_tokens - 1) // walk.chunk_tokens

        def turn(
            chunk: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            column = chunk * walk.chunk_pages + lax.iota(jnp.int32, walk.chunk_pages)
            known = column < walk.table_len
            ids = table[row * walk.table_len + jnp.where(known, column, 0)]
            held = known & (ids >= walk.first_block) & (ids < walk.num_blocks)
            found = pages[jnp.where(held, ids, 0)]
            found = jnp.where(held[:, None, None, None], found, jnp.zeros_like(found))
            page = found.transpose(1, 0, 2, 3).reshape(heads, walk.chunk_tokens, lanes)
            return absorb(state, queries, page, chunk * walk.chunk_tokens, start, seen_end, numbers, softmax)

        summed = jnp.zeros((heads, softmax.rows, softmax.page.value_slice[1]), jnp.float32)
        state = lax.fori_loop(low, high, turn, (peak, total, summed))
        out, lse = finish(state, start, end)
        return out.astype(q.dtype), lse[..., 0]

    out, lse = lax.map(program, lax.iota(jnp.int32, batch * blocks))
    return out.reshape(batch, blocks, *out.shape[1:]), lse.reshape(batch, blocks, *lse.shape[1:])
