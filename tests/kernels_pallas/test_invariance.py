"""Bits of the paged decode that must not depend on what else is in the call, nor on the way the pages came."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from forebay.kernels.pallas import paged_decode as decode_module
from forebay.kernels.pallas.rows import gather_pages
from tests.kernels_pallas.cases import FIRST_BLOCK, NONE, Array, Call, Case, build, compiled, run

CASES = {
    "G3": Case((150, 0, 129, 400), group=3, table_len=10, sinks=True, bad=((0, 3), (2, 0))),
    "latent_bf16_T3": Case(
        (150, 2, 129, 0),
        heads=1,
        group=4,
        dim=80,
        value_dim=64,
        spare=48,
        table_len=10,
        query_len=3,
        dtype="bfloat16",
        bad=((2, 1),),
    ),
}
PADDED = 7
"""Rows of a batch padded by rows of no keys."""


def bits(*arrays: Array) -> list[bytes]:
    return [np.ascontiguousarray(x).tobytes() for x in arrays]


def rows_of(call: Call, rows: list[int], by: str) -> tuple[Array, Array]:
    """Some rows of a call, in a call of their own over the same pool."""
    return run(call, by, quickly=False, q=call.q[rows], table=call.table[rows], visible=call.visible[rows])


@pytest.mark.parametrize("window", [NONE, 40])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("by", ["pallas", "xla"])
def test_a_row_alone_is_the_row_among_others(by: str, name: str, window: int) -> None:
    call = build(replace(CASES[name], window=window))
    out, lse = run(call, by, quickly=False)
    for row in range(4):
        assert bits(*rows_of(call, [row], by)) == bits(out[[row]], lse[[row]])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("by", ["pallas", "xla"])
def test_a_row_in_another_place_is_the_row(by: str, name: str) -> None:
    call = build(CASES[name])
    out, lse = run(call, by, quickly=False)
    order = [2, 0, 3, 1]
    assert bits(*rows_of(call, order, by)) == bits(out[order], lse[order])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("by", ["pallas", "xla"])
def test_a_padded_batch_and_a_wider_table_change_nothing(by: str, name: str) -> None:
    """Pad rows see nothing, ask by NaN and have blocks that are none; new columns of the rows that fit are of freed blocks."""
    call = build(CASES[name])
    fits = np.flatnonzero(call.visible <= 160)
    out, lse = run(call, by, quickly=False)
    q = np.full((PADDED, *call.q.shape[1:]), np.nan, np.float32)
    table, visible = np.full((PADDED, 15), -1, np.int32), np.zeros(PADDED, np.int32)
    q[fits], table[fits, :10], table[fits, 10:], visible[fits] = (
        call.q[fits],
        call.table[fits, :10],
        2,
        call.visible[fits],
    )
    wider = replace(call, case=replace(call.case, table_len=14))
    padded_out, padded_lse = run(wider, by, quickly=False, q=q, table=table, visible=visible)
    assert len(fits) >= 3
    assert bits(padded_out[fits], padded_lse[fits]) == bits(out[fits], lse[fits])
    assert not np.delete(padded_out, fits, 0).any()
    assert np.isneginf(np.delete(padded_lse, fits, 0)).all()


@pytest.mark.parametrize("window", [NONE, 40])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("by", ["pallas", "xla"])
def test_gathered_pages_under_a_table_of_their_own_give_the_same_bits(by: str, name: str, window: int) -> None:
    """Block 0 of what was gathered is a page like others, and what is none in the pool is a page of zeros."""
    call = build(replace(CASES[name], window=window))
    case = call.case
    gathered = gather_pages(
        jnp.asarray(call.pages).astype(case.dtype),
        jnp.asarray(call.table),
        jnp.asarray(call.visible),
        table_len=case.table_len,
        first_block=FIRST_BLOCK,
        query_len=case.query_len,
        window=window,
    )
    table = np.arange(4 * case.table_len, dtype=np.int32).reshape(4, -1)
    there = run(call, by, quickly=False, pages=np.array(gathered.astype(jnp.float32)), table=table, first_block=0)
    assert bits(*there) == bits(*run(call, by, quickly=False))


def test_calls_that_differ_by_numbers_alone_are_one_program() -> None:
    case = Case((20, 3), block_size=8, table_len=3, softcap=2.0)
    program = compiled(decode_module, case.format, case.table_len, FIRST_BLOCK, "xla", True, True)
    outs = [
        run(build(replace(case, window=window, softcap=cap)), "xla")[0]
        for window, cap in ((NONE, 2.0), (5, 2.0), (5, 3.0))
    ]
    assert program._cache_size() == 1
    assert len({out.tobytes() for out in outs}) == 3
