"""Paged attention that JAX ships for TPUs, at the sizes of ours; for a device alone."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final

from forebay.hardware.checking.bandwidth import BLOCK, KV_HEADS, Call

HOME: Final = "jax.experimental.pallas.ops.tpu"
AT_GROUP: Final = 4
"""The group at which peers are measured: theirs have to be compiled too."""
CHUNK_PAGES: Final = 32
"""Pages of a block of computation: 512 tokens, the usual of those who use it."""


def peers(
    batch: int, context: int, group: int, dim: int, chain: int
) -> tuple[dict[str, Callable[[], Call]], dict[str, str]]:
    """By name what makes a call of ``chain`` attentions, one of the other, and why others are absent; bfloat16, random pages.

    Head sizes that a peer refuses are asked for as well: its own error is the row.
    """
    if group != AT_GROUP:
        return {}, {}
    makers = {"paged_attention": _paged, "ragged_paged_attention": _ragged}
    ready: dict[str, Callable[[], Call]] = {}
    absent: dict[str, str] = {}
    for name, make in makers.items():
        if find_spec(f"{HOME}.{name}") is None:
            absent[name] = "not present"
        else:
            ready[name] = _later(make, batch, context, group, dim, chain)
    return ready, absent


def _later(make: Callable[..., Call], *sizes: int) -> Callable[[], Call]:
    return lambda: make(*sizes)


def _chained(attend: Callable[..., Any], chain: int) -> Any:
    import jax

    @jax.jit
    def run(q: Any, *rest: Any) -> Any:
        return jax.lax.fori_loop(0, chain, lambda _, x: attend(x, *rest).astype(x.dtype), q)

    return run


def _inputs(batch: int, context: int, group: int, dim: int) -> tuple[Any, Any, Any]:
    """``q [B, Hq, D]``, table ``[B, width]`` of pages in random order, lengths ``[B]``."""
    import jax
    import jax.numpy as jnp

    width = -(-context // BLOCK)
    key = jax.random.key(0)
    q = jax.random.normal(key, (batch, KV_HEADS * group, dim), jnp.bfloat16)
    table = jax.random.permutation(key, batch * width).astype(jnp.int32).reshape(batch, width)
    return q, table, jnp.full((batch,), context, jnp.int32)


def _paged(batch: int, context: int, group: int, dim: int, chain: int) -> Call:
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    q, table, lengths = _inputs(batch, context, group, dim)
    k = jnp.zeros((KV_HEADS, table.size, BLOCK, dim), jnp.bfloat16)
    v = jnp.zeros_like(k)
    pages = min(CHUNK_PAGES, table.shape[1])

    def attend(x: Any, *rest: Any) -> Any:
        return paged_attention(x, *rest, pages_per_compute_block=pages)

    run = _chained(attend, chain)
    return lambda: run(q, k, v, lengths, table)


def _ragged(batch: int, context: int, group: int, dim: int, chain: int) -> Call:
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    q, table, lengths = _inputs(batch, context, group, dim)
    pages = jnp.zeros((table.size, BLOCK, 2 * KV_HEADS, dim), jnp.bfloat16)
    run = _chained(ragged_paged_attention, chain)
    starts, rows = jnp.arange(batch + 1, dtype=jnp.int32), jnp.full((1,), batch, jnp.int32)
    return lambda: run(q, pages, lengths, table, starts, rows)
