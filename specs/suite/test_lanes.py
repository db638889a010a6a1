"""Lanes by themselves: what has a trace of its own, which declines count, who learns of a boundary (clauses C1, C6 to C11)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, CaptureDeclined, Segment
from forebay.specs.testing import claiming, declining

MakeEngine = Callable[..., Any]
MAX_REWARM = 2
ROUNDS = 40
RUN, CAPTURE, REPLAY = (1, 0, 0), (0, 1, 1), (0, 0, 1)


class Counted:
    """Lanes whose step adds 1 to the first rows of a Buffer."""

    def __init__(self, backend: Backend, internals: ModuleType, mode: str = "auto") -> None:
        self.backend, self.greedy = backend, internals.GREEDY
        self.rows = backend.buffer("rows", np.zeros(4, np.int32))
        self.lanes = internals.Lanes(backend, self.segment, 4, mode, MAX_REWARM)

    def segment(self, bucket: int, variant: Any) -> Segment:
        def fn(b: Backend) -> Any:
            return {self.rows: b.xp.head(self.rows.get(), bucket) + 1}, {"rows": b.xp.head(self.rows.get(), bucket)}

        return Segment("count", fn, key=(bucket, variant), updates=(self.rows,))

    def acts(self, bucket: int = 2) -> tuple[int, int, int]:
        """(runs, captures, replays) of one step, which counts on in the bucket's rows."""
        c = self.backend.counters
        before = (c.run, c.capture, c.replay)
        rows = self.backend.fetch(self.rows)
        assert self.lanes.step(bucket, self.greedy).get()["rows"].tolist() == rows[:bucket].tolist()
        rows[:bucket] += 1
        assert self.backend.fetch(self.rows).tolist() == rows.tolist()
        return c.run - before[0], c.capture - before[1], c.replay - before[2]

    def report(self) -> dict[str, Any]:
        (report,) = self.lanes.report()
        return dict(report)

    def close(self) -> None:
        self.lanes.close()
        self.backend.release(self.rows)


@pytest.mark.clause("C11", "C7", "C1")
def test_a_bucket_runs_once_and_then_replays(backend: Backend, internals: ModuleType) -> None:
    for mode, steady in (("off", (1, 0, 0)), ("auto", (0, 0, 1)), ("required", (0, 0, 1))):
        lanes = Counted(backend, internals, mode)
        second = (1, 0, 0) if mode == "off" else (0, 1, 1)
        assert [lanes.acts() for _ in range(4)] == [(1, 0, 0), second, steady, steady]
        assert [lanes.acts(4) for _ in range(2)] == [(1, 0, 0), second]
        assert lanes.acts() == steady
        assert backend.fetch(lanes.rows).tolist() == [7, 7, 2, 2]
        assert [report["declined"] for report in lanes.lanes.report()] == [0, 0]
        lanes.close()


@pytest.mark.clause("C8", "C9")
def test_warming_again_is_bounded_and_says_so(backend: Backend, internals: ModuleType) -> None:
    lanes = Counted(backend, internals)
    declined = backend.counters.declined
    with declining(backend) as declines:
        for _ in range(ROUNDS):
            assert lanes.acts() == (1, 0, 0)
    assert backend.counters.declined - declined == 3
    assert declines.tried == 3
    report = lanes.report()
    assert report["declined"] == 3
    assert "declined 3 times in a row" in report["eager_reason"]
    assert backend.fetch(lanes.rows).tolist() == [ROUNDS, ROUNDS, 0, 0]
    lanes.close()


@pytest.mark.refuses("C11")
def test_required_capture_raises_when_the_device_declines(backend: Backend, internals: ModuleType) -> None:
    lanes = Counted(backend, internals, "required")
    lanes.acts()
    with declining(backend) as declines, pytest.raises(CaptureDeclined, match="no room"):
        lanes.acts()
    assert declines.tried == 1
    lanes.close()


@pytest.mark.clause("C8", "C9")
def test_declines_count_in_a_row_and_captures_when_they_succeed(backend: Backend, internals: ModuleType) -> None:
    """Bad moments that end never add up to giving up, however many there are; every act is counted as what it was."""
    lanes = Counted(backend, internals)
    assert lanes.acts() == RUN
    for moment in range(1, 4):
        with declining(backend, MAX_REWARM):
            assert [lanes.acts() for _ in range(MAX_REWARM + 2)] == [RUN] * MAX_REWARM + [CAPTURE, REPLAY]
        report = lanes.report()
        assert (report["capture"], report["declined"], report["eager_reason"]) == (moment, MAX_REWARM * moment, "")
        assert (report["run"], report["replay"]) == (1 + MAX_REWARM * moment, 2 * moment)
        lanes.lanes.close()
    lanes.close()


@pytest.mark.clause("C6")
@pytest.mark.parametrize("claims", [{}, {"recapture_at_boundary": True}], ids=["declared", "recapture"])
def test_every_lane_learns_of_a_boundary(backend: Backend, internals: ModuleType, claims: dict[str, bool]) -> None:
    with claiming(backend, **claims):
        lanes = Counted(backend, internals)
        for bucket in (1, 2, 4):
            assert [lanes.acts(bucket) for _ in range(3)] == [RUN, CAPTURE, REPLAY]
        lanes.lanes.boundary()
        declared = backend.capabilities.recapture_at_boundary
        for bucket in (1, 2, 4):
            assert [lanes.acts(bucket) for _ in range(2)] == ([RUN, CAPTURE] if declared else [REPLAY, REPLAY])
        lanes.close()


@pytest.mark.clause("C7")
def test_a_sampled_step_has_a_trace_of_its_own(backend: Backend, make_engine: MakeEngine, runtime: ModuleType) -> None:
    """Greedy traffic first, then a draw in the same bucket, then both: the tokens of engines that saw nothing else."""
    prompt = [21, 22, 23]
    wanted = [
        runtime.SamplingParams(max_tokens=8, ignore_eos=True),
        runtime.SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.9, seed=3),
    ]
    alone = [make_engine(backend, slots=1).generate([prompt], one)[0].token_ids for one in wanted]
    assert alone[0] != alone[1]
    engine = make_engine(backend, slots=1)
    for one in (0, 1, 0, 1):
        assert engine.generate([prompt], wanted[one])[0].token_ids == alone[one]
    assert engine.report()["engine"]["reseeds"] == 0
