"""Values that cross from the host: nothing is narrowed silently, and hostile numbers stay visible (clauses D2, D9, D10, W6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import AttentionParams, Backend, BlockTable, InvalidInput, KVGeometry, WriteLoc
from forebay.specs.dtypes import bfloat16_bits, bfloat16_values, host_bits
from forebay.specs.suite.kv import int32, put_values
from forebay.specs.suite.scenes import scene

INT32_MAX = 2**31 - 1


@pytest.mark.refuses("B6")
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([257], "bfloat16"),
        ([2**24 + 1], "float32"),
        (np.array([2**53 + 1]), "float32"),
        (np.array([2**63 + 1], np.uint64), "float32"),
        (np.array([2**63 - 1]), "float32"),
        ([2**31], "int32"),
        ([2], "bool"),
        ([1e300], None),
        ([1.5], "int32"),
    ],
)
def test_a_value_that_would_change_is_refused(backend: Backend, value: Any, dtype: str | None) -> None:
    uploads = backend.counters.uploads
    with pytest.raises(InvalidInput, match=r"do not fit|cannot become"):
        backend.to_device(value, dtype)
    assert backend.counters.uploads == uploads


@pytest.mark.refuses("B6")
@pytest.mark.parametrize("value", [[[1.0], [1.0, 2.0]], ["x"], object(), None])
def test_what_is_no_array_of_numbers_is_refused(backend: Backend, value: Any) -> None:
    with pytest.raises(InvalidInput, match="to_device"):
        backend.to_device(value)


@pytest.mark.clause("D1")
def test_foreign_byte_order_is_understood(backend: Backend) -> None:
    bits = np.array([0x3F80, 0x4000], np.uint16)
    for order in (">u2", "<u2"):
        got = backend.to_host(backend.to_device(bits.astype(order), dtype="bfloat16"))
        np.testing.assert_array_equal(got, [1.0, 2.0])


@pytest.mark.clause("D1")
@given(st.floats(allow_nan=False, width=64), st.integers(-4, 4))
def test_float64_to_bfloat16_rounds_once(start: float, nudge: int) -> None:
    """Nearest even of the float64 itself: rounding through float32 would round a near tie twice."""
    low = float(bfloat16_values(bfloat16_bits(np.array([np.clip(start, -1e30, 1e30)], np.float32)))[0])
    up = float(bfloat16_values(bfloat16_bits(np.array([low], np.float32)) + np.uint16(1))[0])
    tie = (low + up) / 2
    x = tie
    for _ in range(abs(nudge)):
        x = float(np.nextafter(x, np.inf if nudge > 0 else -np.inf))
    got = float(bfloat16_values(host_bits(np.array([x]), "bfloat16")[0])[0])
    if nudge == 0:
        assert got in (low, up)
    else:
        assert got == (max(low, up) if nudge > 0 else min(low, up))


@pytest.mark.clause("D10")
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_poisoned_part_shows_in_the_merge(backend: Backend, poison: float) -> None:
    """NaN propagates, +inf wins with its own output; neither passes for an empty part."""
    outs = [backend.to_device(np.full((1, 1, 2), v, np.float32)) for v in (3.0, 5.0)]
    lses = [backend.to_device(np.full((1, 1), v, np.float32)) for v in (poison, 0.0)]
    out, lse = (backend.to_host(x) for x in backend.merge_partials(outs, lses))
    if np.isnan(poison):
        assert np.isnan(out).all()
        assert np.isnan(lse).all()
    else:
        assert (out == 3.0).all()
        assert np.isposinf(lse).all()


@pytest.mark.clause("D2", "W6")
def test_counts_stay_at_their_largest_value(backend: Backend) -> None:
    """A device count never wraps, whatever nonsense the device holds in ``visible``."""
    pool = backend.create_pool(KVGeometry(4, 16, 1, 64))
    q = backend.to_device(np.zeros((17, 1, 64), np.float32))
    table = backend.to_device(np.zeros((17, 2), np.int32))
    visible = backend.to_device(np.full(17, INT32_MAX, np.int32))
    for _ in range(2):
        backend.paged_decode(q, pool, 0, BlockTable(table), visible, table_len=2)
    assert pool.invalid == INT32_MAX
    backend.upload(pool.dropped_buffer, int32(INT32_MAX - 1))
    rows = backend.to_device(np.zeros((3, 1, 64), np.float32))
    pool.write(0, WriteLoc.slots(backend.to_device(int32(99, 99, 99))), rows, rows)
    assert pool.dropped == INT32_MAX
    backend.release(pool)


@pytest.mark.refuses("D9")
@pytest.mark.parametrize("fields", [{"scale": 1e39}, {"softcap": 1e39}, {"scale": 10**400}, {"window": 10**30}])
def test_parameters_that_float32_or_int32_cannot_hold_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"finite in float32|at most"):
        AttentionParams(**fields)


@pytest.mark.clause("D9")
@pytest.mark.beyond_core
@pytest.mark.parametrize("path", ["direct", "gather"])
def test_a_sink_of_minus_infinity_is_none(backend: Backend, path: str) -> None:
    """It takes nothing of the denominator: such a head's row is that of a call without sinks, beside a head that has one."""
    with scene(backend, (5, 40, 0), heads=2) as s:
        s.check(sinks=np.array([-np.inf, 1.0], np.float32), path=path)
        s.check(sinks=np.full(2, -np.inf, np.float32), path=path)


@pytest.mark.clause("W1")
def test_no_rows_at_all(backend: Backend) -> None:
    pool = backend.create_pool(KVGeometry(4, 16, 1, 64))
    for put in (backend.to_device, np.asarray):
        loc = WriteLoc.paged(put(np.zeros((0, 1), np.int32)), put(np.zeros(0, np.int32)), table_len=1)
        assert backend.xp.shape(pool.read(0, loc)[0]) == (0, 1, 64)
        put_values(backend, pool, [17], [7])
        one = WriteLoc.paged(put(int32([1])), put(int32(1)), table_len=1)
        assert (backend.to_host(pool.read(0, one)[1]) == 7).all()
    backend.release(pool)
