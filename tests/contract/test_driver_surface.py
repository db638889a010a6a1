"""The driver surface: ten members make a port; the checks in front of it are not its to loosen (clauses B6, B4, D8, C9).

The tests imported below are those of the other files, over a port that has no kernel at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from tests.contract.kv import geometry, int32, new_pool, refused, scene, unchanged
from tests.contract.numpy_port import DeviceArray, NumpyPort, opened
from tests.contract.test_decode import (
    test_a_3d_query_is_one_query,
    test_a_window_counts_the_current_token,
    test_any_group_of_query_heads,
    test_any_layout,
    test_every_parameter,
    test_layers_are_apart,
    test_several_queries,
    test_the_output_has_the_dtype_of_q,
    test_what_lies_behind_the_visible_range_never_leaks,
)
from tests.contract.test_decode_bits import (
    test_a_query_among_several_equals_the_query_alone,
    test_empty_parts_weigh_nothing_whatever_they_hold,
    test_merged_parts_keep_their_dtype,
    test_only_the_switch_selects_gather,
    test_parts_of_a_sequence_merge_to_the_whole,
    test_parts_that_do_not_belong_together_are_refused,
    test_the_lse_is_a_natural_logarithm,
)
from tests.contract.test_decode_inputs import (
    test_a_query_of_the_wrong_shape_is_refused,
    test_a_ragged_page_list_is_refused,
    test_a_wrong_argument_is_refused,
    test_an_empty_row_is_zero_whatever_the_maximum,
    test_an_invalid_block_is_zero_rows_that_take_part,
    test_an_overhanging_table_entry_is_never_read,
    test_any_row_and_column_stride_of_a_table,
    test_any_table_width,
    test_int32_and_host_int64_tables_are_taken,
    test_invalid_blocks_anywhere_meet_the_oracle,
    test_nothing_but_empty_rows,
    test_other_host_types_are_refused_by_name,
    test_visible_beyond_the_table_known_to_the_device_only,
)
from tests.contract.test_doors import (
    test_a_copy_drops_a_row_once,
    test_a_copy_reads_before_it_writes_and_moves_bits,
    test_a_door_rounds_rows_to_the_pools_dtype,
    test_a_pad_writes_nothing_and_never_wraps,
    test_a_wrong_location_is_refused_at_every_door,
    test_an_id_outside_the_pool_raises_on_the_host_and_is_counted_on_the_device,
    test_any_device_ids_do_what_the_rule_says,
    test_duplicate_slots_of_one_host_known_call_are_refused,
    test_nan_and_inf_survive_the_door,
    test_no_rows_are_a_legal_call,
    test_rows_of_one_call_in_one_block_land_whole_in_any_order,
    test_sink_ids_are_dropped_and_counted,
    test_wrong_rows_and_layers_are_refused,
)
from tests.contract.test_layouts import (
    test_a_row_lands_where_its_layout_says,
    test_every_layout_answers_alike,
    test_foreign_memory_is_a_capability,
)
from tests.contract.test_row_operations import (
    test_a_bitcast_keeps_every_bit,
    test_a_cutoff_is_the_largest_whose_mass_is_reached,
    test_a_lone_row_has_the_bits_it_has_among_others,
    test_additions_reach_their_columns_and_no_others,
    test_draws_are_a_published_hash_of_seed_position_and_token,
    test_integer_sums_wrap,
    test_the_k_largest_come_in_falling_order_the_first_of_equals_first,
    test_the_kth_largest_counts_equals_one_by_one,
    test_the_penalty_reaches_the_columns_of_the_bitmap,
    test_variates_are_gumbels_of_the_hash,
)
from tests.contract.test_staging import (
    test_any_view_is_staged_bit_for_bit,
    test_latent_kv_is_staged_without_v,
    test_old_rows_of_a_recycled_slot_are_never_read,
    test_special_bits_survive_staging,
)
from tests.contract.test_write_loc import (
    test_only_the_first_table_len_columns_are_blocks,
    test_positions_and_a_table_are_lowered_to_slots,
    test_unmarked_ids_are_refused_at_every_door,
)

SHARED = (
    test_a_3d_query_is_one_query,
    test_a_window_counts_the_current_token,
    test_any_group_of_query_heads,
    test_any_layout,
    test_every_parameter,
    test_layers_are_apart,
    test_several_queries,
    test_the_output_has_the_dtype_of_q,
    test_what_lies_behind_the_visible_range_never_leaks,
    test_a_query_among_several_equals_the_query_alone,
    test_empty_parts_weigh_nothing_whatever_they_hold,
    test_merged_parts_keep_their_dtype,
    test_only_the_switch_selects_gather,
    test_parts_of_a_sequence_merge_to_the_whole,
    test_parts_that_do_not_belong_together_are_refused,
    test_the_lse_is_a_natural_logarithm,
    test_a_query_of_the_wrong_shape_is_refused,
    test_a_ragged_page_list_is_refused,
    test_a_wrong_argument_is_refused,
    test_an_empty_row_is_zero_whatever_the_maximum,
    test_an_invalid_block_is_zero_rows_that_take_part,
    test_an_overhanging_table_entry_is_never_read,
    test_any_row_and_column_stride_of_a_table,
    test_any_table_width,
    test_int32_and_host_int64_tables_are_taken,
    test_invalid_blocks_anywhere_meet_the_oracle,
    test_nothing_but_empty_rows,
    test_other_host_types_are_refused_by_name,
    test_visible_beyond_the_table_known_to_the_device_only,
    test_a_copy_drops_a_row_once,
    test_a_copy_reads_before_it_writes_and_moves_bits,
    test_a_door_rounds_rows_to_the_pools_dtype,
    test_a_pad_writes_nothing_and_never_wraps,
    test_a_wrong_location_is_refused_at_every_door,
    test_an_id_outside_the_pool_raises_on_the_host_and_is_counted_on_the_device,
    test_any_device_ids_do_what_the_rule_says,
    test_duplicate_slots_of_one_host_known_call_are_refused,
    test_nan_and_inf_survive_the_door,
    test_no_rows_are_a_legal_call,
    test_rows_of_one_call_in_one_block_land_whole_in_any_order,
    test_sink_ids_are_dropped_and_counted,
    test_wrong_rows_and_layers_are_refused,
    test_a_row_lands_where_its_layout_says,
    test_every_layout_answers_alike,
    test_foreign_memory_is_a_capability,
    test_a_bitcast_keeps_every_bit,
    test_a_cutoff_is_the_largest_whose_mass_is_reached,
    test_a_lone_row_has_the_bits_it_has_among_others,
    test_additions_reach_their_columns_and_no_others,
    test_draws_are_a_published_hash_of_seed_position_and_token,
    test_integer_sums_wrap,
    test_the_k_largest_come_in_falling_order_the_first_of_equals_first,
    test_the_kth_largest_counts_equals_one_by_one,
    test_the_penalty_reaches_the_columns_of_the_bitmap,
    test_variates_are_gumbels_of_the_hash,
    test_any_view_is_staged_bit_for_bit,
    test_latent_kv_is_staged_without_v,
    test_old_rows_of_a_recycled_slot_are_never_read,
    test_special_bits_survive_staging,
    test_only_the_first_table_len_columns_are_blocks,
    test_positions_and_a_table_are_lowered_to_slots,
    test_unmarked_ids_are_refused_at_every_door,
)
"""What pytest collects here a second time, over this file's ``backend``."""


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    """The port without a kernel, in place of the backend of the other files."""
    with opened(NumpyPort()) as port:
        yield port


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
            type("Partial", (Driver,), members)()  # type: ignore[abstract]


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
def test_what_a_port_leaves_out_is_counted_as_delegated(backend: Backend) -> None:
    with new_pool(backend, geometry()) as pool:
        calls = operations(backend, pool)
        assert set(calls) == set(DELEGABLE)
        for name, act in calls.items():
            launches, delegated = Counter(backend.counters.launches), Counter(backend.counters.delegated)
            act()
            assert backend.counters.launches == launches
            assert backend.counters.delegated - delegated == Counter({name: 1})
        assert set(backend.counters.as_dict()["delegated"]) >= set(DELEGABLE)


@pytest.mark.clause("B6", "C9")
def test_what_a_port_implements_is_counted_as_launched() -> None:
    class Zeroing(NumpyPort):
        def zero(self, buffer: Any) -> None:
            buffer.handle[...] = 0

    with opened(Zeroing()) as b, new_pool(b, geometry()) as pool:
        for act in operations(b, pool).values():
            act()
        assert b.counters.launches == Counter({"zero": 1})
        assert b.counters.delegated == Counter(dict.fromkeys(set(DELEGABLE) - {"zero"}, 1))
    with open_backend("cpu") as b, new_pool(b, geometry()) as pool:
        for act in operations(b, pool).values():
            act()
        assert b.counters.delegated == Counter()
        assert b.counters.launches == Counter(dict.fromkeys(DELEGABLE, 1))


@pytest.mark.clause("C9", "B6", "C2", "C12")
def test_capture_may_decline_and_is_counted(backend: Backend) -> None:
    x = backend.buffer("x", np.zeros(2, np.float32))
    segment = Segment("s", lambda b: ({x: x.get() + 1}, {"x": x.get()}), updates=(x,))
    assert backend.run(segment).get()["x"].tolist() == [0, 0]
    assert backend.fetch(x).tolist() == [1, 1]
    declined = backend.counters.declined
    with unchanged(backend, x), pytest.raises(CaptureDeclined, match="does not capture"):
        backend.capture(segment)
    assert backend.counters.declined == declined + 1
    assert backend.counters.capture == 0
    backend.release(x)


@pytest.mark.clause("B6", "C9", "C12", "C2")
def test_a_delegated_operation_cannot_be_captured() -> None:
    class Recording(NumpyPort):
        def __init__(self) -> None:
            super().__init__()
            self.capabilities = replace(self.capabilities, capture=True)

        def capture(self, step: Any) -> Any:
            return step().emits

    with opened(Recording()) as b:
        pool = b.create_pool(geometry())
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
        with pytest.raises(CaptureViolation, match="upload"):
            b.capture(Segment("bad", lambda b: b.upload(ids, int32(5)), reads=(ids,)))
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
        assert isinstance(table, DeviceArray)
        assert isinstance(positions, DeviceArray)
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
    with opened(spy) as b, new_pool(b, geometry(num_blocks=6)) as pool:
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
    with opened(spy) as b, new_pool(b, geometry()) as pool:
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
def test_the_checking_class_is_final_and_the_only_one_opened(backend: Backend) -> None:
    """What is opened is the class of specs itself, whatever the driver: a port has no say in which checks stand before it."""
    assert Backend.__final__ is True  # type: ignore[attr-defined]
    with open_backend("cpu") as cpu:
        assert type(cpu) is type(backend) is Backend
        assert type(cpu.create_pool(geometry())) is Pool

    class Loose(NumpyPort):
        """A driver that brings checks of its own under the names of the real ones."""

        def forbid_in_segment(self, act: str) -> None:
            return

        def check_layer(self, layer: int, what: str) -> None:
            return

    with opened(Loose()) as b, new_pool(b, geometry()) as pool:
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
        with opened(port) as b, scene(b, (5, 9), query_len=query_len) as s:
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
