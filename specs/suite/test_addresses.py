"""Addresses that 32 bits do not hold (clause L1)."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest

from forebay.specs import Backend, KVGeometry, Pool, WriteLoc
from forebay.specs.geometry import storage_shapes
from forebay.specs.suite import attention, oracle
from forebay.specs.suite.attention import Array
from forebay.specs.suite.kv import EACH_KV_DTYPE, HOST_DTYPE, as_stored, decode_bits, put, same_bits

# Linux refuses at once what its memory could not hold; Python 3.11 has no name for the flag that says it will not be touched.
MAPPING: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000} if sys.platform == "linux" else {}

pytestmark = pytest.mark.beyond_core


def lazy_memory(count: int) -> Array:
    """``count`` uint16 elements that the system commits when they are touched."""
    return np.frombuffer(mmap.mmap(-1, 2 * count, **MAPPING), np.uint16)


def sweep(backend: Backend, pool: Pool, arrays: list[Array], ids: list[int], tokens: int) -> None:
    """The same rows written to each block answer with the same bits, and read back whole; block by block, then copied.

    ``arrays`` is the pool's host memory: the rows have to lie in it where the layout's own formula says.
    """
    g = pool.geometry
    rows = np.random.default_rng(7).standard_normal((2, tokens, g.num_kv_heads, g.head_dim)).astype(np.float32)
    offsets = np.arange(tokens)
    for block in ids:
        put(backend, pool, block * g.block_size + offsets, rows[0], rows[1])
    want = [attention.nearest(x, "bfloat16") for x in rows]
    for block in ids:
        read = pool.read(0, WriteLoc.slots(block * g.block_size + offsets))
        for held, x in zip(read, want, strict=True):
            same_bits(backend.to_host(held), x)
        block_of_each = np.full(tokens, block)
        for held, x in zip(oracle.rows_at(pool.layout, arrays, g, block_of_each, offsets), want, strict=True):
            same_bits(held, as_stored(x, "bfloat16"))
        for path in ("direct", "gather"):
            answer = decode_bits(backend, pool, block, visible=tokens, path=path)
            same_bits(answer, decode_bits(backend, pool, ids[0], visible=tokens))
    low = 5
    for block in ids[1:]:
        pool.copy(WriteLoc.slots(block * g.block_size + offsets), WriteLoc.slots(low * g.block_size + offsets))
        same_bits(decode_bits(backend, pool, low, visible=tokens), decode_bits(backend, pool, ids[0], visible=tokens))
        put(backend, pool, low * g.block_size + offsets, 0 * rows[0], 0 * rows[1])


@pytest.mark.clause("L1")
@pytest.mark.smoke("L1")
@pytest.mark.case("B01")
@pytest.mark.parametrize("layout", ["KV2", "PACKED", "FUSED", "NHD"])
def test_block_offsets_beyond_two_to_the_31_elements(backend: Backend, layout: str) -> None:
    """K and V packed, so half the expected number of blocks reaches the limit: block stride 16384, 131074 blocks."""
    g = KVGeometry(131074, 32, 4, 64, dtype="bfloat16")
    memory = lazy_memory(131074 * 16384)
    if layout == "NHD":
        both = memory.reshape(131074, 2, 32, 4, 64)
        arrays = [both[:, 0], both[:, 1]]
    else:
        arrays = [memory.reshape(storage_shapes(layout, g)[0])]
    pool = backend.wrap_pool(tuple(arrays) if len(arrays) > 1 else arrays[0], layout=layout, geometry=g)
    sweep(backend, pool, arrays, [0, 131071, 131072, 131073], 32)
    same_bits(decode_bits(backend, pool, 131071, 131072), decode_bits(backend, pool, 0, 131073))
    backend.release(pool)


@pytest.mark.clause("L1")
@pytest.mark.case("B02")
def test_page_times_page_stride_beyond_32_bits(backend: Backend) -> None:
    """One head, D = 512, BS = 256: page stride 131072, so page 16384 starts at 2^31 elements."""
    g = KVGeometry(16386, 256, 1, 512, dtype="bfloat16")
    k, v = (lazy_memory(16386 * 131072).reshape(16386, 256, 1, 512) for _ in range(2))
    pool = backend.wrap_pool((k, v), layout="NHD", geometry=g)
    sweep(backend, pool, [k, v], [0, 16383, 16384, 16385], 40)
    backend.release(pool)


@pytest.mark.clause("L1")
@pytest.mark.case("B04")
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
def test_a_small_pool_across_a_4_gib_boundary_of_addresses(backend: Backend, dtype: str) -> None:
    g = KVGeometry(64, 4, 1, 8, dtype=dtype)
    memory = lazy_memory(2**31 + 2**20)
    start = memory.ctypes.data
    size = 2 * 64 * 4 * 8 * (4 if dtype == "float32" else 2)
    at = (-start) % 2**32 - size // 2 - size // 8
    at += 2**32 if at < 0 else 0
    low = (start + at) % 2**32
    assert low + size > 2**32
    high = memory[at // 2 : (at + size) // 2].view(HOST_DTYPE[dtype]).reshape(64, 2, 4, 1, 8)
    answers = []
    rows = np.random.default_rng(3).standard_normal((2, 256, 1, 8)).astype(np.float32)
    for array in (high, np.zeros_like(high)):
        pool = backend.wrap_pool(array, layout="KV2", geometry=g)
        put(backend, pool, range(256), rows[0], rows[1])
        answers.append(decode_bits(backend, pool, *range(64)))
        read = pool.read(0, WriteLoc.slots(np.arange(256)))
        answers[-1] = np.concatenate([answers[-1], *(backend.to_host(x).reshape(-1) for x in read)])
        backend.release(pool)
    same_bits(*answers)
