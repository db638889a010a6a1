"""Calls of the Triton paged decode with pools full of poison, and attention in float64 to hold them against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forebay.kernels.triton.decode_config import DecodeTiles, interpreted_tiles
from forebay.kernels.triton.gather import gather
from forebay.kernels.triton.paged_decode import paged_decode

Array = npt.NDArray[Any]
LAYOUTS = ("NHD", "HND", "KV2", "PACKED", "LATENT", "SPARSE")
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
POISON = (float("nan"), float("inf"), float("-inf"))
BAD = (-1, -7, -(2**31), 2**31 - 1, 10**6, 0)
FIRST_BLOCK = 1


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Scratch full of NaN."""
    return torch.full(tuple(shape), float("nan") if dtype.is_floating_point else -(2**31), dtype=dtype)


def poison(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """NaN, inf and -inf in turn."""
    count = int(np.prod(shape))
    return torch.tensor(POISON).repeat(count // 3 + 1)[:count].reshape(tuple(shape)).to(dtype)


def views(
    layout: str, blocks: int, bs: int, heads: int, dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned K ``[NB, BS, H, D]`` and V ``[NB, BS, H, Dv]`` as views of a store of the layout."""
    if layout == "NHD":
        return poison((blocks, bs, heads, dim), dtype), poison((blocks, bs, heads, value_dim), dtype)
    if layout == "HND":
        k, v = poison((blocks, heads, bs, dim), dtype), poison((blocks, heads, bs, value_dim), dtype)
        return k.transpose(1, 2), v.transpose(1, 2)
    if layout == "KV2":
        k, v = poison((blocks, 2, bs, heads, dim), dtype).unbind(1)
        return k, v
    if layout == "PACKED":
        both = poison((blocks, bs, heads, dim + value_dim), dtype)
        return both[..., :dim], both[..., dim:]
    if layout == "LATENT":
        k = poison((blocks, bs, 1, dim), dtype)
        return k, k[..., :value_dim]
    store = poison((blocks, bs * 2, heads, 2 * dim + 3), dtype)
    return store[:, ::2, :, 1 : 2 * dim : 2], store[:, 1::2, :, 2 : 2 * value_dim + 1 : 2]


@dataclass(frozen=True)
class Case:
    """One call; ``params`` are scale, window, softcap and sinks."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    visible: torch.Tensor
    table_len: int
    layout: str
    tiles: DecodeTiles
    params: dict[str, Any]

    def row(self, *rows: int) -> Case:
        """The same call for some of its rows."""
        pick = list(rows)
        return replace(self, q=self.q[pick], table=self.table[pick], visible=self.visible[pick])

    def with_tiles(self, **changes: Any) -> Case:
        return replace(self, tiles=replace(self.tiles, **changes))

    def run(self, path: str = "direct") -> tuple[Array, Array, int]:
        """out float32 ``[B, T, Hq, Dv]``, lse ``[B, T, Hq]`` and the invalid blocks; asserts that no element was left unwritten."""
        out = empty((*self.q.shape[:3], self.v.shape[3]), self.q.dtype)
        lse, invalid = empty(self.q.shape[:3], torch.float32), torch.zeros(1, dtype=torch.int32)
        k, v, table = self.k, self.v, self.table
        more: dict[str, Any] = {}
        blocks: dict[str, Any] = {"first_block": FIRST_BLOCK, "num_blocks": self.k.shape[0]}
        if path == "gather":
            k, v, table = self._gathered(blocks)
            more = {"count_table": self.table, "count_first_block": FIRST_BLOCK, "count_num_blocks": self.k.shape[0]}
            blocks = {"first_block": 0, "num_blocks": k.shape[0]}
        options: dict[str, Any] = {"scale": self.q.shape[3] ** -0.5} | self.params
        paged_decode(
            self.q,
            k,
            v,
            table,
            self.visible,
            out,
            lse,
            invalid,
            table_len=self.table_len,
            tiles=self.tiles,
            empty=empty,
            values_in_keys=self.layout == "LATENT",
            **blocks,
            **options,
            **more,
        )
        return out.float().numpy(), lse.numpy(), int(invalid)

    def _gathered(self, blocks: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = self.q.shape[0] * self.table_len
        latent = self.layout == "LATENT"
        k = poison((rows, *self.k.shape[1:]), self.k.dtype)
        v = None if latent else poison((rows, *self.v.shape[1:]), self.k.dtype)
        table = empty((self.q.shape[0], self.table_len), torch.int32)
        gather(
            self.k,
            None if latent else self.v,
            self.table,
            self.visible,
            k,
            v,
            table,
            table_len=self.table_len,
            query_len=self.q.shape[1],
            window=self.params.get("window"),
            **blocks,
        )
        return k, k[..., : self.v.shape[3]] if v is None else v, table

    def check(self, path: str = "direct") -> tuple[Array, Array, int]:
        """Run, and hold the result against attention in float64."""
        out, lse, invalid = self.run(path)
        want, want_lse, want_invalid, largest = attend(self)
        assert np.abs(out - want).max(initial=0) <= TOLERANCE[self.q.dtype] * largest
        empty_rows = np.isneginf(want_lse)
        np.testing.assert_array_equal(np.isneginf(lse), empty_rows)
        assert not out[empty_rows].any()
        exact = TOLERANCE[torch.float32]
        np.testing.assert_allclose(lse[~empty_rows], want_lse[~empty_rows], rtol=exact, atol=exact)
        assert invalid == want_invalid
        return out, lse, invalid


def make(
    lengths: Sequence[int],
    *,
    group: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    value_dim: int | None = None,
    block_size: int = 16,
    query_len: int = 1,
    q_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    layout: str = "NHD",
    bad: Sequence[tuple[int, int]] = (),
    extra: int = 0,
    tiles: dict[str, Any] | None = None,
    seed: int = 0,
    **params: Any,
) -> Case:
    """Rows of these lengths in blocks dealt at random; only what their queries see is written, all else is poison.

    ``bad`` names (row, column) entries that are no block, ``extra`` columns are garbage; ``tiles`` changes the interpreter's.
    """
    generator = torch.Generator().manual_seed(seed)
    kv_heads = 1 if layout == "LATENT" else kv_heads
    value_dim = value_dim or (dim - dim // 3 if layout == "LATENT" else dim)
    columns = max(1, *(-(-n // block_size) for n in lengths))
    blocks = len(lengths) * columns + 3
    k, v = views(layout, blocks, block_size, kv_heads, dim, value_dim, dtype)
    table = torch.full((len(lengths), columns + extra), -(2**31), dtype=torch.int32)
    deal = (torch.randperm(blocks - FIRST_BLOCK, generator=generator) + FIRST_BLOCK).int()
    for b, n in enumerate(lengths):
        used = -(-n // block_size)
        table[b, :used] = deal[b * columns : b * columns + used]
        low = 0 if params.get("window") is None else max(0, n - (query_len - 1) - params["window"])
        position = torch.arange(low, n)
        block = table[b, position // block_size].long()
        if layout != "LATENT":
            v[block, position % block_size] = torch.randn(n - low, kv_heads, value_dim, generator=generator).to(dtype)
        k[block, position % block_size] = torch.randn(n - low, kv_heads, dim, generator=generator).to(dtype)
    for i, (b, c) in enumerate(bad):
        table[b, c] = BAD[i % len(BAD)]
    q = torch.randn(len(lengths), query_len, kv_heads * group, dim, generator=generator).to(q_dtype)
    size = replace(interpreted_tiles(q_dtype, dtype, group, query_len, dim, value_dim), **(tiles or {}))
    return Case(q, k, v, table, torch.tensor(lengths, dtype=torch.int32), columns, layout, size, params)


def attend(case: Case) -> tuple[Array, Array, int, float]:
    """out, lse, invalid entries and the largest visible |V|, one query and head at a time in float64."""
    batch, query_len, heads, dim = case.q.shape
    blocks, bs, kv_heads, value_dim = case.v.shape
    window, softcap, sinks = (case.params.get(name) for name in ("window", "softcap", "sinks"))
    scale = case.params.get("scale", dim**-0.5)
    q, table = case.q.double().numpy(), case.table.numpy()
    out, lse = np.zeros((batch, query_len, heads, value_dim)), np.full((batch, query_len, heads), -np.inf)
    invalid, largest = 0, 1e-30
    for b in range(batch):
        seen: set[int] = set()
        for t in range(query_len):
            end = int(case.visible[b]) - (query_len - 1 - t)
            if end <= 0:
                continue
            position = np.arange(0 if window is None else max(0, end - window), end)
            column = position // bs
            block = np.full(len(position), -1)
            block[column < case.table_len] = table[b, column[column < case.table_len]]
            held = (block >= FIRST_BLOCK) & (block < blocks)
            seen |= set(column[~held].tolist())
            keys, values = np.zeros((len(position), kv_heads, dim)), np.zeros((len(position), kv_heads, value_dim))
            where = torch.tensor(block[held]), torch.tensor(position[held] % bs)
            keys[held], values[held] = case.k[where].double().numpy(), case.v[where].double().numpy()
            largest = max(largest, float(np.abs(values).max()))
            for h in range(heads):
                score = keys[:, h * kv_heads // heads] @ q[b, t, h] * scale
                if softcap is not None:
                    score = softcap * np.tanh(score / softcap)
                logits = score if sinks is None else np.append(score, float(sinks[h]))
                peak = logits.max()
                total = np.exp(logits - peak).sum()
                out[b, t, h] = np.exp(score - peak) @ values[:, h * kv_heads // heads] / total
                lse[b, t, h] = peak + np.log(total)
        invalid += len(seen)
    return out, lse, invalid, largest


def assert_same_bits(one: tuple[Array, Array, int], other: tuple[Array, Array, int]) -> None:
    """Equal bits of out and lse, and equal counts."""
    np.testing.assert_array_equal(one[0].view(np.uint32), other[0].view(np.uint32))
    np.testing.assert_array_equal(one[1].view(np.uint32), other[1].view(np.uint32))
    assert one[2] == other[2]
