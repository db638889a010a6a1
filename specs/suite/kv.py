"""What the contract tests are made of: pools full of poison, rows written through the doors, every byte compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import numpy as np
import pytest
from hypothesis import strategies as st

from forebay.specs import Backend, Buffer, KVGeometry, Pool, WriteLoc
from forebay.specs.driver import OWN_COUNTS
from forebay.specs.geometry import storage_shapes
from forebay.specs.suite import attention, oracle
from forebay.specs.suite.attention import Array

LAYOUTS = ("NHD", "HND", "KV2", "PACKED", "FUSED", "LATENT")
KV_DTYPES = ("float32", "bfloat16", "float16")
EACH_KV_DTYPE = ("float32", "bfloat16", pytest.param("float16", marks=pytest.mark.beyond_core))
"""The same as parameters of a test."""
BLOCK_SIZE, HEAD_DIM = 16, 64
"""Sizes of the core: what a test uses unless other sizes are its subject, so that no backend may refuse it."""
HOST_DTYPE = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
"""What numpy holds of a dtype; of bfloat16 the bit patterns."""
POISON = np.array([np.nan, np.inf, -np.inf], np.float32)
"""What memory holds that nobody wrote: whoever sums one of them up has it in the result."""
BAD_BLOCKS = np.array([-1, -7, -(2**31), 2**31 - 1, 10**6], np.int32)
"""Block ids no pool here holds: whoever follows one leaves the pool."""


def int32(*rows: Any) -> Array:
    """numpy int32, one argument a row: ``int32(5, 0)`` are two lengths ``[2]``, ``int32([1, 2], [3, 4])`` is a table ``[2, 2]``."""
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
    """Fill every element of KV, in all layers, with NaN, inf and -inf, by uploads and not through a door; counts stay as they are."""
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
    """Draw of ``values`` what the backend's capability ``field`` allows; where it allows none of them, of what the field lists.

    A field that is no list, but a limit, has to allow one of them.
    """
    limit = getattr(backend.capabilities, field)
    some = [value for value in values if backend.capabilities.allows(field, value)]
    return st.sampled_from(some or limit)


def put(backend: Backend, pool: Pool, slots: Any, k: Array, v: Array | None = None, layer: int = 0) -> None:
    """Write rows through the door of one layer, at physical ``slots [n]`` (host ids).

    ``k [n, Hkv, Dk]`` and ``v [n, Hkv, Dv]`` are numpy float32; the door rounds them to the pool's dtype. In LATENT the values are K's
    columns already, so ``v`` is left out.

    Raises: what the door raises.
    """
    v = None if pool.layout == "LATENT" else v
    device_v = None if v is None else backend.to_device(v)
    loc = WriteLoc.slots(np.asarray(slots, np.int32), physical=True)
    pool.write(layer, loc, backend.to_device(k), device_v)


def put_values(backend: Backend, pool: Pool, slots: Sequence[int], values: Sequence[float]) -> None:
    """Write rows to layer 0, at physical ``slots [n]``, whose V is one of ``values [n]`` in every element.

    K is 0 but where LATENT keeps V in it. A query of 0 scores all equal.
    """
    g = pool.geometry
    k, v = (np.zeros((len(values), g.num_kv_heads, dim), np.float32) for dim in (g.key_dim, g.value_dim))
    v += np.array(values, np.float32)[:, None, None]
    if pool.layout == "LATENT":
        k[..., : g.value_dim] = v
    put(backend, pool, slots, k, v)


def device_rows(backend: Backend, g: KVGeometry, values: Any, dtype: str | None = None) -> tuple[Any, Any]:
    """Device rows K ``[n, Hkv, Dk]`` and V ``[n, Hkv, Dv]`` of ``values [n]``: one number in all of a row's K and, negated, of its V.

    V is None in LATENT. Their dtype is ``dtype``, float32 unless given. Only where Dk and Dv are equal, or in LATENT.
    """
    ones = np.ones((len(values), g.num_kv_heads, g.key_dim), np.float32)
    k = np.array(values, np.float32)[:, None, None] * ones
    v = None if g.value_head_dim is not None else backend.to_device(-k, dtype)
    return backend.to_device(k, dtype), v


def held(backend: Backend, pool: Pool, slots: Any, layer: int = 0) -> Array:
    """numpy ``[n]``: the first element of K at each of physical ``slots [n]``, as the device stores it (not through a door)."""
    slots, bs = np.asarray(slots), pool.geometry.block_size
    arrays = oracle.stored(backend, pool, layer)
    return oracle.rows_at(pool.layout, arrays, pool.geometry, slots // bs, slots % bs)[0][:, 0, 0]


def row_bits(backend: Backend, pool: Pool, layer: int = 0) -> Array:
    """uint8 ``[num_slots, any]``: the bytes that the device holds of each slot's K and V (not through a door)."""
    slots, bs = np.arange(pool.num_slots), pool.geometry.block_size
    rows = oracle.rows_at(pool.layout, oracle.stored(backend, pool, layer), pool.geometry, slots // bs, slots % bs)
    return np.concatenate([bits(x).reshape(len(slots), -1) for x in rows], axis=1)


def block_contents(backend: Backend, pool: Pool, blocks: Sequence[int]) -> list[Array]:
    """What physical ``blocks`` hold, as the device stores it: an array whose first axis is the block for each Buffer of each layer."""
    layers = range(pool.geometry.num_layers)
    return [backend.fetch(buffer)[list(blocks)] for layer in layers for buffer in pool.storage(layer)]


def changed_slots(before: Array, after: Array) -> list[int]:
    """The slots whose bytes differ between two results of :func:`row_bits`, ascending."""
    return [int(s) for s in np.flatnonzero((before != after).any(axis=1))]


def slot(pool: Pool, block: int, offset: int = 0) -> int:
    """The physical slot at ``offset`` of a block counted without the sink: block 0 is the pool's first usable one."""
    return (block + pool.first_block) * pool.geometry.block_size + offset


def storage(layout: str, g: KVGeometry, fill: float = np.nan) -> Any:
    """Foreign memory for one layer, as ``wrap_pool`` takes it: a numpy array, or a pair, of the layout's shapes and ``g.dtype``.

    bfloat16 comes as uint16 patterns. ``fill`` is in every element.
    """
    arrays: list[Array] = [np.full(shape, fill, np.float32) for shape in storage_shapes(layout, g)]
    arrays = [as_stored(a, g.dtype) for a in arrays]
    return tuple(arrays) if len(arrays) > 1 else arrays[0]


def as_stored(x: Array, dtype: str) -> Array:
    """Host memory of ``dtype`` for float32 values, cut off where they do not fit: bfloat16 as uint16 patterns."""
    return attention.upper_halves(x) if dtype == "bfloat16" else x.astype(HOST_DTYPE[dtype])


# -- bytes ---------------------------------------------------------------------------------------------------------------


def bits(x: Array) -> Array:
    """uint8 ``[bytes]``: the bytes of an array, for comparisons that tell NaN from NaN and 0 from -0."""
    return np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8)


def words(x: Array) -> Array:
    """Unsigned integers of the shape of ``x``: the bytes of its elements."""
    return np.ascontiguousarray(x).view(f"u{x.itemsize}").reshape(x.shape)


def _first(a: Array, b: Array, differ: Array) -> str:
    """The first of the elements that differ, told as :data:`.failure.TOLD` reads it."""
    at = tuple(int(index) for index in differ[0])
    return (
        f"expected: {b[at]!r} at {list(at)} of {b.dtype}{list(b.shape)}, bit for bit\n"
        f"got: {a[at]!r}; {len(differ)} of {a.size} elements differ"
    )


def same_bits(a: Array, b: Array) -> None:
    """Assert the same shape, dtype and bytes, and not all of them zero: zeros that agree show nothing of a device."""
    same_arrays([a], [b])


def same_arrays(these: Iterable[Array], those: Iterable[Array]) -> None:
    """Assert the same arrays in the same order, bit for bit; some may be all zero, but not every one.

    Raises:
        ValueError: there are more of one than of the other.
    """
    shown, size = 0, 0
    for a, b in zip(these, those, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        differ = np.argwhere(words(a) != words(b))
        assert len(differ) == 0, _first(a, b, differ)
        shown, size = shown + int(np.count_nonzero(bits(a))), size + a.size
    assert shown or not size, "both sides are nothing but zeros"


def bytes_of(backend: Backend, *things: Pool | Buffer) -> list[tuple[str, bytes]]:
    """Name and bytes of each Buffer, those of pools and their counts included; waits for the device."""
    buffers = [b for thing in things for b in (thing.buffers if isinstance(thing, Pool) else (thing,))]
    return [(buffer.name, backend.fetch(buffer).tobytes()) for buffer in buffers]


def changes(before: list[tuple[str, bytes]], after: list[tuple[str, bytes]]) -> dict[str, str]:
    """What differs between two results of :func:`bytes_of`, by name of the Buffer.

    An ``assert`` about this ends at once; about the bytes themselves pytest would, where it runs verbosely or under CI, look for a
    smallest difference, which takes minutes.
    """
    found = {}
    for (name, old), (_, new) in zip(before, after, strict=True):
        differ = np.flatnonzero(np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8))
        if differ.size:
            found[name] = f"{differ.size} of {len(old)} bytes, the first at {differ[0]}"
    return found


@contextmanager
def unchanged(backend: Backend, *things: Pool | Buffer) -> Iterator[None]:
    """Assert that the body leaves every byte of ``things`` as it was, counts of pools included; what it raises comes through."""
    before = bytes_of(backend, *things)
    yield
    assert changes(before, bytes_of(backend, *things)) == {}


@contextmanager
def refused(backend: Backend, error: type[Exception], says: str, *things: Pool | Buffer) -> Iterator[None]:
    """Assert that the body raises ``error`` before any device work, and leaves every byte of ``things`` as it was.

    ``says`` is a regular expression that the message holds; what is raised is of a class of the contract's own. Neither launches,
    delegated operations nor uploads are counted.
    """

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


def mean_of_values(backend: Backend, pool: Pool, table: Any, visible: Sequence[int], **options: Any) -> Array:
    """float32 ``[B]``: attention under a query of 0 over layer 0, which is the plain mean of the visible values.

    ``table [B, width]`` and ``options`` are arguments of ``paged_decode``, ``visible [B]`` the visible tokens.
    Asserts that all elements of a row's output are equal.
    """
    g = pool.geometry
    q = backend.to_device(np.zeros((len(visible), g.num_kv_heads, g.key_dim), np.float32))
    if "table_len" not in options:
        options["table_len"] = table.shape[1]
    out = backend.to_host(backend.paged_decode(q, pool, 0, table, np.array(visible, np.int32), **options))
    np.testing.assert_array_equal(out, np.broadcast_to(out[:, :1, :1], out.shape))
    return out[:, 0, 0]


def decode_bits(
    backend: Backend, pool: Pool, *blocks: int, visible: int | None = None, layer: int = 0, path: str = "direct"
) -> Array:
    """float32 ``[2 * Hkv * (Dv + 1)]``: one row's output over ``blocks`` under a fixed query, and then its LSE, for comparing bits.

    All of the blocks' tokens are visible unless ``visible`` says how many. Asserts that the output is not all zero.
    """
    g = pool.geometry
    q = np.linspace(-1, 1, 2 * g.num_kv_heads * g.key_dim, dtype=np.float32).reshape(1, -1, g.key_dim)
    visible = len(blocks) * g.block_size if visible is None else visible
    out, lse = (
        backend.to_host(x)
        for x in backend.paged_decode(
            backend.to_device(q),
            pool,
            layer,
            int32(blocks),
            int32(visible),
            table_len=len(blocks),
            path=path,
            return_lse=True,
        )
    )
    assert out.any()
    return np.append(out, lse)
