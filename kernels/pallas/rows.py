"""Rows in and out of pages ``[NB, Hkv, BS, lanes]``: scatters and gathers of XLA, which alias a donated pool and copy nothing of it.

JAX counts a negative index from the end even where it drops others, so every row that must not land is sent to page NB first.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

PAD: Final = -1
MOST: Final = 2**31 - 1


def slots_of(table: jax.Array, positions: jax.Array, *, table_len: int, block_size: int, num_blocks: int) -> jax.Array:
    """Slots int32 ``[B * T]`` of ``positions [B]`` or ``[B, T]`` in the sequences of ``table [B, width]``.

    Position -1 gives -1, a pad. A position that is negative otherwise or has no column, and a block that is not in the pool, give
    ``num_blocks * block_size``: out of range.
    """
    at = positions.reshape(table.shape[0], prod(positions.shape[1:]))
    column = jnp.maximum(at, 0) // block_size
    outside = num_blocks * block_size
    if table_len == 0:
        slots = jnp.full_like(at, outside)
    else:
        block = jnp.take_along_axis(table[:, :table_len], jnp.minimum(column, table_len - 1), axis=1)
        known = (at >= 0) & (column < table_len) & (block >= 0) & (block < num_blocks)
        slots = jnp.where(known, jnp.where(known, block, 0) * block_size + jnp.maximum(at, 0) % block_size, outside)
    return jnp.where(at == PAD, PAD, slots).reshape(-1)


def _places(slots: jax.Array, first_slot: int, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which slots are rows of the pool, and page and offset of each; page NB where it is none."""
    blocks, _, block_size, _ = shape
    live = (slots >= first_slot) & (slots < blocks * block_size)
    safe = jnp.where(live, slots, 0)
    return live, jnp.where(live, safe // block_size, blocks), safe % block_size


def counted(count: jax.Array, bad: jax.Array) -> jax.Array:
    """``count [1]`` int32, not negative, with the number of true elements added; it stays at the largest int32."""
    return count + jnp.minimum(jnp.sum(bad.astype(jnp.int32)), MOST - count)


def write_rows(
    pages: jax.Array, dropped: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array | None, *, first_slot: int
) -> tuple[jax.Array, jax.Array]:
    """Pages and count after rows ``k [N, Hkv, D]``, ``v [N, Hkv, Dv]`` landed at ``slots`` int32 ``[N]``, rounded to the pages' dtype.

    Lanes that belong to nobody become 0. Slots outside ``first_slot`` to ``NB * BS - 1`` are dropped, and counted unless they are -1.
    ``v`` is None where V is part of K.
    """
    live, page, offset = _places(slots, first_slot, pages.shape)
    rows = (k if v is None else jnp.concatenate((k.astype(pages.dtype), v.astype(pages.dtype)), -1)).astype(pages.dtype)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, pages.shape[3] - rows.shape[2])))
    return pages.at[page, :, offset].set(rows, mode="drop"), counted(dropped, ~live & (slots != PAD))


def read_rows(
    pages: jax.Array, dropped: jax.Array, slots: jax.Array, *, first_slot: int
) -> tuple[jax.Array, jax.Array]:
    """Rows ``[N, Hkv, lanes]`` at ``slots`` int32 ``[N]``, 0 where they are none, and the count after it."""
    live, page, offset = _places(slots, first_slot, pages.shape)
    rows = pages[jnp.minimum(page, pages.shape[0] - 1), :, offset]
    return jnp.where(live[:, None, None], rows, jnp.zeros_like(rows)), counted(dropped, ~live & (slots != PAD))


def copy_rows(
    layers: tuple[jax.Array, ...], dropped: jax.Array, source: jax.Array, target: jax.Array, *, first_slot: int
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Every layer's pages after rows went from ``source`` to ``target``, int32 ``[N]``, all read before any is written.

    A row without a place at one of its ends stays where it is, and is counted once unless one of them is -1.
    """
    readable, from_page, from_offset = _places(source, first_slot, layers[0].shape)
    writable, to_page, to_offset = _places(target, first_slot, layers[0].shape)
    live, blocks = readable & writable, layers[0].shape[0]
    to_page = jnp.where(live, to_page, blocks)
    padded = (source == PAD) | (target == PAD)
    moved = tuple(
        pages.at[to_page, :, to_offset].set(pages[jnp.minimum(from_page, blocks - 1), :, from_offset], mode="drop")
        for pages in layers
    )
    return moved, counted(dropped, ~live & ~padded)


def stage_pages(pages: jax.Array, new: jax.Array, targets: jax.Array, tokens: jax.Array, *, lanes: int) -> jax.Array:
    """Pages after ``new [n, Hkv, BS, lanes]`` landed at ``targets`` int32 ``[n]``: the first ``tokens [n]`` rows of each, bit for bit.

    Lanes from ``lanes`` on keep what they held, and so do the rows behind. A target of NB is none.
    """
    if pages.dtype.itemsize != 2:
        return _staged(pages, new, targets, tokens, lanes=lanes)
    # XLA for the host takes two bytes through float32, which changes the bits of a NaN; integers it leaves alone. For a TPU the pages
    # would be copied to be integers.
    found: jax.Array = lax.platform_dependent(
        pages,
        new,
        targets,
        tokens,
        cpu=partial(_staged_as_integers, lanes=lanes),
        default=partial(_staged, lanes=lanes),
    )
    return found


def _staged_as_integers(
    pages: jax.Array, new: jax.Array, targets: jax.Array, tokens: jax.Array, *, lanes: int
) -> jax.Array:
    into, words = (lax.bitcast_convert_type(x, jnp.uint16) for x in (pages, new))
    return lax.bitcast_convert_type(_staged(into, words, targets, tokens, lanes=lanes), pages.dtype)


def _staged(pages: jax.Array, new: jax.Array, targets: jax.Array, tokens: jax.Array, *, lanes: int) -> jax.Array:
    old = pages[jnp.minimum(targets, pages.shape[0] - 1)]
    row = lax.broadcasted_iota(jnp.int32, old.shape, 2)
    lane = lax.broadcasted_iota(jnp.int32, old.shape, 3)
    chosen = (row < tokens[:, None, None, None]) & (lane < lanes)
    return pages.at[targets].set(jnp.where(chosen, new, old), mode="drop")


def gather_pages(
    pages: jax.Array,
    table: jax.Array,
    visible: jax.Array,
    *,
    table_len: int,
    first_block: int,
    query_len: int,
    window: jax.Array | int,
) -> jax.Array:
    """The visible pages of each row, one after the other: ``[B * max(table_len, 1), Hkv, BS, lanes]``.

    A column that stands for no block, or that no query sees, gives a page of zeros and reads nothing of its own.
    """
    blocks, block_size = pages.shape[0], pages.shape[2]
    columns = max(table_len, 1)
    ids = table[:, :table_len] if table_len else jnp.full((table.shape[0], 1), -1, jnp.int32)
    seen = jnp.maximum(visible, 0)[:, None]
    first = jnp.maximum(jnp.maximum(seen - (query_len - 1), 0) - window, 0)
    column = lax.broadcasted_iota(jnp.int32, (table.shape[0], columns), 1)
    needed = (column < seen // block_size + (seen % block_size > 0)) & (column >= first // block_size)
    held = (needed & (ids >= first_block) & (ids < blocks)).reshape(-1)
    found = pages[jnp.where(held, ids.reshape(-1), 0)]
    return jnp.where(held[:, None, None, None], found, jnp.zeros_like(found))


def merge_partials(outs: tuple[jax.Array, ...], lses: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Parts of one attention ``[..., Hq, Dv]`` by their natural-log LSE ``[..., Hq]``; an empty part (LSE -inf) is not read."""
    lse = jnp.stack(lses)
    out = jnp.stack([x.astype(jnp.float32) for x in outs])
    peak = jnp.max(lse, axis=0)
    none = peak == -jnp.inf
    safe = jnp.where(none, 0.0, peak)
    empty = lse == -jnp.inf
    weight = jnp.where(empty, 0.0, jnp.where(lse == peak, 1.0, jnp.exp(lse - safe)))
    total = jnp.where(none, 1.0, jnp.sum(weight, axis=0))
    merged = jnp.sum(jnp.where(empty[..., None], 0.0, out * (weight / total)[..., None]), axis=0)
    return merged.astype(outs[0].dtype), jnp.where(none, -jnp.inf, safe + jnp.log(total))
