"""What the contract tests are made of: pools full of poison, rows written through the doors, every byte compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import numpy as np
import pytest
from hypothesis import strategies as st

from forebay.specs import AttentionParams, Backend, Buffer, KVGeometry, Pool, WriteLoc
from forebay.specs.clauses import catalogue
from forebay.specs.driver import OWN_COUNTS
from forebay.specs.geometry import storage_shapes
from forebay.specs.suite import attention, oracle
from forebay.specs.suite.attention import Array, Attention
from forebay.specs.suite.measured import tell

LAYOUTS = ("NHD", "HND", "KV2", "PACKED", "LATENT")
KV_DTYPES = ("float32", "bfloat16")
BLOCK_SIZE, HEAD_DIM = 16, 64
"""Sizes of the core: what a test uses unless other sizes are its subject, so that no backend may refuse it."""
HOST_DTYPE = {"float32": np.float32, "bfloat16": np.uint16}
"""What numpy holds of a dtype; of bfloat16 the bit patterns."""
POISON = np.array([np.nan, np.inf, -np.inf], np.float32)
BAD_BLOCKS = np.array([-1, -7, -(2**31), 2**31 - 1, 10**6], np.int32)
"""Block ids no pool here holds: whoever follows one leaves the pool."""


def int32(*rows: Any) -> Array:
    """One argument a row: ``int32(5, 0)`` are two lengths, ``int32([1, 2], [3, 4])`` is a table of two rows."""
    return np.array(rows, np.int32)


class Sizes(TypedDict, total=False):
    """Keyword arguments of :func:`geometry`, which are fields of ``KVGeometry``."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    dtype: str
    value_head_dim: int | None


class Params(TypedDict, total=False):
    """Fields of ``AttentionParams``, with ``sinks`` float32 ``[Hq]`` on the host."""

    scale: float | None
    window: int | None
    softcap: float | None
    sinks: Array | None


# -- pools ---------------------------------------------------------------------------------------------------------------


def poison(backend: Backend, pool: Pool, seed: int = 0) -> None:
    """Fill every byte of KV with NaN, inf and -inf."""
    rng = np.random.default_rng(seed)
    for layer in range(pool.geometry.num_layers):
        for buffer in pool.storage(layer):
            backend.upload(buffer, rng.choice(POISON, size=buffer.shape))


@contextmanager
def new_pool(backend: Backend, geometry: KVGeometry, layout: str | None = None, **options: Any) -> Iterator[Pool]:
    """A poisoned pool, released at the end unless the test failed."""
    pool = backend.create_pool(geometry, layout, **options)
    poison(backend, pool)
    yield pool
    backend.release(pool)


def geometry(layout: str | None = "NHD", **changes: Unpack[Sizes]) -> KVGeometry:
    """Sizes of the core, so supported everywhere, that fit ``layout``: LATENT keeps one head, whose values are its first columns."""
    g = replace(KVGeometry(4, BLOCK_SIZE, 2, HEAD_DIM), **changes)
    if layout != "LATENT":
        return g
    return replace(g, num_kv_heads=1, value_head_dim=g.value_head_dim or max(1, g.head_dim - g.head_dim // 3))


def claimed(backend: Backend, field: str, values: Iterable[Any]) -> st.SearchStrategy[Any]:
    """Draw of ``values`` what the backend's capability ``field`` allows; where it allows none of them, of what it lists."""
    limit = getattr(backend.capabilities, field)
    some = [value for value in values if backend.capabilities.allows(field, value)]
    return st.sampled_from(some or limit)


def put(backend: Backend, pool: Pool, slots: Any, k: Array, v: Array | None = None, layer: int = 0) -> None:
    """Write float32 rows through the door; in LATENT the values are K's columns already."""
    v = None if pool.layout == "LATENT" else v
    device_v = None if v is None else backend.to_device(v)
    loc = WriteLoc.slots(np.asarray(slots, np.int32), physical=True)
    pool.write(layer, loc, backend.to_device(k), device_v)


def put_values(backend: Backend, pool: Pool, slots: Sequence[int], values: Sequence[float]) -> None:
    """Rows whose V is the given number in every element; K is 0 but where LATENT keeps V in it. A query of 0 scores all equal."""
    g = pool.geometry
    k, v = (np.zeros((len(values), g.num_kv_heads, dim), np.float32) for dim in (g.key_dim, g.value_dim))
    v += np.array(values, np.float32)[:, None, None]
    if pool.layout == "LATENT":
        k[..., : g.value_dim] = v
    put(backend, pool, slots, k, v)


def device_rows(backend: Backend, g: KVGeometry, values: Any, dtype: str | None = None) -> tuple[Any, Any]:
    """Device rows that hold one number each, in K and, negated, in V (None in LATENT)."""
    ones = np.ones((len(values), g.num_kv_heads, g.key_dim), np.float32)
    k = np.array(values, np.float32)[:, None, None] * ones
    v = None if g.value_head_dim is not None else backend.to_device(-k, dtype)
    return backend.to_device(k, dtype), v


def held(backend: Backend, pool: Pool, slots: Any, layer: int = 0) -> Array:
    """The first element of K at each slot, as the device stores it (not through a door)."""
    slots, bs = np.asarray(slots), pool.geometry.block_size
    arrays = oracle.stored(backend, pool, layer)
    return oracle.rows_at(pool.layout, arrays, pool.geometry, slots // bs, slots % bs)[0][:, 0, 0]


def row_bits(backend: Backend, pool: Pool, layer: int = 0) -> Array:
    """uint8 ``[num_slots, any]``: the bytes that the device holds of each slot's K and V (not through a door)."""
    slots, bs = np.arange(pool.num_slots), pool.geometry.block_size
    rows = oracle.rows_at(pool.layout, oracle.stored(backend, pool, layer), pool.geometry, slots // bs, slots % bs)
    return np.concatenate([bits(x).reshape(len(slots), -1) for x in rows], axis=1)


def changed_slots(before: Array, after: Array) -> list[int]:
    """The slots whose bytes differ between two results of :func:`row_bits`."""
    return [int(s) for s in np.flatnonzero((before != after).any(axis=1))]


def slot(pool: Pool, block: int, offset: int = 0) -> int:
    """The slot of a block counted without the sink: block 0 is the pool's first usable one."""
    return (block + pool.first_block) * pool.geometry.block_size + offset


def storage(layout: str, g: KVGeometry, fill: float = np.nan) -> Any:
    """Foreign memory for one layer, as ``wrap_pool`` takes it: an array, or a pair."""
    arrays: list[Array] = [np.full(shape, fill, np.float32) for shape in storage_shapes(layout, g)]
    if g.dtype == "bfloat16":
        arrays = [attention.upper_halves(a) for a in arrays]
    return tuple(arrays) if len(arrays) > 1 else arrays[0]


# -- bytes ---------------------------------------------------------------------------------------------------------------


def bits(x: Array) -> Array:
    """The bytes of an array, for comparisons that tell NaN from NaN and 0 from -0."""
    return np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8)


def same_bits(a: Array, b: Array) -> None:
    """The same shape, dtype and bytes, and not all of them zero: zeros that agree show nothing of a device."""
    same_arrays([a], [b])


def same_arrays(these: Iterable[Array], those: Iterable[Array]) -> None:
    """The same arrays in the same order, bit for bit; some may be all zero, but not every one."""
    shown, size = 0, 0
    for a, b in zip(these, those, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))
        shown, size = shown + int(np.count_nonzero(bits(a))), size + a.size
    assert shown or not size, "both sides are nothing but zeros"


def bytes_of(backend: Backend, *things: Pool | Buffer) -> list[tuple[str, bytes]]:
    """Every byte of Buffers and of pools, their counts included."""
    buffers = [b for thing in things for b in (thing.buffers if isinstance(thing, Pool) else (thing,))]
    return [(buffer.name, backend.fetch(buffer).tobytes()) for buffer in buffers]


@contextmanager
def unchanged(backend: Backend, *things: Pool | Buffer) -> Iterator[None]:
    before = bytes_of(backend, *things)
    yield
    assert bytes_of(backend, *things) == before


@contextmanager
def refused(backend: Backend, error: type[Exception], says: str, *things: Pool | Buffer) -> Iterator[None]:
    """The body raises ``error`` with a message that says so, before any device work, and no byte of ``things`` changes."""

    def work() -> dict[str, Counter[str] | int]:
        counters = backend.counters
        return {
            "launches": Counter(counters.launches),
            "delegated": Counter(counters.delegated),
            "uploads": counters.uploads,
        }

    with unchanged(backend, *things):
        before = work()
        with pytest.raises(error, match=says) as caught:
            yield
        assert work() == before
        assert type(caught.value).__module__ == "forebay.specs.errors"


# -- counts --------------------------------------------------------------------------------------------------------------


def launches(backend: Backend, operation: str) -> int:
    """How often an operation ran, in a kernel or in numpy."""
    return backend.counters.launches[operation] + backend.counters.delegated[operation]


def own_counts(backend: Backend) -> dict[str, int]:
    """What the driver itself counted of bytes to the host and of waits, so far as it keeps such counts."""
    info = backend.info
    return {name: int(info[name]) for name in OWN_COUNTS if name in info}


# -- attention -----------------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """One call of ``paged_decode``: a pool, and host copies of ``q [B, T, Hq, D]``, ``table [B, width]`` and ``visible [B]``."""

    backend: Backend
    pool: Pool
    q: Array
    table: Array
    visible: Array
    table_len: int

    def rows(self, *index: int) -> Scene:
        """The same call for some rows, in this order."""
        pick = list(index)
        return replace(self, q=self.q[pick], table=self.table[pick], visible=self.visible[pick])

    def decode(
        self, *, path: str = "direct", q_dtype: str = "float32", host: bool = False, **params: Unpack[Params]
    ) -> tuple[Array, Array]:
        """out ``[B, T, Hq, Dv]`` and lse ``[B, T, Hq]`` of the backend; ``host`` hands over numpy table and visible."""
        b = self.backend
        sinks = params.get("sinks")
        if sinks is not None:
            params["sinks"] = b.to_device(sinks)
        table, visible = (x if host else b.to_device(x) for x in (self.table, self.visible))
        out, lse = b.paged_decode(
            b.to_device(self.q, q_dtype),
            self.pool,
            0,
            table,
            visible,
            table_len=self.table_len,
            params=AttentionParams(**params),
            path=path,
            return_lse=True,
        )
        assert b.xp.dtype(out) == q_dtype
        out, lse = b.to_host(out), b.to_host(lse)
        self._show_values(out, lse)
        return out, lse

    def both_paths(self, **params: Unpack[Params]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """out and lse of the direct path, and of gather, which the driver reports that it took: agreeing bits alone do not tell."""
        before = launches(self.backend, "gather")
        direct = self.decode(**params)
        assert launches(self.backend, "gather") == before, "direct was asked for, and gather was launched"
        gather = self.decode(path="gather", **params)
        assert launches(self.backend, "gather") == before + 1, "gather was asked for, and the driver launched none"
        return direct, gather

    def _show_values(self, out: Array, lse: Array) -> None:
        """Each row that sees its last token holds something, and not all hold the same: a result like that can be compared."""
        bs, first, end = self.pool.geometry.block_size, self.pool.first_block, self.pool.geometry.num_blocks
        column = (self.visible - 1) // bs
        rows = np.flatnonzero((self.visible > 0) & (column < self.table_len))
        last = self.table[rows, column[rows]]
        rows = rows[(last >= first) & (last < end)]
        assert out[rows, -1].any(axis=(1, 2)).all(), "the rows of a sequence are nothing but zeros"
        calls = {(self.q[row].tobytes(), self.table[row].tobytes(), int(self.visible[row])) for row in rows[:8]}
        results = {(out[row].tobytes(), lse[row].tobytes()) for row in rows[:8]}
        assert len(calls) < 2 or len(results) > 1, "different rows have the same result"

    def expect(self, **params: Unpack[Params]) -> Attention:
        arrays = oracle.stored(self.backend, self.pool, 0)
        return oracle.attend(self.pool, arrays, self.q, self.table, self.visible, table_len=self.table_len, **params)

    def check(self, *, path: str = "direct", **params: Unpack[Params]) -> tuple[Array, Array]:
        """Hold the result against the oracle, within clause D6; returns out and lse."""
        before = self.pool.invalid
        out, lse = self.decode(path=path, **params)
        want = self.expect(**params)
        assert self.pool.invalid - before == want.invalid
        limit = tolerance(self.backend, self.pool.geometry.dtype)
        assert_near(out, want, limit, self.pool.geometry.dtype)
        empty = np.isneginf(want.lse)
        np.testing.assert_array_equal(np.isneginf(lse), empty)
        np.testing.assert_allclose(lse[~empty], want.lse[~empty], rtol=limit, atol=limit)
        assert not out[empty].any()
        return out, lse


def assert_near(out: Array, want: Attention, limit: float, dtype: str) -> None:
    """Hold a result against the oracle's, relative to the largest visible |V|; the error is told to whoever keeps a record."""
    error = float(np.abs(out - want.out).max(initial=0.0))
    tell(dtype, error / want.largest if want.largest else error, limit)
    assert error <= limit * want.largest, f"error {error:.2e}, allowed {limit:g} * {want.largest:.3g}"


def tolerance(backend: Backend, dtype: str) -> float:
    """Clause D6's limit relative to max |V|, from the contract."""
    return max(catalogue().tolerance(dtype), catalogue().tolerance("tf32") if backend.capabilities.tf32 else 0.0)


@contextmanager
def scene(
    backend: Backend,
    lengths: Sequence[int],
    *,
    layout: str | None = None,
    heads: int = 4,
    query_len: int = 1,
    extra_width: int = 2,
    seed: int = 0,
    **sizes: Unpack[Sizes],
) -> Iterator[Scene]:
    """Sequences of random rows in shuffled blocks of a pool that holds poison wherever ``lengths`` does not reach.

    The layout is the backend's own unless it is named. Table entries past the visible range, and the columns past ``table_len``, name
    blocks outside the pool or full of poison.
    """
    rng = np.random.default_rng(seed)
    g = geometry(layout or backend.capabilities.layouts[0], **sizes)
    needed = [-(-length // g.block_size) for length in lengths]
    g = replace(g, num_blocks=sum(needed) + 3)
    with new_pool(backend, g, layout) as pool:
        table_len = max(1, *needed)
        order = rng.permutation(np.arange(pool.first_block, g.num_blocks)).astype(np.int32)
        canaries = np.append(BAD_BLOCKS, order[-1])
        table = rng.choice(canaries, size=(len(lengths), table_len + extra_width)).astype(np.int32)
        slots: list[Array] = []
        taken = 0
        for b, (length, blocks) in enumerate(zip(lengths, needed, strict=True)):
            table[b, :blocks] = order[taken : taken + blocks]
            taken += blocks
            position = np.arange(length)
            slots.append(table[b, position // g.block_size] * g.block_size + position % g.block_size)
        rows = np.concatenate(slots)
        k = rng.standard_normal((len(rows), g.num_kv_heads, g.key_dim)).astype(np.float32)
        v = rng.standard_normal((len(rows), g.num_kv_heads, g.value_dim)).astype(np.float32)
        put(backend, pool, rows, k, v)
        q = rng.standard_normal((len(lengths), query_len, heads, g.key_dim)).astype(np.float32)
        yield Scene(backend, pool, q, table, np.array(lengths, np.int32), table_len)


def mean_of_values(backend: Backend, pool: Pool, table: Any, visible: Sequence[int], **options: Any) -> Array:
    """Every row's output, one number a row: with a query of 0, attention is the plain mean of the visible values."""
    g = pool.geometry
    q = backend.to_device(np.zeros((len(visible), g.num_kv_heads, g.key_dim), np.float32))
    if "table_len" not in options:
        options["table_len"] = table.shape[1]
    out = backend.to_host(backend.paged_decode(q, pool, 0, table, np.array(visible, np.int32), **options))
    np.testing.assert_array_equal(out, np.broadcast_to(out[:, :1, :1], out.shape))
    return out[:, 0, 0]


def decode_bits(backend: Backend, pool: Pool, *blocks: int, visible: int | None = None) -> Array:
    """The bits of a row over ``blocks`` under a fixed query."""
    g = pool.geometry
    q = np.linspace(-1, 1, 2 * g.num_kv_heads * g.key_dim, dtype=np.float32).reshape(1, -1, g.key_dim)
    visible = len(blocks) * g.block_size if visible is None else visible
    out, lse = (
        backend.to_host(x)
        for x in backend.paged_decode(
            backend.to_device(q), pool, 0, int32(blocks), int32(visible), table_len=len(blocks), return_lse=True
        )
    )
    assert out.any()
    return np.append(out, lse)
