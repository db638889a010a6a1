"""Pools whose offsets and addresses need all 64 bits, in memory that is committed only where it is touched (clause
L1)."""

from __future__ import annotations

import mmap
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forebay.kernels.numba.rows import copy_rows, read_rows, write_rows
from forebay.specs.suite.attention import Array
from tests.kernels.cases import Case, make


def lazy_bytes(count: int) -> Array:
    """Zero bytes of an anonymous mapping that no one has touched yet."""
    no_reserve = getattr(
        mmap, "MAP_NORESERVE", 0x4000
    )  # named by the module from Python 3.13 on; the value is that of Linux
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, count, flags=flags), np.uint8)


def moved(case: Case, k: Array, v: Array, first_page: int) -> Case:
    """The case with its blocks copied to pages ``first_page`` on of other storage."""
    blocks = case.k.shape[0]
    k[first_page : first_page + blocks], v[first_page : first_page + blocks] = case.k, case.v
    table = np.where((case.table >= 0) & (case.table < blocks), case.table + first_page, -1).astype(np.int32)
    return replace(case, k=k, v=v, table=table, options={**case.options, "num_blocks": k.shape[0]})


def assert_same(case: Case, other: Case) -> None:
    for path in ("direct", "gather"):
        for got, want in zip(other.run(path=path)[:2], case.run()[:2], strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.clause("L1")
@pytest.mark.case("B01", "B02")
@pytest.mark.parametrize("dim", [128, 96])
@pytest.mark.parametrize("elements", [2**31, 2**32])
def test_bfloat16_pool_beyond_32_bit_offsets(elements: int, dim: int) -> None:
    """K and V packed side by side; pages on both sides of the limit, at it, and the last ones."""
    block_size, kv_heads = 32, 4
    stride = block_size * kv_heads * 2 * dim
    limit = elements // stride
    blocks = limit + 10
    store = lazy_bytes(blocks * stride * 2).view(np.uint16).reshape(blocks, block_size, kv_heads, 2 * dim)
    k, v = store[..., :dim], store[..., dim:]
    case = make([70, 40], heads=16, kv_heads=kv_heads, dim=dim, block_size=block_size, dtype="bfloat16")
    for page in (1, limit - 3, limit + 1, blocks - case.k.shape[0]):
        assert_same(case, moved(case, k, v, page))


@pytest.mark.clause("L1")
@pytest.mark.case("B01")
def test_float32_pool_beyond_32_bit_offsets_with_the_heads_outermost() -> None:
    """Here the stride of a head alone is more than 2**31 elements."""
    blocks, block_size, dim = (2**31 + 2**20) // (16 * 64), 16, 64
    k, v = (
        lazy_bytes(2 * blocks * block_size * dim * 4)
        .view(np.float32)
        .reshape(2, blocks, block_size, dim)
        .transpose(1, 2, 0, 3)
        for _ in range(2)
    )
    case = make([70, 40], heads=8, kv_heads=2, dim=dim, block_size=block_size)
    assert_same(case, moved(case, k, v, blocks - case.k.shape[0]))


@pytest.mark.clause("L1")
@pytest.mark.case("B04")
@pytest.mark.parametrize("dim", [8, 64])
def test_a_pool_across_a_multiple_of_2_to_the_32(dim: int) -> None:
    case = make([70, 40], heads=4, kv_heads=1, dim=dim, block_size=4, layout="KV2")
    size = case.k.base.nbytes if case.k.base is not None else 0
    room = lazy_bytes(2**32 + 2 * size)
    start = -room.ctypes.data % 2**32
    if start < size:
        start += 2**32
    edge = start - size // 2 // 64 * 64
    blocks = case.k.shape[0]
    store = room[edge : edge + size].view(np.float32).reshape(blocks, 2, 4, 1, dim)
    assert store.ctypes.data // 2**32 != (store.ctypes.data + size - 1) // 2**32
    assert_same(case, moved(case, store[:, 0], store[:, 1], 0))


@pytest.mark.clause("L1", "W6")
@pytest.mark.case("B01", "B02")
def test_doors_beyond_32_bit_offsets() -> None:
    block_size, dim = 32, 512
    blocks = 2**32 // (block_size * 2 * dim) + 4
    store = lazy_bytes(blocks * block_size * 2 * dim * 2).view(np.uint16).reshape(blocks, 2, block_size, 1, dim)
    k, v = store[:, 0], store[:, 1]
    bounds = {"first_slot": 0, "num_slots": blocks * block_size}
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 2**16, (2, 4, 1, dim)).astype(np.uint16)
    slots = np.array([0, 2**31 // (2 * dim), 2**32 // (2 * dim) + 5, blocks * block_size - 1], np.int64)
    dropped = np.zeros(1, np.int32)
    write_rows(k, v, slots, rows[0], rows[1], dropped, **bounds)
    for i, slot in enumerate(slots):
        np.testing.assert_array_equal(store[slot // block_size, :, slot % block_size], rows[:, i])
    copy_rows(k, v, slots[2:], slots[2:] - 7, dropped, **bounds)
    out = np.zeros_like(rows)
    read_rows(k, v, np.concatenate([slots[:2], slots[2:] - 7]), out[0], out[1], dropped, **bounds)
    np.testing.assert_array_equal(out, rows)
    assert dropped[0] == 0


@pytest.mark.clause("D2", "L3", "L1")
@pytest.mark.parametrize("dim", [64, 32])
@pytest.mark.parametrize("path", ["direct", "gather"])
def test_nothing_outside_the_visible_range_is_read(path: str, dim: int) -> None:
    """Blocks and table columns that no query sees lie on unreadable pages: 64 takes a specialised build, 32 the other
    one."""
    command = [sys.executable, "-m", "tests.kernels.guarded", path, str(dim)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, f"exit {done.returncode} (a negative one is a fault): {done.stderr}"
