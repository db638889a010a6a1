"""Padding: tokens that fill a tile up, rows that fill a bucket up, and where they would write (clauses D2, D3, W6, L4, C3)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, Buffer, Pool, Segment, WriteLoc
from forebay.specs.suite.attention import Array
from forebay.specs.suite.kv import (
    EACH_KV_DTYPE,
    changed_slots,
    geometry,
    int32,
    mean_of_values,
    new_pool,
    put,
    row_bits,
    slot,
)

# -- tokens of a block that nobody wrote -----------------------------------------------------------------------------------


@pytest.mark.clause("D2", "D6", "L3")
@pytest.mark.case("I02")
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (32, 64), (32, 128), (8, 32), (64, 32)])
def test_equal_keys_and_values_of_one_give_exactly_one(
    backend: Backend, block_size: int, head_dim: int, dtype: str, path: str
) -> None:
    """K is 0 and V is 1, a row of the call for each length. What is behind them in the last block, zeros or poison, takes no part:
    a padded token of zeros would pull the mean below 1.
    """
    lengths = sorted({1, 16, 17, 20, 32, 33, block_size - 1, block_size, block_size + 1})
    width = -(-lengths[-1] // block_size)
    sizes = geometry(num_blocks=len(lengths) * width + 1, block_size=block_size, head_dim=head_dim, dtype=dtype)
    with new_pool(backend, sizes) as pool:
        table = pool.first_block + np.arange(len(lengths) * width, dtype=np.int32).reshape(-1, width)
        slots = [slot(pool, 0, t) for t in range(table.size * block_size)]
        seen = (np.arange(width * block_size) < np.array(lengths)[:, None]).reshape(-1, 1, 1)
        for behind in (0.0, np.nan):
            k, v = (np.tile(np.where(seen, x, behind).astype(np.float32), (1, 2, head_dim)) for x in (0.0, 1.0))
            put(backend, pool, slots, k, v)
            out = mean_of_values(backend, pool, table, lengths, path=path)
            assert dict(zip(lengths, out.tolist(), strict=True)) == dict.fromkeys(lengths, 1.0), f"{behind} behind them"


# -- rows of a bucket that hold no request ---------------------------------------------------------------------------------


class Bucket:
    """A step over the first rows of its state: each row writes one value at its position and attends to what it has (equal keys)."""

    def __init__(self, backend: Backend, pool: Pool, rows: int, path: str) -> None:
        g = pool.geometry
        self.backend, self.pool, self.rows = backend, pool, rows
        host = {
            "position": int32(*[-1] * rows),
            "value": np.zeros((rows, 1, 1), np.float32),
            "table": int32(*[[0]] * rows),
        }
        self.state: dict[str, Buffer] = {name: backend.buffer(name, x) for name, x in host.items()}
        self.q = backend.buffer("q", np.zeros((rows, g.num_kv_heads, g.head_dim), np.float32))

        def fn(b: Backend) -> Any:
            position, value, table = (self.state[name].get() for name in ("position", "value", "table"))
            v = b.xp.repeat(value, g.head_dim)
            pool.write(0, WriteLoc.paged(table, position, table_len=1), self.q.get(), v)
            return {}, {"out": b.paged_decode(self.q.get(), pool, 0, table, position + 1, table_len=1, path=path)}

        self.segment = Segment("bucket", fn, key=(rows, path), reads=(*self.state.values(), self.q), pools=(pool,))
        backend.run(self.segment)
        self.trace = backend.capture(self.segment)

    def __call__(self, how: str, position: list[int], value: list[float], table: list[int]) -> Array:
        """One number a row, of a step over this state."""
        self.backend.upload(self.state["position"], np.array(position, np.int32))
        self.backend.upload(self.state["value"], np.array(value, np.float32).reshape(-1, 1, 1))
        self.backend.upload(self.state["table"], np.array(table, np.int32).reshape(-1, 1))
        ticket = self.backend.run(self.segment) if how == "run" else self.backend.replay(self.trace)
        out = ticket.get()["out"]
        np.testing.assert_array_equal(out, np.broadcast_to(out[:, :1, :1], out.shape))
        return np.array(out[:, 0, 0])

    def close(self) -> None:
        self.backend.release(self.trace)
        for buffer in (*self.state.values(), self.q):
            self.backend.release(buffer)


@pytest.mark.clause("W6", "D3", "C3")
@pytest.mark.case("A03")
@pytest.mark.parametrize("how", ["run", "replay"])
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize(("bucket", "row"), [(2, 0), (2, 1), (4, 2), (8, 5)])
def test_idle_rows_of_a_bucket_leave_every_block_alone(
    backend: Backend, bucket: int, row: int, path: str, how: str
) -> None:
    """A request has written 1, 2, 3 into its block and sits a step out; then the bucket holds another request's first token alone.

    The idle rows still name blocks: the sink's, the first request's, one that is no block at all. Only the second request's slot
    changes, and the first goes on to 2.0.
    """
    with new_pool(backend, geometry(num_blocks=5, num_kv_heads=1)) as pool:
        step = Bucket(backend, pool, bucket, path)
        first, second = pool.first_block, pool.first_block + 2
        idle = [-1] * bucket

        def at(r: int, x: Any, others: list[Any]) -> list[Any]:
            return [*others[:r], x, *others[r + 1 :]]

        for position in range(3):
            out = step(how, at(row, position, idle), [position + 1.0] * bucket, [first] * bucket)
            np.testing.assert_allclose(out, at(row, position / 2 + 1, [0.0] * bucket), rtol=1e-6)
        for value, names in zip((50.0, 51.0, 52.0, 53.0), (0, first, 10**6, -1), strict=True):
            before = row_bits(backend, pool)
            out = step(how, at(row, 0, idle), [value] * bucket, at(row, second, [names] * bucket))
            assert out.tolist() == at(row, value, [0.0] * bucket)
            assert changed_slots(before, row_bits(backend, pool)) == [second * pool.geometry.block_size]
        assert mean_of_values(backend, pool, int32([first]), [3], path=path).tolist() == [2.0]
        assert (pool.dropped, pool.invalid) == (0, 0)
        step.close()


# -- a block for them ------------------------------------------------------------------------------------------------------


@pytest.mark.clause("L4", "C11", "C3")
@pytest.mark.case("A12")
@pytest.mark.parametrize(
    ("block_size", "requests"),
    [(16, [(5, 12), (5, 12), (10, 23)]), (16, [(16, 33), (33, 33), (1, 33)]), (32, [(1, 32), (2, 31), (1, 32)])],
)
def test_a_full_pool_still_replays_padded_buckets(
    backend: Backend,
    make_engine: Callable[..., Any],
    runtime: ModuleType,
    internals: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    block_size: int,
    requests: list[tuple[int, int]],
) -> None:
    """Three requests hold every block and a bucket of four replays: padding has the sink, and the capacity was told without it."""
    prompts = [list(range(3 + 10 * i, 3 + 10 * i + length)) for i, (length, _) in enumerate(requests)]
    params = [runtime.SamplingParams(max_tokens=made, ignore_eos=True) for _, made in requests]
    blocks = sum(-(-(length + made - 1) // block_size) for length, made in requests)
    right = [
        list(make_engine(backend, arm="eager", slots=1).generate([p], s)[0].token_ids)
        for p, s in zip(prompts, params, strict=True)
    ]
    engine = make_engine(backend, capture="required", slots=4, block_size=block_size, num_blocks=1 + blocks)
    assert engine.report()["memory"]["capacity_tokens"] == blocks * block_size
    for _ in range(2):
        engine.generate(prompts, params)
    warm, steps = engine.report()["lanes"], engine.report()["engine"]["steps"]
    free: list[int] = []
    whole = internals.Lanes.step

    def step(lanes: Any, *arguments: Any) -> Any:
        free.append(engine.report()["memory"]["blocks_free"])
        return whole(lanes, *arguments)

    monkeypatch.setattr(internals.Lanes, "step", step)
    live = [engine.add(p, s) for p, s in zip(prompts, params, strict=True)]
    while engine.has_work:
        engine.step()
    assert [list(r.token_ids) for r in live] == right
    report = engine.report()
    replays, runs = (
        sum(lane[k] for lane in report["lanes"]) - sum(lane[k] for lane in warm) for k in ("replay", "run")
    )
    assert (replays, runs) == (report["engine"]["steps"] - steps, 0)
    assert not any(lane["eager_reason"] or lane["declined"] for lane in report["lanes"])
    assert min(free) == 0, "there was a step with no block left"
