"""Paged decode attention on the CPU: right values, from any geometry, layout and contents."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.kernels.numba.paged_decode import paged_decode, prepare, specialised_keys, warm
from forebay.specs.suite.attention import Array
from tests.kernels.cases import LAYOUTS, Case, Dtype, make

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
DIMS = (32, 64, 128, 1, 17, 80, 96, 100, 192)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 20)


@pytest.mark.clause("D6", "D3", "L3")
@pytest.mark.case("D06", "D07")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_every_head_size_and_group(dim: int, dtype: Dtype) -> None:
    for group in GROUPS:
        kv_heads = 1 if group > 4 else 2
        make([5, 0, 70], heads=group * kv_heads, kv_heads=kv_heads, dim=dim, dtype=dtype, seed=group).check()


@pytest.mark.clause("D6")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 128), (3, 1, 64), (5, 1, 96)])
def test_long_sequences(heads: int, kv_heads: int, dim: int, dtype: Dtype) -> None:
    lengths = [4097, 4096, 513, 512, 511, 1]
    make(lengths, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype).check()
    make(lengths[:3], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, magnitude=3.0).check()


@pytest.mark.clause("D6")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_short_length(dtype: Dtype) -> None:
    make(list(range(100)), dim=64, heads=4, kv_heads=1, block_size=3, dtype=dtype).check()


@pytest.mark.clause("L1", "D6")
@pytest.mark.parametrize("block_size", [1, 2, 5, 8, 16, 33, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_block_size(layout: str, block_size: int) -> None:
    for dtype in DTYPES:
        make([1, 130, 64], block_size=block_size, layout=layout, dtype=dtype).check()
        make([7, 65], block_size=block_size, layout=layout, dtype=dtype, dim=20, v_dim=12).check()


@pytest.mark.clause("L1", "D6")
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_values_are_the_first_columns_of_the_keys(dtype: Dtype) -> None:
    make([9, 600], heads=20, kv_heads=1, dim=96, v_dim=64, layout="LATENT", dtype=dtype).check()
    make([9, 40], heads=8, kv_heads=1, dim=64, v_dim=64, layout="LATENT", dtype=dtype).check()


@st.composite
def drawn_cases(draw: Any) -> Case:
    """Anything a call may look like, small."""
    query_len = draw(st.integers(1, 5))
    kv_heads = draw(st.integers(1, 3))
    group = draw(st.sampled_from((1, 2, 3, 4, 5, 8, 20)))
    dim = draw(st.sampled_from((*DIMS, 2, 31, 33)))
    case = make(
        draw(st.lists(st.integers(0, 80) | st.integers(500, 530), min_size=1, max_size=4)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=dim,
        v_dim=draw(st.sampled_from((dim, dim, 5))),
        block_size=draw(st.integers(1, 64)),
        query_len=query_len,
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        extra_width=draw(st.integers(0, 3)),
        sink=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
        window=draw(st.none() | st.integers(1, 100)),
        softcap=draw(st.none() | st.floats(0.5, 60.0)),
    )
    if draw(st.booleans()):
        case.options["sinks"] = np.linspace(-2, 3, kv_heads * group).astype(np.float32)
    for _ in range(draw(st.integers(0, 3))):
        b = draw(st.integers(0, len(case.visible) - 1))
        column = draw(st.integers(0, case.table.shape[1] - 1))
        case.table[b, column] = draw(st.sampled_from((-1, case.options["num_blocks"], -(2**31), 2**31 - 1)))
    return case


@pytest.mark.clause("D2", "D3", "D4", "D6", "D9", "D11", "L1", "L3")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_cases())
def test_any_case_equals_the_oracle_on_both_paths(case: Case) -> None:
    out, lse = case.check()
    gathered, gathered_lse, _ = case.run(path="gather")
    np.testing.assert_array_equal(out, gathered)
    np.testing.assert_array_equal(lse, gathered_lse)


def equal_keys(values: list[float], *, window: int | None = None, sinks: Array | None = None) -> Case:
    """One sequence whose keys are equal and whose value at position t is ``values[t]`` in every element."""
    case = make([len(values)], heads=1, kv_heads=1, dim=2, block_size=4, window=window, sinks=sinks)
    for position, value in enumerate(values):
        case.k[case.table[0, position // 4], position % 4] = 0.0
        case.v[case.table[0, position // 4], position % 4] = value
    return case


@pytest.mark.clause("L3", "D9")
@pytest.mark.case("D01", "D02")
def test_poison_after_the_last_visible_token_stays_out() -> None:
    case = equal_keys([1.0, 3.0])
    page = case.table[0, 0]
    for bad in (np.nan, np.inf, -np.inf):
        for plane in (case.k, case.v):
            plane[page, 2:] = bad
            out, _, _ = case.run()
            np.testing.assert_array_equal(out, 2.0)


@pytest.mark.clause("D6")
def test_poison_that_is_visible_comes_out() -> None:
    for plane in "kv":
        case = make([40], heads=8, kv_heads=2, dim=64)
        getattr(case, plane)[case.table[0, 1], 3, 1, 5] = np.nan
        out, _, _ = case.run()
        assert np.isfinite(out[0, 0, :4]).all()
        assert np.isnan(out[0, 0, 4:]).any(axis=-1).all()


@pytest.mark.clause("D9")
@pytest.mark.case("D05")
@pytest.mark.parametrize("length", [3, 4, 5, 6, 600])
@pytest.mark.parametrize("window", [1, 4, 513, 10_000])
def test_a_window_counts_the_current_token(length: int, window: int) -> None:
    case = equal_keys([float(t) for t in range(length)], window=window)
    seen = np.arange(max(0, length - window), length)
    out, lse = case.check()
    np.testing.assert_allclose(out, seen.mean(), rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(len(seen)), rtol=1e-6)


@pytest.mark.clause("D9", "D2")
def test_entries_before_the_window_are_not_read() -> None:
    case = make([40], block_size=4, window=7)
    case.k[case.table[0, :8]], case.v[case.table[0, :8]] = np.nan, np.nan
    case.k[case.table[0, 8], 0], case.v[case.table[0, 8], 0] = np.nan, np.nan
    case.table[0, :8] = 2**31 - 1
    case.check()
    assert case.run()[2] == 0


@pytest.mark.clause("D9", "D10")
def test_sinks_are_one_more_score_in_the_denominator() -> None:
    case = equal_keys([8.0, 8.0, 8.0], sinks=np.zeros(1, np.float32))
    out, lse = case.check()
    np.testing.assert_allclose(out, 6.0, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(4.0), rtol=1e-6)
    case.options["sinks"] = np.full(1, 1e4, np.float32)
    np.testing.assert_array_equal(case.run()[0], 0.0)
    case.visible[:] = 0
    out, lse, _ = case.run()
    np.testing.assert_array_equal(out, 0.0)
    assert np.isneginf(lse).all()


@pytest.mark.clause("D9")
@pytest.mark.parametrize("softcap", [0.3, 5.0, 30.0, 50.0])
def test_soft_cap(softcap: float) -> None:
    for dtype in DTYPES:
        make([1, 600, 33], softcap=softcap, dtype=dtype, magnitude=2.0).check()
        make([1, 60, 33], softcap=softcap, dtype=dtype, dim=17, magnitude=4.0).check()


@pytest.mark.clause("D2", "D3")
@pytest.mark.case("I04")
def test_a_visible_block_that_is_not_there_is_zero_and_counted_once() -> None:
    for bad in (-1, 0, 10**6, 2**31 - 1, -(2**31)):
        case = make([6, 6], heads=6, block_size=4, query_len=3)
        case.table[0, 1] = bad
        assert case.run()[2] == 1
        case.check(path="direct")
        case.check(path="gather")
        assert case.run(first_block=0)[2] == (0 if bad == 0 else 1)


@pytest.mark.clause("D2", "D1")
@pytest.mark.parametrize("visible", [9, 12, 2047, 5000])
def test_visible_beyond_the_table_is_invalid_blocks(visible: int) -> None:
    for window in (None, 3, 1500):
        case = make([8], block_size=4, window=window)
        case.visible[:] = visible
        out, lse = case.check()
        gathered, gathered_lse, _ = case.run(path="gather")
        np.testing.assert_array_equal(out, gathered)
        np.testing.assert_array_equal(lse, gathered_lse)
        case.table = np.pad(case.table[:, :2], ((0, 0), (0, 2000)), constant_values=-1)
        wider, wider_lse, invalid = case.run(table_len=2000)
        np.testing.assert_array_equal(out, wider)
        np.testing.assert_array_equal(lse, wider_lse)
        assert invalid == case.run()[2]


@pytest.mark.clause("D2")
def test_a_visible_length_of_garbage_ends() -> None:
    case = make([8], block_size=4)
    case.visible[:] = 2**31 - 1
    out, lse, invalid = case.run()
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    assert invalid == 2**29 - 2


@pytest.mark.clause("D2")
@pytest.mark.case("I08", "I07", "A04")
def test_columns_beyond_table_len_are_not_blocks() -> None:
    case = make([16, 9], block_size=4)
    case.table[:, 2] = case.table[:, 1]
    want = case.run(table_len=2)
    case.table[:, 2:] = 2**31 - 1
    got = case.run(table_len=2)
    np.testing.assert_array_equal(want[0], got[0])
    assert want[2] == got[2] == 3


@pytest.mark.clause("D3")
@pytest.mark.case("A05", "D03")
def test_every_row_is_written() -> None:
    case = make([5, 0, 3], query_len=4)
    case.visible[1] = -3
    out, lse = case.check()
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(out[1], 0.0)
    np.testing.assert_array_equal(out[2, 0], 0.0)
    assert np.isneginf(lse[1]).all()


@pytest.mark.clause("D11", "D9")
@pytest.mark.parametrize("window", [None, 3, 40])
def test_several_queries(window: int | None) -> None:
    for dtype in DTYPES:
        make([70, 3, 520, 0], query_len=6, window=window, dtype=dtype, heads=6, dim=64).check()


@pytest.mark.clause("D10")
@pytest.mark.case("D09")
def test_the_log_sum_exp_is_natural_and_merges() -> None:
    part, rest = equal_keys([0.0, 0.0, 0.0]), equal_keys([8.0])
    (out_a, lse_a, _), (out_b, lse_b, _) = part.run(), rest.run()
    weight = np.exp([lse_a.item(), lse_b.item()])
    merged = (weight[0] * out_a[0, 0, 0] + weight[1] * out_b[0, 0, 0]) / weight.sum()
    np.testing.assert_allclose(merged, 2.0, rtol=1e-6)


@pytest.mark.clause("D6", "D3")
def test_scores_far_apart() -> None:
    case = make([40, 700], magnitude=30.0)
    case.check()
    case.options["scale"] = -1.0
    out, _, _ = case.run()
    want = case.expect()
    np.testing.assert_allclose(out, want.out, atol=1e-3 * want.largest)


@pytest.mark.clause("W9", "C4")
def test_a_prepared_call_follows_its_arrays() -> None:
    for path in ("direct", "gather"):
        case = make([0, 0, 0], extra_width=40)
        out, lse, invalid = case.outputs()
        case.options["table_len"] = case.table.shape[1]
        call = prepare(case.q, case.k, case.v, case.table, case.visible, out, lse, invalid, path=path, **case.options)
        for seed in range(4):
            fresh = make([seed * 11 + 1, 0, 70 - seed], seed=seed, extra_width=40)
            blocks = case.k.shape[0]
            case.table[:] = fresh.table[:, : case.table.shape[1]] % blocks
            rng = np.random.default_rng(seed)
            case.k[...], case.v[...] = rng.standard_normal((2, *case.k.shape))
            case.q[...] = fresh.q
            case.visible[:] = fresh.visible
            call()
            again, again_lse, _ = case.run()
            np.testing.assert_array_equal(out, again)
            np.testing.assert_array_equal(lse, again_lse)
            case.check()


@pytest.mark.clause("D6")
def test_at_most_twelve_specialised_builds_and_each_of_them_works() -> None:
    keys = specialised_keys()
    assert len(keys) == len(set(keys)) <= 12
    by_name: dict[str, Dtype] = {dtype: dtype for dtype in DTYPES}
    for group, dim, name in keys:
        dtype = by_name[name]
        warm(group, dim, dtype)
        make([33, 600], heads=group * 2, kv_heads=2, dim=dim, dtype=dtype).check()


@pytest.mark.clause("D1")
def test_a_table_may_be_any_strided_read_only_view() -> None:
    case = make([40, 33, 8], block_size=4)
    want = case.run()[0]
    wide = np.full((6, 50), -9, np.int32)
    wide[::2, 1 : 1 + 2 * case.table.shape[1] : 2] = case.table
    view = wide[::2, 1 : 1 + 2 * case.table.shape[1] : 2]
    view.flags.writeable = False
    case.table = view
    np.testing.assert_array_equal(case.run()[0], want)


@pytest.mark.clause("D2")
def test_the_count_of_invalid_blocks_is_added() -> None:
    case = make([6], block_size=4)
    case.table[0, 0] = -5
    out, lse, invalid = case.outputs()
    invalid[0] = 3
    paged_decode(case.q, case.k, case.v, case.table, case.visible, out, lse, invalid, **case.options)
    assert invalid[0] == 4


@pytest.mark.clause("D1", "D8")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((1, 1, 3, 64), np.float32)}, "q: got 3 query heads, expected a multiple of the 2 KV heads"),
        (
            {"q": np.zeros((1, 1, 4, 64))},
            "q: got contiguous float64[1, 1, 4, 64], expected contiguous float32[1, 1, 4, 64]",
        ),
        (
            {"q": np.zeros((1, 1, 4, 128), np.float32)[..., ::2]},
            "q: got strided float32[1, 1, 4, 64], expected contiguous",
        ),
        ({"q": np.zeros((1, 4, 64), np.float32)}, "q, k_view, v_view: got 3, 4 and 4 axes, expected 4 each"),
        (
            {"q": np.zeros((1, 1, 4, 32), np.float32)},
            "k_view: got contiguous float32[4, 16, 2, 64], expected float32 or uint16",
        ),
        ({"table": np.zeros(3, np.int32)}, "table: got contiguous int32[3], expected int32[1, any]"),
        ({"table": np.zeros((1, 3), np.int64)}, "table: got contiguous int64[1, 3], expected int32[1, any]"),
        ({"visible": np.zeros(2, np.int32)}, "visible: got contiguous int32[2], expected int32[1]"),
        ({"table_len": 9}, "table_len: got 9, expected 0 to the table's width 3"),
        ({"window": 0}, "window: got 0, expected at least 1 or None"),
        ({"sinks": np.zeros(3, np.float32)}, "sinks: got contiguous float32[3], expected contiguous float32[4]"),
        ({"block_size": 8}, "k_view: got contiguous float32[4, 16, 2, 64], expected float32 or uint16"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    case = make([9])
    out, lse, invalid = case.outputs()
    arrays = {name: change.get(name, getattr(case, name)) for name in ("q", "table", "visible")}
    options = {**case.options, **{name: value for name, value in change.items() if name not in arrays}}
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_decode(arrays["q"], case.k, case.v, arrays["table"], arrays["visible"], out, lse, invalid, **options)
    assert np.isnan(out).all()
