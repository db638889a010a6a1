"""The engine for asyncio: many tasks, one worker, and callers that wait for room."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from forebay.runtime import AsyncEngine, Engine, Model, SamplingParams
from forebay.runtime.async_stream import AsyncStream
from forebay.runtime.core import EngineCore
from forebay.specs import Backend, InvalidInput
from forebay.specs.errors import QueueFull
from tests.runtime.harness import PARAMS, PROMPTS, make_engine, prompt
from tests.runtime.tasks import ENDLESS, LONG, SHORT, run, tokens_of, until


# -- many at once ------------------------------------------------------------------------------------------------------
def test_many_tasks_get_the_tokens_each_would_get_alone(served: Engine, expected: list[tuple[int, ...]]) -> None:
    """Far more tasks than the queue has room for: the others wait outside, and all are served."""

    async def main() -> None:
        async with AsyncEngine(served) as engine:
            streams = [tokens_of(engine, p, s) for p, s in zip(PROMPTS * 4, PARAMS * 4, strict=True)]
            results = [engine.generate(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
            streamed, finished = await asyncio.gather(asyncio.gather(*streams), asyncio.gather(*results))
            assert streamed == expected * 4
            assert [r.token_ids for r in finished] == expected
            assert [r.text for r in finished] == [served.model.tokenizer.decode(t) for t in expected]

    run(main())


def test_random_comings_and_goings_leave_the_others_their_tokens(
    served: Engine, expected: list[tuple[int, ...]]
) -> None:
    """A third of the tasks is cancelled at some moment: held back, queued, or running. What the others get is theirs alone."""
    random = np.random.default_rng(5)

    async def main() -> None:
        async with AsyncEngine(served) as engine:
            tasks = []
            for i in range(60):
                which = i % len(PROMPTS)
                tasks.append(asyncio.create_task(tokens_of(engine, PROMPTS[which], PARAMS[which], priority=i % 3)))
                if random.random() < 0.3:
                    await asyncio.sleep(0.01 * random.random())
                if random.random() < 0.3:
                    tasks[random.integers(len(tasks))].cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            for i, outcome in enumerate(outcomes):
                assert isinstance(outcome, asyncio.CancelledError) or outcome == expected[i % len(PROMPTS)]
            cancelled = sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
            assert 0 < cancelled < 30
            report = await engine.report()
            assert report["requests"] == {"waiting": 0, "running": 0}

    run(main())


def test_a_stream_has_pieces_result_and_samples(served: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(served) as engine:
            stream = await engine.add(prompt(6), SamplingParams(max_tokens=9, ignore_eos=True, n=3))
            with pytest.raises(InvalidInput, match="the stream has not ended"):
                _ = stream.result
            pieces = [piece async for piece in stream]
            for i, sample in enumerate(stream.result.samples):
                own = [piece for piece in pieces if piece.sample == i]
                assert tuple(t for piece in own for t in piece.token_ids) == sample.token_ids
                assert "".join(piece.text for piece in own) == sample.text
            assert len(stream.result.samples) == 3
            assert [piece async for piece in stream] == []

    run(main())


def test_every_call_into_the_engine_is_made_by_one_thread(served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    for name in ("step", "submit", "cancel", "report"):
        honest = getattr(EngineCore, name)

        def noted(core: EngineCore, *arguments: Any, honest: Any = honest) -> Any:
            threads.add(threading.get_ident())
            return honest(core, *arguments)

        monkeypatch.setattr(EngineCore, name, noted)

    async def main() -> None:
        async with AsyncEngine(served) as engine:
            await engine.generate(prompt(5), SHORT)
            stream = await engine.add(prompt(5), LONG)
            await stream.aclose()
            assert (await engine.report())["engine"]["cancelled"] == 1
            await engine.add(prompt(5), LONG)
        assert len(threads) == 1
        assert threads != {threading.get_ident()}

    run(main())


def test_the_worker_sleeps_while_nothing_runs(served: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(served) as engine:
            await engine.generate(prompt(5), SHORT)
            steps = served._core.steps
            before = time.process_time()
            await asyncio.sleep(0.3)
            assert served._core.steps == steps
            assert time.process_time() - before < 0.15

    run(main())


# -- back-pressure -----------------------------------------------------------------------------------------------------
def test_a_full_queue_holds_callers_back_in_order_or_refuses(
    tiny_model: Model, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[int] = []
    step = EngineCore.step

    def watched(core: EngineCore) -> Any:
        waiting.append(len(core.waiting))
        return step(core)

    monkeypatch.setattr(EngineCore, "step", watched)

    async def main(inner: Engine) -> None:
        async with AsyncEngine(inner) as engine:
            running = await engine.add(prompt(5), ENDLESS)
            await anext(running)
            added = [asyncio.create_task(engine.add(prompt(4, seed=i), SHORT)) for i in range(4)]
            await until(lambda: sum(task.done() for task in added) == 1)
            with pytest.raises(QueueFull, match="max_waiting is 1"):
                await engine.add(prompt(3), SHORT, wait=False)
            with pytest.raises(InvalidInput, match="an empty prompt"):
                await engine.add([], SHORT)
            order: list[int] = []

            async def note(i: int, task: asyncio.Task[AsyncStream]) -> None:
                await asyncio.wait([task])
                order.append(i)

            notes = [asyncio.create_task(note(i, task)) for i, task in reversed(list(enumerate(added)))]
            await running.aclose()
            streams = await asyncio.gather(*added)
            for stream in streams:
                assert sum([len(piece.token_ids) async for piece in stream]) == 4
            await asyncio.wait(notes)
            assert order == [0, 1, 2, 3]
            assert max(waiting) == 1

    with make_engine(tiny_model, backend, slots=1, block_size=4, max_len=512, max_waiting=1) as inner:
        run(main(inner))


def test_a_caller_held_back_leaves_when_cancelled_or_when_its_deadline_passes(
    tiny_model: Model, backend: Backend
) -> None:
    now = [0.0]

    async def main(inner: Engine) -> None:
        async with AsyncEngine(inner) as engine:
            running = await engine.add(prompt(5), ENDLESS)
            queued = await engine.add(prompt(5), ENDLESS)
            outside = asyncio.create_task(engine.generate(prompt(4), SHORT))
            overdue = asyncio.create_task(engine.generate(prompt(4), SHORT, deadline=5.0))
            await until(lambda: len(engine._worker._outside) == 2)
            outside.cancel()
            with pytest.raises(asyncio.CancelledError):
                await outside
            now[0] = 5.0
            with pytest.raises(QueueFull, match="no room came free before the deadline"):
                await overdue
            await running.aclose()
            await queued.aclose()

    with make_engine(
        tiny_model, backend, slots=1, block_size=4, max_len=512, max_waiting=1, clock=lambda: now[0]
    ) as inner:
        run(main(inner))
        assert not inner.has_work


def test_a_slow_consumer_holds_nobody_back_and_keeps_no_more_than_its_tokens(served: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(served) as engine:
            slow = await engine.add(prompt(5), LONG)
            others = await asyncio.gather(*(engine.generate(prompt(4, seed=i), LONG) for i in range(6)))
            assert [len(r.token_ids) for r in others] == [40] * 6
            assert slow._mailbox is not None
            box = slow._mailbox
            await until(lambda: box.ended)
            assert sum(len(piece.token_ids) for piece in box.pieces) == 40
            assert sum([len(piece.token_ids) async for piece in slow]) == 40

    run(main())
