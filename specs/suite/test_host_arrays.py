"""Memory the host hands over belongs to it again when the call returns, however late the device gets to it (clause S4)."""

from __future__ import annotations

import numpy as np
import pytest

from forebay.specs import Backend, WriteLoc
from forebay.specs.suite.kv import geometry, int32, new_pool

STEP = 16


@pytest.mark.clause("S4")
def test_uploads_take_their_bytes_at_once(backend: Backend) -> None:
    """One host array carries every value in turn, and nobody waits in between."""
    host = np.empty(4, np.float32)
    made, arrays = [], []
    for n in range(STEP):
        host[:] = n
        made.append(backend.buffer(f"b{n}", host))
        arrays.append(backend.to_device(host))
        host[:] = -1
        backend.upload(made[0], host)
        host[:] = n
        backend.upload(made[0], host)
        host[:] = np.nan
    for n, (buffer, x) in enumerate(zip(made, arrays, strict=True)):
        assert backend.to_host(x).tolist() == [n] * 4
        assert backend.fetch(buffer).tolist() == [n if n else STEP - 1] * 4
        backend.release(buffer)


@pytest.mark.clause("S4", "S2")
@pytest.mark.smoke("S4")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_staging_takes_its_rows_at_once(backend: Backend, count: int) -> None:
    """Blocks side by side and apart, staged again and again from one host array before anything is read."""
    g = geometry(num_blocks=14, num_kv_heads=1)
    with new_pool(backend, g) as pool:
        k, v = (np.empty((count, g.block_size, 1, g.head_dim), np.float32) for _ in range(2))
        firsts = range(1, g.num_blocks - count + 1, count)
        for first in firsts:
            k[:], v[:] = first, -first
            backend.stage(
                k,
                v,
                pool,
                0,
                src_blocks=list(range(count)),
                dst_blocks=list(range(first, first + count)),
                tokens=g.block_size * count,
                dtype="float32",
            )
            k[:], v[:] = np.nan, np.inf
        for first in firsts:
            slots = np.arange(first * g.block_size, (first + count) * g.block_size, dtype=np.int32)
            got = [backend.to_host(x) for x in pool.read(0, WriteLoc.slots(slots, physical=True))]
            assert (got[0] == first).all()
            assert (got[1] == -first).all()


@pytest.mark.clause("S4", "W8")
def test_ids_of_a_write_are_taken_at_once(backend: Backend) -> None:
    with new_pool(backend, geometry(num_kv_heads=1)) as pool:
        ids = int32(16)
        rows = backend.to_device(np.ones((1, 1, pool.geometry.head_dim), np.float32))
        for slot in (17, 33, 49):
            ids[0] = slot
            pool.write(0, WriteLoc.slots(ids, physical=True), rows, rows)
            ids[0] = 19
        k, _ = pool.read(0, WriteLoc.slots(int32(17, 33, 49, 19), physical=True))
        assert np.isfinite(backend.to_host(k)[:, 0, 0]).tolist() == [True, True, True, False]
