"""Steps over the first rows of their state, few or many: each row has the bits it has in any other bucket (clauses C3, D5, W9)."""

from __future__ import annotations

import pytest

from forebay.specs import Backend
from forebay.specs.suite.kv import BLOCK_SIZE, same_arrays, same_bits
from forebay.specs.suite.steps import VOCAB, copies, decoder, everything, same_emits, warm_trace


@pytest.mark.clause("C3", "W9")
@pytest.mark.parametrize("bucket", [16, 32])
def test_a_wide_bucket_replays_as_it_runs(backend: Backend, bucket: int) -> None:
    """Every row seated, written and attended to; the last as the first."""
    ran, replayed = (
        decoder(backend, slots=bucket, bucket=bucket, table_len=2, num_blocks=2 * bucket + 1) for _ in range(2)
    )
    idle, trace = warm_trace(ran), warm_trace(replayed)
    for d in (ran, replayed):
        for row in range(bucket):
            d.seat(row, row % VOCAB, [1 + 2 * row, 2 + 2 * row])
    for _ in range(BLOCK_SIZE + 2):
        one, other = copies(backend.run(ran.segment)), copies(backend.replay(trace))
        same_emits(one, other)
        assert other["out"].any(axis=(1, 2)).all()
    same_arrays(everything(ran), everything(replayed))
    for each in (idle, trace):
        backend.release(each)
    for d in (ran, replayed):
        d.close()


@pytest.mark.clause("D5")
def test_a_bucket_is_the_first_rows(backend: Backend) -> None:
    """The same request in buckets of 1, 2 and 4, and at other slots of wide ones: the same bits of its row."""
    results = []
    for bucket, row in ((1, 0), (2, 0), (4, 0), (4, 3), (32, 31)):
        d = decoder(backend, slots=max(4, bucket), bucket=bucket)
        trace = warm_trace(d)
        d.seat(row, 5, [3, 1, 7])
        steps = [copies(backend.replay(trace)) for _ in range(20)]
        results.append([{name: value[row] for name, value in step.items()} for step in steps])
        backend.release(trace)
        d.close()
    for other in results[1:]:
        for step, want in zip(other, results[0], strict=True):
            for name in ("chosen", "out", "lse"):
                same_bits(step[name], want[name])
