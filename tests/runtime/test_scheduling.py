"""Who is served when: order, priorities, preemption, the step's budget, and a queue that is full."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.runtime import Engine, Model, Request, SamplingParams
from forebay.runtime.decoder import Decoder
from forebay.runtime.waiting import WaitingQueue
from forebay.specs import Backend
from forebay.specs.errors import QueueFull
from tests.runtime.books import check_books, check_empty
from tests.runtime.harness import ARMS, PARAMS, PROMPTS, make_engine, prompt, tokens_of
from tests.runtime.plain import Plain

EVERY_ARM = pytest.mark.parametrize("arm", ARMS)


def tokens(made: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=made, ignore_eos=True, **options)


def steps_of_first_slots(engine: Engine, requests: list[Request], most: int = 2000) -> dict[int, int]:
    """Step to the end: the engine's step in which each request first had a slot, by index."""
    started: dict[int, int] = {}
    for _ in range(most):
        if not engine.has_work:
            return started
        engine.step()
        check_books(engine, requests)
        for r in requests:
            if r.admitted:
                started.setdefault(r.index, engine._core.steps)
    raise AssertionError("the engine does not come to an end")


# -- the queue ---------------------------------------------------------------------------------------------------------
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 3)), max_size=30),
    ahead=st.integers(1, 9),
    taken_out=st.lists(st.integers(0, 29), max_size=10),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_queue_is_ordered_by_arrival_less_priority_and_ties_by_index(
    arrivals: list[tuple[int, int]], ahead: int, taken_out: list[int]
) -> None:
    queue, step = WaitingQueue(1000, ahead), 0
    there: list[tuple[int, int]] = []
    made: list[Request] = []
    for index, (later, priority) in enumerate(arrivals):
        step += later
        request = Request(index, (1,), tokens(1), (), priority=priority)
        made.append(request)
        queue.push(request, step)
        there.append((step - priority * ahead, index))
    assert [r.place for r in queue] == sorted(there)
    for index in taken_out:
        if index < len(made):
            queue.remove(made[index])
            queue.remove(made[index])
            assert made[index] not in queue
            queue.put_back(made[index])
    assert [r.place for r in queue] == sorted(there)
    assert len(queue) == len(arrivals)


def test_a_full_queue_refuses_new_requests_and_takes_back_old_ones() -> None:
    queue = WaitingQueue(2, 1)
    for index in range(2):
        queue.push(Request(index, (1,), tokens(1), ()), 0)
    assert not queue.has_room
    with pytest.raises(QueueFull, match=r"request 7: 2 requests wait already and max_waiting is 2"):
        queue.push(Request(7, (1,), tokens(1), (), priority=9), 0)
    queue.put_back(Request(3, (1,), tokens(1), ()))
    assert [r.index for r in queue] == [0, 1, 3]


# -- order and starvation ----------------------------------------------------------------------------------------------
@EVERY_ARM
@pytest.mark.parametrize("slots", [1, 3])
def test_requests_of_one_priority_start_in_the_order_of_their_arrival(
    tiny_model: Model, backend: Backend, arm: str, slots: int
) -> None:
    with make_engine(tiny_model, backend, arm=arm, slots=slots, block_size=4, max_len=40) as engine:
        requests = [engine.add(prompt(1 + 5 * i % 17, seed=i), tokens(1 + 3 * i % 7)) for i in range(12)]
        started = steps_of_first_slots(engine, requests)
        assert [started[i] for i in range(12)] == sorted(started.values())


@pytest.mark.parametrize("priority", [1, 2])
@pytest.mark.parametrize("ahead", [1, 6])
def test_a_stream_of_higher_priority_holds_a_request_back_for_no_longer_than_the_priorities_differ(
    tiny_model: Model, backend: Backend, priority: int, ahead: int
) -> None:
    """One slot, and at every step a new request of higher priority: without end, if they always went first."""
    with make_engine(
        tiny_model, backend, slots=1, block_size=4, max_len=24, priority_steps=ahead, max_waiting=200
    ) as engine:
        first = engine.add(prompt(3), tokens(3))
        engine.step()
        low = engine.add(prompt(4), tokens(2))
        arrived = engine._core.steps
        stream: list[Request] = []
        while not low.finished:
            stream.append(engine.add(prompt(2, seed=len(stream)), tokens(2), priority=priority))
            engine.step()
            check_books(engine, [first, low, *stream])
            assert len(stream) < 100, "it starves"
        before = [r for r in stream if r.admitted and r.place < low.place]
        assert [r for r in stream if r.admitted and r.finished] == before, "who came too late went behind it"
        assert all(r.waiting_step < arrived + priority * ahead for r in before)
        assert before


@EVERY_ARM
@pytest.mark.parametrize(("steps", "gives_way"), [(2, True), (6, False)])
def test_a_request_of_higher_priority_takes_a_slot_only_if_it_stands_before_who_runs(
    tiny_model: Model, backend: Backend, arm: str, steps: int, gives_way: bool
) -> None:
    """A priority is worth four steps: after two the newcomer stands before the running request, after six behind it."""
    with make_engine(tiny_model, backend, arm="eager", slots=1, max_len=40) as plain:
        right = tokens_of(plain.generate([prompt(3), prompt(5, seed=1)], tokens(12)))
    with make_engine(tiny_model, backend, arm=arm, slots=1, block_size=4, max_len=40, priority_steps=4) as engine:
        low = engine.add(prompt(3), tokens(12))
        for _ in range(steps):
            engine.step()
        high = engine.add(prompt(5, seed=1), tokens(12), priority=1)
        engine.step()
        assert (high.slot is not None, low in engine._core.waiting) == (gives_way, gives_way)
        steps_of_first_slots(engine, [low, high])
        assert tokens_of([low, high]) == right
        assert engine.report()["engine"]["preemptions"] == gives_way
        check_empty(engine)


@EVERY_ARM
def test_of_equal_priority_nobody_gives_a_slot_up_and_blocks_are_taken_from_who_is_served_last(
    tiny_model: Model, backend: Backend, arm: str
) -> None:
    """Room for one to grow: the later of two gives way, whatever its slot, and the earlier never does."""
    with make_engine(tiny_model, backend, arm=arm, slots=2, block_size=2, num_blocks=10, max_len=18) as engine:
        requests = [engine.add(prompt(3, seed=i), tokens(14)) for i in range(3)]
        preempted: list[int] = []
        while engine.has_work:
            running = {r.index for r in requests if r.slot is not None}
            engine.step()
            check_books(engine, requests)
            gone = [i for i in running if requests[i].slot is None and not requests[i].finished]
            assert all(i > min(running) for i in gone)
            preempted += gone
        assert preempted
        assert 0 not in preempted


# -- the budget --------------------------------------------------------------------------------------------------------
class Meter:
    """Rows of each decode step of an engine and prompt tokens between two of them."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        dispatch, eagerly = Decoder.dispatch, Decoder.step_eagerly

        def count(decoder: Decoder, act: Any) -> Any:
            if decoder is engine._core.decoder:
                self.rows += len(decoder.active)
            return act(decoder)

        patch.setattr(Decoder, "dispatch", lambda decoder: count(decoder, dispatch))
        patch.setattr(Decoder, "step_eagerly", lambda decoder: count(decoder, eagerly))


@EVERY_ARM
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 7, 16, 512])
def test_a_step_computes_no_more_tokens_than_its_budget(
    tiny_model: Model, backend: Backend, monkeypatch: pytest.MonkeyPatch, arm: str, budget: int
) -> None:
    """Prompt chunks and decoding rows together; only rows that decode already, and one prompt token, are always let through."""
    with make_engine(tiny_model, backend, arm=arm, slots=3, block_size=4, max_len=64, max_step_tokens=budget) as engine:
        meter, requests = Meter(engine, monkeypatch), [engine.add(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
        seen = []
        while engine.has_work:
            meter.rows, decoding = 0, len(engine._core.decoder.active)
            before = engine._core.counts["prefill_tokens"]
            engine.step()
            computed = engine._core.counts["prefill_tokens"] - before
            assert computed + meter.rows <= max(budget, decoding + 1), f"{computed} prompt tokens, {meter.rows} rows"
            seen.append(computed + meter.rows)
        assert all(r.finish_reason == "length" for r in requests)
        assert max(seen) >= min(budget, 20)


@EVERY_ARM
def test_who_decodes_gets_a_token_at_every_step_while_a_long_prompt_is_computed(
    tiny_model: Model, backend: Backend, arm: str
) -> None:
    with make_engine(tiny_model, backend, arm=arm, slots=2, block_size=4, max_len=160, max_step_tokens=8) as engine:
        short = engine.add(prompt(3), tokens(60))
        engine.step()
        long = engine.add(prompt(120, seed=1), tokens(4))
        steps = 0
        while not long.token_ids:
            before = len(short.token_ids)
            engine.step()
            steps += 1
            assert len(short.token_ids) == before + 1
        assert steps == -(-120 // 7), "seven prompt tokens beside one row"


@EVERY_ARM
def test_prompts_of_later_requests_use_what_the_first_one_leaves_of_the_budget(
    tiny_model: Model, backend: Backend, arm: str
) -> None:
    with make_engine(tiny_model, backend, arm=arm, slots=3, block_size=4, max_len=40, max_step_tokens=10) as engine:
        a, b, c = (engine.add(prompt(n, seed=n), tokens(2)) for n in (6, 7, 5))
        engine.step()
        assert len(a.token_ids) >= 1
        assert (b.computed, c.computed) == (3, 0), "six, a row, and three"
        while engine.has_work:
            engine.step()
        assert [len(r.token_ids) for r in (a, b, c)] == [2, 2, 2]


# -- back-pressure -----------------------------------------------------------------------------------------------------
def test_a_full_engine_refuses_by_name_loses_nothing_and_takes_more_once_there_is_room(
    tiny_model: Model, backend: Backend
) -> None:
    with make_engine(tiny_model, backend, slots=1, block_size=4, max_len=24, max_waiting=3) as engine:
        requests = [engine.add(prompt(3, seed=i), tokens(4)) for i in range(3)]
        for _ in range(2):
            with pytest.raises(QueueFull, match="raise max_waiting"):
                engine.add(prompt(3, seed=9), tokens(4, n=2), priority=5)
            check_books(engine, requests)
        engine.step()
        requests.append(engine.add(prompt(3, seed=3), tokens(4)))
        steps_of_first_slots(engine, requests)
        with make_engine(tiny_model, backend, arm="eager", slots=1, max_len=24) as plain:
            assert tokens_of(requests) == tokens_of(plain.generate([prompt(3, seed=i) for i in range(4)], tokens(4)))
        check_empty(engine)


@EVERY_ARM
def test_generate_takes_more_prompts_than_may_wait(
    tiny_model: Model, backend: Backend, expected: list[tuple[int, ...]], arm: str
) -> None:
    with make_engine(tiny_model, backend, arm=arm, slots=1, block_size=4, max_len=64, max_waiting=1) as engine:
        waited = []
        push_any = engine._core.submit

        def submit(request: Request) -> None:
            push_any(request)
            waited.append(len(engine._core.waiting))

        engine._core.submit = submit  # type: ignore[method-assign]
        assert tokens_of(engine.generate(PROMPTS, PARAMS)) == expected
        assert waited == [1] * len(PROMPTS)
        check_empty(engine)


@pytest.mark.clause("L5")
@pytest.mark.parametrize("preempt", ["recompute", "offload"])
def test_who_gave_way_is_served_before_whoever_came_later(
    tiny_model: Model, backend: Backend, plain: Plain, preempt: str
) -> None:
    """Its wait is reported as any other; so a request that keeps its place in the queue does not starve."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with make_engine(tiny_model, backend, slots=4, block_size=2, num_blocks=30, max_len=30, preempt=preempt) as engine:
        requests = [engine.add(prompt(8, seed=s), params) for s in range(12)]
        gave_way: set[int] = set()
        started: list[int] = []
        while engine.has_work:
            engine.step()
            waiting = [r for r in requests if r in engine._core.waiting]
            gave_way |= {r.index for r in waiting if r.token_ids}
            started += [r.index for r in requests if r.token_ids and r.index not in started]
            for r in waiting:
                later = [x for x in engine._core.running.values() if x.place > r.place]
                assert not r.token_ids or not later, "somebody who came later runs while it waits"
        assert len(gave_way) >= 3
        assert started == sorted(started)
        assert engine.report()["latencies"]["worst_wait_steps"] > 0
        assert [tuple(r.token_ids) for r in requests] == [plain.tokens(r) for r in requests]
