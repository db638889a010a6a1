"""Log-sum-exps, and partial results that are merged by them (clause D10)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import Backend, InvalidInput, Segment
from forebay.specs.suite.attention import Array
from forebay.specs.suite.kv import (
    BLOCK_SIZE,
    EACH_KV_DTYPE,
    HEAD_DIM,
    claimed,
    geometry,
    int32,
    new_pool,
    put_values,
    refused,
    slot,
)
from forebay.specs.suite.scenes import Q_DTYPES, WAYS, How, Scene, scene, tolerance
from forebay.specs.suite.steps import copies


def partial(backend: Backend, values: list[float], *, path: str = "direct") -> tuple[Any, Any]:
    """Attention over equal keys (score 0) with these values, as device arrays; its LSE is ln of their number."""
    blocks = max(1, -(-len(values) // BLOCK_SIZE))
    with new_pool(backend, geometry(num_blocks=2 + blocks, num_kv_heads=1)) as pool:
        if values:
            places = [slot(pool, *divmod(t, BLOCK_SIZE)) for t in range(len(values))]
            put_values(backend, pool, places, values)
        q = backend.to_device(np.zeros((1, 2, HEAD_DIM), np.float32))
        table = int32([pool.first_block + block for block in range(blocks)])
        out, lse = backend.paged_decode(
            q, pool, 0, table, int32(len(values)), table_len=blocks, path=path, return_lse=True
        )
    return out, lse


@pytest.mark.clause("D10")
@pytest.mark.case("D09", "H02")
@pytest.mark.parametrize("path", ["direct", "gather"])
def test_the_lse_is_a_natural_logarithm(backend: Backend, path: str) -> None:
    """Three keys of score 0 and value 0, one of value 8: LSEs ln 3 and 0, merged 2.0 (base 2 mixed up gives 1.361)."""
    three, one = partial(backend, [0, 0, 0], path=path), partial(backend, [8], path=path)
    np.testing.assert_allclose(backend.to_host(three[1]), np.log(3), rtol=1e-6)
    np.testing.assert_allclose(backend.to_host(one[1]), 0.0, atol=1e-6)
    out, lse = backend.merge_partials([three[0], one[0]], [three[1], one[1]])
    np.testing.assert_allclose(backend.to_host(out), 2.0, rtol=1e-6)
    np.testing.assert_allclose(backend.to_host(lse), np.log(4), rtol=1e-6)


@pytest.mark.clause("D10")
@pytest.mark.case("D09", "H02")
@pytest.mark.parametrize("path", ["direct", "gather"])
def test_the_lse_of_a_long_row_is_a_natural_logarithm(backend: Backend, path: str) -> None:
    """1,300 keys of score 0, which a kernel may cut into several parts and merge: the LSE is their logarithm."""
    out, lse = partial(backend, [3.0] * 1300, path=path)
    np.testing.assert_allclose(backend.to_host(out), 3.0, rtol=1e-5)
    np.testing.assert_allclose(backend.to_host(lse), np.log(1300), rtol=1e-5)


@pytest.mark.clause("D10", "D3")
@pytest.mark.case("D09", "H02")
def test_empty_parts_weigh_nothing_whatever_they_hold(backend: Backend) -> None:
    some, none = partial(backend, [1, 5]), partial(backend, [])
    assert np.isneginf(backend.to_host(none[1])).all()
    for garbage in (0.0, 123.0, np.nan, np.inf):
        empty = backend.to_device(np.full((1, 2, HEAD_DIM), garbage, np.float32))
        for order in (0, 1):
            parts = [(some[0], some[1]), (empty, none[1])]
            outs, lses = zip(*(parts if order else parts[::-1]), strict=True)
            out, lse = backend.merge_partials(outs, lses)
            np.testing.assert_allclose(backend.to_host(out), 3.0, rtol=1e-6)
            np.testing.assert_allclose(backend.to_host(lse), np.log(2), rtol=1e-6)
        out, lse = backend.merge_partials([empty, empty], [none[1], none[1]])
        assert not backend.to_host(out).any()
        assert np.isneginf(backend.to_host(lse)).all()


@pytest.mark.clause("D10", "D6")
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@given(data=st.data())
def test_parts_of_a_sequence_merge_to_the_whole(backend: Backend, dtype: str, data: st.DataObject) -> None:
    """Cut a table anywhere, empty parts included: the merge is attention over all of it, for every query of T.

    Each of several queries sees all of every part but the last one, where they end one after the other.
    """
    draw = data.draw
    columns, q_dtype = draw(st.integers(1, 9)), draw(st.sampled_from(Q_DTYPES))
    query_len = draw(claimed(backend, "max_query_len", (1, 2, 3, 7)))
    with scene(backend, [BLOCK_SIZE * columns] * 2, heads=4, dtype=dtype, query_len=query_len) as s:
        most = st.lists(st.integers(0, columns), max_size=7)
        parts = []
        for low, high in pairwise([0, *sorted(draw(most)), columns]):
            table, visible = np.ascontiguousarray(s.table[:, low:high]), np.full(2, (high - low) * BLOCK_SIZE, np.int32)
            part = Scene(backend, s.pool, s.q, table, visible, high - low)
            if high == columns:
                parts.append(part.decode(q_dtype=q_dtype))
                continue
            # A call of one query a row, for each of the T: none of them ends before the part does.
            q = s.q.reshape(2 * query_len, 1, 4, HEAD_DIM)
            each = Scene(backend, s.pool, q, table.repeat(query_len, 0), visible.repeat(query_len), high - low)
            out, lse = each.decode(q_dtype=q_dtype)
            parts.append((out.reshape(s.q.shape), lse.reshape(s.q.shape[:3])))
        # Parts and whole are rounded to q's dtype once each, by half a unit in the last place: together within its limit.
        out, lse = merged(backend, parts, q_dtype, "eager")
        s.hold(out, lse, s.expect(q_dtype=q_dtype), q_dtype)


def merged(backend: Backend, parts: list[tuple[Array, Array]], dtype: str, how: How) -> tuple[Array, Array]:
    """The merge of host parts as out and LSE; as a step it is captured and replayed over zeros, then handed these."""
    if how == "eager":
        outs, lses = (
            [backend.to_device(x, d) for x in xs] for xs, d in zip(zip(*parts, strict=True), (dtype, None), strict=True)
        )
        out, lse = backend.merge_partials(outs, lses)
        assert backend.xp.dtype(out) == dtype
        return backend.to_host(out), backend.to_host(lse)
    cells = [(backend.buffer("out", 0 * out, dtype), backend.buffer("lse", np.zeros_like(lse))) for out, lse in parts]

    def fn(b: Backend) -> Any:
        return {}, dict(
            zip(
                ("out", "lse"),
                b.merge_partials(*([x.get() for x in xs] for xs in zip(*cells, strict=True))),
                strict=True,
            )
        )

    buffers = tuple(buffer for cell in cells for buffer in cell)
    segment = Segment("merge", fn, reads=buffers)
    backend.run(segment)
    trace = backend.capture(segment)
    backend.replay(trace)
    for buffer, x in zip(buffers, (x for part in parts for x in part), strict=True):
        backend.upload(buffer, x)
    got = copies(backend.run(segment) if how == "run" else backend.replay(trace))
    backend.release(trace)
    for buffer in buffers:
        backend.release(buffer)
    return got["out"], got["lse"]


@pytest.mark.clause("D10", "C3")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dtype", Q_DTYPES)
@pytest.mark.parametrize("count", [1, 9, 17, 40])
def test_parts_weigh_by_their_lse(backend: Backend, dtype: str, how: How, count: int) -> None:
    """Parts of unequal LSE, each of one number, of one query a row or of several: against the weighted mean in float64."""
    rng = np.random.default_rng(0)
    shapes: tuple[tuple[int, ...], ...] = ((3, 2), (2, 5, 2))
    for shape in shapes if backend.capabilities.allows("max_query_len", 5) else shapes[:1]:
        lses = rng.uniform(-3, 3, (count, *shape)).astype(np.float32)
        # The last part outweighs all others in the first row: among many it would not be missed.
        lses[-1, 0] += 6
        numbers = rng.choice([-8, -5, -1, 2, 3, 7], count).astype(np.float32)
        parts = [(np.full((*shape, 4), number, np.float32), lse) for number, lse in zip(numbers, lses, strict=True)]
        out, lse = merged(backend, parts, dtype, how)
        weights = np.exp(lses.astype(np.float64))
        want = np.tensordot(numbers, weights, 1) / weights.sum(0)
        assert np.abs(out - want[..., None]).max() <= tolerance(backend, dtype) * np.abs(numbers).max()
        limit = tolerance(backend, "float32")
        np.testing.assert_allclose(lse, np.log(weights.sum(0)), rtol=limit, atol=limit)


@pytest.mark.clause("D10")
@pytest.mark.parametrize("count", [33, 64, 65, 128, 300])
def test_any_number_of_parts_is_merged(backend: Backend, count: int) -> None:
    """All of equal weight, all 0 but one: whichever it is, the mean is 1."""
    outs = [backend.to_device(np.full((1, 2, 4), float(x), np.float32)) for x in (0, count)]
    lse = backend.to_device(np.zeros((1, 2), np.float32))
    for one in {0, 7, 8, 15, 16, 31, 32, 63, 64, count // 2, count - 2, count - 1} & {*range(count)}:
        merged, merged_lse = backend.merge_partials([outs[i == one] for i in range(count)], [lse] * count)
        np.testing.assert_allclose(backend.to_host(merged), 1.0, rtol=1e-5)
        np.testing.assert_allclose(backend.to_host(merged_lse), np.log(count), rtol=1e-6)


@pytest.mark.clause("D10")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_merged_parts_keep_their_dtype(backend: Backend, dtype: str) -> None:
    out = backend.to_device(np.full((3, 2, 4), 2.0, np.float32), dtype)
    lse = backend.to_device(np.linspace(-90, 90, 6, dtype=np.float32).reshape(3, 2))
    merged, merged_lse = backend.merge_partials([out, out, out], [lse, lse, lse])
    assert backend.xp.dtype(merged) == dtype
    np.testing.assert_allclose(backend.to_host(merged), 2.0, rtol=8e-3)
    np.testing.assert_allclose(backend.to_host(merged_lse), backend.to_host(lse) + np.log(3), rtol=1e-6)


@pytest.mark.refuses("D10")
def test_parts_that_do_not_belong_together_are_refused(backend: Backend) -> None:
    def device(*shape: int, dtype: Any = np.float32) -> Any:
        return backend.to_device(np.zeros(shape, dtype))

    out, lse = device(3, 2, 4), device(3, 2)
    for outs, lses, says in (
        ([], [], "got 0 outputs and 0 LSEs"),
        ([out], [lse, lse], "got 1 outputs and 2 LSEs"),
        ([out, device(3, 2, 5)], [lse, lse], r"got out \[3, 2, 5\]"),
        ([out, out], [lse, device(3)], r"LSE float32\[3\], expected \[3, 2, 4\] and float32 \[3, 2\]"),
        ([out], [device(3, 2, dtype=np.int32)], r"LSE int32\[3, 2\]"),
    ):
        with refused(backend, InvalidInput, says):
            backend.merge_partials(outs, lses)
