"""Replay is the step: the same bits as a run, no model Python, no uploads, and nothing written by rows that are not there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from forebay.backends.cpu.driver import CpuDriver
from forebay.backends.cpu.kernel_namespace import KernelNamespace
from forebay.backends.cpu.namespace import TorchNamespace
from forebay.runtime import Engine, Model, Request, SamplingParams
from forebay.runtime import decode_step as decode_step_module
from forebay.runtime.decode_step import decode_segment
from forebay.runtime.digests import digest
from forebay.runtime.forward import HostForward
from forebay.runtime.models.llama import Llama
from forebay.runtime.state import RECEIPT_FIELDS, BucketRows, DeviceState, SlotState
from forebay.specs import AttentionParams, Backend, BlockTable, Buffer, KVGeometry, Pool, Segment, Trace, WriteLoc
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
    poison(engine.backend, engine._pool)
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
                    epoch = engine._ledger.state(request.slot).epoch
                    if epoch not in epochs[request.slot]:
                        epochs[request.slot].append(epoch)
            if at % 20 == 0:
                pools.append(contents(engine.backend, engine._pool))
        pools.append(contents(engine.backend, engine._pool))
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
        (HostForward, ("prefill", "decode", "_pass")),
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
        row_bytes = 4 * (engine._table_len + 1)
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


# -- padded rows -------------------------------------------------------------------------------------------------------
class Rig:
    """The decode Segment on master Buffers filled by hand; every slot may hold a request with KV of its own."""

    SLOTS = 8
    TABLE = 4

    def __init__(self, backend: Backend, model: Model) -> None:
        self.backend = backend
        self.llama = model.bind(backend, max_len=64)
        config = model.config
        geometry = KVGeometry(
            num_blocks=1 + self.SLOTS * self.TABLE,
            block_size=BLOCK,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_layers=config.num_layers,
        )
        self.pool = backend.create_pool(geometry)
        self.device = DeviceState(backend, self.SLOTS, self.TABLE, 2, config.vocab_size)
        self.segments = {b: decode_segment(self.llama, self.pool, self.device, b, "direct") for b in (1, 2, 4, 8)}
        self.traces: dict[int, Trace] = {}

    def state(self, slot: int, position: int) -> SlotState:
        """A request in ``slot`` that has come to ``position``, in blocks of its own."""
        blocks = tuple(1 + slot * self.TABLE + i for i in range(self.TABLE))
        return SlotState(20 + slot, position, 100 + slot, 16, slot, blocks, (2,))

    def fill(self, active: dict[int, int]) -> None:
        """Rows of ``active`` (slot: position) are seeded; all others are as an ended request leaves them, table row and all."""
        poison(self.backend, self.pool)
        for slot in range(self.SLOTS):
            self.device.seed(slot, self.state(slot, active.get(slot, 5)))
            if slot not in active:
                for name, value in (("position", -1), ("visible", 0)):
                    self.backend.upload(self.device.scalars[name], np.array([value], np.int32), slot)

    def step(self, bucket: int, *, replay: bool) -> HostArray:
        """Receipts of one step, run or replayed."""
        segment = self.segments[bucket]
        if not replay:
            return self.backend.run(segment).get()["receipt"]
        if bucket not in self.traces:
            kept = [self.backend.fetch(b) for b in self.device.buffers]
            self.backend.run(segment)
            for buffer, values in zip(self.device.buffers, kept, strict=True):
                self.backend.upload(buffer, values)
            poison(self.backend, self.pool)
            self.traces[bucket] = self.backend.capture(segment)
        return self.backend.replay(self.traces[bucket]).get()["receipt"]

    def close(self) -> None:
        for trace in self.traces.values():
            self.backend.release(trace)
        self.backend.release(self.pool)
        for buffer in (*self.llama.buffers, *self.device.buffers):
            self.backend.release(buffer)


@pytest.fixture(scope="module")
def rig(backend: Backend, tiny_model: Model) -> Iterator[Rig]:
    made = Rig(backend, tiny_model)
    yield made
    made.close()


ACTIVE = [
    {},
    {0: 0},
    {1: 3},
    {0: 4, 1: 9},
    {2: 7},
    {0: 1, 3: 15},
    {5: 8},
    {1: 0, 4: 4, 7: 11},
    {slot: slot + 3 for slot in range(8)},
]


@pytest.mark.clause("C3", "C4", "C5", "W6")
@pytest.mark.case("A03")
@pytest.mark.parametrize("replay", [False, True], ids=["run", "replay"])
@pytest.mark.parametrize("active", ACTIVE, ids=lambda active: "-".join(map(str, active)) or "none")
def test_padded_rows_write_nothing_at_all(rig: Rig, active: dict[int, int], replay: bool) -> None:
    """Of all blocks only those change in which an active row has its position: not the sink, not what padded rows once held."""
    for bucket in (1, 2, 4, 8):
        rig.fill(active)
        before = contents(rig.backend, rig.pool)
        receipts = rig.step(bucket, replay=replay)
        written = {rig.state(s, p).blocks[p // BLOCK] for s, p in active.items() if s < bucket}
        assert changed_blocks(before, contents(rig.backend, rig.pool)) == written
        assert receipts[:, RECEIPT_FIELDS.index("accepted")].tolist() == [int(s in active) for s in range(bucket)]
        for name in ("token", "position", "visible"):
            rows = rig.backend.fetch(rig.device.scalars[name])
            idle = {"token": 20, "position": -1, "visible": 0}[name]
            for slot in set(range(rig.SLOTS)) - set(active):
                assert rows[slot] == idle + (slot if name == "token" else 0)


WRONG: dict[str, dict[str, int]] = {
    "visible ahead": {"visible": 11},
    "visible behind": {"visible": 9},
    "visible 0": {"visible": 0},
    "epoch": {"epoch": 101},
    "stamp": {"stamp": 103},
    "limit reached": {"limit": 9},
    "limit passed": {"limit": 3},
    "limit negative": {"limit": -1},
    "position negative": {"position": -2, "visible": -1},
    "position beyond the table": {"position": 16, "visible": 17, "limit": 40},
    "position far beyond the table": {"position": 2**30, "visible": 2**30 + 1, "limit": 2**31 - 1},
    "page is the sink": {"page": 0},
    "page negative": {"page": -1},
    "page just outside the pool": {"page": 33},
    "page far outside the pool": {"page": 2**31 - 1},
}
"""What is wrong with the row in slot 2, whose position is 9 and whose epoch is 102."""


@pytest.mark.clause("C5", "W6")
@pytest.mark.parametrize("replay", [False, True], ids=["run", "replay"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_row_that_does_not_check_is_not_accepted_and_writes_nothing(rig: Rig, wrong: str, replay: bool) -> None:
    """The device itself refuses it, before any receipt is read; its neighbour goes on, and the row stays where it is."""
    rig.step(4, replay=replay)
    rig.fill({0: 5, 2: 9})
    table = rig.backend.fetch(rig.device.table)[2:3]
    for name, value in WRONG[wrong].items():
        if name in ("page", "stamp"):
            table[0, 9 // BLOCK if name == "page" else -1] = value
            rig.backend.upload(rig.device.table, table, 2)
        else:
            rig.backend.upload(rig.device.scalars[name], np.array([value], np.int32), 2)
    before, dropped = contents(rig.backend, rig.pool), rig.pool.dropped
    held = {name: rig.backend.fetch(rig.device.scalars[name])[2] for name in rig.device.scalars}
    tables, stops = rig.backend.fetch(rig.device.table), rig.backend.fetch(rig.device.stop)
    receipts = rig.step(4, replay=replay)
    consumed = dict(zip(RECEIPT_FIELDS, receipts[2].tolist(), strict=True))
    assert {name: consumed[name] for name in held} == held, "each field of the receipt is read from its own Buffer"
    assert (consumed["table"], consumed["stop"]) == (digest(tables[2, :-1]), digest(stops[2]))
    assert receipts[:, RECEIPT_FIELDS.index("accepted")].tolist() == [1, 0, 0, 0]
    assert changed_blocks(before, contents(rig.backend, rig.pool)) == {rig.state(0, 5).blocks[5 // BLOCK]}
    assert rig.pool.dropped == dropped, "it does not even ask the door"
    assert {name: rig.backend.fetch(rig.device.scalars[name])[2] for name in rig.device.scalars} == held


@pytest.mark.clause("C3", "D5")
def test_a_row_is_right_wherever_it_stands(rig: Rig) -> None:
    """The same request in every slot and bucket that has it: the same token."""
    tokens = set()
    for slot in range(rig.SLOTS):
        for bucket in (b for b in (1, 2, 4, 8) if b > slot):
            rig.fill({slot: 0})
            rig.backend.upload(rig.device.scalars["token"], np.array([77], np.int32), slot)
            receipt = rig.step(bucket, replay=True)[slot]
            tokens.add(int(receipt[RECEIPT_FIELDS.index("next_token")]))
    assert len(tokens) == 1


@pytest.mark.clause("C12")
def test_capturing_changes_no_buffer(rig: Rig) -> None:
    rig.fill({0: 3, 2: 6})
    segment = rig.segments[4]
    rig.backend.run(segment)
    rig.fill({0: 3, 2: 6})
    before = [bits(rig.backend.fetch(b)) for b in segment.buffers]
    trace = rig.backend.capture(segment)
    assert [bits(rig.backend.fetch(b)) for b in segment.buffers] == before
    rig.backend.release(trace)


# -- attention alone, with values that can be checked by eye -----------------------------------------------------------
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
