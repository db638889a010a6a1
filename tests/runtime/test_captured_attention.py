"""Captured attention alone, with values that can be checked by eye (clauses C3, D5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.specs import AttentionParams, Backend, BlockTable, Buffer, KVGeometry, Segment, Trace, WriteLoc
from tests.runtime.harness import changed_blocks, contents, poison


class Means:
    """One head of size 1, equal keys: what a row attends to comes out as the mean of its visible values.

    Each step writes ``value`` at ``position`` of every row that is not idle, then moves on; V of the next token is one more.
    """

    def __init__(self, backend: Backend, num_blocks: int, block_size: int, rows: int, width: int) -> None:
        self.backend = backend
        self.pool = backend.create_pool(KVGeometry(num_blocks, block_size, num_kv_heads=1, head_dim=1))
        poison(backend, self.pool)
        self.zeros = backend.buffer("zeros", np.zeros((rows, 1, 1), np.float32))
        self.value = backend.buffer("value", np.zeros((rows, 1, 1), np.float32))
        self.position = backend.buffer("position", np.full(rows, -1, np.int32))
        self.table = backend.buffer("table", np.zeros((rows, width), np.int32))
        self.width = width

    def segment(self, bucket: int, path: str) -> Segment:
        def fn(b: Backend) -> tuple[dict[Buffer, Any], dict[str, Any]]:
            xp = b.xp
            position, value = xp.head(self.position.get(), bucket), xp.head(self.value.get(), bucket)
            table, zeros = (
                BlockTable(xp.head(self.table.get(), bucket), physical=True),
                xp.head(self.zeros.get(), bucket),
            )
            self.pool.write(0, WriteLoc.paged(table, position, table_len=self.width), zeros, value)
            live = position >= 0
            out = b.paged_decode(
                zeros,
                self.pool,
                0,
                table,
                xp.where(live, position + 1, 0),
                table_len=self.width,
                params=AttentionParams(scale=1.0),
                path=path,
            )
            return {self.position: xp.where(live, position + 1, position), self.value: value + 1.0}, {"out": out}

        reads = (self.zeros, self.table)
        return Segment("mean", fn, (bucket,), reads=reads, updates=(self.position, self.value), pools=(self.pool,))

    def set(self, position: list[int], value: list[float], table: list[list[int]]) -> None:
        self.backend.upload(self.position, np.array(position, np.int32))
        self.backend.upload(self.value, np.array(value, np.float32).reshape(-1, 1, 1))
        self.backend.upload(self.table, np.array(table, np.int32))

    def warm(self, bucket: int, path: str) -> Trace:
        """A trace of the bucket, captured while every row is idle."""
        segment = self.segment(bucket, path)
        self.backend.run(segment)
        return self.backend.capture(segment)


@pytest.mark.clause("C3", "W6", "L4")
@pytest.mark.case("A03")
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("padded_table", ["zeros", "of the other request"])
@pytest.mark.parametrize(("bucket", "row"), [(2, 0), (2, 1), (4, 0), (4, 2), (8, 5)])
def test_a_replay_with_one_request_leaves_the_other_requests_block_alone(
    backend: Backend, bucket: int, row: int, padded_table: str, path: str
) -> None:
    means = Means(backend, num_blocks=3, block_size=4, rows=bucket, width=1)
    a, b = 1, 2
    trace = means.warm(bucket, path)
    idle, first = [-1] * bucket, [0] * bucket
    for value in (1.0, 2.0, 3.0):
        position = [*idle]
        position[row] = int(value) - 1
        means.set(position, [value if r == row else 99.0 for r in range(bucket)], [[a]] * bucket)
        out = backend.replay(trace).get()["out"]
    assert out[row, 0, 0] == 2.0
    before = contents(backend, means.pool)
    first[row] = b
    table = [[b] if r == row else [a if padded_table != "zeros" else 0] for r in range(bucket)]
    means.set([0 if r == row else -1 for r in range(bucket)], [50.0] * bucket, table)
    out = backend.replay(trace).get()["out"]
    assert out[row, 0, 0] == 50.0
    assert all(out[r, 0, 0] == 0.0 for r in range(bucket) if r != row), "a row without keys is exactly 0"
    assert changed_blocks(before, contents(backend, means.pool)) == {b}
    again = means.backend.paged_decode(
        backend.to_device(np.zeros((1, 1, 1), np.float32)),
        means.pool,
        0,
        np.array([[a]], np.int32),
        np.array([3], np.int32),
        table_len=1,
        params=AttentionParams(scale=1.0),
        path=path,
    )
    assert backend.to_host(again).tolist() == [[[2.0]]]
    backend.release(trace)


@pytest.mark.clause("C3", "D5")
@pytest.mark.case("A07")
@pytest.mark.parametrize("path", ["direct", "gather"])
@pytest.mark.parametrize("captured_at", [1, 4, 5])
def test_a_trace_captured_at_one_length_is_right_at_every_other(backend: Backend, captured_at: int, path: str) -> None:
    """V of token t is t, so n tokens give (n-1)/2: far past any split, tile or table width the captured length could suggest."""
    longest = 600
    blocks = -(-longest // 4)
    means = Means(backend, num_blocks=1 + blocks, block_size=4, rows=2, width=blocks)
    table = [[0] * blocks, list(range(1, blocks + 1))]
    means.set([-1, 0], [0.0, 0.0], table)
    segment, trace, got = means.segment(2, path), None, []
    for n in range(1, longest + 1):
        if n == captured_at + 1:
            trace = backend.capture(segment)
        ticket = backend.run(segment) if trace is None else backend.replay(trace)
        got.append(float(ticket.get()["out"][1, 0, 0]))
    np.testing.assert_allclose(got, [(n - 1) / 2 for n in range(1, longest + 1)], rtol=1e-6)
    assert (got[3], got[4], got[12]) == (1.5, 2.0, 6.0)
    assert trace is not None
    backend.release(trace)
