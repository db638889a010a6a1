"""Values of the paged decode, by the Pallas kernel and by the loop in XLA, against float64 over pools full of poison."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from forebay.kernels.pallas.paged_decode import paged_decode
from forebay.kernels.pallas.pages import MOST_SCALARS, PageFormat, pages_of_chunk, queries_of_block
from tests.kernels_pallas.cases import NONE, Case, build, run
from tests.kernels_pallas.oracle import complaint

LOW, HIGH = -(2**31), 2**31 - 1
WAYS = ("pallas", "xla")

CASES = {
    "D64_G3": Case(
        (320, 0, 129, 1, HIGH, LOW),
        group=3,
        table_len=20,
        bad=((0, 3), (2, 0), (2, 7), (2, 8), (4, 19), (4, 0), (0, 8)),
    ),
    "D32_G8_T3_sinks_cap": Case(
        (2, 160, 131, 0, 163, LOW),
        group=8,
        dim=32,
        block_size=8,
        table_len=20,
        query_len=3,
        softcap=3.0,
        sinks=True,
        bad=((1, 1), (2, 15), (4, 19)),
    ),
    "D128_T5_bf16": Case(
        (4, 160, 129, 0, 200, 5),
        dim=128,
        block_size=4,
        table_len=40,
        query_len=5,
        q_dtype="bfloat16",
        dtype="bfloat16",
        bad=((1, 39), (2, 31), (4, 0)),
    ),
    "D80_bf16_pages": Case(
        (384, 128, 0, 129, 400), dim=80, block_size=128, table_len=3, dtype="bfloat16", bad=((0, 1), (4, 2))
    ),
    "D256_G3_T3_bf16_queries": Case(
        (128, 2, 0, 130, 17), group=3, dim=256, table_len=9, query_len=3, q_dtype="bfloat16", bad=((0, 0), (3, 7))
    ),
    "latent_G8_f16": Case(
        (100, 0, 128, 129, 150),
        heads=1,
        group=8,
        dim=80,
        value_dim=43,
        spare=48,
        table_len=9,
        q_dtype="float16",
        dtype="bfloat16",
        sinks=True,
        bad=((0, 2), (3, 8)),
    ),
    "latent_G3_T5": Case(
        (130, 3, 0, 260, 300),
        heads=1,
        group=3,
        dim=256,
        value_dim=128,
        table_len=17,
        query_len=5,
        softcap=20.0,
        bad=((0, 8), (3, 0)),
    ),
    "three_blocks_of_queries": Case(
        (130, 3, 0, 7), heads=1, group=48, table_len=9, query_len=5, dtype="bfloat16", bad=((0, 4),)
    ),
}
"""Rows of no keys, of some, of whole pages and chunks, and of more than the table has; ids of the table that are no blocks."""


@pytest.mark.parametrize("window", [NONE, 1, 20, 131])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("by", WAYS)
def test_every_query_sees_its_own_keys_alone(by: str, name: str, window: int) -> None:
    call = build(replace(CASES[name], window=window))
    assert complaint(call, *run(call, by)) == ""


@pytest.mark.parametrize("torn_keys", [False, True])
@pytest.mark.parametrize(
    ("name", "window"), [("D128_T5_bf16", NONE), ("D32_G8_T3_sinks_cap", 20), ("latent_G3_T5", 131)]
)
@pytest.mark.parametrize("by", WAYS)
def test_a_key_that_is_not_finite_harms_no_query_that_does_not_see_it(
    by: str, name: str, window: int, torn_keys: bool
) -> None:
    """In one row the last key, which the last query sees; in another, with a window, the first, which only the first query sees."""
    case = replace(CASES[name], window=window, torn_keys=torn_keys or CASES[name].value_dim is not None)
    first = max(case.visible[1] - case.query_len + 1 - window, 0)
    call = build(replace(case, torn=((2, case.visible[2] - 1), (1, first), (0, case.visible[0] - 2))))
    out, lse = run(call, by)
    assert np.isnan(out).any() and not np.isnan(out).all()
    assert complaint(call, out, lse) == ""


@pytest.mark.parametrize("by", WAYS)
def test_a_table_of_no_columns_is_zeros_that_take_part(by: str) -> None:
    call = build(Case((0, 1, 40), table_len=0, sinks=True))
    out, lse = run(call, by)
    assert complaint(call, out, lse) == ""
    assert not out.any()


@pytest.mark.parametrize("by", WAYS)
def test_no_rows_are_no_rows(by: str) -> None:
    call = build(Case(()))
    out, lse = run(call, by)
    assert out.shape == (0, 1, 2, 64)
    assert lse.shape == (0, 1, 2)


def test_a_table_that_scalar_memory_cannot_hold_is_refused() -> None:
    call = build(Case((1, 1)))
    wide = MOST_SCALARS // 2
    with pytest.raises(ValueError, match=f"{2 * wide + 2} scalars, scalar memory holds {MOST_SCALARS}.*fewer rows"):
        paged_decode(
            jnp.asarray(call.q),
            jnp.asarray(call.pages),
            jnp.ones((2, wide), jnp.int32),
            jnp.asarray(call.visible),
            page=call.case.format,
            table_len=wide,
            first_block=1,
            scale=1.0,
            interpret=True,
        )


def test_a_chunk_is_128_tokens_unless_two_would_not_fit() -> None:
    assert [pages_of_chunk(bs, 8, 256, 2) for bs in (4, 16, 128, 256)] == [32, 8, 1, 1]
    assert pages_of_chunk(16, 32, 512, 4) == 2  # 1 MiB a page
    assert pages_of_chunk(16, 32, 513, 4) == 1  # lanes count as whole registers
    assert [queries_of_block(5, g) for g in (1, 8, 48, 64, 128, 200)] == [5, 5, 2, 2, 1, 1]


def test_a_format_takes_whole_registers_where_it_can() -> None:
    assert (PageFormat(256, 128, 128, 128).key_lanes, PageFormat(256, 128, 128, 128).value_slice) == (128, (128, 128))
    assert (PageFormat(128, 64, 64, 64).key_lanes, PageFormat(128, 64, 64, 64).value_slice) == (128, (0, 128))
    assert (PageFormat(640, 576, 0, 512).key_lanes, PageFormat(640, 576, 0, 512).value_slice) == (640, (0, 512))
