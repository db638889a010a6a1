"""A decode step small enough to read: embed, write KV, attend, choose, advance; all of it on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.specs import (
    AttentionParams,
    Backend,
    BlockTable,
    Buffer,
    KVGeometry,
    Pool,
    Segment,
    Ticket,
    Trace,
    WriteLoc,
)
from forebay.specs.suite.attention import Array
from forebay.specs.suite.kv import BLOCK_SIZE, HEAD_DIM, poison, same_arrays

VOCAB = 29
"""Tokens of these decoders: few, so that a wrong one comes up soon."""


@dataclass
class Decoder:
    """State of a few slots, and the Segment that decodes the first ``bucket`` of them.

    Two decoders of one seed are twins: what one runs, the other replays.

    Attributes:
        pool: one layer, poisoned where nothing was written.
        segment: one step; it writes the KV of ``token`` at ``position``, attends, and updates ``token``, ``position`` and ``visible``
            of live slots (position >= 0). It emits ``token`` and ``chosen`` int32 ``[bucket]``, and in float32
            ``out [bucket, Hq, Dv]``, ``lse [bucket, Hq]`` and ``logits [bucket, VOCAB]``.
        table_len: columns of the table that a step reads.
        state: int32 Buffers ``token``, ``position`` and ``visible`` ``[slots]``, and ``table [slots, table_len + 1]`` of physical
            blocks.
        weights: float32 Buffers ``wq [VOCAB, Hq*D]``, ``wk [VOCAB, Hkv*D]``, ``wv [VOCAB, Hkv*Dv]`` and ``wo [Hq*Dv, VOCAB]``.
    """

    backend: Backend
    pool: Pool
    segment: Segment
    table_len: int
    state: dict[str, Buffer]
    weights: dict[str, Buffer]

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Every Buffer: state, weights, and those of the pool, its counts included."""
        return (*self.state.values(), *self.weights.values(), *self.pool.buffers)

    def seat(self, slot: int, token: int, blocks: Sequence[int], position: int = 0) -> None:
        """Give a slot to a sequence: its next token, its physical blocks, and how many tokens it has (their KV is there already).

        Uploads to the slot's row of every Buffer of ``state``; there are at most ``table_len + 1`` blocks.
        """
        row = np.full((1, self.state["table"].shape[1]), 10**6, np.int32)
        row[0, : len(blocks)] = blocks
        self.backend.upload(self.state["table"], row, slot)
        for name, value in (("token", token), ("position", position), ("visible", position + 1)):
            self.backend.upload(self.state[name], np.array([value], np.int32), slot)

    def clear(self, slot: int) -> None:
        """Make a slot idle by uploads of position -1 and 0 visible tokens; its table row and token stay as they were."""
        for name, value in (("position", -1), ("visible", 0)):
            self.backend.upload(self.state[name], np.array([value], np.int32), slot)

    def close(self) -> None:
        """Release the pool, and every Buffer of ``state`` and ``weights``."""
        self.backend.release(self.pool)
        for buffer in (*self.state.values(), *self.weights.values()):
            self.backend.release(buffer)


def decoder(
    backend: Backend,
    *,
    slots: int = 4,
    bucket: int = 4,
    table_len: int = 5,
    path: str = "direct",
    layout: str | None = None,
    block_size: int = BLOCK_SIZE,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = HEAD_DIM,
    dtype: str = "float32",
    num_blocks: int = 12,
    window: int | None = None,
    seed: int = 0,
) -> Decoder:
    """A decoder with all of its slots idle, its weights drawn from ``seed``; nothing is run yet.

    ``bucket`` of the ``slots`` take part in a step. ``layout`` None is the backend's own; LATENT has one KV head, whose values are two
    columns fewer than ``dim``. ``dtype`` is the pool's; the rest is computed in float32. ``window`` and ``path`` are those of
    ``paged_decode``. The caller closes it.

    Raises:
        Unsupported: a size, dtype or layout of the pool that the backend does not declare.
    """
    rng = np.random.default_rng(seed)
    latent = layout == "LATENT"
    kv_heads = 1 if latent else kv_heads
    v_dim = dim - 2 if latent else dim
    g = KVGeometry(num_blocks, block_size, kv_heads, dim, dtype=dtype, value_head_dim=v_dim if latent else None)
    pool = backend.create_pool(g, layout)
    poison(backend, pool)
    sizes = {"wq": (VOCAB, heads * dim), "wk": (VOCAB, kv_heads * dim), "wv": (VOCAB, kv_heads * v_dim)}
    sizes["wo"] = (heads * v_dim, VOCAB)
    weights = {
        name: backend.buffer(name, rng.standard_normal(shape).astype(np.float32)) for name, shape in sizes.items()
    }
    idle = {"token": 0, "position": -1, "visible": 0}
    state = {name: backend.buffer(name, np.full(slots, value, np.int32)) for name, value in idle.items()}
    # One more column than there are blocks: a stamp that must never be read as one.
    state["table"] = backend.buffer("table", np.full((slots, table_len + 1), 10**6, np.int32))

    def step(b: Backend) -> Any:
        xp = b.xp
        token, position, visible, table = (
            xp.head(state[name].get(), bucket) for name in ("token", "position", "visible", "table")
        )
        q, k, v = (
            xp.reshape(xp.take(weights[name].get(), token), (bucket, h, d))
            for name, h, d in (("wq", heads, dim), ("wk", kv_heads, dim), ("wv", kv_heads, v_dim))
        )
        blocks = BlockTable(table, physical=True)
        pool.write(0, WriteLoc.paged(blocks, position, table_len=table_len), k, None if latent else v)
        out, lse = b.paged_decode(
            q,
            pool,
            0,
            blocks,
            visible,
            table_len=table_len,
            path=path,
            return_lse=True,
            params=AttentionParams(window=window),
        )
        logits = xp.matmul(xp.reshape(out, (bucket, -1)), weights["wo"].get())
        live = position >= 0
        chosen = xp.argmax(logits)
        updates = {
            state["token"]: xp.where(live, chosen, token),
            state["position"]: xp.where(live, position + 1, position),
            state["visible"]: xp.where(live, visible + 1, visible),
        }
        return updates, {"token": token, "chosen": chosen, "out": out, "lse": lse, "logits": logits}

    segment = Segment(
        "decode",
        step,
        key=(bucket, table_len, path, dtype, pool.generation),
        reads=(*weights.values(), state["table"]),
        updates=(state["token"], state["position"], state["visible"]),
        pools=(pool,),
    )
    return Decoder(backend, pool, segment, table_len, state, weights)


def everything(d: Decoder) -> list[Array]:
    """What every Buffer of a decoder holds, in the order of :attr:`Decoder.buffers`; waits for the device."""
    return [d.backend.fetch(buffer) for buffer in d.buffers]


def warm_trace(d: Decoder) -> Trace:
    """A trace of an idle decoder: every slot is padded, so its one run leaves no mark."""
    d.backend.run(d.segment)
    return d.backend.capture(d.segment)


def copies(ticket: Ticket) -> dict[str, Array]:
    """The emits of a step by name, waited for, in memory of their own that no later step can reach."""
    return {name: value.copy() for name, value in ticket.get().items()}


def same_emits(a: dict[str, Array], b: dict[str, Array]) -> None:
    """Assert that two steps emitted the same names with the same bits, not all of them zero."""
    assert a.keys() == b.keys()
    same_arrays(a.values(), (b[name] for name in a))
