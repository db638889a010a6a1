"""Paged decode attention on the CPU: the public call, its dispatch and its memory (clauses L1, L3, D2 to D6, D9 to
D12).

:func:`prepare` resolves everything that does not depend on the contents of ``visible`` or the table; the callable it
returns may be called again and again with new contents in the same arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from .checks import Array, add_count, expect_float32, expect_int32, expect_storage
from .claims import wait_for_items
from .decode_loop import Scratch, build
from .decode_plan import (
    HEAD_BYTES,
    ROW_BYTES,
    SPLIT,
    Limits,
    Partials,
    Shape,
    Table,
    count_invalid,
    plan_rows,
)
from .gather import prepare_gather_blocks
from .rows import vector_of, view_of
from .tile_ops import TABLE_BYTES, TILE
from .workers import helper, usable_cpus

# Builds of their own for the shapes that most Llama-like models have: G 3, D 64 (SmolLM2-135M), 4 and 64 (Llama 3.2
# 1B), 1 and 64 (SmolLM2-1.7B), 1 and 128 (Llama 2 7B), 4 and 128 (Llama 3 8B, Mistral), 8 and 128 (Llama 3 70B). The
# build for any geometry takes about twice as long.
_SPECIALISED: Final = (
    (3, 64, 4),
    (4, 64, 4),
    (1, 64, 4),
    (1, 128, 4),
    (4, 128, 4),
    (8, 128, 4),
    (3, 64, 2),
    (4, 64, 2),
    (1, 64, 2),
    (1, 128, 2),
    (4, 128, 2),
    (8, 128, 2),
)
_ANY: Final = (0, 0, 0)
_PARTIALS_BUDGET: Final = 64 << 20
"""Bytes of partial results at once; a call that needs more goes over its rows in several passes."""
_BYTES_PER_THREAD: Final = 2 << 20
"""KV bytes that pay for another thread, about 100 microseconds of work: waking one takes a third of that."""
_LOG2E: Final = 1.0 / math.log(2.0)

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


def specialised_keys() -> tuple[tuple[int, int, str], ...]:
    """The geometries with a build of their own: ``(G, D, dtype)``. All others share one build, with the same bits."""
    return tuple((group, dim, "float32" if size == 4 else "bfloat16") for group, dim, size in _SPECIALISED)


@cache
def _loop(group: int, dim: int, size: int) -> Any:
    """The compiled loop of a specialised key, or of any geometry (0, 0, 0)."""
    return build(dim, group, int(size == 2))


def _key(k: Array, v: Array, group: int) -> tuple[int, int, int]:
    """The build for these views; it depends on geometry alone, never on lengths or contents."""
    dim, size = k.shape[3], k.itemsize
    in_place = k.strides[3] == size and v.strides[3] == size and v.shape[3] == dim
    key = (group, dim, size)
    return key if in_place and key in _SPECIALISED else _ANY


class _Memory:
    """Scratch of one call, in one allocation: the plan, the partial results, and for each thread query, scores and
    rows."""

    def __init__(self, shape: Shape, rows: int, splits: int, threads: int, *, brings_rows: bool) -> None:
        _, kv_heads, group, _, _, k_padded, v_padded = shape
        heads = kv_heads * group
        self.rows = max(1, min(rows, _PARTIALS_BUDGET // (splits * heads * (v_padded + 2) * 4)))
        items = self.rows * splits
        shared = [
            HEAD_BYTES + self.rows * ROW_BYTES,
            items * heads * v_padded * 4,
            items * heads * 4,
            items * heads * 4,
        ]
        zero_row = max(k_padded, v_padded) * 4
        thread = [
            heads * k_padded * 4,
            heads * TILE * 4,
            heads * 4,
            4 * TABLE_BYTES,
            brings_rows * TILE * kv_heads * k_padded * 4,
            brings_rows * TILE * kv_heads * v_padded * 4,
        ]
        ends = [0, *accumulate(-(-size // 64) * 64 for size in (zero_row, *shared, *thread * threads))]
        self.buffer = np.empty(ends[-1] + 64, np.uint8)
        base = _address(self.buffer)
        base += -base % 64
        self.buffer[: zero_row + 64] = 0
        zeros, self.plan, sums, maxima, weights, *rest = (base + end for end in ends[:-1])
        self.partials: Partials = (sums, maxima, weights)
        self.scratch: list[Scratch] = [
            (a, b, c, d, e, f, zeros) for a, b, c, d, e, f in zip(*[iter(rest)] * 6, strict=True)
        ]


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _padded(dim: int) -> int:
    """Head sizes in the loop are whole pairs of vectors."""
    return -(-dim // 32) * 32


def _check(
    q: Array,
    k_view: Array,
    v_view: Array,
    table: Array,
    visible: Array,
    out: Array,
    lse: Array,
    sinks: Array | None,
    table_len: int,
    block_size: int,
    window: int | None,
) -> None:
    """Raise ValueError for arrays that do not fit together."""
    if q.ndim != 4 or k_view.ndim != 4 or v_view.ndim != 4:
        raise ValueError(f"q, k_view, v_view: got {q.ndim}, {k_view.ndim} and {v_view.ndim} axes, expected 4 each")
    batch, query_len, heads, k_dim = q.shape
    expect_storage("k_view", k_view, (None, block_size, None, k_dim))
    expect_storage("v_view", v_view, (*k_view.shape[:3], None))
    if k_view.dtype != v_view.dtype:
        raise ValueError(f"v_view: got {v_view.dtype}, expected the dtype of k_view, {k_view.dtype}")
    if heads % k_view.shape[2]:
        raise ValueError(f"q: got {heads} query heads, expected a multiple of the {k_view.shape[2]} KV heads")
    expect_float32("q", q, q.shape)
    expect_float32("out", out, (batch, query_len, heads, v_view.shape[3]))
    expect_float32("lse", lse, (batch, query_len, heads))
    expect_int32("table", table, (batch, None))
    expect_int32("visible", visible, (batch,))
    if sinks is not None:
        expect_float32("sinks", sinks, (heads,))
    if not 0 <= table_len <= table.shape[1]:
        raise ValueError(f"table_len: got {table_len}, expected 0 to the table's width {table.shape[1]}")
    if window is not None and window < 1:
        raise ValueError(f"window: got {window}, expected at least 1 or None")


@dataclass(frozen=True)
class _Source:
    """Where the loop finds its rows: views, the table that leads to them, and what brings them there before each
    call."""

    k: Array
    v: Array
    table: Int32
    limits: Limits
    fetch: Callable[[], None] | None


def _gather(pool: _Source, visible: Int32, query_len: int, window: int | None) -> _Source:
    """Contiguous scratch as a pool of its own, filled from ``pool`` before each call: sequence b, column c is block b
    * len + c."""
    table_len, first_block, num_blocks, block_size = pool.limits
    batch, blocks = len(visible), len(visible) * table_len
    k, v = (np.empty((blocks, *view.shape[1:]), view.dtype) for view in (pool.k, pool.v))
    fetch = prepare_gather_blocks(
        pool.k,
        pool.v,
        pool.table,
        visible,
        *(rows.reshape(batch, table_len * block_size, *rows.shape[2:]) for rows in (k, v)),
        table_len=table_len,
        first_block=first_block,
        num_blocks=num_blocks,
        query_len=query_len,
        window=window,
    )
    table = np.arange(blocks, dtype=np.int32).reshape(batch, table_len)
    return _Source(k, v, table, (table_len, 0, blocks, block_size), fetch)


def _table(table: Int32) -> Table:
    return (_address(table), table.strides[0], table.strides[1])


def prepare(
    q: Float32,
    k_view: Array,
    v_view: Array,
    table: Int32,
    visible: Int32,
    out: Float32,
    lse: Float32,
    invalid: Int32,
    *,
    table_len: int,
    first_block: int,
    num_blocks: int,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float32 | None = None,
    path: Literal["direct", "gather"] = "direct",
    on_gather: Callable[[], None] = lambda: None,
    threads: int | None = None,
) -> Callable[[], None]:
    """Resolve a :func:`paged_decode` once; the returned callable works on what the arrays hold when it is called.

    ``on_gather`` is called once where that callable copies the visible rows first.
    """
    _check(q, k_view, v_view, table, visible, out, lse, sinks, table_len, block_size, window)
    batch, query_len, heads, k_dim = q.shape
    kv_heads, v_dim = k_view.shape[2], v_view.shape[3]
    shape = (query_len, kv_heads, heads // kv_heads, k_dim, v_dim, _padded(k_dim), _padded(v_dim))
    key = _key(k_view, v_view, heads // kv_heads)
    limits = (table_len, first_block, num_blocks, block_size)
    source = _Source(k_view, v_view, table, limits, None)
    if path == "gather":
        source = _gather(source, visible, query_len, window)
        on_gather()
    attend = _loop(*key)
    where, lengths, width = _table(table), vector_of(visible), window or 0
    io = (_address(q), _address(out), _address(lse), 0 if sinks is None else _address(sinks))
    factors = (scale * _LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * _LOG2E)
    token_bytes = kv_heads * (k_dim + v_dim) * k_view.itemsize

    rows, splits = batch * query_len, max(1, -(-table_len * block_size // SPLIT))
    workers = max(1, min(threads or usable_cpus(), rows * splits))
    memory = _Memory(shape, rows, splits, workers, brings_rows=key == _ANY)
    plan, fetch = memory.plan, source.fetch
    k, v, seen = view_of(source.k), view_of(source.v), _table(source.table)

    # Compiled code knows these by address only. A helper may come late, after the caller has dropped the call: its job
    # keeps them alive too.
    alive = (q, k_view, v_view, table, visible, out, lse, sinks, source, memory)

    def job(scratch: Scratch) -> Callable[[], None]:
        def run(_alive: tuple[Any, ...] = alive) -> None:
            attend(plan, shape, k, v, seen, source.limits, factors, io, memory.partials, scratch)

        return run

    mine, *others = (job(scratch) for scratch in memory.scratch)
    passes = [(first, min(memory.rows, rows - first)) for first in range(0, rows, memory.rows)]

    def decode(_alive: tuple[Any, ...] = alive) -> None:
        bad = count_invalid(lengths, batch, query_len, width, where, limits)
        if bad:
            add_count(invalid, bad)
        if fetch is not None:
            fetch()
        for first, count in passes:
            tokens = plan_rows(plan, first, count, lengths, query_len, width, limits, heads, v_dim, io)
            helpers = min(len(others), tokens * token_bytes // _BYTES_PER_THREAD)
            for i in range(helpers):
                helper(i).start(others[i])
            mine()
            if helpers:
                wait_for_items(plan)

    return decode


def paged_decode(
    q: Float32,
    k_view: Array,
    v_view: Array,
    table: Int32,
    visible: Int32,
    out: Float32,
    lse: Float32,
    invalid: Int32,
    *,
    table_len: int,
    first_block: int,
    num_blocks: int,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float32 | None = None,
    path: Literal["direct", "gather"] = "direct",
    threads: int | None = None,
) -> None:
    """Attention of ``T`` queries a sequence over paged KV.

    Query ``t`` of sequence ``b`` sees the first ``n = visible[b] - (T - 1 - t)`` keys, with a window only those from
    ``n - window`` on; ``n <= 0`` gives a row of zeros and a log-sum-exp of -inf. A visible block that the pool does
    not hold is never read: its keys and values are zero and take part in the softmax. Scores, weights and sums are
    float32. The bits of a row depend on its query, its keys and values, and nothing else: not on other rows, T, block
    size, strides, table width, threads or path.

    Args:
        q: float32 ``[B, T, Hq, Dk]``, contiguous.
        k_view: ``[NB, BS, Hkv, Dk]``, float32 or uint16 (bfloat16 bits), any strides.
        v_view: ``[NB, BS, Hkv, Dv]``, same dtype; may be the first columns of ``k_view``.
        table: int32 ``[B, width]``, any strides; entries past the visible range are not read.
        visible: int32 ``[B]``, keys that a sequence's last query sees.
        out: float32 ``[B, T, Hq, Dv]``, contiguous; every row is written.
        lse: float32 ``[B, T, Hq]``, contiguous; natural logarithm of the softmax denominator, written.
        invalid: int32 ``[1]``; the number of (sequence, column) pairs in a visible range that hold no block is added.
        table_len: columns of the table that are blocks; visible keys beyond them count as invalid blocks.
        first_block: lowest block id that may be read (1 with a sink block, else 0).
        num_blocks: ids from here on are invalid.
        block_size: tokens per block.
        scale: factor on ``q . k``.
        window: number of keys a query sees at most, itself included.
        softcap: ``c`` in ``score = c * tanh(score / c)``, applied after the scale.
        sinks: float32 ``[Hq]``, one more score per head in the denominator; it is part of ``lse``, so give it to one
        part only of
            a result that is merged by log-sum-exp.
        path: ``"direct"`` reads the pool in place; ``"gather"`` first copies the visible rows to contiguous memory.
        threads: at most this many threads (default: the CPUs this process may use); small calls use one.

    Raises:
        ValueError: arrays that do not fit together; nothing was written.
    """
    prepare(
        q,
        k_view,
        v_view,
        table,
        visible,
        out,
        lse,
        invalid,
        table_len=table_len,
        first_block=first_block,
        num_blocks=num_blocks,
        block_size=block_size,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        path=path,
        threads=threads,
    )()


def warm(group: int, dim: int, dtype: Literal["float32", "bfloat16"]) -> None:
    """Compile what a call of this geometry uses, or load it from the disk cache: run one small call of it."""
    storage = np.zeros((1, 1, 1, dim), np.float32 if dtype == "float32" else np.uint16)
    result = np.zeros((1, 1, group, dim), np.float32)
    paged_decode(
        result.copy(),
        storage,
        storage,
        np.zeros((1, 1), np.int32),
        np.ones(1, np.int32),
        result,
        np.zeros((1, 1, group), np.float32),
        np.zeros(1, np.int32),
        table_len=1,
        first_block=0,
        num_blocks=1,
        block_size=1,
        scale=1.0,
    )
