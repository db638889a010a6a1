"""The engine: what it refuses, what it counts, what it gives back, and the same tokens however it is run."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.runtime import BlockAllocator, Engine, Model, Request, SamplingParams, Settings, load_model, open_backend
from forebay.runtime.lanes import Lanes
from forebay.specs import Backend, StaleTrace, Ticket
from forebay.specs.errors import (
    Cancelled,
    CaptureDeclined,
    ForebayError,
    InvalidInput,
    InvalidLayout,
    InvalidModel,
    InvalidSetting,
    Unsupported,
)
from tests.models import tiny
from tests.runtime.harness import ARMS, TestDriver, backend_of, count_lines, make_engine, prompt, tokens_of

PROMPTS = [prompt(n, seed=9) for n in (3, 1, 12, 7, 5, 20)]
PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n) for n in (18, 1, 9, 30, 2, 11)]


@pytest.fixture(scope="module")
def expected(tiny_model: Model, backend: Backend) -> list[tuple[int, ...]]:
    """Tokens of each prompt alone, in the eager arm."""
    with make_engine(tiny_model, backend, arm="eager", slots=1, max_len=64) as engine:
        return [engine.generate([p], s)[0].token_ids for p, s in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture
def engine(tiny_model: Model, backend: Backend) -> Iterator[Engine]:
    """A small engine: 5 blocks of 4 tokens, sequences of at most 40."""
    with make_engine(tiny_model, backend, slots=2, block_size=4, num_blocks=6, max_len=40) as made:
        yield made


# -- bad input ---------------------------------------------------------------------------------------------------------
@contextmanager
def refused(backend: Backend, error: type[ForebayError], says: str) -> Iterator[None]:
    """Raises one clear error, before anything is done on the device."""
    before, pools = count_lines(backend), len(backend._pools)
    with pytest.raises(error, match=re.escape(says)) as caught:
        yield
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
    assert count_lines(backend) == before
    assert len(backend._pools) == pools


VOCABULARY = len(tiny.TOKENS)
NINE_STOPS = SamplingParams(ignore_eos=True, stop_token_ids=tuple(range(9)))
BAD: dict[str, tuple[Any, Any, str]] = {
    "empty text": ([""], None, "prompt 0: an empty prompt; give at least one token"),
    "no tokens": ([[5], []], None, "prompt 1: an empty prompt; give at least one token"),
    "token beyond the vocabulary": (
        [[5, VOCABULARY]],
        None,
        f"token id {VOCABULARY} is not in the vocabulary (0 to 266)",
    ),
    "negative token": ([[5, -1]], None, "token id -1 is not in the vocabulary (0 to 266)"),
    "bool token": ([[5, True]], None, "prompt 0: got the bool True among the token ids, expected ints"),
    "float token": ([[5, 6.0]], None, "prompt 0: got the float 6.0 among the token ids, expected ints"),
    "text token": ([["5"]], None, "prompt 0: got the str '5' among the token ids, expected ints"),
    "bytes": ([b"hello"], None, "prompt 0: got bytes, expected text or a list of token ids"),
    "a number": ([7], None, "prompt 0: got int, expected text or a list of token ids"),
    "nothing": ([None], None, "prompt 0: got NoneType, expected text or a list of token ids"),
    "no list of prompts": (7, None, "generate: got int, expected prompts"),
    "longer than max_len": (
        [prompt(30)],
        SamplingParams(max_tokens=11),
        "prompt 0: 30 prompt tokens and max_tokens=11 are 41 tokens; max_len is 40",
    ),
    "larger than the pool": (
        [prompt(3), prompt(15)],
        SamplingParams(max_tokens=7),
        "prompt 1: 15 prompt tokens and max_tokens=7 need 6 blocks of 4 tokens; the pool has 5 (20 tokens); raise num_blocks",
    ),
    "no SamplingParams": ([[5]], {"max_tokens": 3}, "prompt 0: got dict, expected SamplingParams"),
    "not all SamplingParams": ([[5], [6]], [SamplingParams(), 3], "prompt 1: got int, expected SamplingParams"),
    "too few SamplingParams": (
        [[5], [6]],
        [SamplingParams()],
        "generate: 2 prompts and 1 SamplingParams; give one, or one",
    ),
    "too many SamplingParams": (
        [[5]],
        [SamplingParams()] * 2,
        "generate: 1 prompts and 2 SamplingParams; give one, or one",
    ),
    "too many stop tokens": ([[5]], NINE_STOPS, "prompt 0: 9 stop tokens, at most 8"),
    "stop token beyond the vocabulary": (
        [[5]],
        SamplingParams(stop_token_ids=(3, 2**40)),
        f"prompt 0: stop token {2**40} is not in the vocabulary (0 to 266)",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_prompt_is_refused_before_any_device_work_and_the_engine_stays_good(
    engine: Engine, backend: Backend, kind: str
) -> None:
    prompts, params, says = BAD[kind]
    with refused(backend, InvalidInput, says):
        engine.generate(prompts, params)
    if isinstance(prompts, list) and not isinstance(params, list):
        with refused(backend, InvalidInput, says.replace("prompt 0", "prompt").replace("prompt 1", "prompt")):
            engine.add(prompts[-1], params)
    assert not engine.has_work
    report = engine.report()
    assert set(report["engine"].values()) == {0}
    assert report["memory"]["blocks_free"] == 5
    good = engine.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [len(r.token_ids) for r in good] == [3]


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"max_tokens": 0}, InvalidInput, "SamplingParams.max_tokens: got 0, expected an int >= 1"),
        ({"max_tokens": True}, InvalidInput, "SamplingParams.max_tokens: got True"),
        ({"max_tokens": 2.0}, InvalidInput, "SamplingParams.max_tokens: got 2.0"),
        ({"temperature": -0.5}, InvalidInput, "SamplingParams.temperature: got -0.5, expected a finite number >= 0"),
        ({"temperature": float("nan")}, InvalidInput, "SamplingParams.temperature: got nan"),
        ({"temperature": 0.7}, Unsupported, "SamplingParams.temperature: got 0.7, this version decodes greedily (0)"),
        ({"seed": 2**31}, InvalidInput, f"SamplingParams.seed: got {2**31}, expected an int of 32 bits"),
        ({"stop_token_ids": (3, -1)}, InvalidInput, "SamplingParams.stop_token_ids: got -1, expected token ids >= 0"),
        ({"stop_token_ids": (True,)}, InvalidInput, "SamplingParams.stop_token_ids: got True"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_bad_sampling_parameters_are_refused_when_made(fields: Any, error: type[ForebayError], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_len": 513}, InvalidInput, "max_len: got 513, the model "),
        ({"max_len": 0}, InvalidSetting, "max_len = 0 (call); expected an integer of at least 1"),
        ({"max_len": True}, InvalidSetting, "max_len = True (call)"),
        ({"max_len": "64"}, InvalidSetting, "max_len = '64' (call)"),
        ({"slots": 0}, InvalidSetting, "slots = 0 (call); expected an integer of at least 1"),
        ({"block_size": 0}, InvalidSetting, "block_size = 0 (call); expected an integer of at least 1"),
        ({"num_blocks": 1}, InvalidSetting, "num_blocks = 1 (call); expected an integer of at least 2"),
        ({"num_blocks": 2**31}, InvalidLayout, "slot ids are int32"),
        ({"arm": "fast"}, InvalidSetting, "arm = 'fast' (call); expected 'eager' or 'hostfree' or 'captured' or none"),
        ({"capture": "on"}, InvalidSetting, "capture = 'on' (call); expected 'off' or 'auto' or 'required'"),
        ({"attention": "paged"}, InvalidSetting, "attention = 'paged' (call); expected 'direct' or 'gather'"),
        (
            {"kv_dtype": "float16"},
            InvalidSetting,
            "kv_dtype = 'float16' (call); expected 'float32' or 'bfloat16' or none",
        ),
        ({"read_behind": -1}, InvalidSetting, "read_behind = -1 (call); expected an integer of at least 0"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_a_bad_engine_is_refused_before_any_device_work(
    tiny_model: Model, backend: Backend, options: Any, error: type[ForebayError], says: str
) -> None:
    with refused(backend, error, says):
        make_engine(tiny_model, backend, **options)


@pytest.mark.clause("D8")
def test_heads_that_do_not_divide_are_refused_where_the_model_is_read_and_where_it_is_used(
    tiny_model: Model, backend: Backend, tmp_path: Path
) -> None:
    folder = tiny.write_folder(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({**tiny.CONFIG, "num_attention_heads": 3}))
    with refused(backend, InvalidModel, "3 attention heads do not divide into 2 key/value heads"):
        load_model(folder)
    config, opened = copy.copy(tiny_model.config), copy.copy(tiny_model.folder)
    object.__setattr__(config, "num_heads", 3)
    object.__setattr__(opened, "config", config)
    with refused(backend, InvalidLayout, "3 query heads are not a multiple of 2 KV heads"):
        make_engine(dataclasses.replace(tiny_model, folder=opened), backend)


def test_a_pool_of_a_type_the_backend_has_not_is_refused(tiny_model: Model) -> None:
    driver = TestDriver(kv_dtypes=("float32",))
    with (
        backend_of(driver) as backend,
        refused(backend, Unsupported, "KV dtype 'bfloat16': backend 'cpu' supports float32"),
    ):
        make_engine(tiny_model, backend, kv_dtype="bfloat16")


def test_the_smallest_pool_takes_the_smallest_request_and_refuses_the_next(tiny_model: Model, backend: Backend) -> None:
    with make_engine(tiny_model, backend, slots=2, block_size=1, num_blocks=2, max_len=8) as engine:
        results = engine.generate([[5], [6], [7]], SamplingParams(max_tokens=1))
        assert [len(r.token_ids) for r in results] == [1, 1, 1]
        with refused(
            backend, InvalidInput, "1 prompt tokens and max_tokens=2 need 2 blocks of 1 tokens; the pool has 1 (1"
        ):
            engine.generate([[5]], SamplingParams(max_tokens=2))


# -- the same tokens, however it is run --------------------------------------------------------------------------------
@pytest.mark.clause("C11")
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_the_arms_agree_whatever_runs_beside(
    tiny_model: Model, backend: Backend, expected: list[tuple[int, ...]], arm: str, kv_dtype: str
) -> None:
    with make_engine(tiny_model, backend, arm=arm, kv_dtype=kv_dtype, slots=3, block_size=4, max_len=64) as engine:
        together = tokens_of(engine.generate(PROMPTS, PARAMS))
        assert tokens_of(engine.generate(PROMPTS, PARAMS)) == together
        if kv_dtype == "float32":
            assert together == expected
            return
        alone = [engine.generate([p], s)[0].token_ids for p, s in zip(PROMPTS, PARAMS, strict=True)]
        assert together == alone


@pytest.mark.clause("C11")
@pytest.mark.parametrize(
    ("options", "arm", "captures"),
    [
        ({"capture": "off"}, "hostfree", False),
        ({"capture": "auto"}, "captured", True),
        ({"capture": "required"}, "captured", True),
        ({"capture": "off", "arm": "captured"}, "captured", True),
        ({"capture": "required", "arm": "hostfree"}, "hostfree", False),
        ({"capture": "required", "arm": "eager"}, "eager", False),
    ],
    ids=str,
)
def test_the_capture_switch_is_honoured_and_arm_overrides_it(
    tiny_model: Model, backend: Backend, expected: list[tuple[int, ...]], options: Any, arm: str, captures: bool
) -> None:
    before = count_lines(backend)
    with make_engine(tiny_model, backend, slots=1, max_len=64, **options) as engine:
        assert engine.generate([PROMPTS[0]], PARAMS[0])[0].token_ids == expected[0]
        assert engine.report()["arm"] == arm
    done = count_lines(backend) - before
    assert (done["capture"] > 0, done["replay"] > 0, done["run"] > 0) == (captures, captures, arm != "eager")


@pytest.mark.clause("C5")
@pytest.mark.parametrize("read_behind", [0, 1, 3])
@pytest.mark.parametrize("arm", ["hostfree", "captured"])
def test_reading_behind_changes_no_token_and_a_seeds_first_step_is_read_at_once(
    tiny_model: Model,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[tuple[int, ...]],
    arm: str,
    read_behind: int,
) -> None:
    with make_engine(
        tiny_model, backend, arm=arm, slots=2, block_size=4, max_len=64, read_behind=read_behind
    ) as engine:
        requests = [engine.add(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
        depths = []
        while engine.has_work:
            epoch, started = engine._epoch, engine._counts["prefills"]
            engine.step()
            seeded = engine._epoch != epoch
            if seeded:
                assert engine._ledger.in_flight == 0, "the first step of a seed was read at once"
            assert seeded <= (engine._counts["prefills"] > started)
            depths.append(engine._ledger.in_flight)
        assert tokens_of(requests) == expected
        assert max(depths) == read_behind
        assert engine.report()["engine"]["reseeds"] == 0


@pytest.mark.clause("D5", "C3")
def test_the_number_of_threads_changes_no_token(tiny_model: Model, expected: list[tuple[int, ...]]) -> None:
    threads = torch.get_num_threads()
    try:
        with (
            open_backend("cpu", threads=2) as two,
            make_engine(tiny_model, two, slots=3, block_size=4, max_len=64) as engine,
        ):
            assert tokens_of(engine.generate(PROMPTS, PARAMS)) == expected
    finally:
        torch.set_num_threads(threads)


def test_tokens_are_told_as_they_come_and_add_up_to_the_results(engine: Engine) -> None:
    told: dict[int, list[int]] = {}
    prompts = [prompt(4, seed=i) for i in range(3)]
    results = engine.generate(
        prompts,
        SamplingParams(max_tokens=6, ignore_eos=True),
        on_token=lambda request, token: told.setdefault(request.index, []).append(token),
    )
    assert [tuple(t) for _, t in sorted(told.items())] == tokens_of(results)
    assert [list(r.prompt_token_ids) for r in results] == prompts
    assert engine.generate([]) == []


@pytest.mark.clause("C4")
def test_a_request_ends_at_the_models_end_token_at_its_own_and_not_when_told_to_ignore(
    tiny_model: Model, backend: Backend
) -> None:
    """A stop token ends it wherever it comes up: as the prompt's own first token, at the first step, later."""
    with make_engine(tiny_model, backend, slots=2, block_size=4, max_len=64) as engine:
        whole = engine.generate([prompt(8)], SamplingParams(max_tokens=20, ignore_eos=True))[0].token_ids
        assert len(whole) == 20
        for at in (0, 1, 2, 7):
            assert whole.index(whole[at]) == at
            result = engine.generate([prompt(8)], SamplingParams(max_tokens=20, stop_token_ids=(whole[at],)))[0]
            assert (result.token_ids, result.finish_reason) == (whole[: at + 1], "stop")
        eos = dataclasses.replace(tiny_model.config, eos_token_ids=(whole[5],))
        opened = copy.copy(tiny_model.folder)
        object.__setattr__(opened, "config", eos)
        model = dataclasses.replace(tiny_model, folder=opened)
    with make_engine(model, backend, slots=2, block_size=4, max_len=64) as engine:
        ended, ignoring = (
            engine.generate([prompt(8)], SamplingParams(max_tokens=20, ignore_eos=ignore))[0]
            for ignore in (False, True)
        )
    assert (ended.token_ids, ended.finish_reason) == (whole[:6], "stop")
    assert (ignoring.token_ids, ignoring.finish_reason) == (whole, "length")


# -- more requests than room -------------------------------------------------------------------------------------------
@pytest.mark.clause("L5")
@pytest.mark.parametrize("read_behind", [0, 3])
def test_requests_wait_for_blocks_in_order_and_none_runs_out_of_them(
    tiny_model: Model, backend: Backend, read_behind: int
) -> None:
    """Each request gets at once the promise of every block it may need, so that a growing one never finds the pool empty."""
    with make_engine(
        tiny_model, backend, slots=4, block_size=2, num_blocks=12, max_len=22, read_behind=read_behind
    ) as engine:
        prompts, params = (
            [prompt(1 + i % 7, seed=i) for i in range(14)],
            [SamplingParams(max_tokens=1 + (5 * i) % 15, ignore_eos=True) for i in range(14)],
        )
        started: list[int] = []
        requests = [engine.add(p, s) for p, s in zip(prompts, params, strict=True)]
        while engine.has_work:
            engine.step()
            started += [r.index for r in requests if r.token_ids and r.index not in started]
            promised = sum(r.blocks_needed(2) for r in engine._running.values())
            assert promised <= 11
        assert started == sorted(started) == list(range(14))
        assert [len(r.token_ids) for r in requests] == [s.max_tokens for s in params]
    with make_engine(tiny_model, backend, arm="eager", slots=1, block_size=16, max_len=22) as alone:
        assert tokens_of(requests) == [
            alone.generate([p], s)[0].token_ids for p, s in zip(prompts, params, strict=True)
        ]


@pytest.mark.clause("L5", "C5")
@pytest.mark.case("C03")
@pytest.mark.parametrize("leaves_by", ["stop", "error"])
def test_no_block_is_handed_out_while_a_step_in_flight_may_write_it(
    tiny_model: Model, backend: Backend, monkeypatch: pytest.MonkeyPatch, leaves_by: str
) -> None:
    """A request's end is known while later steps, in which its row is still among the rows, are on their way.

    R and T hold the pool between them; R leaves, and S waits for R's slot and blocks while T goes on.
    """
    with make_engine(tiny_model, backend, slots=2, block_size=2, num_blocks=29, max_len=32, read_behind=3) as engine:
        whole = engine.generate([prompt(4)], SamplingParams(max_tokens=24, ignore_eos=True))[0].token_ids
        stop = (whole[9],) if leaves_by == "stop" else ()
        r = engine.add(prompt(4), SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=stop))
        t = engine.add(prompt(2), SamplingParams(max_tokens=27, ignore_eos=True))
        s = engine.add(prompt(5), SamplingParams(max_tokens=20, ignore_eos=True))
        blocks_of_r: set[int] = set()
        reused = waited = False
        allocate_any = BlockAllocator.allocate

        def allocate(allocator: BlockAllocator, n: int) -> list[int]:
            nonlocal reused
            blocks = allocate_any(allocator, n)
            in_flight = {b for step in engine._ledger._pending for _, held in step.slots.values() for b in held}
            assert in_flight.isdisjoint(blocks)
            reused |= not blocks_of_r.isdisjoint(blocks)
            return blocks

        monkeypatch.setattr(BlockAllocator, "allocate", allocate)
        for _ in range(8):
            engine.step()
            blocks_of_r |= set(r.blocks)
        if leaves_by == "error":
            assert engine._ledger.in_flight == 3
            engine._fail(r, Cancelled("given up"))
        while engine.has_work:
            if r.finish_reason is not None and s.slot is None and s.finish_reason is None:
                waited |= engine.report()["memory"]["blocks_in_flight"] > 0
            engine.step()
        assert waited, "S had to wait for the last step that could still write R's blocks"
        assert reused, "and then had some of them"
        assert (len(s.token_ids), len(t.token_ids), r.finish_reason) == (20, 27, leaves_by)
        memory = engine.report()["memory"]
        assert (memory["blocks_free"], memory["blocks_in_flight"]) == (28, 0)


@pytest.mark.clause("L4", "C11")
@pytest.mark.case("A12")
@pytest.mark.parametrize(
    ("block_size", "requests"),
    [
        (2, [(1, 2), (1, 2), (2, 3)]),
        (2, [(3, 4), (2, 1), (5, 6)]),
        (4, [(4, 6), (9, 8), (1, 15)]),
        (1, [(1, 3), (2, 2), (3, 5)]),
    ],
)
def test_a_full_pool_still_replays_padded_buckets(
    tiny_model: Model, backend: Backend, block_size: int, requests: list[tuple[int, int]]
) -> None:
    """Padding has the sink, which was set aside from the start; the capacity is reported without it."""
    params = [SamplingParams(max_tokens=made, ignore_eos=True) for _, made in requests]
    needed = [
        Request(0, tuple(prompt(n)), p, ()).blocks_needed(block_size)
        for (n, _), p in zip(requests, params, strict=True)
    ]
    with make_engine(
        tiny_model, backend, capture="required", slots=4, block_size=block_size, num_blocks=1 + sum(needed), max_len=24
    ) as engine:
        assert engine.report()["memory"]["capacity_tokens"] == sum(needed) * block_size
        engine.generate([prompt(n) for n, _ in requests], params)
        engine.generate([prompt(n) for n, _ in requests], params)
        warm, before = engine.report()["lanes"], engine.report()["engine"]["steps"]
        live = [engine.add(prompt(n), p) for (n, _), p in zip(requests, params, strict=True)]
        least = sum(needed)
        while engine.has_work:
            engine.step()
            least = min(least, engine._allocator.num_free)
        lanes = engine.report()["lanes"]
        replays, runs = (sum(lane[k] for lane in lanes) - sum(lane[k] for lane in warm) for k in ("replay", "run"))
        assert (replays, runs) == (engine.report()["engine"]["steps"] - before, 0)
        assert all(lane["eager_reason"] == "" and lane["declined"] == 0 for lane in lanes)
        assert [r.finish_reason for r in live] == ["length"] * 3


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
                assert engine._lanes.bucket_for(bucket - 1) == bucket
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

            def step(lanes: Lanes, bucket: int, whole: Any = whole, seen: list[bytes] = seen) -> Ticket:
                ticket: Ticket = whole(lanes, bucket)
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
        buffers = [*engine._llama.buffers, *engine._device.buffers, *engine._pool.buffers]
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
    assert report["engine"] == {
        "steps": 5,
        "eager_steps": 0,
        "tokens": 6,
        "prefills": 1,
        "reseeds": 0,
        "finished": 1,
    }
    layers, heads, dim = 2, 2, 16
    assert report["memory"]["kv_bytes"] == layers * 2 * (1 + 2 * 8) * 4 * heads * dim * 4
    assert report["memory"]["capacity_tokens"] == 64
    assert report["lanes"] == [
        {"bucket": 1, "run": 1, "replay": 4, "capture": 1, "declined": 0, "released": 0, "eager_reason": ""}
    ]
    assert {"run", "capture", "replay", "recapture", "declined", "dropped", "invalid", "uploads"} <= set(
        report["counters"]
    )
