"""Replay is the step: the same bits as a run, without the model's Python and without uploads."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from forebay.backends.cpu.driver import CpuDriver
from forebay.backends.cpu.kernel_namespace import KernelNamespace
from forebay.backends.torch_shared.namespace import TorchNamespace
from forebay.runtime import Engine, Model, Request, SamplingParams
from forebay.runtime import decode_step as decode_step_module
from forebay.runtime.forward import HostForward
from forebay.runtime.models.llama import Llama
from forebay.runtime.state import RECEIPT_FIELDS, BucketRows
from forebay.specs import Backend, Buffer, Pool
from forebay.specs.dtypes import HostArray
from tests.runtime.harness import (
    Recorded,
    bits,
    changed_blocks,
    contents,
    count_lines,
    make_engine,
    poison,
    prompt,
    recorded,
    tokens_of,
    with_logits,
)

STEPS = 300
SLOTS = 4
BLOCK = 4


# -- 300 steps with requests that come and go --------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """What one arm did with the script."""

    steps: list[Recorded]
    tokens: list[tuple[int, ...]]
    pool: list[HostArray]
    epochs: list[list[int]]
    blocks: list[set[int]]
    report: dict[str, Any]


def script() -> list[tuple[int, list[int], SamplingParams]]:
    """(step of arrival, prompt, parameters): 1 to 4 requests at once, of 1 to 60 tokens, some ended by a stop token."""
    random = np.random.default_rng(3)
    arrivals, at = [], 0
    for i in range(60):
        length = int(random.integers(1, 24))
        stop = tuple(int(t) for t in random.integers(3, 200, 3)) if i % 3 == 0 else ()
        params = SamplingParams(
            max_tokens=1 + i % 10 if i % 10 < 2 else int(random.integers(3, 60)),
            ignore_eos=bool(i % 2),
            stop_token_ids=stop,
            seed=i,
        )
        arrivals.append((at, prompt(length, seed=i), params))
        at += 40 if i % 9 == 8 else int(random.integers(0, 12))
    return arrivals


def play(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the script for STEPS decode steps, then let what is left come to its end."""
    poison(engine.backend, engine._parts.pool)
    todo, requests, pools = script(), [], []
    epochs: list[list[int]] = [[] for _ in range(SLOTS)]
    blocks: list[set[int]] = []
    at = 0
    with recorded(monkeypatch, engine) as steps:
        while len(steps) < STEPS or engine.has_work:
            while todo and todo[0][0] <= at and len(steps) < STEPS:
                requests.append(engine.add(*todo.pop(0)[1:]))
                blocks.append(set())
            engine.step()
            at += 1
            for request, held in zip(requests, blocks, strict=True):
                held.update(request.blocks)
                if request.slot is not None:
                    epoch = engine._core.decoder.ledger.state(request.slot).epoch
                    if epoch not in epochs[request.slot]:
                        epochs[request.slot].append(epoch)
            if at % 20 == 0:
                pools.append(contents(engine.backend, engine._parts.pool))
        pools.append(contents(engine.backend, engine._parts.pool))
        return Run(steps, tokens_of(requests), pools, epochs, blocks, engine.report())


@pytest.fixture(scope="module")
def runs(tiny_model: Model, backend: Backend) -> dict[tuple[str, str], Run]:
    """The script in both arms and over both attention paths."""
    found = {}
    for arm, attention in (("hostfree", "direct"), ("captured", "direct"), ("captured", "gather")):
        with pytest.MonkeyPatch.context() as patch:
            with_logits(patch)
            options = {"arm": arm, "attention": attention, "capture": "required" if arm == "captured" else "auto"}
            with make_engine(
                tiny_model, backend, slots=SLOTS, block_size=BLOCK, num_blocks=52, max_len=96, **options
            ) as engine:
                found[arm, attention] = play(engine, patch)
    return found


def assert_same_bits(one: Run, other: Run) -> None:
    assert one.tokens == other.tokens
    assert [s.bucket for s in one.steps] == [s.bucket for s in other.steps]
    for number, (a, b) in enumerate(zip(one.steps, other.steps, strict=True)):
        for name in ("receipt", "logits"):
            assert bits(a.emits[name]) == bits(b.emits[name]), f"{name} of step {number}"
    for number, (x, y) in enumerate(zip(one.pool, other.pool, strict=True)):
        assert not changed_blocks(x, y), f"pool after look {number}"


@pytest.mark.clause("C3", "C11", "C12", "C13")
def test_captured_equals_hostfree_bit_for_bit_over_300_steps(runs: dict[tuple[str, str], Run]) -> None:
    assert_same_bits(runs["hostfree", "direct"], runs["captured", "direct"])


@pytest.mark.clause("D4")
def test_direct_equals_gather_bit_for_bit_through_whole_captured_steps(runs: dict[tuple[str, str], Run]) -> None:
    assert_same_bits(runs["captured", "direct"], runs["captured", "gather"])


@pytest.mark.clause("C3", "C6")
def test_those_300_steps_cross_blocks_change_buckets_and_reuse_slots_blocks_and_tables(
    runs: dict[tuple[str, str], Run],
) -> None:
    run = runs["captured", "direct"]
    assert len(run.steps) >= STEPS
    assert {s.bucket for s in run.steps} == {1, 2, 4}
    assert sum(a.bucket != b.bucket for a, b in pairwise(run.steps)) > 12
    assert min(len(epochs) for epochs in run.epochs) >= 3, "every slot had several requests"
    holders = [sum(block in held for held in run.blocks) for block in range(1, 52)]
    assert min(holders) >= 2, "every block had several holders"
    assert {len(tokens) for tokens in run.tokens} >= {1, 2}
    accepted = RECEIPT_FIELDS.index("accepted")
    padded = sum(int((s.emits["receipt"][:, accepted] == 0).any()) for s in run.steps)
    assert padded > 50, "many steps had padded rows"


@pytest.mark.clause("C9", "C11")
def test_nearly_every_step_was_a_replay_and_nothing_fell_back(runs: dict[tuple[str, str], Run]) -> None:
    for key in (("captured", "direct"), ("captured", "gather")):
        run = runs[key]
        lanes = run.report["lanes"]
        assert [(lane["bucket"], lane["run"], lane["capture"]) for lane in lanes] == [(1, 1, 1), (2, 1, 1), (4, 1, 1)]
        assert [(lane["declined"], lane["released"], lane["eager_reason"]) for lane in lanes] == [(0, 0, "")] * 3
        replays = sum(s.counters["replay"] for s in run.steps)
        assert replays == sum(lane["replay"] for lane in lanes) == len(run.steps) - 3
        assert replays >= 0.9 * len(run.steps)
        assert sum(s.counters["run"] for s in run.steps) == 3
        assert run.report["counters"]["delegated"] == {}
        assert run.report["engine"]["reseeds"] == 0


@pytest.mark.clause("D4")
def test_only_the_switch_selects_gather(runs: dict[tuple[str, str], Run], tiny_model: Model, backend: Backend) -> None:
    before = backend.counters.launches["gather"]
    with make_engine(tiny_model, backend, attention="direct", max_len=64) as engine:
        engine.generate([prompt(3)], SamplingParams(max_tokens=6))
    assert backend.counters.launches["gather"] == before
    with make_engine(tiny_model, backend, attention="gather", max_len=64) as engine:
        engine.generate([prompt(3)], SamplingParams(max_tokens=6, ignore_eos=True))
    layers = tiny_model.config.num_layers
    assert backend.counters.launches["gather"] == before + 6 * layers


# -- without the model's Python, without uploads -----------------------------------------------------------------------


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a replay executed the Segment's Python")


def forbid_the_model(patch: pytest.MonkeyPatch) -> None:
    """Every function a step could be computed by raises from now on."""
    for owner, names in (
        (Llama, ("forward", "logits", "_attention", "_feed_forward")),
        (HostForward, ("chunk", "decode", "_pass")),
        (BucketRows, ("load", "receipt")),
        (decode_step_module, ("_rows_that_check", "_advance", "decode_segment")),
        (Backend, ("run", "capture", "_evaluate", "paged_decode", "load", "dispatch_write", "to_device")),
        (Buffer, ("get",)),
        (Pool, ("write", "read", "copy")),
        (CpuDriver, ("run", "capture", "write_kv", "read_kv", "paged_decode", "load")),
        (TorchNamespace, tuple(n for n in vars(TorchNamespace) if not n.startswith("_") and n != "dtype")),
        (KernelNamespace, tuple(n for n in vars(KernelNamespace) if not n.startswith("_"))),
    ):
        for name in names:
            patch.setattr(owner, name, refuse)


LONG = {0: (9, 70), 1: (2, 33), 2: (17, 50), 3: (1, 12)}
"""Slot: (prompt length, max_tokens); they end one by one, so the bucket shrinks from 4 to 1."""


@pytest.mark.clause("C3", "C4", "C9", "C11")
def test_replay_runs_without_the_models_functions_and_uploads_only_grown_table_rows(
    tiny_model: Model, backend: Backend
) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in LONG.values()]
    prompts = [prompt(length, seed=7) for length, _ in LONG.values()]
    with make_engine(tiny_model, backend, arm="hostfree", slots=4, block_size=BLOCK, max_len=96) as engine:
        expected = tokens_of(engine.generate(prompts, params))
    with make_engine(
        tiny_model, backend, arm="captured", capture="required", slots=4, block_size=BLOCK, max_len=96
    ) as engine:
        engine.generate([prompt(3, seed=i) for i in range(4)], [SamplingParams(max_tokens=4 * n) for n in (9, 6, 3, 5)])
        assert [lane["capture"] for lane in engine.report()["lanes"]] == [1, 1, 1], "every bucket is warm"
        requests = [engine.add(p, s) for p, s in zip(prompts, params, strict=True)]
        engine.step()
        row_bytes = 4 * (engine._parts.device.table_len + 1)
        before, steps, grown_in_all = count_lines(backend), 0, 0
        with pytest.MonkeyPatch.context() as patch:
            forbid_the_model(patch)
            while engine.has_work:
                grown = sum(grows(r) for r in requests if r.finish_reason is None)
                uploads, uploaded = backend.counters.uploads, backend.counters.upload_bytes
                engine.step()
                assert backend.counters.uploads - uploads == grown
                assert backend.counters.upload_bytes - uploaded == grown * row_bytes
                steps, grown_in_all = steps + 1, grown_in_all + grown
        done = count_lines(backend) - before
    assert tokens_of(requests) == expected
    assert (done["replay"], done["run"], done["capture"], done["uploads"]) == (steps, 0, 0, grown_in_all)
    assert steps == 68
    assert 30 < grown_in_all < steps


def grows(request: Request) -> bool:
    """True if the next token to consume is the first of a block."""
    return (len(request.prompt) + len(request.token_ids) - 1) % BLOCK == 0


@pytest.mark.clause("C4")
def test_most_steady_steps_upload_nothing_at_all(tiny_model: Model, backend: Backend) -> None:
    with make_engine(tiny_model, backend, slots=1, block_size=32, max_len=512, capture="required") as engine:
        engine.add(prompt(5), SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(3):
            engine.step()
        uploads = []
        while engine.has_work:
            before = backend.counters.upload_bytes
            engine.step()
            uploads.append(backend.counters.upload_bytes - before)
    assert uploads.count(0) == len(uploads) - 6
    assert set(uploads) == {0, 4 * (512 // 32 + 1)}
