"""An error or an interrupt anywhere in a step: whoever steps on gets every token right, and everything comes back (clauses C5, L5)."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.runtime import Engine, Model, Request, SamplingParams
from forebay.runtime.core import EngineCore
from forebay.runtime.decoder import Decoder
from forebay.runtime.kv_cache import KVCache
from forebay.runtime.ledger import Ledger
from forebay.runtime.prefix_cache import PrefixCache
from forebay.runtime.room import Room
from forebay.runtime.state import DeviceState
from forebay.runtime.stop_strings import StopStrings
from forebay.runtime.waiting import WaitingQueue
from forebay.specs import Backend, Pool, Ticket
from tests.runtime.harness import make_engine, prompt

PLACES: tuple[tuple[type, str], ...] = (
    (Ticket, "get"),
    (DeviceState, "seed"),
    (DeviceState, "idle"),
    (DeviceState, "write_table"),
    (Decoder, "seed"),
    (Decoder, "grow"),
    (Decoder, "drop"),
    (Decoder, "dispatch"),
    (Ledger, "dispatched"),
    (Ledger, "grow"),
    (Ledger, "_advance"),
    (KVCache, "extend"),
    (KVCache, "make_private"),
    (KVCache, "attach"),
    (KVCache, "publish"),
    (KVCache, "fork"),
    (PrefixCache, "match"),
    (Pool, "copy"),
    (Room, "_preempt"),
    (StopStrings, "check"),
    (WaitingQueue, "remove"),
    (EngineCore, "_take_in"),
    (EngineCore, "_settle"),
    (EngineCore, "_first_tokens"),
    (EngineCore, "_fork"),
    (EngineCore, "_restart"),
)

REQUESTS = [
    (prompt(9, seed=1), SamplingParams(max_tokens=12, ignore_eos=True, n=2, temperature=1.0, seed=3)),
    (prompt(6, seed=2), SamplingParams(max_tokens=14, ignore_eos=True, repetition_penalty=1.3)),
    (prompt(9, seed=1)[:5] + prompt(3, seed=4), SamplingParams(max_tokens=9, ignore_eos=True)),
    (prompt(2, seed=5), SamplingParams(max_tokens=7, ignore_eos=True, temperature=0.7, seed=8)),
]
STOPS_AFTER = 5
"""Tokens after which the second request meets its stop string."""


def open_engine(model: Model, backend: Backend, arm: str, **options: Any) -> Engine:
    return make_engine(model, backend, arm=arm, block_size=2, max_len=32, prefix_reuse=True, **options)


@pytest.fixture(scope="module")
def requests(tiny_model: Model, backend: Backend) -> list[tuple[list[int], SamplingParams]]:
    """The requests, one of them with a stop string that its text will contain."""
    given, params = REQUESTS[1]
    with open_engine(tiny_model, backend, "eager", slots=1) as engine:
        made = engine.generate([given], params)[0].token_ids
    head, text = (tiny_model.tokenizer.decode(made[:n]) for n in (STOPS_AFTER, STOPS_AFTER + 1))
    stop = text[len(head.rstrip("\ufffd")) :] or text[-1:]
    stopping = SamplingParams(max_tokens=14, ignore_eos=True, repetition_penalty=1.3, stop=(stop,))
    return [REQUESTS[0], (given, stopping), *REQUESTS[2:]]


@pytest.fixture(scope="module")
def right(
    tiny_model: Model, backend: Backend, requests: list[tuple[list[int], SamplingParams]]
) -> list[tuple[tuple[int, ...], str]]:
    """Tokens and reason of each sample alone."""
    with open_engine(tiny_model, backend, "eager", slots=2) as engine:
        results = [engine.generate([p], s)[0] for p, s in requests]
    return [(sample.token_ids, sample.finish_reason) for result in results for sample in result.samples]


@pytest.mark.clause("C5", "L5")
@pytest.mark.parametrize(("arm", "read_behind"), [("eager", 0), ("captured", 0), ("captured", 2)])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0].__name__}.{place[1]}")
def test_whoever_steps_on_gets_every_token_right(
    tiny_model: Model,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    requests: list[tuple[list[int], SamplingParams]],
    right: list[tuple[tuple[int, ...], str]],
    place: tuple[type, str],
    arm: str,
    read_behind: int,
) -> None:
    owner, name = place
    honest, reached = getattr(owner, name), False
    for late in (False, True):
        for at in (1, 4):
            calls = 0

            def cut_off(*arguments: Any, late: bool = late, at: int = at, **named: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == at and not late:
                    raise KeyboardInterrupt
                made = honest(*arguments, **named)
                if calls == at and late:
                    raise KeyboardInterrupt
                return made

            # Room for about two requests: the last comer gives way again and again.
            with open_engine(tiny_model, backend, arm, slots=3, num_blocks=14, read_behind=read_behind) as engine:
                family: list[Request] = []
                for ids, params in requests:
                    root = engine.add(ids, params)
                    family += [root, *root.siblings]
                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, cut_off)
                    for _ in range(300):
                        try:
                            engine.step()
                        except KeyboardInterrupt:
                            reached = True
                            continue
                        if not engine.has_work:
                            break
                assert not engine.has_work, f"{name}, call {at}, {'after' if late else 'before'} it: still at work"
                assert [(tuple(r.token_ids), r.finish_reason) for r in family] == right, f"call {at}, late {late}"
                engine.reset_prefix_cache()
                memory = engine.report()["memory"]
                assert (memory["blocks_allocated"], memory["blocks_in_flight"]) == (0, 0), f"call {at}, late {late}"
    of_the_device = owner in (Ticket, DeviceState) or name in ("dispatch", "dispatched", "_advance", "_restart")
    assert reached or of_the_device, "the place was never reached"
    assert reached or arm == "eager" or name == "_restart", "the place was never reached"
