"""The decode kernel: one program a query block, all KV heads, pages fetched by DMA of our own into two buffers.

While a chunk is computed the next one is on its way, also across programs: the last chunk of a row fetches the first of the next row.
Chunks lie at absolute positions, so a row's bits depend on its own keys alone. A page is waited for exactly where it was asked for:
by the same question of the same scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .pages import LANES
from .softmax import Softmax, absorb, begin, finish, ranges


@dataclass(frozen=True)
class Walk:
    """What the kernel knows at compile time besides the softmax.

    Attributes:
        softmax: the mathematics.
        heads: Hkv.
        block_size: BS.
        chunk_pages: pages of a chunk.
        blocks_of_queries: query blocks of a row of the batch.
        query_len: T.
        table_len: columns of the table, which is flat.
        first_block, num_blocks: the range of ids that are blocks.
        window: W, or None.
        with_sinks: whether there are sinks.
    """

    softmax: Softmax
    heads: int
    block_size: int
    chunk_pages: int
    blocks_of_queries: int
    query_len: int
    table_len: int
    first_block: int
    num_blocks: int
    window: int | None
    with_sinks: bool

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.chunk_pages * self.block_size

    @property
    def most(self) -> int:
        """Keys that the table has columns for."""
        return min(self.table_len * self.block_size, 2**31 - 1)


def quotient(x: jax.Array, n: int) -> jax.Array:
    """``x // n`` of an ``x`` that is not negative; ``//`` asks for the signs as well, and for that Pallas wants a TPU to be there."""
    return lax.div(x, jnp.int32(n))


def kernel(walk: Walk) -> Callable[..., None]:
    """The kernel's function for these sizes."""
    softmax = walk.softmax

    def row_of(program: jax.Array) -> jax.Array:
        return quotient(program, walk.blocks_of_queries)

    def first_query(program: jax.Array) -> jax.Array:
        return lax.rem(program, jnp.int32(walk.blocks_of_queries)) * softmax.queries

    def span(visible_ref: Any, program: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First key and end of the keys that a query of the program sees and the table has."""
        visible = visible_ref[row_of(program)]
        first = first_query(program)
        last = jnp.minimum(first + softmax.queries, walk.query_len) - 1
        high = jnp.minimum(jnp.maximum(visible - (walk.query_len - 1 - last), 0), walk.most)
        low = jnp.int32(0)
        if walk.window is not None:
            low = jnp.maximum(jnp.maximum(visible - (walk.query_len - 1 - first), 0) - walk.window, 0)
        return jnp.minimum(low, high), high

    def chunks(visible_ref: Any, program: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first chunk of a program, and how many it has: at least one, which may be empty."""
        low, high = span(visible_ref, program)
        first = quotient(low, walk.chunk_tokens)
        return first, jnp.maximum(quotient(high + (walk.chunk_tokens - 1), walk.chunk_tokens) - first, 1)

    def body(*refs: Any) -> None:
        visible_ref, table_ref, q_ref, *rest = refs
        sinks_ref = rest.pop(0) if walk.with_sinks else None
        pages_ref, out_ref, lse_ref, buffers, arrived, half_ref, peak_ref, total_ref, summed_ref = rest
        program, programs = pl.program_id(0), pl.num_programs(0)

        def each_page(of: jax.Array, chunk: jax.Array, half: jax.Array, held: Any, missing: Any = None) -> None:
            """``held(copy)`` for each page of a chunk that is a block, ``missing(place)`` for those that are seen and none."""
            low, high = span(visible_ref, of)
            row = row_of(of)

            def one(j: jax.Array, _: None) -> None:
                column = chunk * walk.chunk_pages + j
                seen = (column * walk.block_size < high) & ((column + 1) * walk.block_size > low)
                page = table_ref[row * walk.table_len + jnp.where(seen, column, 0)]
                block = (page >= walk.first_block) & (page < walk.num_blocks)
                place = buffers.at[half, :, pl.ds(pl.multiple_of(j * walk.block_size, walk.block_size), walk.block_size)]

                @pl.when(seen & block)
                def _() -> None:
                    held(pltpu.make_async_copy(pages_ref.at[page], place, arrived.at[half]))

                if missing is not None:

                    @pl.when(seen & ~block)
                    def _() -> None:
                        missing(place)

            lax.fori_loop(0, walk.chunk_pages, one, None)

        def fetch(of: jax.Array, chunk: jax.Array, half: jax.Array) -> None:
            each_page(of, chunk, half, lambda copy: copy.start())

        def clear(place: Any) -> None:
            place[...] = jnp.zeros(place.shape, place.dtype)

        @pl.when(program == 0)
        def _() -> None:
            half_ref[0] = 0
            fetch(program, chunks(visible_ref, program)[0], jnp.int32(0))

        first, count = chunks(visible_ref, program)
        visible = visible_ref[row_of(program)]
        start, end = ranges(visible, first_query(program), softmax=softmax, query_len=walk.query_len, window=walk.window)
        sinks = None if sinks_ref is None else sinks_ref[:, :, :1]
        peak, total = begin(start, end, walk.most, sinks, walk.heads)
        peak_ref[...] = jnp.broadcast_to(peak, peak_ref.shape)
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
        summed_ref[...] = jnp.zeros_like(summed_ref)
        seen_end = jnp.minimum(end, walk.most)

        def turn(i: jax.Array, _: None) -> None:
            half = half_ref[0]
            last = i + 1 == count
            following = jnp.where(last, program + 1, program)

            @pl.when(following < programs)
            def _() -> None:
                fetch(following, jnp.where(last, chunks(visible_ref, following)[0], first + i + 1), 1 - half)

            each_page(program, first + i, half, lambda copy: copy.wait(), clear)
            state = (peak_ref[:, :, :1], total_ref[:, :, :1], summed_ref[...])
            at = (first + i) * walk.chunk_tokens
            peak, total, summed = absorb(state, q_ref[...], buffers[half], at, start, seen_end, softmax)
            peak_ref[...] = jnp.broadcast_to(peak, peak_ref.shape)
            total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
            summed_ref[...] = summed
            half_ref[0] = 1 - half

        lax.fori_loop(0, count, turn, None)
        out, lse = finish((peak_ref[:, :, :1], total_ref[:, :, :1], summed_ref[...]), start, end)
        out_ref[...] = out.astype(out_ref.dtype)
        lse_ref[...] = jnp.broadcast_to(lse, lse_ref.shape)

    return body


def launch(walk: Walk, q: jax.Array, pages: jax.Array, table: jax.Array, visible: jax.Array, sinks: Any, interpret: Any) -> Any:
    """Run it: output ``[B, blocks, Hkv, rows, width]`` in q's dtype and LSE float32 ``[B, blocks, Hkv, rows]``.

    Args:
        walk: the sizes.
        q: ``[B, blocks, Hkv, rows, key_lanes]``.
        pages: ``[NB, Hkv, BS, lanes]``.
        table: int32 ``[B * table_len]``; visible: int32 ``[B]``, not negative.
        sinks: float32 ``[Hkv, rows]`` or None.
        interpret: as Pallas takes it.
    """
    batch, blocks, heads, rows, key_lanes = q.shape
    width = walk.softmax.page.value_slice[1]

    def of_program(lanes: int) -> Any:
        return pl.BlockSpec(
            (None, None, heads, rows, lanes),
            lambda p, *_: (quotient(p, blocks), lax.rem(p, jnp.int32(blocks)), 0, 0, 0),
        )

    inputs, specs = [q], [of_program(key_lanes)]
    if sinks is not None:
        inputs.append(jnp.broadcast_to(sinks[:, :, None], (heads, rows, LANES)))
        specs.append(pl.BlockSpec((heads, rows, LANES), lambda p, *_: (0, 0, 0)))
    out, lse = pl.pallas_call(
        kernel(walk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch * blocks,),
            in_specs=[*specs, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=[of_program(width), of_program(LANES)],
            scratch_shapes=[
                pltpu.VMEM((2, heads, walk.chunk_tokens, pages.shape[3]), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, width), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, blocks, heads, rows, width), q.dtype),
            jax.ShapeDtypeStruct((batch, blocks, heads, rows, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_decode",
    )(visible, table, *inputs, pages)
    return out, lse[..., 0]
