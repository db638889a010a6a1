"""Virtual ids, a map on the device, and the doors behind it, eager and captured (clauses W3, W4, W9)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, CaptureViolation, Segment, UnmarkedWriteLoc, WriteLoc
from forebay.specs.suite.kv import device_rows, geometry, held, int32, new_pool, refused
from forebay.specs.suite.mapped import Mapped


@pytest.mark.clause("W4", "W9")
@pytest.mark.refuses("W3")
@pytest.mark.case("B10")
def test_a_replayed_write_lands_where_the_new_map_says(backend: Backend) -> None:
    g = geometry()
    with new_pool(backend, g, requires_physical_write_loc=True) as pool:
        mapped = Mapped(backend, pool)
        mapped.remap([*range(17), 19, 17, 18])
        ids = backend.buffer("ids", int32(17))
        k, v = device_rows(backend, g, [7])
        rows = [backend.buffer(n, backend.to_host(x)) for n, x in (("k", k), ("v", v))]
        with refused(backend, UnmarkedWriteLoc, "an unmarked WriteLoc", pool):
            pool.write(0, WriteLoc.slots(int32(17)), k, v)

        def step(b: Backend) -> tuple[dict[Any, Any], dict[str, Any]]:
            pool.write(0, mapped.loc(ids.get()), rows[0].get(), rows[1].get())
            return {}, {}

        segment = Segment("mapped", step, reads=(mapped.map, ids, *rows), pools=(pool,))
        backend.run(segment).get()
        assert held(backend, pool, [19])[0] == 7
        assert not np.isin(held(backend, pool, [16, 17, 18]), 7).any()
        trace = backend.capture(segment)
        mapped.remap([*range(17), 18, 17, 19])
        backend.replay(trace).get()
        assert held(backend, pool, [18])[0] == 7
        assert not np.isin(held(backend, pool, [16, 17]), 7).any()
        backend.release(trace)
        for buffer in (mapped.map, ids, *rows):
            backend.release(buffer)


@pytest.mark.clause("W3", "W4")
@pytest.mark.case("B12", "G05")
def test_reads_and_copies_of_the_same_ids_follow_the_map(backend: Backend) -> None:
    """The same tensor is translated anew; what another request put into the old place is never read."""
    g = geometry()
    with new_pool(backend, g, requires_physical_write_loc=True) as pool:
        mapped = Mapped(backend, pool)
        ids = backend.to_device(int32(16, 17))
        k, v = device_rows(backend, g, [1, 2])
        pool.write(0, mapped.loc(ids), k, v)
        pool.copy(WriteLoc.slots(int32(17), physical=True), WriteLoc.slots(int32(33), physical=True))
        mapped.remap([*range(17), 33, *range(18, 33), 17])
        pool.write(0, WriteLoc.slots(int32(17), physical=True), *device_rows(backend, g, [99]))
        assert backend.to_host(mapped.translate(ids)).tolist() == [16, 33]
        assert backend.to_host(pool.read(0, mapped.loc(ids))[0])[:, 0, 0].tolist() == [1, 2]
        backend.release(mapped.map)


@pytest.mark.refuses("W9", "C2", "W3")
@pytest.mark.parametrize("declared", [True, False])
def test_a_step_that_stores_kv_declares_its_pool_and_marks_its_ids(backend: Backend, declared: bool) -> None:
    """Run or captured, a write inside a step is checked as any other: an undeclared pool, or unmarked ids, change no byte."""
    g = geometry()
    with new_pool(backend, g, requires_physical_write_loc=True) as pool:
        ids = backend.buffer("ids", int32(17))
        k, v = device_rows(backend, g, [7])
        rows = [backend.buffer(n, backend.to_host(x)) for n, x in (("k", k), ("v", v))]

        def step(_: Backend) -> tuple[dict[Any, Any], dict[str, Any]]:
            pool.write(0, WriteLoc.slots(ids.get(), physical=not declared), rows[0].get(), rows[1].get())
            return {}, {}

        segment = Segment("fused", step, reads=(ids, *rows), pools=(pool,) if declared else ())
        error, says = (
            (UnmarkedWriteLoc, "an unmarked WriteLoc") if declared else (CaptureViolation, "a pool it does not declare")
        )
        for act in (backend.run, backend.capture):
            with refused(backend, error, says, pool):
                act(segment)
        for buffer in (ids, *rows):
            backend.release(buffer)
