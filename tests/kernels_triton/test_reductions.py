"""Row operations of sampling in Triton's interpreter: exact where they can be, and a row's bits its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from forebay.kernels.triton.reductions import gumbel, mass_cutoff, penalise, row_sum
from forebay.kernels.triton.spans import INTERPRETER_SPANS, SpanTiles
from forebay.specs import draws
from tests.kernels_triton.memory import Bits, any_bits, bits, from_bits, lazy, poisoned

SMALL = SpanTiles(columns=8, elements=16, fitted=False)
TILES = pytest.mark.parametrize("tiles", [INTERPRETER_SPANS, SMALL], ids=["large", "small"])
INF, NAN = float("inf"), float("nan")
MASK = 0xFFFFFFFF


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def within(shape: tuple[int, int], values: Tensor) -> Tensor:
    """``values`` as a view of a wider memory of NaNs, rows contiguous."""
    view = poisoned((shape[0] + 2, shape[1] + 9), torch.float32)[1:-1, 5:-4]
    view.copy_(values)
    return view


# -- sums --------------------------------------------------------------------------------------------------------------
def sums(x: Tensor, tiles: SpanTiles) -> Tensor:
    out = torch.full((x.shape[0], 3), 77, dtype=x.dtype)
    row_sum(x, out[:, 1:2], tiles=tiles)
    assert out[:, ::2].flatten().tolist() == [77] * (2 * x.shape[0])
    return out[:, 1]


@TILES
@pytest.mark.parametrize("width", [0, 1, 7, 8, 9, 33, 1000])
def test_sums_are_those_of_the_row(tiles: SpanTiles, width: int) -> None:
    x = normal(5, width) * 100
    got, want = sums(within((5, width), x), tiles), x.double().sum(1)
    bound = x.abs().double().sum(1) * 2.0**-24 * 16
    assert ((got - want).abs() <= bound).all()


@TILES
@pytest.mark.parametrize("width", [1, 9, 65])
def test_sums_of_integers_are_exact_and_wrap(tiles: SpanTiles, width: int) -> None:
    x = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, (7, 2 * width), np.int64).astype(np.int32))
    x = x[:, ::2]
    want = x.long().sum(1)
    assert width == 1 or (want.abs() > 2**31).any()
    assert sums(x, tiles).tolist() == want.to(torch.int32).tolist()


@pytest.mark.parametrize(
    ("tiles", "width"), [(INTERPRETER_SPANS, 5), (INTERPRETER_SPANS, 1003), (SMALL, 8), (SMALL, 100)], ids=str
)
def test_the_bits_of_a_sum_are_the_rows_own(tiles: SpanTiles, width: int) -> None:
    """Alone, among others of other sizes, at another address, by another step: one row, one sum."""
    row = normal(width, seed=3)
    alone = bits(sums(row[None], tiles).contiguous())[0]
    for count in (2, 3, 9):
        x = normal(count, width, seed=count) * 1e6
        x[count // 2] = row
        for view in (x, within((count, width), x), x.t().contiguous().t()):
            assert bits(sums(view, tiles).contiguous())[count // 2] == alone


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # infinity less infinity, on purpose
def test_a_nan_or_infinity_stays_in_its_row() -> None:
    x = torch.tensor([[1.0, NAN], [INF, 1.0], [INF, -INF], [1.0, 2.0]])
    got = sums(x, SMALL).tolist()
    assert got[1:2] + got[3:] == [INF, 3.0]
    assert [v != v for v in got] == [True, False, True, False]


def test_sums_of_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got torch.float16 and out torch.float16, expected torch.float32 or"):
        row_sum(torch.ones(1, 2).half(), torch.ones(1, 1).half())
    with pytest.raises(ValueError, match=r"got torch.int32 and out torch.float32"):
        row_sum(torch.ones(1, 2).int(), torch.ones(1, 1))


# -- thresholds by mass ------------------------------------------------------------------------------------------------
def cutoffs(p: Tensor, mass: Tensor, tiles: SpanTiles) -> list[float]:
    falling = torch.sort(p, -1, descending=True)[0]
    out = poisoned((p.shape[0], 2), torch.float32)
    mass_cutoff(within((falling.shape[0], falling.shape[1]), falling), mass, out[:, 1:], tiles=tiles)
    assert out[:, 0].isnan().all()
    found: list[float] = out[:, 1].tolist()
    return found


def cutoff_of(row: list[float], mass: float) -> float:
    """The oracle, by the definition: candidates from the largest down, in float64."""
    candidates = [] if mass == INF else sorted(set(row), reverse=True)
    return next((t for t in candidates if sum(value for value in row if value >= t) >= mass), -INF)


@TILES
@pytest.mark.parametrize("width", [1, 2, 8, 9, 40])
def test_cutoffs_by_definition_where_sums_are_exact(tiles: SpanTiles, width: int) -> None:
    """Multiples of 2^-10: ties in every row, and masses that are reached exactly, just missed, or never."""
    p = torch.from_numpy(np.random.default_rng(width).integers(0, 6, (60, width)).astype(np.float32)) / 1024
    whole = p.double().sum(1)
    share = torch.arange(60) % 6
    mass = torch.where(share == 5, whole + 1 / 1024, (whole * share / 5 * 1024).round() / 1024).float()[:, None]
    want = [cutoff_of(p[i].tolist(), mass[i].item()) for i in range(60)]
    assert cutoffs(p, mass, tiles) == want
    assert -INF in want


@TILES
def test_masses_and_rows_that_are_no_numbers(tiles: SpanTiles) -> None:
    row = [0.5, 0.25, 0.0, 0.25] * 5
    p = torch.tensor([row] * 6 + [[*row[:-1], NAN], [0.0] * 20])
    mass = torch.tensor([[0.0], [-1.0], [INF], [NAN], [5.0], [5.000001], [0.5], [0.0]])
    assert cutoffs(p, mass, tiles) == [0.5, 0.5, -INF, -INF, 0.25, -INF, -INF, 0.0]


@TILES
def test_the_cutoff_of_a_row_is_its_own(tiles: SpanTiles) -> None:
    p = torch.softmax(normal(9, 300) * 3, -1)
    mass = torch.linspace(0.05, 0.999, 9)[:, None]
    together = cutoffs(p, mass, tiles)
    assert together == [cutoffs(p[i : i + 1], mass[i : i + 1], tiles)[0] for i in range(9)]
    for i, t in enumerate(together):
        above, reached = p[i][p[i] > t].double().sum(), p[i][p[i] >= t].double().sum()
        assert above < mass[i, 0] <= reached


def test_rows_of_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="got rows with a step of 2, expected contiguous ones"):
        mass_cutoff(torch.ones(2, 8)[:, ::2], torch.ones(2, 1), torch.ones(2, 1))


# -- random numbers ----------------------------------------------------------------------------------------------------
def exact_variates(hashes: Bits) -> Bits:
    """In float64, of u in float32: the upper 31 bits, exclusive of both ends."""
    upper = np.minimum(hashes.astype(np.uint64) >> np.uint64(1), np.uint64(2**31 - 128)).astype(np.float32)
    u = (upper + np.float32(0.5)) * np.float32(2.0**-31)
    found: Bits = -np.log(-np.log1p(-u.astype(np.float64)))
    return found


def variates(keys: Tensor, blocks: Tensor, tiles: SpanTiles) -> Bits:
    out = poisoned((keys.shape[0], blocks.shape[1] + 2), torch.float32)
    gumbel(keys, blocks, out[:, 1:-1], tiles=tiles)
    assert out[:, [0, -1]].isnan().all()
    found: Bits = out[:, 1:-1].numpy()
    return found


@TILES
def test_variates_are_those_of_the_contracts_integers(tiles: SpanTiles) -> None:
    keys = torch.tensor([[3, 0], [-77, 0], [2**31 - 1, 0], [-(2**31), 0], [0, 0]], dtype=torch.int32)[:, :1]
    blocks = torch.from_numpy(draws.token_blocks(203)[None])
    want = exact_variates(draws.draw_bits(keys.numpy(), blocks.numpy()).view(np.uint32))
    got = variates(keys, blocks, tiles)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)
    alone = [variates(keys[i : i + 1], blocks, tiles)[0] for i in range(5)]
    np.testing.assert_array_equal(got, np.stack(alone))


def block_for(wanted: int) -> int:
    """The mixed block with which key 0 hashes to ``wanted``: each step of the hash backwards."""

    def unshifted(x: int, n: int) -> int:
        found = x
        for _ in range(32 // n + 1):
            found = x ^ (found >> n)
        return found

    h = unshifted(wanted, 16) * pow(0xC2B2AE35, -1, 2**32) & MASK
    h = unshifted(h, 13) * pow(0x85EBCA6B, -1, 2**32) & MASK
    h = ((unshifted(h, 16) ^ 8) - 0xE6546B64) * pow(5, -1, 2**32) & MASK
    return ((h >> 13) | (h << 19)) & MASK


def test_variates_are_finite_and_exact_at_both_ends() -> None:
    wanted = np.array([0, 1, 2, 2**24 - 2, 2**24, 2**24 + 2, 2**32 - 200, 2**32 - 2, 2**32 - 1], np.uint64)
    blocks = np.array([[block_for(int(h)) for h in wanted]], np.uint32).view(np.int32)
    got = variates(torch.zeros(1, 1, dtype=torch.int32), torch.from_numpy(blocks), INTERPRETER_SPANS)
    np.testing.assert_allclose(got[0], exact_variates(wanted), rtol=1e-6, atol=1e-5)
    assert np.isfinite(got).all()
    assert got.max() > 22


# -- repetition penalty ------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy computes what a mask discards, and infinities on purpose
@TILES
@pytest.mark.parametrize("width", [1, 31, 32, 33, 100])
def test_seen_columns_are_penalised_and_others_keep_their_bits(tiles: SpanTiles, width: int) -> None:
    x = normal(6, width) * 3
    x[0], x[1, ::2] = any_bits((width,), torch.float32), -0.0
    words = -(-width // 32)
    seen = np.random.default_rng(1).integers(-(2**31), 2**31, (6, words + 1), np.int64).astype(np.int32)
    seen[0], seen[2] = 0, -1
    penalty = torch.tensor([[1.3], [1.3], [0.7], [1.0], [2.0], [1e30]])
    view, out = within((6, width), x), within((6, width), torch.zeros(6, width))
    penalise(view, torch.from_numpy(seen)[:, :words], penalty, out, tiles=tiles)
    flags = np.unpackbits(seen[:, :words].copy().view(np.uint8), axis=1, bitorder="little")[:, :width].astype(bool)
    held, factor = x.numpy(), penalty.numpy()
    want = np.where(flags, np.where(held < 0, held * factor, held / factor), held)
    np.testing.assert_array_equal(bits(out), want.view(np.int32))
    penalise(view, torch.from_numpy(seen)[:, :words], penalty, view, tiles=tiles)
    np.testing.assert_array_equal(bits(view), want.view(np.int32))


# -- addresses beyond 32 bits, and nothing to do -----------------------------------------------------------------------
def test_offsets_have_64_bits() -> None:
    far = 2**31 + 8
    memory = lazy(far + 256, torch.float32)
    x, out, mass = (memory[i:].as_strided((2, 8), (far, 1)) for i in (0, 16, 32))
    x.copy_(torch.tensor([[0.5, 0.25] + [0.0] * 6, [4.0, 2.0, 1.0] + [0.0] * 5]))
    mass.fill_(0.75)
    row_sum(x, out[:, :1], tiles=SMALL)
    assert out[:, 0].tolist() == [0.75, 7.0]
    mass_cutoff(x, mass[:, :1], out[:, :1], tiles=SMALL)
    assert out[:, 0].tolist() == [0.25, 4.0]
    numbers = memory[48:].view(torch.int32).as_strided((2, 8), (far, 1))
    numbers.copy_(torch.tensor([[5] * 8, [2] * 8], dtype=torch.int32))
    penalise(x, numbers[:, :1], torch.full((2, 1), 2.0), out, tiles=SMALL)
    assert out.tolist() == [[0.25, 0.25] + [0.0] * 6, [4.0, 1.0, 1.0] + [0.0] * 5]
    blocks = torch.from_numpy(draws.token_blocks(8)[None])
    gumbel(numbers[:, :1], blocks, out, tiles=SMALL)
    np.testing.assert_array_equal(out.numpy(), variates(numbers[:, :1].contiguous(), blocks, SMALL))


def test_no_rows_are_nothing_to_launch() -> None:
    def launch(*_: object, **__: object) -> None:
        raise AssertionError("launched")

    none, one, numbers = torch.empty(0, 4), torch.empty(0, 1), torch.empty(0, 1, dtype=torch.int32)
    row_sum(none, one, launch=launch)
    mass_cutoff(none, one, one, launch=launch)
    gumbel(numbers, torch.zeros(1, 4, dtype=torch.int32), none, launch=launch)
    penalise(none, numbers, one, none, launch=launch)
    nowhere = torch.empty(3, 0)
    gumbel(torch.zeros(3, 1, dtype=torch.int32), torch.zeros(1, 0, dtype=torch.int32), nowhere, launch=launch)
    penalise(nowhere, torch.zeros(3, 0, dtype=torch.int32), torch.ones(3, 1), nowhere, launch=launch)


def test_bits_survive_a_round_trip_of_the_helpers() -> None:
    """The oracle's own memory: what the tests compare is what they wrote."""
    values = np.array([0x7FC12345, -1, 0], np.int32)
    np.testing.assert_array_equal(bits(from_bits(values, torch.float32)), values)
