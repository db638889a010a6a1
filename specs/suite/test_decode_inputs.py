"""What paged decode takes and what it refuses (clauses D1, D8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.specs import AttentionParams, Backend, BlockTable, InvalidInput, InvalidLayout, KVGeometry, Pool, WriteLoc
from forebay.specs.suite.attention import Array
from forebay.specs.suite.fixtures import Another
from forebay.specs.suite.kv import (
    BLOCK_SIZE,
    HEAD_DIM,
    geometry,
    int32,
    mean_of_values,
    new_pool,
    put_values,
    refused,
    same_bits,
    slot,
)
from forebay.specs.suite.scenes import Scene, scene


def page_values(backend: Backend, pool: Pool) -> None:
    """V of every token of a block is the number of the block, counted without the sink."""
    g = pool.geometry
    for block in range(g.num_blocks - pool.first_block):
        put_values(backend, pool, [slot(pool, block, t) for t in range(g.block_size)], [block] * g.block_size)


# -- tables: types, strides, widths ----------------------------------------------------------------------------------------


@pytest.mark.clause("D1")
@pytest.mark.smoke("D1")
@pytest.mark.case("I03")
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_int32_and_host_int64_tables_are_taken(backend: Backend, dtype: Any, marked: bool) -> None:
    with new_pool(backend, geometry(num_blocks=5)) as pool:
        page_values(backend, pool)
        host = np.array([[1, 2]], dtype) + pool.first_block
        device = backend.to_device(host)
        for table in (host, device):
            given_as = BlockTable(table, physical=True) if marked else table
            got = mean_of_values(backend, pool, given_as, [32], table_len=2)
            assert got[0] == 1.5
            assert mean_of_values(backend, pool, given_as, [32], table_len=2, path="gather")[0] == 1.5


@pytest.mark.refuses("D1")
@pytest.mark.case("I03")
@pytest.mark.parametrize(
    "dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "float32", "float64", "bool"]
)
@pytest.mark.parametrize("name", ["table", "visible"])
def test_other_host_types_are_refused_by_name(backend: Backend, name: str, dtype: str) -> None:
    with scene(backend, (4,)) as s:
        arrays: dict[str, Array] = {"table": s.table[:, :1], "visible": s.visible}
        arrays[name] = arrays[name].astype(dtype)
        late = Late(s)
        with refused(backend, InvalidInput, f"{name}: got numpy {dtype}, expected int32 or int64", s.pool):
            late(**arrays)


@pytest.mark.refuses("D1")
@pytest.mark.case("I03")
@pytest.mark.parametrize("name", ["table", "visible"])
def test_device_arrays_of_another_type_are_refused(backend: Backend, name: str) -> None:
    with scene(backend, (4,)) as s:
        late = Late(s)
        for host, dtype in ((np.ones((1, 1), np.float32), "float32"), (np.ones((1, 1), bool), "bool")):
            array = backend.to_device(host if name == "table" else host[0])
            with refused(backend, InvalidInput, f"{name}: got a device array of {dtype}, expected int32", s.pool):
                late(**{name: array})


@pytest.mark.refuses("D1")
@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (thing, name)
        for thing in (None, [[1]], 3, "1", object())
        for name in ("table", "visible", "q", "sinks")
        if (thing, name) != (None, "sinks")  # which asks for none
    ],
)
def test_things_that_are_no_arrays_are_refused(backend: Backend, name: str, thing: object) -> None:
    with scene(backend, (4,)) as s:
        late = Late(s)
        arguments = {"params": AttentionParams(sinks=thing)} if name == "sinks" else {name: thing}
        with refused(backend, InvalidInput, rf"{name}: got {type(thing).__name__}, expected a", s.pool):
            late(**arguments)


@pytest.mark.refuses("D1")
@given(table=st.integers(-(2**63), 2**63 - 1).filter(lambda n: not -(2**31) <= n < 2**31))
def test_int64_values_that_do_not_fit_are_refused(backend: Backend, table: int) -> None:
    with scene(backend, (4,)) as s:
        late = Late(s)
        for name, array in (("table", np.array([[table]])), ("visible", np.array([table]))):
            with refused(backend, InvalidInput, f"{name}: int64 values {table} to {table} do not fit int32", s.pool):
                late(**{name: array})


@pytest.mark.clause("D1")
@pytest.mark.case("I03", "I08")
def test_any_row_and_column_stride_of_a_table(backend: Backend) -> None:
    """Slices of a wider table, on the host and on the device, and a transposed one."""
    with scene(backend, (33, 17, 64), extra_width=0) as s:
        want, want_lse = s.decode()
        width = s.table.shape[1]
        wide = np.full((3, 3 * width + 5), 10**6, np.int32)
        wide[:, 2 : 2 + width] = s.table
        sparse = np.full((3, 2 * width), -1, np.int32)
        sparse[:, ::2] = s.table
        device_wide, device_sparse = backend.to_device(wide), backend.to_device(sparse)
        turned = backend.to_device(np.ascontiguousarray(s.table.T))
        for table in (
            wide[:, 2 : 2 + width],
            sparse[:, ::2],
            np.asfortranarray(s.table),
            device_wide[:, 2 : 2 + width],
            device_sparse[:, ::2],
            backend.xp.permute(turned, (1, 0)),
        ):
            for path in ("direct", "gather"):
                out, lse = call(s, table=table, path=path, return_lse=True)
                same_bits(backend.to_host(out), want)
                same_bits(backend.to_host(lse), want_lse)


@pytest.mark.clause("D1")
@pytest.mark.parametrize("query_len", [1, pytest.param(2, marks=pytest.mark.clause("D11"))])
def test_strided_q_and_visible(backend: Backend, query_len: int) -> None:
    with scene(backend, (33, 17, 64), heads=4, query_len=query_len) as s:
        want, _ = s.decode()
        turned = backend.xp.permute(backend.to_device(np.ascontiguousarray(s.q.transpose(1, 2, 0, 3))), (2, 0, 1, 3))
        doubled = backend.to_device(np.repeat(s.visible, 2))[::2]
        same_bits(backend.to_host(call(s, q=turned, visible=doubled)), want)


@pytest.mark.clause("D1")
@pytest.mark.case("I08")
@pytest.mark.parametrize("width", [3, 4, 5, 7, 64])
def test_any_table_width(backend: Backend, width: int) -> None:
    with new_pool(backend, geometry(num_blocks=8, num_kv_heads=1)) as pool:
        page_values(backend, pool)
        table = np.full((2, width), 10**6, np.int32)
        table[:, :3] = np.array([[1, 2, 3], [4, 5, 6]]) + pool.first_block
        for table_len in {3, width}:
            got = mean_of_values(backend, pool, table, [48, 40], table_len=table_len)
            np.testing.assert_allclose(got, [2.0, 4.8], rtol=1e-6)
    with new_pool(backend, geometry(num_blocks=8, num_kv_heads=1)) as pool:
        page_values(backend, pool)
        for narrow in (1, 2):
            got = mean_of_values(backend, pool, int32([4, 5][:narrow]) + pool.first_block, [BLOCK_SIZE * narrow])
            assert got[0] == (4.0 if narrow == 1 else 4.5)


@pytest.mark.clause("D1")
@pytest.mark.case("I07")
def test_page_lists_of_different_lengths_are_rows_of_a_table(backend: Backend) -> None:
    """Pages [7] and [1, 2, 3], the shorter filled up with entries nobody reads: the means are 7.0 and 2.0."""
    with new_pool(backend, geometry(num_blocks=9, num_kv_heads=1)) as pool:
        page_values(backend, pool)
        first = pool.first_block
        got = mean_of_values(
            backend, pool, int32([7, 10**6, -1], [1, 2, 3]) + first * int32([1, 0, 0], [1, 1, 1]), [16, 48]
        )
        np.testing.assert_array_equal(got, [7.0, 2.0])


@pytest.mark.refuses("D1")
@pytest.mark.case("I07")
def test_a_ragged_page_list_is_refused(backend: Backend) -> None:
    """Pages [7] and [1, 2, 3] packed in one line are no table."""
    with new_pool(backend, geometry(num_blocks=9, num_kv_heads=1)) as pool:
        q = backend.to_device(np.zeros((2, 1, HEAD_DIM), np.float32))
        ragged = int32(7, 1, 2, 3)
        for table, says in (
            (ragged, r"block table: got shape \(4,\), expected 2-D"),
            (backend.to_device(ragged), r"block table: got shape \(4,\), expected 2-D"),
            (ragged[None], "block table: got 1 rows, expected 2 as in q"),
            (ragged[:, None], "block table: got 4 rows, expected 2 as in q"),
            (ragged[None, None], r"block table: got shape \(1, 1, 4\), expected 2-D"),
        ):
            with refused(backend, InvalidInput, says, pool):
                backend.paged_decode(q, pool, 0, table, int32(16, 48), table_len=1)


# -- other refusals --------------------------------------------------------------------------------------------------------


def call(s: Scene, **changes: Any) -> Any:
    """The call of a scene with some arguments changed."""
    b = s.backend
    arguments: dict[str, Any] = {
        "pool": s.pool,
        "layer": 0,
        "table": s.table,
        "visible": s.visible,
        "table_len": s.table_len,
    }
    if "q" not in changes:
        arguments["q"] = b.to_device(s.q)
    return b.paged_decode(**(arguments | changes))


class Late:
    """A call whose q is on the device already, so that a refusal can be seen to come before any device work."""

    def __init__(self, s: Scene) -> None:
        self.scene, self.q = s, s.backend.to_device(s.q)

    def __call__(self, **changes: Any) -> Any:
        return call(self.scene, **({"q": self.q} | changes))


@pytest.mark.clause("D1")
@pytest.mark.refuses("D1", "D8")
@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"layer": 1}, InvalidInput, "got layer 1, expected 0 to 0"),
        ({"layer": -1}, InvalidInput, "got layer -1"),
        ({"layer": True}, InvalidInput, "got layer True"),
        ({"layer": "0"}, InvalidInput, "got layer '0'"),
        ({"table_len": 7}, InvalidInput, "table_len: got 7, expected 0 to the table's width 5"),
        ({"table_len": -1}, InvalidInput, "table_len: got -1"),
        ({"table_len": 2.0}, InvalidInput, "table_len: got 2.0"),
        ({"table_len": None}, InvalidInput, "table_len: got None"),
        (
            {"visible": int32(33, 49)},
            InvalidInput,
            r"got 33 to 49, expected 0 to table_len \* block_size = 3 \* 16 = 48",
        ),
        ({"visible": int32(-1, 5)}, InvalidInput, "visible: got -1 to 5"),
        ({"visible": np.array([2**31 - 1, 0])}, InvalidInput, "visible: got 0 to 2147483647"),
        ({"visible": int32(33, 17), "table_len": 2}, InvalidInput, r"2 \* 16 = 32"),
        ({"visible": int32([9, 5])}, InvalidInput, r"visible: got shape \(1, 2\), expected 1-D"),
        ({"visible": int32(9)}, InvalidInput, "visible: got 1 rows, expected 2 as in q"),
        ({"visible": int32(9, 5, 1)}, InvalidInput, "visible: got 3 rows, expected 2 as in q"),
        ({"path": "Gather"}, InvalidInput, "path: got 'Gather', expected one of direct, gather"),
        ({"path": None}, InvalidInput, "path: got None"),
        ({"params": {"scale": 1.0}}, InvalidInput, "params: got dict, expected AttentionParams"),
        ({"q": np.zeros((2, 4, 64), np.float32)}, InvalidInput, "q: got ndarray, expected a device array"),
    ],
)
def test_a_wrong_argument_is_refused(
    backend: Backend, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    """And the call that was right before is right after it."""
    with scene(backend, (33, 17)) as s:
        late = Late(s)
        with refused(backend, error, says, s.pool):
            late(**changes)
        same_bits(backend.to_host(late()), s.decode()[0])


@pytest.mark.refuses("D1", "D8")
@pytest.mark.parametrize(
    ("shape", "error", "says"),
    [
        ((2, 3, 64), InvalidLayout, "3 query heads are not a multiple of 2 KV heads"),
        ((2, 1, 64), InvalidLayout, "1 query heads are not a multiple of 2 KV heads"),
        ((2, 0, 64), InvalidLayout, "0 query heads"),
        ((2, 1, 3, 64), InvalidLayout, "3 query heads are not a multiple of 2 KV heads"),
        ((2, 4, 7), InvalidInput, r"q: got shape \(2, 4, 7\), expected head_dim 64"),
        ((2, 4, 16), InvalidInput, "expected head_dim 64"),
        ((2, 0, 4, 64), InvalidInput, "query_len >= 1"),
        ((2, 32), InvalidInput, r"q: got float32\[2, 32\], expected a float \[B, Hq, D\] or"),
        ((2, 1, 1, 4, 64), InvalidInput, "expected a float"),
        ((3, 4, 64), InvalidInput, "got 2 rows, expected 3 as in q"),
    ],
)
def test_a_query_of_the_wrong_shape_is_refused(
    backend: Backend, shape: tuple[int, ...], error: type[Exception], says: str
) -> None:
    with scene(backend, (33, 17)) as s:
        q = backend.to_device(np.zeros(shape, np.float32))
        with refused(backend, error, says, s.pool):
            call(s, q=q)
        q = backend.to_device(np.zeros((2, 4, HEAD_DIM), np.int32))
        with refused(backend, InvalidInput, r"q: got int32\[2, 4, 64\], expected a float", s.pool):
            call(s, q=q)


@pytest.mark.refuses("D8")
@given(kv_heads=st.integers(1, 8), heads=st.integers(0, 40))
def test_query_heads_that_do_not_divide_are_refused_everywhere(kv_heads: int, heads: int) -> None:
    g = KVGeometry(2, 2, kv_heads, 4)
    if heads and heads % kv_heads == 0:
        assert g.check_query_heads(heads, "here") == heads // kv_heads
    else:
        with pytest.raises(InvalidLayout, match=f"here: {heads} query heads are not a multiple of {kv_heads} KV heads"):
            g.check_query_heads(heads, "here")


@pytest.mark.refuses("D9", "D1")
@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"window": 0}, "window: got 0, expected None or an int >= 1"),
        ({"window": -3}, "window: got -3"),
        ({"window": 2.0}, "window: got 2.0"),
        ({"window": True}, "window: got True"),
        ({"softcap": 0.0}, "softcap: got 0.0, expected None or a positive number"),
        ({"softcap": -1.0}, "softcap: got -1.0"),
        ({"softcap": float("nan")}, "softcap: got nan"),
        ({"scale": float("inf")}, "scale: got inf, expected None or a number finite in float32"),
        ({"scale": "1"}, "scale: got '1'"),
        ({"scale": True}, "scale: got True, expected None or a number"),
        ({"softcap": True}, "softcap: got True"),
        ({"scale": np.bool_(True)}, "scale: got "),
        ({"window": np.bool_(True)}, "window: got "),
        ({"scale": np.ones(1)}, "scale: got array"),
        ({"scale": 1j}, "scale: got 1j"),
        ({"window": np.int64(0)}, "window: got "),
        ({"softcap": 1e-320}, "softcap: got 1e-320, expected None or a positive number, at least 1.18e-38"),
    ],
)
def test_parameters_out_of_range_are_refused(params: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        AttentionParams(**params)


@pytest.mark.clause("D9")
@pytest.mark.parametrize("of", [float, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("whole", [int, np.int8, np.uint32, np.int64])
def test_numbers_of_numpy_are_numbers(of: type[Any], whole: type[Any]) -> None:
    """A driver gets them as Python's, so that none computes in the precision of a scalar."""
    made = AttentionParams(scale=of(0.5), softcap=whole(3), window=whole(7))
    assert [(type(x), x) for x in (made.scale, made.softcap, made.window)] == [(float, 0.5), (float, 3.0), (int, 7)]


@pytest.mark.beyond_core
@pytest.mark.refuses("D9", "D1")
def test_sinks_of_the_wrong_kind_are_refused(backend: Backend) -> None:
    with scene(backend, (9, 5), heads=4) as s:
        late = Late(s)
        for sinks in (
            np.zeros(4, np.float32),
            backend.to_device(np.zeros(2, np.float32)),
            backend.to_device(np.zeros((1, 4), np.float32)),
            backend.to_device(np.zeros(4, np.int32)),
        ):
            with refused(backend, InvalidInput, r"sinks: got .*, expected a float32 device array \[4\]", s.pool):
                late(params=AttentionParams(sinks=sinks))


@pytest.mark.refuses("D1", "B5")
def test_pools_that_are_not_the_backends_are_refused(backend: Backend, another: Another) -> None:
    """Another backend's pool, a released one, a closed backend: refused, not dereferenced."""
    with scene(backend, (9, 5)) as s, another() as other:
        foreign = other.create_pool(s.pool.geometry)
        gone = backend.create_pool(s.pool.geometry)
        backend.release(gone)
        late = Late(s)
        loc = WriteLoc.slots(int32(4))
        rows = backend.to_device(np.zeros((1, 2, HEAD_DIM), np.float32))
        with refused(backend, InvalidInput, "a pool of another backend", s.pool):
            late(pool=foreign)
        for pool in (gone, None, "pool"):
            with refused(backend, InvalidInput, "a pool of another backend, a released one or no pool", s.pool):
                late(pool=pool)
        doors: list[Callable[[], Any]] = [
            lambda: gone.read(0, loc),
            lambda: gone.write(0, loc, rows, rows),
            lambda: gone.copy(loc, loc),
        ]
        for door in doors:
            with pytest.raises(InvalidInput, match="released"):
                door()
        other.close()
        for use in (
            lambda: other.paged_decode(late.q, foreign, 0, s.table, s.visible, table_len=s.table_len),
            lambda: foreign.read(0, loc),
            lambda: other.to_device(np.zeros(1, np.float32)),
            lambda: other.create_pool(s.pool.geometry),
            lambda: other.buffer("x", np.zeros(1, np.float32)),
        ):
            with pytest.raises(InvalidInput, match=r"is closed; open it again|pool of another backend"):
                use()
