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
from .softmax import Numbers, Softmax, absorb, begin, finish, ranges


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
        with_sinks: whether there are sinks.
        whole_tiles: whether a page is whole tiles of the vector memory, so that pages of a chunk can lie one behind the other there.
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
    with_sinks: bool
    whole_tiles: bool

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

    def span(visible_ref: Any, window: jax.Array, program: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First key and end of the keys that a query of the program sees and the table has."""
        visible = visible_ref[row_of(program)]
        first = first_query(program)
        last = jnp.minimum(first + softmax.queries, walk.query_len) - 1
        high = jnp.minimum(jnp.maximum(visible - (walk.query_len - 1 - last), 0), walk.most)
        low = jnp.maximum(jnp.maximum(visible - (walk.query_len - 1 - first), 0) - window, 0)
        return jnp.minimum(low, high), high

    def chunks(visible_ref: Any, window: jax.Array, program: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first chunk of a program, and how many it has: at least one, which may be empty."""
        low, high = span(visible_ref, window, program)
        first = quotient(low, walk.chunk_tokens)
        return first, jnp.maximum(quotient(high + (walk.chunk_tokens - 1), walk.chunk_tokens) - first, 1)

    def body(*refs: Any) -> None:
        visible_ref, table_ref, window_ref, numbers_ref, q_ref, *rest = refs
        window = window_ref[0]
        sinks_ref = rest.pop(0) if walk.with_sinks else None
        pages_ref, out_ref, lse_ref, buffers, arrived, half_ref, peak_ref, total_ref, summed_ref = rest
        program, programs = pl.program_id(0), pl.num_programs(0)

        def page_of(of: jax.Array, chunk: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Page j of a chunk: whether a query sees it, whether it is a block, and its id."""
            low, high = span(visible_ref, window, of)
            column = chunk * walk.chunk_pages + j
            seen = (column * walk.block_size < high) & ((column + 1) * walk.block_size > low)
            page = table_ref[row_of(of) * walk.table_len + jnp.where(seen, column, 0)]
            return seen, seen & (page >= walk.first_block) & (page < walk.num_blocks), page

        def copy_of(page: jax.Array, half: jax.Array, j: jax.Array) -> Any:
            return pltpu.make_async_copy(pages_ref.at[page], place_of(half, j), arrived.at[half])

        def place_of(half: jax.Array, j: jax.Array) -> Any:
            if not walk.whole_tiles:
                return buffers.at[half, j]
            first_token = pl.multiple_of(j * walk.block_size, walk.block_size)
            return buffers.at[half, :, pl.ds(first_token, walk.block_size)]

        def chunk_at(half: jax.Array) -> jax.Array:
            if walk.whole_tiles:
                return buffers[half]  # type: ignore[no-any-return]  # Pallas leaves it untyped
            # Rows of parts of tiles are put together as elements of four bytes: narrower ones cannot be moved by one row.
            by_page = buffers[half]
            rows = jnp.swapaxes(by_page.astype(jnp.float32), 0, 1).reshape(
                walk.heads, walk.chunk_tokens, by_page.shape[3]
            )
            return rows.astype(by_page.dtype)

        first, count = chunks(visible_ref, window, program)
        visible = visible_ref[row_of(program)]
        start, end = ranges(visible, first_query(program), softmax=softmax, query_len=walk.query_len, window=window)
        sinks = None if sinks_ref is None else sinks_ref[:, :, :1]
        peak, total = begin(start, end, walk.most, sinks, walk.heads)
        peak_ref[...] = jnp.broadcast_to(peak, peak_ref.shape)
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
        summed_ref[...] = jnp.zeros_like(summed_ref)
        seen_end = jnp.minimum(end, walk.most)
        numbers = numbers_ref[0], numbers_ref[1]

        @pl.when(program == 0)
        def _begin() -> None:
            half_ref[0] = 0

        def turn(i: jax.Array, _: None) -> None:
            half = half_ref[0]
            last = i + 1 == count
            following = jnp.where(last, program + 1, program)
            # Behind the last program there is nothing to fetch; its own scalars stand in, for there are no others.
            ahead = jnp.minimum(following, programs - 1)
            next_chunk = jnp.where(last, chunks(visible_ref, window, ahead)[0], first + i + 1)

            def one(j: jax.Array, _: None) -> None:
                _seen, is_block, page = page_of(ahead, next_chunk, j)

                @pl.when(is_block & (following < programs))
                def _fetch() -> None:
                    copy_of(page, 1 - half, j).start()

                seen, is_block, page = page_of(program, first + i, j)

                @pl.when(is_block & (i >= 0))
                def _await() -> None:
                    copy_of(page, half, j).wait()

                @pl.when(seen & ~is_block & (i >= 0))
                def _clear() -> None:
                    place = place_of(half, j)
                    place[...] = jnp.zeros(place.shape, place.dtype)

            lax.fori_loop(0, walk.chunk_pages, one, None)
            state = (peak_ref[:, :, :1], total_ref[:, :, :1], summed_ref[...])
            at = (first + i) * walk.chunk_tokens
            peak, total, summed = absorb(state, q_ref[...], chunk_at(half), at, start, seen_end, numbers, softmax)
            peak_ref[...] = jnp.broadcast_to(peak, peak_ref.shape)
            total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
            summed_ref[...] = summed
            half_ref[0] = 1 - half

        # The first program begins a turn early: no page of that turn is seen, it only fetches the first chunk.
        lax.fori_loop(jnp.where(program == 0, -1, 0), count, turn, None)
        out, lse = finish((peak_ref[:, :, :1], total_ref[:, :, :1], summed_ref[...]), start, end)
        out_ref[...] = out.astype(out_ref.dtype)
        lse_ref[...] = jnp.broadcast_to(lse, lse_ref.shape)

    return body


def launch(
    walk: Walk,
    q: jax.Array,
    pages: jax.Array,
    table: jax.Array,
    visible: jax.Array,
    sinks: jax.Array | None,
    window: jax.Array,
    numbers: Numbers,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Run it: output ``[B, blocks, Hkv, rows, width]`` in q's dtype and LSE float32 ``[B, blocks, Hkv, rows]``.

    Args:
        walk: the sizes.
        q: ``[B, blocks, Hkv, rows, key_lanes]``.
        pages: ``[NB, Hkv, BS, lanes]``.
        table: int32 ``[B * table_len]``; visible: int32 ``[B]``, not negative.
        sinks: float32 ``[Hkv, rows]`` or None.
        window: scalar int32; numbers: scale and soft-cap.
        interpret: as Pallas takes it.
    """
    batch, blocks, heads, rows, key_lanes = q.shape
    width = walk.softmax.page.value_slice[1]
    chunk = (heads, walk.chunk_tokens) if walk.whole_tiles else (walk.chunk_pages, heads, walk.block_size)

    def of_program(lanes: int) -> Any:
        return pl.BlockSpec(
            (None, None, heads, rows, lanes),
            lambda p, *_: (quotient(p, blocks), lax.rem(p, jnp.int32(blocks)), 0, 0, 0),
        )

    inputs, specs = [q], [of_program(key_lanes)]
    if sinks is not None:
        inputs.append(jnp.broadcast_to(sinks[:, :, None], (heads, rows, LANES)))
        specs.append(pl.BlockSpec((heads, rows, LANES), lambda *_: (0, 0, 0)))
    out, lse = pl.pallas_call(
        kernel(walk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch * blocks,),
            in_specs=[*specs, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=[of_program(width), of_program(LANES)],
            scratch_shapes=[
                pltpu.VMEM((2, *chunk, pages.shape[3]), pages.dtype),
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
    )(visible, table, window.reshape(1), jnp.stack(numbers), *inputs, pages)
    return out, lse[..., 0]
