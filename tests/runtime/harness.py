"""What the runtime tests share: a tiny model with clear winners, engines on it, looks into the pool, and unlike drivers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from forebay.backends.cpu.driver import CpuDriver
from forebay.runtime import Engine, Model, SamplingParams, Settings
from forebay.runtime import assembly as assembly_module
from forebay.runtime.decode_step import decode_segment
from forebay.runtime.lanes import Lanes
from forebay.runtime.models.llama_tensors import expected_tensors
from forebay.runtime.variants import GREEDY, Variant
from forebay.specs import Backend, Buffer, Pool, Segment, Ticket
from forebay.specs.descriptor import Selection
from forebay.specs.dtypes import HostArray
from forebay.specs.errors import CaptureDeclined
from forebay.specs.segment import Fetch, Step
from tests.models import tiny

MAX_POSITIONS = 512
ARMS = ("eager", "hostfree", "captured")


# -- the tiny model ----------------------------------------------------------------------------------------------------
def tiny_weights(seed: int = 0) -> tiny.Weights:
    """Weights so wide that greedy decoding wanders and its best token is ahead of the second by far more than rounding."""
    random = np.random.default_rng(seed)
    return {
        name: (random.normal(1.0, 0.1, shape) if len(shape) == 1 else random.normal(0.0, 0.3, shape)).astype(np.float32)
        for name, shape in expected_tensors(tiny.config()).items()
    }


def write_tiny_folder(folder: Path) -> Path:
    """The tiny model's folder, with room for 512 positions."""
    tiny.write_folder(folder, tiny_weights())
    (folder / "config.json").write_text(json.dumps({**tiny.CONFIG, "max_position_embeddings": MAX_POSITIONS}))
    return folder


def prompt(length: int, seed: int = 0) -> list[int]:
    """A prompt of so many token ids, the same for the same arguments; none of them is special."""
    random = np.random.default_rng([seed, length])
    return [int(t) for t in random.integers(len(tiny.SPECIAL), len(tiny.TOKENS), length)]


OTHER_SETTINGS = ("read_behind", "threads", "max_rewarm", "max_waiting", "priority_steps", "offload_blocks", "seed")
"""Settings that are no argument of an Engine."""


def make_engine(model: Model, backend: Backend, **options: Any) -> Engine:
    """An Engine whose every setting is the default or one of ``options``, never the machine's; without prefix reuse, so that a test
    knows which blocks are free."""
    options = {"prefix_reuse": False, **options}
    settings = Settings().override(**{k: options.pop(k) for k in OTHER_SETTINGS if k in options})
    return Engine(model, backend, settings=settings, **options)


# -- looks into the pool -----------------------------------------------------------------------------------------------
def poison(backend: Backend, pool: Pool) -> None:
    """NaN in every byte of a float32 pool."""
    for buffer in storage(pool):
        backend.upload(buffer, np.full(buffer.shape, np.nan, np.float32))


def storage(pool: Pool) -> list[Buffer]:
    """The Buffers that hold KV, layer by layer."""
    return [buffer for layer in range(pool.geometry.num_layers) for buffer in pool.storage(layer)]


def contents(backend: Backend, pool: Pool) -> HostArray:
    """Bits of every block: uint32 ``[NB, everything else]``, in NHD and HND pools of float32."""
    parts = [backend.fetch(buffer).view(np.uint32).reshape(pool.geometry.num_blocks, -1) for buffer in storage(pool)]
    return np.concatenate(parts, axis=1)


def changed_blocks(before: HostArray, after: HostArray) -> set[int]:
    """Blocks in which any bit differs."""
    return {int(b) for b in np.flatnonzero((before != after).any(axis=1))}


# -- what an engine does -----------------------------------------------------------------------------------------------
@dataclass
class Recorded:
    """One step of an engine: its bucket and variant, its emits, and what it uploaded and launched."""

    bucket: int
    variant: Variant
    emits: dict[str, HostArray]
    counters: Counter[str]


def count_lines(backend: Backend) -> Counter[str]:
    """The backend's plain counts, for differences."""
    return Counter({k: v for k, v in backend.counters.as_dict().items() if isinstance(v, int)})


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Iterator[list[Recorded]]:
    """Every decode step of ``engine``, as it is dispatched."""
    steps: list[Recorded] = []
    whole = Lanes.step

    def step(lanes: Lanes, bucket: int, variant: Variant = GREEDY) -> Ticket:
        before = count_lines(engine.backend)
        ticket = whole(lanes, bucket, variant)
        after = count_lines(engine.backend)
        if lanes is engine._core.decoder.lanes:
            emits = {name: x.copy() for name, x in ticket.get().items()}
            steps.append(Recorded(bucket, variant, emits, after - before))
        return ticket

    with monkeypatch.context() as patch:
        patch.setattr(Lanes, "step", step)
        yield steps


def with_logits(patch: pytest.MonkeyPatch) -> None:
    """From now on engines are made whose steps emit their logits too."""

    def emitting(*args: Any) -> Segment:
        return decode_segment(*args, emit_logits=True)

    patch.setattr(assembly_module, "decode_segment", emitting)


FloatArray = npt.NDArray[np.float32]


def bits(x: HostArray) -> bytes:
    """Bytes of an array, for comparisons in which NaN equals itself and 0.0 differs from -0.0."""
    return x.tobytes()


def tokens_of(results: Sequence[Any]) -> list[tuple[int, ...]]:
    """Tokens of each result or request."""
    return [tuple(r.token_ids) for r in results]


# -- unlike drivers ----------------------------------------------------------------------------------------------------
class TestDriver(CpuDriver):
    """The CPU driver with other capabilities, a capture that declines some times, and its own counts.

    Attributes:
        declines: how many of the next captures are declined.
        acts: what the driver was asked to do, counted where it happens and independently of the contract's counters.
    """

    __test__ = False

    def __init__(self, *, declines: int = 0, **capabilities: Any) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, **capabilities)
        self.declines = declines
        self.acts: Counter[str] = Counter()

    def _count(self, act: str, n: int = 1) -> None:
        self.acts[act] += n

    def from_host(self, bits: HostArray, dtype: str) -> Any:
        self._count("uploads")
        self._count("upload_bytes", bits.nbytes)
        return super().from_host(bits, dtype)

    def store(self, buffer: Buffer, bits: HostArray, row: int | None) -> None:
        self._count("uploads")
        self._count("upload_bytes", bits.nbytes)
        super().store(buffer, bits, row)

    def to_host(self, x: Any) -> HostArray:
        self._count("downloads")
        return super().to_host(x)

    def run(self, step: Step) -> Fetch:
        self._count("run")
        return self._counted(super().run(step))

    def capture(self, step: Step) -> Any:
        if self.declines:
            self.declines -= 1
            self._count("declined")
            raise CaptureDeclined("no room for a trace")
        payload = super().capture(step)
        self._count("capture")
        return payload

    def replay(self, payload: Any) -> Fetch:
        self._count("replay")
        return self._counted(super().replay(payload))

    def _counted(self, fetch: Fetch) -> Fetch:
        def counted() -> dict[str, HostArray]:
            self._count("downloads")
            return fetch()

        return counted


def backend_of(driver: CpuDriver) -> Backend:
    """A Backend over a driver of the tests."""
    return Backend(driver, Selection(name="cpu", mode=""))


PROMPTS = [prompt(n, seed=9) for n in (3, 1, 12, 7, 5, 20)]
PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n) for n in (18, 1, 9, 30, 2, 11)]
