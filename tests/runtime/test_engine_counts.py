"""What an engine counts, and what it gives back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime import Engine, Model, Request, SamplingParams, Settings
from forebay.runtime.lanes import Lanes
from forebay.runtime.variants import Variant
from forebay.specs import Backend, StaleTrace, Ticket
from forebay.specs.errors import (
    CaptureDeclined,
)
from tests.runtime.harness import PARAMS, PROMPTS, TestDriver, backend_of, count_lines, make_engine, prompt, tokens_of


# -- what it counts ----------------------------------------------------------------------------------------------------
@pytest.mark.clause("C9")
def test_counters_are_what_the_driver_was_asked_to_do(tiny_model: Model) -> None:
    """Two requests in two slots: 2 steps of bucket 2, then 3 of bucket 1. Uploads and downloads are counted by the driver too."""
    driver = TestDriver()
    with backend_of(driver) as backend:
        with make_engine(tiny_model, backend, slots=2, block_size=4, max_len=16) as engine:
            built = backend.counters.uploads
            assert built == driver.acts["uploads"] > 0
            first = engine.add(prompt(3), SamplingParams(max_tokens=6, ignore_eos=True))
            second = engine.add(prompt(5), SamplingParams(max_tokens=3, ignore_eos=True))
            expected = [
                ("run", 2, "both rows"),
                ("capture replay", 2, "the first grows at position 4"),
                ("run", 1, "the second has ended"),
                ("capture replay", 1, ""),
                ("replay", 1, ""),
            ]
            for acts, bucket, why in expected:
                before, launches = count_lines(backend), backend.counters.launches.copy()
                engine.step()
                done = count_lines(backend) - before
                steps = {
                    name: done[name] for name in ("run", "capture", "replay", "recapture", "declined") if done[name]
                }
                assert steps == dict.fromkeys(acts.split(), 1), why
                assert engine._core.decoder.lanes.bucket_for(bucket - 1) == bucket
                forwards = 1 + (2 if why == "both rows" else 0)
                made = backend.counters.launches - launches
                assert made == {"write_kv": 2 * forwards, "paged_decode": 2 * forwards}
                if why != "both rows":
                    grown = "grows" in why
                    assert (done["uploads"], done["upload_bytes"]) == ((1, 4 * (4 + 1)) if grown else (0, 0))
                    assert done["downloads"] == 1
            assert (len(first.token_ids), len(second.token_ids), engine.has_work) == (6, 3, False)
        c = backend.counters
        for name in ("run", "capture", "replay", "declined", "uploads", "upload_bytes"):
            assert getattr(c, name) == driver.acts[name], name
        assert (c.run, c.capture, c.replay, c.recapture, c.declined) == (2, 2, 3, 0, 0)
        assert c.downloads == 2 + 5, "one a prefill, one a step"
        assert (c.syncs, c.dropped, c.invalid, dict(c.delegated)) == (0, 0, 0, {})


@pytest.mark.clause("C6", "C9", "C11")
def test_a_backend_that_recaptures_at_boundaries_gives_the_same_tokens_and_counts_each(
    tiny_model: Model, expected: list[tuple[int, ...]]
) -> None:
    driver = TestDriver(recapture_at_boundary=True)
    with (
        backend_of(driver) as backend,
        make_engine(tiny_model, backend, capture="required", slots=1, block_size=4, max_len=64) as engine,
    ):
        acts: list[str] = []
        requests = [engine.add(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
        while engine.has_work:
            before = driver.acts.copy()
            engine.step()
            acts.append(" ".join(a for a in ("run", "capture", "replay") if driver.acts[a] > before[a]))
        assert tokens_of(requests) == expected
        decoded = [s.max_tokens - 1 for s in PARAMS if s.max_tokens > 1]
        wanted = [["run", "capture replay", *["replay"] * n][:n] for n in decoded]
        assert [a for a in acts if a] == [a for request in wanted for a in request]
        captures = sum(n > 1 for n in decoded)
        lane = engine.report()["lanes"][0]
        assert (lane["capture"], lane["released"]) == (captures, captures - 1)
        assert (backend.counters.capture, backend.counters.recapture) == (captures, captures - 1)
        assert len(backend._traces) == 1, "a released trace is gone"


@pytest.mark.clause("C6", "C11")
def test_with_and_without_recapture_at_boundaries_the_steps_have_the_same_bits(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts = []
    for recapture in (False, True):
        with (
            backend_of(TestDriver(recapture_at_boundary=recapture)) as backend,
            make_engine(tiny_model, backend, slots=3, block_size=4, max_len=64) as engine,
        ):
            seen: list[bytes] = []
            whole = Lanes.step

            def step(
                lanes: Lanes, bucket: int, variant: Variant, whole: Any = whole, seen: list[bytes] = seen
            ) -> Ticket:
                ticket: Ticket = whole(lanes, bucket, variant)
                seen.append(ticket.get()["receipt"].tobytes())
                return ticket

            with monkeypatch.context() as patch:
                patch.setattr(Lanes, "step", step)
                engine.generate(PROMPTS, PARAMS)
            receipts.append(seen)
    assert receipts[0] == receipts[1]


@pytest.mark.clause("C8", "C9", "C11")
@pytest.mark.parametrize(("declines", "max_rewarm"), [(1, 0), (2, 2), (3, 2), (10**9, 3)])
def test_declined_captures_are_counted_bounded_and_cost_no_token(
    tiny_model: Model, expected: list[tuple[int, ...]], declines: int, max_rewarm: int
) -> None:
    driver = TestDriver(declines=declines)
    with (
        backend_of(driver) as backend,
        make_engine(tiny_model, backend, slots=1, max_len=64, max_rewarm=max_rewarm) as engine,
    ):
        assert engine.generate([PROMPTS[3]], PARAMS[3])[0].token_ids == expected[3]
        tries = min(declines, max_rewarm + 1)
        gave_up = declines > max_rewarm
        lane = engine.report()["lanes"][0]
        assert (backend.counters.declined, lane["declined"], driver.acts["declined"]) == (tries, tries, tries)
        assert lane["eager_reason"] == (
            f"capture declined {tries} times in a row: no room for a trace" if gave_up else ""
        )
        steps = PARAMS[3].max_tokens - 1
        assert (lane["run"], lane["replay"]) == ((steps, 0) if gave_up else (1 + tries, steps - 1 - tries))


@pytest.mark.clause("C11")
def test_capture_required_ends_the_call_when_the_device_declines_and_leaves_nothing_behind(tiny_model: Model) -> None:
    driver = TestDriver(declines=1)
    with (
        backend_of(driver) as backend,
        make_engine(tiny_model, backend, capture="required", slots=2, block_size=4, max_len=64) as engine,
    ):
        with pytest.raises(CaptureDeclined, match="no room for a trace"):
            engine.generate(PROMPTS, PARAMS)
        assert not engine.has_work
        assert engine.report()["memory"]["blocks_allocated"] == 0
        again = engine.generate([PROMPTS[0]], PARAMS[0])
        assert len(again[0].token_ids) == PARAMS[0].max_tokens


# -- what it gives back ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("read_behind", [0, 3])
def test_an_interrupted_call_gives_everything_back(
    tiny_model: Model, backend: Backend, expected: list[tuple[int, ...]], read_behind: int
) -> None:
    with make_engine(tiny_model, backend, slots=2, block_size=4, max_len=64, read_behind=read_behind) as engine:
        told = []

        def stop_at_20(request: Request, token: int) -> None:
            told.append(token)
            if len(told) == 20:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, PARAMS, on_token=stop_at_20)
        assert not engine.has_work
        assert tokens_of(engine.generate(PROMPTS, PARAMS)) == expected
        memory = engine.report()["memory"]
        assert (memory["blocks_allocated"], memory["blocks_in_flight"]) == (0, 0)


@pytest.mark.clause("C10", "L5")
def test_close_frees_traces_pool_state_and_weights_and_leaves_the_backend_open(tiny_model: Model) -> None:
    with backend_of(TestDriver()) as backend:
        engine = make_engine(tiny_model, backend, slots=2, block_size=4, max_len=32)
        engine.generate([prompt(3), prompt(4)], SamplingParams(max_tokens=8, ignore_eos=True))
        traces = list(backend._traces)
        buffers = [*engine._parts.model.buffers, *engine._parts.device.buffers, *engine._parts.pool.buffers]
        assert len(traces) >= 1
        assert engine.report()["memory"]["blocks_free"] == 16
        engine.close()
        engine.close()
        assert not any(b.live for b in buffers)
        assert all(b.handle is None for b in buffers)
        assert not any(t.live for t in traces)
        assert (len(backend._traces), len(backend._pools)) == (0, 0)
        for trace in traces:
            with pytest.raises(StaleTrace):
                backend.replay(trace)
        with make_engine(tiny_model, backend, slots=1, max_len=16) as other:
            assert len(other.generate([[5]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


@pytest.mark.clause("B2", "C9")
def test_the_report_is_plain_data_with_the_source_of_every_setting(
    tiny_model: Model, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forebay.toml").write_text("block_size = 4\nslots = 7\n")
    monkeypatch.setenv("FOREBAY_SLOTS", "2")
    monkeypatch.setenv("FOREBAY_READ_BEHIND", "1")
    with Engine(tiny_model, backend, max_len=32, settings=Settings.resolve()) as engine:
        engine.generate([[5, 6]], SamplingParams(max_tokens=6, ignore_eos=True))
        report = json.loads(json.dumps(engine.report()))
    configuration = report["configuration"]
    found = {k: (v["value"], v["source"]) for k, v in configuration.items()}
    assert found["max_len"] == (32, "call")
    assert found["slots"] == (2, "environment")
    assert found["read_behind"] == (1, "environment")
    assert found["block_size"] == (4, "file")
    assert found["capture"] == ("auto", "default")
    assert configuration["slots"]["origin"] == "FOREBAY_SLOTS"
    assert configuration["block_size"]["origin"].endswith("forebay.toml:1")
    assert report["backend"]["name"] == "cpu"
    assert report["backend"]["info"]["threads"] == 1
    assert report["model"] == {"name": tiny_model.name, "dtype": "float32", "max_len": 32}
    assert {name: count for name, count in report["engine"].items() if count or name == "eager_steps"} == {
        "steps": 5,
        "eager_steps": 0,
        "tokens": 6,
        "prefills": 1,
        "prefill_tokens": 2,
        "finished": 1,
    }
    layers, heads, dim = 2, 2, 16
    assert report["memory"]["kv_bytes"] == layers * 2 * (1 + 2 * 8) * 4 * heads * dim * 4
    assert report["memory"]["capacity_tokens"] == 64
    assert report["lanes"] == [
        {
            "bucket": 1,
            "variant": "greedy",
            "run": 1,
            "replay": 4,
            "capture": 1,
            "declined": 0,
            "released": 0,
            "eager_reason": "",
        }
    ]
    assert {"run", "capture", "replay", "recapture", "declined", "dropped", "invalid", "uploads"} <= set(
        report["counters"]
    )
