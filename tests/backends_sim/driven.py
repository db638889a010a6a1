"""An engine driven through everything it does on the simulated device, whole or with a fault, and where faults can strike."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import forebay.runtime
from forebay.backends.sim.driver import SimDriver
from forebay.backends.sim.faults import Faults
from forebay.backends.sim.queue import Launch, Queue
from forebay.runtime import Engine, Model, Request, SamplingParams
from forebay.specs import Backend, DeviceLost, ForebayError
from tests.backends_sim.opened import open_sim
from tests.runtime.harness import make_engine, prompt

RUNTIME = str(Path(forebay.runtime.__file__).parent)
PARAMS = (
    SamplingParams(max_tokens=7, ignore_eos=True, temperature=1.0, seed=3, n=2),
    SamplingParams(max_tokens=8, ignore_eos=True, repetition_penalty=1.3),
    SamplingParams(max_tokens=5, ignore_eos=True),
)
"""A prompt with two samples, whose shared tail is copied; one whose tokens are penalised; one that comes later."""
PROMPTS = (prompt(6, seed=1), prompt(9, seed=2), [*prompt(9, seed=2)[:8], *prompt(3)])
"""The last begins as the second does, and goes before it: who makes room for it is offloaded and brought back."""
SIZES: dict[str, Any] = {
    "slots": 3,
    "max_len": 24,
    "block_size": 4,
    "num_blocks": 9,
    "preempt": "offload",
    "prefix_reuse": True,
}
ARMS: dict[str, dict[str, Any]] = {
    "eager": {"arm": "eager"},
    "hostfree": {"arm": "hostfree"},
    "captured": {"arm": "captured", "read_behind": 2},
}
HAPPENS = ("forks", "block_copies", "reused_tokens", "preemptions", "offloaded", "restored")
Tokens = list[tuple[int, ...]]


@dataclass
class Ending:
    """How a run ended: its requests in the order of their prompts, samples one by one, and what the engine's caller was told."""

    requests: list[Request] = field(default_factory=list)
    errors: list[ForebayError] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    lanes: list[dict[str, Any]] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    again: Tokens = field(default_factory=list)

    @property
    def tokens(self) -> Tokens:
        """What each request was given."""
        return [tuple(r.token_ids) for r in self.requests]


def drive(model: Model, *inject: dict[str, Any], recapture: bool = False, **options: Any) -> Ending:
    """Serve everything, going on after errors, then one prompt again.

    Whatever happens it ends, every request has its end, and blocks, slots and device memory come back.
    """
    ending = Ending()
    b = open_sim(inject=inject, stuck_timeout=0.01, recapture_at_boundary=recapture)
    driver = b._driver
    try:
        engine = make_engine(model, b, **{**SIZES, **options})
        try:
            _serve(engine, ending)
        finally:
            ending.lanes = engine._core.decoder.lanes.report()
            with suppress(DeviceLost):
                engine.close()
    except ForebayError as error:
        ending.errors.append(error)
    finally:
        ending.struck = driver.info["faults"]
        with suppress(DeviceLost):
            b.close()
    assert driver.info["live_bytes"] == 0
    return ending


def _serve(engine: Engine, ending: Ending) -> None:
    def steps(limit: int) -> None:
        for _ in range(limit):
            if engine.has_work:
                try:
                    engine.step()
                except ForebayError as error:
                    ending.errors.append(error)

    def add(index: int, **options: Any) -> None:
        first = engine.add(PROMPTS[index], PARAMS[index], **options)
        ending.requests += [first, *first.siblings]

    add(0)
    add(1)
    steps(4)
    add(2, priority=1)
    steps(300)
    assert not engine.has_work, "it spins"
    assert all(r.finish_reason is not None for r in ending.requests)
    ending.counts = engine._core.report()
    _holds_nothing(engine)
    last = engine.add(PROMPTS[2], PARAMS[2])
    steps(60)
    assert last.finish_reason is not None
    ending.again = [tuple(last.token_ids)]
    _holds_nothing(engine)


def _holds_nothing(engine: Engine) -> None:
    core = engine._core
    with suppress(DeviceLost):
        core._drain()
    if core.cache.prefix is not None:
        core.cache.prefix.clear()
    allocator = core.cache.allocator
    blocks = engine._parts.pool.geometry.num_blocks - 1
    assert (allocator.num_free, allocator.num_allocated, allocator.num_in_flight) == (blocks, 0, 0)
    assert not core.running
    assert engine._parts.offload is None or engine._parts.offload.blocks == 0


def never_wrong(ending: Ending, expected: Tokens) -> None:
    """What was released is how the right answer begins."""
    for got, want in zip(ending.tokens, expected, strict=False):
        assert got == want[: len(got)]


def ended_truly(ending: Ending, expected: Tokens, says: str) -> None:
    """The device is lost: a request is whole, or it ended with the device's own reason, which the engine's caller was told too.

    So were those who came later, at most two times more; they were told nothing else.
    """
    never_wrong(ending, expected)
    assert 1 <= len(ending.errors) <= 3
    assert {type(error) for error in ending.errors} == {DeviceLost}
    assert all(says in str(error) for error in ending.errors)
    for request, want in zip(ending.requests, expected, strict=bool(ending.requests)):
        if request.finish_reason == "length":
            assert tuple(request.token_ids) == want
        else:
            assert request.finish_reason == "error"
            assert any(request.error is error for error in ending.errors)
    if any(request.finish_reason == "error" for request in ending.requests):
        assert ending.again == [()], "a lost device serves nobody"


def served_whole(ending: Ending, expected: Tokens) -> None:
    """Every request got all of its tokens, and so did one that came afterwards."""
    assert ending.tokens == expected
    assert all(r.finish_reason == "length" for r in ending.requests)
    assert ending.again == expected[-1:]


# -- where faults can strike -----------------------------------------------------------------------------------------------
Places = dict[str, list[int]]
"""By the kind of an act, as ``kernel`` or ``module.function: what``, its positions in a run, from 1."""


@dataclass
class Acts:
    """What a whole run did."""

    launches: Places = field(default_factory=lambda: defaultdict(list))
    uploads: Places = field(default_factory=lambda: defaultdict(list))
    allocations: Places = field(default_factory=lambda: defaultdict(list))
    captures: list[int] = field(default_factory=list)
    """For each capture, the kernels that were asked for before it."""


def some_of_each(places: Places, count: int) -> list[int]:
    """So many positions of each kind, first and last among them."""
    return sorted({at for found in places.values() for at in spread(found, count)})


def spread(found: Sequence[int], count: int) -> list[int]:
    """So many of ``found``, both ends among them."""
    last = len(found) - 1
    return sorted({found[last * i // max(count - 1, 1)] for i in range(count)})


@contextmanager
def watched() -> Iterator[Acts]:
    """Every act of the devices opened meanwhile, in the order in which a fault counts them; for one device that is whole."""
    acts = Acts()
    with pytest.MonkeyPatch.context() as patch:
        count, begin, capture = Faults._count, Queue.begin, SimDriver.capture
        # An upload is done later than it was asked for, in the same order.
        asked: list[str] = []

        def counting(faults: Faults, place: str) -> str:
            struck = count(faults, place)
            if place == "at_allocation":
                acts.allocations[_asker()].append(faults.counts[place])
            elif place == "at_upload":
                acts.uploads[asked[faults.counts[place] - 1]].append(faults.counts[place])
            return struck

        def beginning(queue: Queue, name: str) -> None:
            begin(queue, name)
            acts.launches[name].append(queue.faults.counts["at_launch"])

        def capturing(driver: SimDriver, step: Any) -> Any:
            queue = driver._queue
            coming = sum(isinstance(entry, Launch) for entry in queue._entries)
            acts.captures.append(queue.faults.counts["at_launch"] + coming)
            return capture(driver, step)

        def asking(name: str) -> Any:
            whole = getattr(SimDriver, name)

            def act(driver: SimDriver, *arguments: Any) -> Any:
                what = f" {arguments[0].name}" if name == "store" else ""
                asked.append(f"{_asker()}: {name}{what}")
                return whole(driver, *arguments)

            return act

        patch.setattr(Faults, "_count", counting)
        patch.setattr(Queue, "begin", beginning)
        patch.setattr(SimDriver, "capture", capturing)
        for name in ("from_host", "store", "stage"):
            patch.setattr(SimDriver, name, asking(name))
        yield acts


def _asker() -> str:
    """The function of the runtime nearest to the caller, as ``module.function``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(RUNTIME):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


def alone(model: Model, backend: Backend) -> Tokens:
    """What each request gives by itself, on a backend that is whole; samples one by one."""
    made: Tokens = []
    with make_engine(model, backend, arm="eager", slots=1, max_len=SIZES["max_len"]) as engine:
        for given, params in zip(PROMPTS, PARAMS, strict=True):
            (result,) = engine.generate([given], params)
            made += [sample.token_ids for sample in result.samples]
    return made
