"""Virtual ids become physical ones on the device, through maps of any stride, eager and captured (clauses W4, W6, W9)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, InvalidInput, Segment
from forebay.specs.dtypes import HostArray
from forebay.specs.suite.kv import device_rows, geometry, int32, new_pool, refused, row_bits
from forebay.specs.suite.mapped import Mapped
from forebay.specs.suite.steps import copies
from forebay.specs.translation import INVALID_ID, translate

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
PAGES = (3, 0, -1, 2**29 - 1, 2**29, INT_MIN, INT_MAX, 7, -2)
"""Where each virtual page is: places of a pool, none, the last page of four whose ids fit int32, the first whose do not, ..."""


def expected(ids: HostArray, pages: Any, page_size: int) -> HostArray:
    """By the words of the operation, id by id, in integers that do not wrap."""
    made = []
    for virtual in ids.reshape(-1).tolist():
        page = pages[virtual // page_size] if 0 <= virtual < len(pages) * page_size else -1
        fits = page >= 0 and (int(page) + 1) * page_size <= 2**31
        physical = int(page) * page_size + virtual % page_size if fits else INVALID_ID
        made.append(-1 if virtual == -1 else physical)
    return np.array(made, np.int32).reshape(ids.shape)


def ids_of(page_size: int) -> HostArray:
    """Every id of the map, those around it, pads between them, and the ends of int32; a whole number of rows of 3."""
    ids = [-1, *range(len(PAGES) * page_size + 3), -2, -1, -page_size - 1, INT_MIN, INT_MAX, INT_MAX - 1, -1]
    return np.array([*ids, *[-1] * (-len(ids) % 3)], np.int32)


def on_device(backend: Backend, pages: Any, columns: int) -> tuple[Any, Any]:
    """(what holds the map as column 1 of a table, or by itself where that has one column; the map)."""
    table = np.full((len(pages), columns), 1, np.int32)
    table[:, columns // 2] = pages
    held = backend.to_device(table)
    return held, held[:, columns // 2]


@pytest.mark.clause("W4", "W6")
@pytest.mark.parametrize("columns", [1, 3], ids=["dense", "a column of a table"])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_ids_follow_the_map_and_what_has_no_page_is_invalid(backend: Backend, page_size: int, columns: int) -> None:
    """Every id of every page; a pad stays a pad, and what has no page is an id that doors drop and count, never a pad."""
    ids, (_, page_map) = ids_of(page_size), on_device(backend, PAGES, columns)
    for shape in ((-1,), (-1, 3), (3, -1, 1)):
        given = ids.reshape(shape)
        got = backend.to_host(translate(backend.xp, backend.to_device(given), page_map, page_size=page_size))
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, expected(given, PAGES, page_size))


@pytest.mark.clause("W4", "W6")
def test_ids_in_a_column_of_a_table_are_translated(backend: Backend) -> None:
    """The ids may be strided too: the columns of a table without its stamp, and one column of it."""
    table = np.append(ids_of(1).reshape(-1, 3), np.full((len(ids_of(1)) // 3, 1), 1, np.int32), axis=1)
    held, (_, page_map) = backend.to_device(table), on_device(backend, PAGES, 2)
    for part, want in ((held[:, :3], table[:, :3]), (held[:, 1], table[:, 1])):
        got = backend.to_host(translate(backend.xp, part, page_map))
        np.testing.assert_array_equal(got, expected(want, PAGES, 1))


@pytest.mark.clause("W4", "W9")
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_replay_translates_by_the_map_of_the_moment(backend: Backend, page_size: int) -> None:
    """The map is a column of a table in a Buffer; run, captured and replayed under one map after the other."""
    ids = ids_of(page_size)
    table = np.full((len(PAGES), 3), 1, np.int32)
    buffers = [backend.buffer("ids", ids), backend.buffer("table", table)]
    segment = Segment(
        "translate",
        lambda b: ({}, {"ids": translate(b.xp, buffers[0].get(), buffers[1].get()[:, 1], page_size=page_size)}),
        key=(page_size,),
        reads=tuple(buffers),
    )
    backend.run(segment).get()
    trace = backend.capture(segment)
    for pages in (PAGES, PAGES[::-1], tuple(range(len(PAGES)))):
        table[:, 1] = pages
        backend.upload(buffers[1], table)
        for done in (backend.run(segment), backend.replay(trace)):
            np.testing.assert_array_equal(copies(done)["ids"], expected(ids, pages, page_size))
    backend.release(trace)
    for buffer in buffers:
        backend.release(buffer)


@pytest.mark.clause("W4", "W6")
def test_a_door_drops_and_counts_what_has_no_page_and_leaves_pads_alone(backend: Backend) -> None:
    """Of five translated ids two name no page: nothing is written for them, and the pool's count says two; the pad counts nothing."""
    g = geometry(num_blocks=4)
    with new_pool(backend, g, requires_physical_write_loc=True) as pool:
        mapped, bs = Mapped(backend, pool, (0, 2, -1, 3)), g.block_size
        ids = backend.to_device(int32(bs, 2 * bs, -1, 9 * bs, 3 * bs + 1))
        before = row_bits(backend, pool)
        k, v = device_rows(backend, g, [1.0, 2.0, 3.0, 4.0, 5.0])
        pool.write(0, mapped.loc(ids), k, v)
        after = row_bits(backend, pool)
        changed = [slot for slot in range(pool.num_slots) if (before[slot] != after[slot]).any()]
        assert changed == [2 * bs, 3 * bs + 1]
        assert pool.dropped == 2
        backend.release(mapped.map)


@pytest.mark.refuses("W4", "W6")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.array([1], np.int32)}, "got ids of ndarray"),
        ({"page_map": np.array([1], np.int32)}, "got page_map of ndarray"),
        ({"page_map": "float32"}, "got page_map of float32"),
        ({"page_map": "flat"}, r"got a map \[1, 9\]"),
        ({"page_size": 0}, "got page_size 0"),
        ({"page_size": 2**31}, "got page_size 2147483648"),
        ({"page_size": True}, "got page_size True"),
        ({"page_size": 2.0}, "got page_size 2.0"),
    ],
)
def test_what_is_no_map_or_no_page_size_is_refused(backend: Backend, change: dict[str, Any], message: str) -> None:
    held, page_map = on_device(backend, PAGES, 1)
    made = {
        "float32": lambda: backend.xp.astype(page_map, "float32"),
        "flat": lambda: backend.xp.reshape(held, (1, -1)),
    }
    given = {"ids": backend.to_device(int32(1)), "page_map": page_map, "page_size": 4}
    given |= {name: made[x]() if isinstance(x, str) else x for name, x in change.items()}
    with refused(backend, InvalidInput, message):
        translate(backend.xp, given["ids"], given["page_map"], page_size=given["page_size"])
