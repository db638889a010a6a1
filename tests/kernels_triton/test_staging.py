"""Staging in Triton's interpreter: bits of the tokens asked for, from any strides to any layout, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from forebay.kernels.triton.staging import stage_rows
from forebay.kernels.triton.tiles import INTERPRETER_TILES, RowTiles
from tests.kernels_triton.memory import FLOATS, LAYOUTS, Store, any_bits, bits, lazy, store

BS = 4
SMALL_TILES = RowTiles(rows=2, columns=4, entries=4, fitted=False)
TILES = pytest.mark.parametrize("tiles", [INTERPRETER_TILES, SMALL_TILES], ids=["large", "small"])


def ids(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(layout: str, blocks: int, heads: int, dim: int, dtype: torch.dtype) -> Store:
    memory = store(layout, blocks, BS, heads, dim, dtype)
    for part in memory.parts:
        part.copy_(any_bits(part.shape, dtype, 9))
    return memory


def put(target: Tensor | None, source: Tensor | None, src: Sequence[int], dst: Sequence[int], tokens: int) -> None:
    """The oracle."""
    if target is not None and source is not None:
        for i, (s, d) in enumerate(zip(src, dst, strict=True)):
            n = max(min(BS, tokens - i * BS), 0)
            bits(target)[d, :n] = bits(source)[s, :n]


@pytest.mark.parametrize("source_layout", ["KV2", "STRIDED", "NHD"])
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "LATENT"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@TILES
def test_tokens_move_bit_for_bit(source_layout: str, layout: str, dtype: torch.dtype, tiles: RowTiles) -> None:
    source = filled(source_layout, 3, 3, 5, dtype)
    got, want = (store(layout, 6, BS, 3, 5, dtype) for _ in range(2))
    src, dst, tokens = [2, 0, 2], [5, 1, 3], 2 * BS + 1
    stage_rows(source.k, source.v, got.k, got.v, ids(src), ids(dst), tokens=tokens, tiles=tiles)
    put(want.k, source.k, src, dst, tokens)
    put(want.v, source.v, src, dst, tokens)
    for a, b in zip(got.snapshot(), want.snapshot(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("tokens", [0, 1, BS - 1, BS, BS + 1, 3 * BS])
@TILES
def test_rows_past_the_prefix_keep_their_bytes(tokens: int, tiles: RowTiles) -> None:
    source = filled("LATENT", 5, 1, 7, torch.bfloat16)
    got, want = (store("LATENT", 5, BS, 1, 7, torch.bfloat16) for _ in range(2))
    blocks = torch.tensor([[3, 0], [1, 1], [4, 3]], dtype=torch.int32)  # ids may be columns of a wider array
    stage_rows(source.k, None, got.k, None, blocks[:, 0], blocks[:, 1], tokens=tokens, tiles=tiles)
    put(want.k, source.k, [3, 1, 4], [0, 1, 3], tokens)
    np.testing.assert_array_equal(got.snapshot()[0], want.snapshot()[0])


@pytest.mark.parametrize("bad", [-(2**31), -1, 3, 2**31 - 1])
def test_blocks_that_are_in_neither_memory_move_nothing(bad: int) -> None:
    source, got, want = (filled("NHD", n, 2, 4, torch.float32) for n in (3, 3, 3))
    for memory in (got, want):
        for part in memory.parts:
            part.zero_()
    for src, dst in (([bad, 1], [2, 0]), ([2, 1], [bad, 0])):
        stage_rows(source.k, source.v, got.k, got.v, ids(src), ids(dst), tokens=2 * BS, tiles=INTERPRETER_TILES)
    put(want.k, source.k, [1], [0], BS)
    put(want.v, source.v, [1], [0], BS)
    for a, b in zip(got.snapshot(), want.snapshot(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_k_and_v_may_differ_in_strides_and_width() -> None:
    k, v = any_bits((2, BS, 3, 4), torch.float32), any_bits((2, 3, BS, 6), torch.float32).transpose(1, 2)
    got, want = ([torch.zeros(3, BS, 3, 4), torch.zeros(3, BS, 3, 6)] for _ in range(2))
    stage_rows(k, v, got[0], got[1], ids([1, 0]), ids([0, 2]), tokens=BS + 2, tiles=SMALL_TILES)
    put(want[0], k, [1, 0], [0, 2], BS + 2)
    put(want[1], v, [1, 0], [0, 2], BS + 2)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_sources_and_targets_must_fit() -> None:
    block = torch.zeros(2, BS, 2, 4)
    for source in (torch.zeros(2, BS, 2, 5), torch.zeros(2, BS + 1, 2, 4), block.half()):
        with pytest.raises(ValueError, match=r"k: got blocks .* for a target of blocks \(\[4, 2, 4\], torch.float32\)"):
            stage_rows(source, None, block, None, ids([0]), ids([1]), tokens=1)
    with pytest.raises(ValueError, match="v: got blocks None"):
        stage_rows(block, None, block, block, ids([0]), ids([1]), tokens=1)


def test_offsets_in_both_memories_have_64_bits() -> None:
    step = 2**29 + 16
    source, target = (lazy(5 * step, torch.bfloat16).as_strided((5, BS, 2, 4), (step, 8, 4, 1)) for _ in range(2))
    source[4] = any_bits((BS, 2, 4), torch.bfloat16)
    stage_rows(source, None, target, None, ids([4]), ids([4]), tokens=BS, tiles=INTERPRETER_TILES)
    np.testing.assert_array_equal(bits(target[4]), bits(source[4]))
    assert not target[0].any()
