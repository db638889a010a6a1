"""Attention cases: strided KV storage that is poison wherever nothing was written, and the arguments of a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from forebay.kernels.numba.paged_decode import prepare
from forebay.specs.suite import attention
from forebay.specs.suite.attention import Array, Attention
from tests.kernels import oracle
from tests.kernels.oracle import Options

Dtype = Literal["float32", "bfloat16"]
LAYOUTS = ("NHD", "HND", "KV2", "PACKED", "TOKEN_MAJOR", "REVERSED", "SPARSE")
POISON = (np.float32(np.nan), np.float32(np.inf), np.float32(-np.inf))


def poisoned(shape: tuple[int, ...], dtype: Dtype, rng: np.random.Generator) -> Array:
    """Storage of which every element is NaN, or one of NaN, inf and -inf."""
    bad = rng.choice(np.array(POISON), size=shape).astype(np.float32)
    return bad if dtype == "float32" else attention.upper_halves(bad)


def encode(numbers: Array, dtype: Dtype) -> Array:
    """float32 numbers as storage."""
    numbers = numbers.astype(np.float32)
    return numbers if dtype == "float32" else attention.round_to_bfloat16(numbers)


def views(
    layout: str,
    blocks: int,
    block_size: int,
    heads: int,
    k_dim: int,
    v_dim: int,
    dtype: Dtype,
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """K ``[NB, BS, Hkv, Dk]`` and V ``[NB, BS, Hkv, Dv]`` views of poisoned storage."""
    n, s, h = blocks, block_size, heads
    if layout == "LATENT":
        store = poisoned((n, s, h, k_dim), dtype, rng)
        return store, store[..., :v_dim]
    if layout == "PACKED":
        store = poisoned((n, s, h, k_dim + v_dim), dtype, rng)
        return store[..., :k_dim], store[..., k_dim:]
    dim = max(k_dim, v_dim)
    if layout == "KV2":
        store = poisoned((n, 2, s, h, dim), dtype, rng)
        k, v = store[:, 0], store[:, 1]
    elif layout == "TOKEN_MAJOR":
        store = poisoned((n, s, 3, 2, h, dim), dtype, rng)
        k, v = store[:, :, 1, 0], store[:, :, 1, 1]
    elif layout == "HND":
        k, v = (poisoned((n, h, s, dim), dtype, rng).transpose(0, 2, 1, 3) for _ in range(2))
    elif layout == "REVERSED":
        k, v = (poisoned((n, s, h, dim), dtype, rng)[::-1, ::-1] for _ in range(2))
    elif layout == "SPARSE":
        k, v = (poisoned((n, s, h, 3 * dim), dtype, rng)[..., ::3] for _ in range(2))
    else:
        k, v = (poisoned((n, s, h, dim), dtype, rng) for _ in range(2))
    return k[..., :k_dim], v[..., :v_dim]


@dataclass
class Case:
    """One call: ``q [B, T, Hq, Dk]``, KV views, table, visible, and the options of both kernel and oracle."""

    q: Array
    k: Array
    v: Array
    table: Array
    visible: Array
    options: Options

    @property
    def dtype(self) -> Dtype:
        return "float32" if self.k.dtype == np.float32 else "bfloat16"

    def outputs(self) -> tuple[Array, Array, Array]:
        """Fresh outputs full of NaN, and the count of invalid blocks."""
        batch, query_len, heads, _ = self.q.shape
        out = np.full((batch, query_len, heads, self.v.shape[3]), np.nan, np.float32)
        return out, np.full((batch, query_len, heads), np.nan, np.float32), np.zeros(1, np.int32)

    def run(self, **more: Any) -> tuple[Array, Array, int]:
        """out, lse and the number of invalid blocks from the kernel."""
        out, lse, invalid = self.outputs()
        options: dict[str, Any] = {**self.options, **more}
        prepare(self.q, self.k, self.v, self.table, self.visible, out, lse, invalid, **options)()
        return out, lse, int(invalid[0])

    def expect(self) -> Attention:
        """The same from the oracle."""
        return oracle.attend(self.q, self.k, self.v, self.table, self.visible, **self.options)

    def row(self, b: int) -> Case:
        """Sequence ``b`` alone."""
        return replace(self, q=self.q[b : b + 1].copy(), table=self.table[b : b + 1], visible=self.visible[b : b + 1])

    def check(self, **more: Any) -> tuple[Array, Array]:
        """Compare with the oracle; returns out and lse."""
        out, lse, invalid = self.run(**more)
        want = self.expect()
        limit = oracle.TOLERANCE * want.largest
        np.testing.assert_allclose(out, want.out, rtol=0, atol=limit)
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want.lse))
        seen = np.isfinite(want.lse)
        np.testing.assert_allclose(lse[seen], want.lse[seen], rtol=2e-6, atol=5e-6)
        assert not out[~seen].any()
        assert invalid == want.invalid
        return out, lse


def make(
    lengths: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    v_dim: int | None = None,
    block_size: int = 16,
    query_len: int = 1,
    dtype: Dtype = "float32",
    layout: str = "NHD",
    extra_width: int = 2,
    sink: bool = True,
    seed: int = 0,
    magnitude: float = 1.0,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Array | None = None,
) -> Case:
    """A case with live rows exactly where ``lengths`` says; every other byte of storage, table and outputs is poison.

    Table entries past the visible range name blocks far outside the pool or blocks full of poison.
    """
    rng = np.random.default_rng(seed)
    v_dim = dim if v_dim is None else v_dim
    needed = [-(-max(n, 0) // block_size) for n in lengths]
    table_len = max(1, *needed)
    first = int(sink)
    num_blocks = first + sum(needed) + 2
    k, v = views(layout, num_blocks, block_size, kv_heads, dim, v_dim, dtype, rng)
    order = rng.permutation(np.arange(first, num_blocks))
    table = rng.choice(
        np.array([-1, num_blocks, 2**31 - 1, -(2**31), int(order[-1])]), size=(len(lengths), table_len + extra_width)
    )
    table = table.astype(np.int32)
    taken = 0
    for b, (length, blocks) in enumerate(zip(lengths, needed, strict=True)):
        table[b, :blocks] = order[taken : taken + blocks]
        taken += blocks
        positions = np.arange(max(length, 0))
        pages = table[b, positions // block_size]
        rows = rng.standard_normal((2, len(positions), kv_heads, max(dim, v_dim))) * magnitude
        v[pages, positions % block_size] = encode(rows[1, ..., :v_dim], dtype)
        k[pages, positions % block_size] = encode(rows[0, ..., :dim], dtype)
    q = (rng.standard_normal((len(lengths), query_len, heads, dim)) * magnitude).astype(np.float32)
    options: Options = {
        "table_len": table_len,
        "first_block": first,
        "num_blocks": num_blocks,
        "block_size": block_size,
        "scale": dim**-0.5 if scale is None else scale,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
    }
    return Case(q, k, v, table, np.array(lengths, np.int32), options)


def relocate(
    case: Case, layout: str, *, block_size: int | None = None, width: int | None = None, seed: int = 1
) -> Case:
    """The same keys and values in another layout, block size, block order and table width."""
    rng = np.random.default_rng(seed)
    old, new = case.options["block_size"], block_size or case.options["block_size"]
    needed = [-(-int(n) // new) for n in case.visible]
    table_len = max(1, *needed)
    num_blocks = 1 + sum(needed) + 1
    heads, k_dim, v_dim = case.k.shape[2], case.k.shape[3], case.v.shape[3]
    k, v = views(layout, num_blocks, new, heads, k_dim, v_dim, case.dtype, rng)
    table = np.full((len(needed), width or table_len), -7, np.int32)
    free = rng.permutation(np.arange(1, num_blocks))
    for b, blocks in enumerate(needed):
        table[b, :blocks], free = free[:blocks], free[blocks:]
        for position in range(int(case.visible[b])):
            source = (case.table[b, position // old], position % old)
            target = (table[b, position // new], position % new)
            k[target], v[target] = case.k[source], case.v[source]
    options: Options = {
        **case.options,
        "table_len": table_len,
        "first_block": 1,
        "num_blocks": num_blocks,
        "block_size": new,
    }
    return Case(case.q, k, v, table, case.visible, options)
