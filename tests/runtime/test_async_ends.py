"""How requests of tasks end: cancelled, overdue, cut off by an error, closed. Nobody waits for ever."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from forebay.runtime import AsyncEngine, Engine, Model, SamplingParams
from forebay.runtime.async_stream import AsyncStream
from forebay.runtime.decoder import Decoder
from forebay.specs import Backend, InvalidInput
from forebay.specs.errors import Cancelled, DeviceLost, ForebayError, StaleTrace
from tests.runtime.harness import make_engine, prompt
from tests.runtime.tasks import ENDLESS, LONG, SHORT, run, tokens_of, until


@pytest.mark.parametrize("how", ["task", "task between pieces", "break", "aclose", "with", "timeout", "drop"])
def test_a_request_that_nobody_reads_on_is_cancelled(served: Engine, how: str) -> None:
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
        async with AsyncEngine(served) as engine:
            other = asyncio.create_task(engine.generate(prompt(7), LONG))
            task = asyncio.create_task(consume(engine))
            if how.startswith("task"):
                await until(lambda: served._core.counts["tokens"] > 0)
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
    served: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception
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
        async with AsyncEngine(served) as engine:
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


def test_closing_ends_what_runs_and_refuses_what_comes(served: Engine) -> None:
    async def main() -> None:
        engine = AsyncEngine(served)
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
        assert served.generate([prompt(5)], SHORT)[0].finish_reason == "length", "the engine itself stays open"

    run(main())


def test_a_loop_that_went_away_without_closing_leaves_nothing_running(served: Engine) -> None:
    made: list[AsyncEngine] = []
    streams: list[object] = []

    async def leave() -> None:
        made.append(AsyncEngine(served))
        streams.append(await made[0].add(prompt(5), ENDLESS))

    async def close() -> None:
        await until(lambda: not made[0]._worker._inside)
        await made[0].aclose()

    asyncio.run(leave())
    run(close())
    assert served.report()["engine"]["cancelled"] == len(streams) == 1
