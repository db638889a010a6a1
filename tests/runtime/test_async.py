"""The engine for asyncio: many tasks, one worker; nobody waits for ever."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from forebay.runtime import AsyncEngine, Engine, Model, SamplingParams
from forebay.runtime.async_stream import AsyncStream
from forebay.runtime.core import EngineCore
from forebay.runtime.decoder import Decoder
from forebay.specs import Backend, InvalidInput
from forebay.specs.errors import Cancelled, DeviceLost, ForebayError, QueueFull, StaleTrace
from tests.runtime.harness import PARAMS, PROMPTS, make_engine, prompt

LONG = SamplingParams(max_tokens=40, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=480, ignore_eos=True)
"""So many tokens that a test is done with the request long before they are made."""

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
PATIENCE = 60.0
"""Seconds after which a test that hangs fails."""


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE))


@pytest.fixture
def wide(tiny_model: Model, backend: Backend) -> Iterator[Engine]:
    with make_engine(tiny_model, backend, slots=3, block_size=4, max_len=512, max_waiting=2) as made:
        yield made
        assert not made.has_work
        memory = made.report()["memory"]
        assert (memory["blocks_allocated"], memory["blocks_in_flight"]) == (0, 0)


async def until(happened: Callable[[], bool]) -> None:
    while not happened():
        await asyncio.sleep(0.001)


async def tokens_of(engine: AsyncEngine, ids: list[int], params: SamplingParams, **options: Any) -> tuple[int, ...]:
    return tuple([t async for piece in engine.stream(ids, params, **options) for t in piece.token_ids])


# -- many at once ------------------------------------------------------------------------------------------------------
def test_many_tasks_get_the_tokens_each_would_get_alone(wide: Engine, expected: list[tuple[int, ...]]) -> None:
    """Far more tasks than the queue has room for: the others wait outside, and all are served."""

    async def main() -> None:
        async with AsyncEngine(wide) as engine:
            streams = [tokens_of(engine, p, s) for p, s in zip(PROMPTS * 4, PARAMS * 4, strict=True)]
            results = [engine.generate(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)]
            streamed, finished = await asyncio.gather(asyncio.gather(*streams), asyncio.gather(*results))
            assert streamed == expected * 4
            assert [r.token_ids for r in finished] == expected
            assert [r.text for r in finished] == [wide.model.tokenizer.decode(t) for t in expected]

    run(main())


def test_a_stream_has_pieces_result_and_samples(wide: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(wide) as engine:
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


def test_every_call_into_the_engine_is_made_by_one_thread(wide: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    for name in ("step", "submit", "cancel", "report"):
        honest = getattr(EngineCore, name)

        def noted(core: EngineCore, *arguments: Any, honest: Any = honest) -> Any:
            threads.add(threading.get_ident())
            return honest(core, *arguments)

        monkeypatch.setattr(EngineCore, name, noted)

    async def main() -> None:
        async with AsyncEngine(wide) as engine:
            await engine.generate(prompt(5), SHORT)
            stream = await engine.add(prompt(5), LONG)
            await stream.aclose()
            assert (await engine.report())["engine"]["cancelled"] == 1
            await engine.add(prompt(5), LONG)
        assert len(threads) == 1
        assert threads != {threading.get_ident()}

    run(main())


def test_the_worker_sleeps_while_nothing_runs(wide: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(wide) as engine:
            await engine.generate(prompt(5), SHORT)
            steps = wide._core.steps
            before = time.process_time()
            await asyncio.sleep(0.3)
            assert wide._core.steps == steps
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


def test_a_slow_consumer_holds_nobody_back_and_keeps_no_more_than_its_tokens(wide: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(wide) as engine:
            slow = await engine.add(prompt(5), LONG)
            others = await asyncio.gather(*(engine.generate(prompt(4, seed=i), LONG) for i in range(6)))
            assert [len(r.token_ids) for r in others] == [40] * 6
            assert slow._mailbox is not None
            box = slow._mailbox
            await until(lambda: box.ended)
            assert sum(len(piece.token_ids) for piece in box.pieces) == 40
            assert sum([len(piece.token_ids) async for piece in slow]) == 40

    run(main())


# -- ends --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["task", "task between pieces", "break", "aclose", "with", "timeout", "drop"])
def test_a_request_that_nobody_reads_on_is_cancelled(wide: Engine, how: str) -> None:
    held: list[AsyncStream] = []

    async def consume(engine: AsyncEngine) -> None:
        if how == "aclose":
            stream = await engine.add(prompt(5), ENDLESS)
            await anext(stream)
            await stream.aclose()
            assert stream.result.finish_reason == "cancelled"
            assert [piece async for piece in stream] == []
        elif how == "with":
            async with engine.stream(prompt(5), ENDLESS) as stream:
                await anext(stream)
        elif how == "timeout":
            async with asyncio.timeout(10.0) as limit:
                held.append(await engine.add(prompt(5), ENDLESS))
                await anext(held[0])
                limit.reschedule(asyncio.get_running_loop().time())
                async for _ in held[0]:
                    pass
        elif how == "task":
            held.append(await engine.add(prompt(5), ENDLESS))
            async for _ in held[0]:
                pass
        elif how == "drop":
            await engine.add(prompt(5), ENDLESS)
        else:
            async for _ in engine.stream(prompt(5), ENDLESS):
                if how == "break":
                    break
                await asyncio.sleep(60)

    async def main() -> None:
        async with AsyncEngine(wide) as engine:
            other = asyncio.create_task(engine.generate(prompt(7), LONG))
            task = asyncio.create_task(consume(engine))
            if how.startswith("task"):
                await until(lambda: wide._core.counts["tokens"] > 0)
                task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() == how.startswith("task")
            assert isinstance(None if task.cancelled() else task.exception(), TimeoutError | None)
            del task
            gc.collect()
            while (await engine.report())["engine"]["cancelled"] == 0:
                await asyncio.sleep(0.001)
            assert len((await other).token_ids) == 40

    run(main())


def test_a_deadline_ends_a_request_with_what_was_made(tiny_model: Model, backend: Backend) -> None:
    now = [0.0]

    async def main(inner: Engine) -> None:
        async with AsyncEngine(inner) as engine:
            stream = await engine.add(prompt(5), LONG, deadline=3.0)
            tokens = list((await anext(stream)).token_ids)
            now[0] = 3.0
            async for piece in stream:
                tokens += piece.token_ids
            assert stream.result.finish_reason == "deadline"
            assert stream.result.token_ids == tuple(tokens)

    with make_engine(tiny_model, backend, slots=1, block_size=4, max_len=64, clock=lambda: now[0]) as inner:
        run(main(inner))


@pytest.mark.parametrize(
    "error", [StaleTrace("a row acted"), DeviceLost("gone"), RuntimeError("a bug"), MemoryError()], ids=repr
)
def test_an_error_of_a_step_reaches_everyone_and_the_next_request_is_served(
    wide: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Running, queued and held-back callers, readers of streams and waiters for results."""
    collect = Decoder.collect
    broken = threading.Event()

    def failing(decoder: Decoder, read_behind: int) -> Any:
        if broken.is_set() and decoder.steps > 3:
            raise error
        return collect(decoder, read_behind)

    monkeypatch.setattr(Decoder, "collect", failing)

    async def main() -> None:
        async with AsyncEngine(wide) as engine:
            broken.set()
            tasks: list[asyncio.Task[Any]] = []
            tasks += [asyncio.create_task(engine.generate(prompt(5, seed=i), LONG)) for i in range(5)]
            tasks += [asyncio.create_task(tokens_of(engine, prompt(4, seed=i), LONG)) for i in range(5)]
            assert await asyncio.gather(*tasks, return_exceptions=True) == [error] * 10
            assert (await engine.report())["memory"]["blocks_allocated"] == 0
            broken.clear()
            assert len((await engine.generate(prompt(5), SHORT)).token_ids) == 4

    run(main())


def test_a_device_that_stays_lost_does_not_keep_the_worker_busy(
    tiny_model: Model, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where even giving up a slot fails, callers hear of the first error, and the worker sleeps."""

    def lost(*_arguments: Any, **_options: Any) -> Any:
        raise DeviceLost("gone for good")

    async def main(inner: Engine) -> None:
        async with AsyncEngine(inner) as engine:
            stream = await engine.add(prompt(5), SamplingParams(max_tokens=40, ignore_eos=True, n=2))
            await anext(stream)
            for name in ("collect", "drop", "dispatch"):
                monkeypatch.setattr(Decoder, name, lost)
            with pytest.raises(DeviceLost, match="gone for good"):
                async for _ in stream:
                    pass
            with pytest.raises(ForebayError):
                await engine.generate(prompt(5), SHORT)
            steps = inner._core.steps
            await asyncio.sleep(0.05)
            assert inner._core.steps == steps
        monkeypatch.undo()

    with make_engine(tiny_model, backend, slots=2, block_size=4, max_len=64) as inner:
        run(main(inner))


def test_closing_ends_what_runs_and_refuses_what_comes(wide: Engine) -> None:
    async def main() -> None:
        engine = AsyncEngine(wide)
        tasks = [asyncio.create_task(engine.generate(prompt(5, seed=i), ENDLESS)) for i in range(8)]
        stream = await engine.add(prompt(5), ENDLESS)
        await anext(stream)
        unread = engine.stream(prompt(5), ENDLESS)
        await engine.aclose()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, Cancelled)
        with pytest.raises(Cancelled):
            async for _ in stream:
                pass
        assert stream.result.finish_reason == "cancelled"
        for refused in (anext(unread), engine.add(prompt(5)), engine.generate(prompt(5)), engine.report()):
            with pytest.raises(InvalidInput, match="the async engine is closed"):
                await refused
        await engine.aclose()
        assert not engine._worker.thread.is_alive()
        assert wide.generate([prompt(5)], SHORT)[0].finish_reason == "length", "the engine itself stays open"

    run(main())


def test_a_loop_that_went_away_without_closing_leaves_nothing_running(wide: Engine) -> None:
    made: list[AsyncEngine] = []
    streams: list[object] = []

    async def leave() -> None:
        made.append(AsyncEngine(wide))
        streams.append(await made[0].add(prompt(5), ENDLESS))

    async def close() -> None:
        await until(lambda: not made[0]._worker._inside)
        await made[0].aclose()

    asyncio.run(leave())
    run(close())
    assert wide.report()["engine"]["cancelled"] == len(streams) == 1
