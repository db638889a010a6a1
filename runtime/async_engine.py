"""The engine for asyncio: one worker thread steps it, and every call into it happens there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from forebay.specs.errors import Cancelled, InvalidInput, QueueFull

from .async_stream import AsyncStream, Mailbox, News, post
from .engine import Engine
from .request import GenerationResult, Prompt, Request
from .sampling import SamplingParams
from .streaming import Reader

T = TypeVar("T")


class AsyncEngine:
    """Requests of many tasks over one :class:`Engine`.

    The engine belongs to the worker thread until :meth:`aclose` has returned: use it, its backend and its streams nowhere else
    meanwhile. The engine itself stays open. The worker sleeps while nothing runs.

    Back-pressure: a caller that finds ``max_waiting`` requests waiting is held until there is room, first come first served; it holds
    nothing in the engine. What a slow consumer has not read yet stays with its stream, ``max_tokens`` tokens a sample at most, and
    holds nobody up.

    An error that a step raises ends every request, and reaches everyone who waits for one.
    """

    def __init__(self, engine: Engine) -> None:
        self._worker: Final = _Worker(engine)

    async def add(
        self, prompt: Prompt, params: SamplingParams | None = None, *, wait: bool = True, **options: Any
    ) -> AsyncStream:
        """Queue a request and return its stream, once it is queued.

        ``options``: those of :meth:`Engine.add`; a ``deadline`` also bounds the wait for room.

        Raises:
            InvalidInput: as :meth:`Engine.add`, or the engine is closed.
            QueueFull: ``max_waiting`` requests wait, and ``wait`` is False or the deadline has passed.
        """
        stream = self.stream(prompt, params, wait=wait, **options)
        await stream.start()
        return stream

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, wait: bool = True, **options: Any
    ) -> AsyncStream:
        """An async iterator over the pieces of a request, which is queued by the first pull; errors as :meth:`add`."""

        def submit(mailbox: Mailbox) -> Callable[[], None]:
            worker = self._worker
            worker.send(partial(worker.submit, mailbox, prompt, params, options, wait=wait))
            return partial(worker.send_anyhow, partial(worker.cancel, mailbox))

        return AsyncStream(submit)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, wait: bool = True, **options: Any
    ) -> GenerationResult:
        """Finish one prompt.

        Raises:
            InvalidInput, QueueFull: as :meth:`add`.
            ForebayError: the request was cut off by an error of the engine.
        """
        async with self.stream(prompt, params, wait=wait, **options) as stream:
            async for _ in stream:
                pass
            return stream.result

    async def report(self) -> dict[str, Any]:
        """As :meth:`Engine.report`, between two steps."""
        return await self._call(lambda engine: engine.report())

    async def metrics_text(self) -> str:
        """As :meth:`Engine.metrics_text`, between two steps."""
        return await self._call(lambda engine: engine.metrics_text())

    async def _call(self, act: Callable[[Engine], T]) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._worker.send(partial(self._worker.call, act, loop, answer))
        return await answer

    async def aclose(self) -> None:
        """Cancel what runs, whose callers get :class:`Cancelled`, and wait for the worker to end. Closing twice is no error."""
        self._worker.send_anyhow(self._worker.stop)
        await asyncio.to_thread(self._worker.thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()


@dataclass(frozen=True, eq=False)
class _Call:
    """One checked request and where its news go."""

    mailbox: Mailbox
    request: Request
    reader: Reader

    def news(self, error: Exception | None = None) -> News:
        """What has come of it since the last news; ``error`` ends it for its caller."""
        pieces = tuple(self.reader.read())
        ended = error is not None or self.reader.finished
        return News(pieces, self.reader.result() if ended else None, error or self.reader.error)


class _Worker:
    """The thread that owns the engine: obeys what it is sent, lets waiting callers in, steps, and posts what came of it.

    All but ``send`` and ``send_anyhow`` runs in the thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = Lock()
        self._ended = False
        self._stopping = False
        self._outside: dict[Mailbox, _Call] = {}
        self._inside: dict[Mailbox, _Call] = {}
        self._of: dict[Request, _Call] = {}
        self.thread: Final = Thread(target=self._work, name="forebay-engine", daemon=True)
        self.thread.start()

    # -- from any thread -------------------------------------------------------------------------------------------------
    def send(self, command: Callable[[], None]) -> None:
        """Have ``command`` run in the worker.

        Raises:
            InvalidInput: the worker has ended.
        """
        with self._lock:
            if self._ended:
                raise InvalidInput("the async engine is closed; make a new one")
            self._inbox.put(command)

    def send_anyhow(self, command: Callable[[], None]) -> None:
        """As ``send``, at any moment, a garbage collection's too; nothing happens once the worker has ended."""
        self._inbox.put(command)

    # -- the loop --------------------------------------------------------------------------------------------------------
    def _work(self) -> None:
        why: Exception = Cancelled("the async engine was closed")
        try:
            while not self._stopping:
                self._obey(wait=not (self._inside or self._outside))
                self._let_in()
                if not self._stopping and (self._inside or self._outside):
                    self._step()
        except Exception as error:
            why = error
            raise
        finally:
            with self._lock:
                self._ended = True
            self._obey(wait=False)
            self._fail_all(why)

    def _obey(self, *, wait: bool) -> None:
        """Run what was sent; with ``wait`` sleep until something is."""
        with suppress(Empty):
            while True:
                self._inbox.get(block=wait)()
                wait = False

    def _let_in(self) -> None:
        """Queue callers who wait for room, in their order, and turn away those whose time is up."""
        while self._outside and self._engine.has_room:
            mailbox, call = next(iter(self._outside.items()))
            try:
                self._queue(call)
            except Exception as error:  # noqa: BLE001  # it is the caller's, who must not be left waiting
                post([(mailbox, News(error=error))])
            self._outside.pop(mailbox, None)
        for call in tuple(self._outside.values()):
            deadline = call.request.deadline
            if deadline is not None and deadline <= self._engine.clock():
                del self._outside[call.mailbox]
                why = QueueFull("no room came free before the deadline; come back later, or raise max_waiting")
                post([(call.mailbox, News(error=why))])

    def _queue(self, call: _Call) -> None:
        self._engine.submit(call.request)
        self._inside[call.mailbox] = call
        self._of |= dict.fromkeys(call.reader.members, call)
        self._post([call])

    def _step(self) -> None:
        try:
            released = self._engine.step()
        except Exception as error:  # noqa: BLE001  # whatever it is, nobody may be left waiting
            self._fail_all(error)
            return
        told = dict.fromkeys(self._of[request] for request, _ in released if request in self._of)
        told |= dict.fromkeys(call for call in self._inside.values() if call.reader.finished)
        self._post(told)

    def _post(self, calls: Iterable[_Call]) -> None:
        """Tell callers what has come of their requests, and forget what has ended. A request whose loop is closed is cancelled."""
        letters = [(call.mailbox, call.news()) for call in calls]
        for mailbox, news in letters:
            if news.result is not None:
                self._forget(mailbox)
        for mailbox in post(letters):
            if mailbox in self._inside:
                self._abandon(self._forget(mailbox), "its event loop was closed")

    # -- ends ------------------------------------------------------------------------------------------------------------
    def _forget(self, mailbox: Mailbox) -> _Call:
        call = self._inside.pop(mailbox)
        for member in call.reader.members:
            del self._of[member]
        return call

    def _abandon(self, call: _Call, why: str) -> None:
        """End what has not ended of a call, each sample by itself: a device that is lost must not keep the others."""
        for member in call.reader.members:
            with suppress(Exception):
                self._engine.cancel(member, why)

    def _fail_all(self, error: Exception) -> None:
        calls = (*self._inside.values(), *self._outside.values())
        for call in calls:
            self._abandon(call, f"the engine ended it: {type(error).__name__}: {error}")
        self._inside.clear()
        self._outside.clear()
        self._of.clear()
        post((call.mailbox, call.news(error)) for call in calls)

    # -- what is sent ----------------------------------------------------------------------------------------------------
    def submit(
        self, mailbox: Mailbox, prompt: Prompt, params: SamplingParams | None, options: dict[str, Any], *, wait: bool
    ) -> None:
        """Check a request and queue it, or let its caller wait for room."""
        try:
            request = self._engine.check(prompt, params, **options)
            call = _Call(mailbox, request, Reader(self._engine.model.tokenizer, request))
            self._let_in()
            if wait and not self._engine.has_room:
                self._outside[mailbox] = call
            else:
                self._queue(call)
        except Exception as error:  # noqa: BLE001  # it is the caller's
            post([(mailbox, News(error=error))])

    def cancel(self, mailbox: Mailbox) -> None:
        """End a request wherever it stands; its caller hears of it too."""
        call = self._inside.get(mailbox) or self._outside.pop(mailbox, None)
        if call is not None:
            self._abandon(call, "its caller let it go")
            if mailbox in self._inside:
                self._forget(mailbox)
            post([(mailbox, call.news())])

    def call(self, act: Callable[[Engine], T], loop: asyncio.AbstractEventLoop, answer: asyncio.Future[T]) -> None:
        """Run ``act`` on the engine and hand its value, or what it raises, to ``answer``."""
        try:
            settle = partial(answer.set_result, act(self._engine))
        except Exception as error:  # noqa: BLE001  # it is the caller's
            settle = partial(answer.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(lambda: None if answer.done() else settle())

    def stop(self) -> None:
        """End the worker."""
        self._stopping = True
