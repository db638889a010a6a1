"""The driver surface: ten members make a port; the checks in front of it are not its to loosen (clauses B6, B4, D8, C9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forebay.runtime import open_backend
from forebay.specs import (
    AttentionParams,
    Backend,
    CaptureDeclined,
    CaptureViolation,
    DecodeCall,
    Driver,
    ForebayError,
    InvalidInput,
    KVGeometry,
    Pool,
    Segment,
    Unsupported,
    WriteLoc,
)
from forebay.specs.driver import DELEGABLE
from forebay.specs.suite.kv import geometry, int32, new_pool, refused, unchanged
from forebay.specs.suite.scenes import scene
from tests.contract.numpy_port import NumpyPort, opened
from tests.sample_backend.src.forebay_sample.arrays import SampleArray

# -- what a port is --------------------------------------------------------------------------------------------------------


@pytest.mark.clause("B6")
def test_a_port_has_at_most_ten_abstract_members() -> None:
    required = Driver.__abstractmethods__
    assert len(required) <= 10
    own = {name for name in vars(NumpyPort) if not name.startswith("_")}
    assert own == set(required)
    for missing in required:
        members = {name: getattr(NumpyPort, name) for name in required - {missing}}
        with pytest.raises(TypeError, match=missing):
            type("Partial", (Driver,), members)()


@pytest.mark.clause("B6")
def test_everything_else_has_a_default() -> None:
    kernels = {"zero", "write_kv", "read_kv", "copy_kv", "paged_decode", "merge_partials", "stage"}
    assert set(DELEGABLE) == kernels
    housekeeping = {"release_trace", "synchronize", "close", "wrap"}
    public = {name for name in vars(Driver) if not name.startswith("_")}
    assert public == Driver.__abstractmethods__ | kernels | housekeeping
    port = NumpyPort()
    port.synchronize()
    port.release_trace(None)
    port.close()


def operations(b: Backend, pool: Pool) -> dict[str, Callable[[], Any]]:
    """One legal call of every operation that has a default."""
    rows = b.to_device(np.ones((1, 2, 8), np.float32))
    loc = WriteLoc.slots(b.to_device(int32(4)))
    out, lse = b.to_device(np.ones((1, 2, 8), np.float32)), b.to_device(np.zeros((1, 2), np.float32))
    host = np.ones((1, 4, 2, 8), np.float32)
    table, visible = b.to_device(int32([1])), b.to_device(int32(1))
    return {
        "write_kv": lambda: pool.write(0, loc, rows, rows),
        "read_kv": lambda: pool.read(0, loc),
        "copy_kv": lambda: pool.copy(loc, loc),
        "zero": lambda: b.zero(pool.storage(0)[0]),
        "stage": lambda: b.stage(host, host, pool, 0, src_blocks=[0], dst_blocks=[1], tokens=4, dtype="float32"),
        "paged_decode": lambda: b.paged_decode(rows, pool, 0, table, visible, table_len=1),
        "merge_partials": lambda: b.merge_partials([out], [lse]),
    }


@pytest.mark.clause("B6", "C9")
def test_what_a_port_leaves_out_is_counted_as_delegated(port: Backend) -> None:
    with new_pool(port, geometry(block_size=4, head_dim=8)) as pool:
        calls = operations(port, pool)
        assert set(calls) == set(DELEGABLE)
        for name, act in calls.items():
            launches, delegated = Counter(port.counters.launches), Counter(port.counters.delegated)
            act()
            assert port.counters.launches == launches
            assert port.counters.delegated - delegated == Counter({name: 1})
        assert set(port.counters.as_dict()["delegated"]) >= set(DELEGABLE)


@pytest.mark.clause("B6", "C9")
def test_what_a_port_implements_is_counted_as_launched() -> None:
    class Zeroing(NumpyPort):
        def zero(self, buffer: Any) -> None:
            buffer.handle[...] = 0

    with opened(Zeroing()) as b, new_pool(b, geometry(block_size=4, head_dim=8)) as pool:
        for act in operations(b, pool).values():
            act()
        assert b.counters.launches == Counter({"zero": 1})
        assert b.counters.delegated == Counter(dict.fromkeys(set(DELEGABLE) - {"zero"}, 1))
    with open_backend("cpu") as b, new_pool(b, geometry(block_size=4, head_dim=8)) as pool:
        for act in operations(b, pool).values():
            act()
        assert b.counters.delegated == Counter()
        assert b.counters.launches == Counter(dict.fromkeys(DELEGABLE, 1))


@pytest.mark.clause("C9", "B6", "C2", "C12")
def test_capture_may_decline_and_is_counted(port: Backend) -> None:
    x = port.buffer("x", np.zeros(2, np.float32))
    segment = Segment("s", lambda b: ({x: x.get() + 1}, {"x": x.get()}), updates=(x,))
    assert port.run(segment).get()["x"].tolist() == [0, 0]
    assert port.fetch(x).tolist() == [1, 1]
    declined = port.counters.declined
    with unchanged(port, x), pytest.raises(CaptureDeclined, match="does not capture"):
        port.capture(segment)
    assert port.counters.declined == declined + 1
    assert port.counters.capture == 0
    port.release(x)


@pytest.mark.clause("B6", "C9", "C12", "C2")
def test_a_delegated_operation_cannot_be_captured() -> None:
    class Recording(NumpyPort):
        def __init__(self) -> None:
            super().__init__()
            self.capabilities = replace(self.capabilities, capture=True)

        def capture(self, step: Any) -> Any:
            return step().emits

    with opened(Recording()) as b:
        pool = b.create_pool(geometry(block_size=4, head_dim=8))
        rows, ids = b.buffer("rows", np.ones((1, 2, 8), np.float32)), b.buffer("ids", int32(4))
        for name, act in {
            "write_kv": lambda: pool.write(0, WriteLoc.slots(ids.get()), rows.get(), rows.get()),
            "read_kv": lambda: pool.read(0, WriteLoc.slots(ids.get())),
            "zero": lambda: b.zero(pool.storage(0)[0]),
        }.items():

            def fn(_: Backend, act: Any = act) -> Any:
                act()
                return {}, {}

            segment = Segment("s", fn, reads=(rows, ids), pools=(pool,))
            b.run(segment)
            with unchanged(b, pool), pytest.raises(CaptureDeclined, match=f"{name} is delegated to numpy"):
                b.capture(segment)
        assert b.counters.declined == 3
        plain = Segment("plain", lambda _: ({}, {"rows": rows.get()}), reads=(rows,))
        b.run(plain)
        b.release(b.capture(plain))

        def uploads(b: Backend) -> Any:
            b.upload(ids, int32(5))
            return {}, {}

        with pytest.raises(CaptureViolation, match="upload"):
            b.capture(Segment("bad", uploads, reads=(ids,)))
        assert b.counters.declined == 3


# -- the checks are not a port's to loosen ---------------------------------------------------------------------------------


class Spy(NumpyPort):
    """Checks what crosses the surface, as a port may rely on it, then does it in numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def seen(self, name: str, pool: Pool, layer: int, *locs: WriteLoc) -> list[int]:
        self.calls[name] += 1
        assert type(layer) is int
        assert 0 <= layer < pool.geometry.num_layers
        return [self.rows(loc) for loc in locs]

    def rows(self, loc: WriteLoc) -> int:
        if loc.ids is not None:
            assert (loc.ids.dtype, loc.ids.bits.ndim) == ("int32", 1)
            return len(loc.ids.bits)
        assert loc.table is not None
        table, positions = loc.table.array, loc.positions
        assert isinstance(table, SampleArray)
        assert isinstance(positions, SampleArray)
        assert (table.dtype, table.bits.ndim, positions.dtype) == ("int32", 2, "int32")
        assert positions.bits.ndim in (1, 2)
        assert len(table.bits) == len(positions.bits)
        assert loc.table_len is not None
        assert 0 <= loc.table_len <= table.bits.shape[1]
        return int(positions.bits.size)

    def write_kv(self, pool: Pool, layer: int, loc: WriteLoc, k: Any, v: Any) -> None:
        (n,) = self.seen("write_kv", pool, layer, loc)
        g = pool.geometry
        assert k.bits.shape == (n, g.num_kv_heads, g.key_dim)
        assert v.bits.shape == (n, g.num_kv_heads, g.value_dim)
        super().write_kv(pool, layer, loc, k, v)

    def read_kv(self, pool: Pool, layer: int, loc: WriteLoc) -> Any:
        self.seen("read_kv", pool, layer, loc)
        return super().read_kv(pool, layer, loc)

    def copy_kv(self, pool: Pool, src: WriteLoc, dst: WriteLoc) -> None:
        source, target = self.seen("copy_kv", pool, 0, src, dst)
        assert source == target
        super().copy_kv(pool, src, dst)

    def paged_decode(self, call: DecodeCall) -> Any:
        self.seen("paged_decode", call.pool, call.layer)
        rows, _, heads, dim = call.q.bits.shape
        assert heads % call.pool.geometry.num_kv_heads == 0
        assert dim == call.pool.geometry.head_dim
        assert (call.table.dtype, call.table.bits.ndim, len(call.table.bits)) == ("int32", 2, rows)
        assert (call.visible.dtype, call.visible.bits.shape) == ("int32", (rows,))
        assert 0 <= call.table_len <= call.table.bits.shape[1]
        assert type(call.scale) is float
        assert call.path in ("direct", "gather")
        return super().paged_decode(call)

    def merge_partials(self, outs: Sequence[Any], lses: Sequence[Any]) -> Any:
        self.calls["merge_partials"] += 1
        assert len(outs) == len(lses) > 0
        return super().merge_partials(outs, lses)


@pytest.mark.clause("B6", "D1", "W1")
def test_a_port_gets_checked_arguments_only() -> None:
    """numpy ids, int64 tables, strided rows, 3-D queries all arrive as int32 and float device arrays of the right rank."""
    spy = Spy()
    with opened(spy) as b, new_pool(b, geometry(num_blocks=6, block_size=4, head_dim=8)) as pool:
        rows = b.to_device(np.ones((2, 2, 8), np.float32))
        table = np.array([[1, 2], [3, 4]])
        for loc in (
            WriteLoc.slots(int32(4, 5)),
            WriteLoc.slots(np.array([6, 7])),
            WriteLoc.slots(b.to_device(int32(-1, 10**6))),
            WriteLoc.paged(table, np.array([0, 5]), table_len=2),
            WriteLoc.paged(b.to_device(table), int32(1, -1), table_len=1),
            WriteLoc.paged(table, b.to_device(int32(1, 9)), table_len=2),
        ):
            pool.write(0, loc, rows, rows)
            pool.read(0, loc)
            pool.copy(loc, WriteLoc.slots(int32(8, 9)))
        grid = WriteLoc.paged(table, int32([0, 1], [2, 3]), table_len=2)
        pool.read(0, grid)
        for shape in ((2, 4, 8), (2, 3, 4, 8)):
            q = b.to_device(np.ones(shape, np.float32))
            b.paged_decode(q, pool, 0, table, np.array([1, 2]), table_len=2)
            b.paged_decode(q, pool, 0, table, int32(0, 2), table_len=1, path="gather", return_lse=True)
        b.merge_partials([rows], [b.to_device(np.zeros((2, 2), np.float32))])
    assert spy.calls == Counter({"write_kv": 6, "read_kv": 7, "copy_kv": 6, "paged_decode": 4, "merge_partials": 1})


@pytest.mark.clause("B6", "W3", "W6", "D1", "D8")
def test_a_refused_call_never_reaches_the_port() -> None:
    spy = Spy()
    with opened(spy) as b, new_pool(b, geometry(block_size=4, head_dim=8)) as pool:
        k = b.to_device(np.ones((1, 2, 8), np.float32))
        wide = b.to_device(np.ones((1, 3, 8), np.float32))
        good, bad = WriteLoc.slots(int32(4)), WriteLoc.slots(int32(99))
        table = int32([1])
        calls: list[Callable[[], Any]] = [
            lambda: pool.write(0, bad, k, k),
            lambda: pool.write(1, good, k, k),
            lambda: pool.write(0, good, wide, k),
            lambda: pool.write(0, good, k),
            lambda: pool.read(0, bad),
            lambda: pool.copy(good, bad),
            lambda: pool.copy(bad, good),
            lambda: b.paged_decode(wide, pool, 0, table, int32(1), table_len=1),
            lambda: b.paged_decode(k, pool, 0, table, int32(9), table_len=1),
            lambda: b.paged_decode(k, pool, 0, table[0], int32(1), table_len=1),
            lambda: b.paged_decode(k, pool, 0, table, int32(1), table_len=2),
            lambda: b.merge_partials([], []),
            lambda: b.stage(np.ones(3), None, pool, 0, src_blocks=[], dst_blocks=[], tokens=0, dtype="float32"),
        ]
        for call in calls:
            with pytest.raises(ForebayError):
                call()
        assert spy.calls == Counter()


@pytest.mark.clause("B6")
def test_the_checking_class_is_final_and_the_only_one_opened(port: Backend) -> None:
    """What is opened is the class of specs itself, whatever the driver: a port has no say in which checks stand before it."""
    assert Backend.__final__ is True  # type: ignore[attr-defined]
    with open_backend("cpu") as cpu:
        assert type(cpu) is type(port) is Backend
        assert type(cpu.create_pool(geometry(block_size=4, head_dim=8))) is Pool

    class Loose(NumpyPort):
        """A driver that brings checks of its own under the names of the real ones."""

        def forbid_in_segment(self, act: str) -> None:
            return

        def check_layer(self, layer: int, what: str) -> None:
            return

    with opened(Loose()) as b, new_pool(b, geometry(block_size=4, head_dim=8)) as pool:
        with refused(b, InvalidInput, "got layer 7", pool):
            pool.read(7, WriteLoc.slots(int32(4)))
        with pytest.raises(CaptureViolation, match="to_device"):
            b.run(Segment("s", lambda be: be.to_device(np.zeros(1, np.float32))))


# -- capabilities a port declares ------------------------------------------------------------------------------------------

LIMITS: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({"head_dims": (16, 32)}, {}, r"head_dim: got 8, this backend supports \(16, 32\)"),
    ({"block_sizes": (16,)}, {}, r"block_size: got 4, this backend supports \(16,\)"),
    ({"max_group": 1}, {}, "query heads per KV head: got 2, this backend supports at most 1"),
    ({"max_query_len": 1}, {"query_len": 2}, "query_len: got 2, this backend supports at most 1"),
    (
        {"window": False},
        {"params": AttentionParams(window=4)},
        "window: got 4, this backend supports no sliding window",
    ),
    (
        {"softcap": False},
        {"params": AttentionParams(softcap=4.0)},
        "softcap: got 4.0, this backend supports no soft-cap",
    ),
    ({"sinks": False}, {"sinks": True}, "sinks: got given, this backend supports no attention sinks"),
    ({"lse": False}, {"return_lse": True}, "return_lse: got True, this backend supports no log-sum-exp"),
)


@pytest.mark.clause("D8", "B4", "D10")
@pytest.mark.case("D06", "D07", "H02")
@pytest.mark.parametrize(("limits", "call", "says"), LIMITS, ids=[next(iter(limits)) for limits, _, _ in LIMITS])
def test_geometry_beyond_a_port_is_refused_with_what_it_supports(
    limits: dict[str, Any], call: dict[str, Any], says: str
) -> None:
    """Before any device work; the same call on a port without that limit is answered."""
    options = dict(call)
    query_len, with_sinks = options.pop("query_len", 1), options.pop("sinks", False)
    for port, supported in ((NumpyPort(**limits), False), (NumpyPort(), True)):
        with opened(port) as b, scene(b, (5, 9), query_len=query_len, block_size=4, head_dim=8) as s:
            q, table, visible = (b.to_device(x) for x in (s.q, s.table, s.visible))
            if with_sinks:
                options["params"] = AttentionParams(sinks=b.to_device(np.zeros(4, np.float32)))
            if supported:
                b.paged_decode(q, s.pool, 0, table, visible, table_len=s.table_len, **options)
            else:
                with refused(b, Unsupported, says, s.pool):
                    b.paged_decode(q, s.pool, 0, table, visible, table_len=s.table_len, **options)


@pytest.mark.clause("L1", "B4")
def test_a_pool_beyond_the_limit_is_refused_with_the_limit() -> None:
    g = KVGeometry(4, 4, 2, 8)
    for layout, elements in (("NHD", 4 * 4 * 2 * 8), ("KV2", 2 * 4 * 4 * 2 * 8)):
        with opened(NumpyPort(max_pool_elements=elements)) as b:
            b.create_pool(g, layout)
        with (
            opened(NumpyPort(max_pool_elements=elements - 1)) as b,
            refused(b, Unsupported, f"at most {elements - 1} in one array"),
        ):
            b.create_pool(g, layout)
