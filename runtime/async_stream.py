"""One request as a task sees it: an async iterator, fed by the worker thread of an ``AsyncEngine``."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from forebay.specs.errors import InvalidInput

from .request import GenerationResult
from .streaming import Piece


@dataclass(frozen=True)
class News:
    """What the worker tells the stream of a request: that it is queued, its next pieces, its end (a result, an error, or both)."""

    pieces: tuple[Piece, ...] = ()
    result: GenerationResult | None = None
    error: Exception | None = None


class Mailbox:
    """What has come of one request and is not read yet. Belongs to the thread of its loop; made there.

    Attributes:
        queued: the engine has taken the request.
        ended: no further piece comes.
        changed: set by each delivery.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.pieces: deque[Piece] = deque()
        self.result: GenerationResult | None = None
        self.error: Exception | None = None
        self.queued = False
        self.ended = False
        self.changed = asyncio.Event()

    def deliver(self, news: News) -> None:
        """Take news in and wake whoever waits."""
        self.pieces.extend(news.pieces)
        self.result, self.error = news.result, news.error
        self.ended = news.result is not None or news.error is not None
        self.queued = self.queued or not self.ended
        self.changed.set()


def post(letters: Iterable[tuple[Mailbox, News]]) -> list[Mailbox]:
    """Deliver news in the loops of the mailboxes, from another thread; one wake-up a loop. Returns those whose loop is closed."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, News]]] = {}
    for mailbox, news in letters:
        by_loop.setdefault(mailbox.loop, []).append((mailbox, news))
    closed: list[Mailbox] = []
    for loop, own in by_loop.items():
        try:
            loop.call_soon_threadsafe(_deliver, own)
        except RuntimeError:
            closed += [mailbox for mailbox, _ in own]
    return closed


def _deliver(letters: list[tuple[Mailbox, News]]) -> None:
    for mailbox, news in letters:
        mailbox.deliver(news)


class AsyncStream(AsyncIterator[Piece]):
    """The pieces of one request; made by ``AsyncEngine.stream`` and ``AsyncEngine.add``.

    The request is cancelled where the task that waits for a piece is cancelled, where the stream is closed (use it with ``async
    with`` to be sure when), and where it is dropped.

    Args:
        submit: sends the request to the worker, whose news go to the mailbox; returns what cancels it, at any moment and from any
            thread.
    """

    def __init__(self, submit: Callable[[Mailbox], Callable[[], None]]) -> None:
        self._mailbox: Mailbox | None = None
        self._submit = submit
        self._cancel: Callable[[], None] | None = None
        self._over = False

    async def start(self) -> None:
        """Send the request where that has not been done, and wait until it is queued.

        Raises:
            InvalidInput, QueueFull: it was refused.
        """
        if self._mailbox is None:
            mailbox = Mailbox()
            self._cancel = self._submit(mailbox)
            self._mailbox = mailbox
        box = self._mailbox
        await self._until(box, lambda: box.queued or box.ended)
        if not box.queued and box.error is not None and not self._over:
            self._over = True
            raise box.error

    async def __anext__(self) -> Piece:
        """The next piece.

        Raises:
            InvalidInput, QueueFull: it was refused.
            ForebayError: a sample was cut off, for the reason given, or a step of the engine failed; once, behind the last piece.
        """
        if not self._over:
            await self.start()
        box = self._mailbox
        if self._over or box is None:
            raise StopAsyncIteration
        await self._until(box, lambda: bool(box.pieces) or box.ended)
        if box.pieces:
            return box.pieces.popleft()
        self._over = True
        if box.error is not None:
            raise box.error
        raise StopAsyncIteration

    @property
    def result(self) -> GenerationResult:
        """What the prompt became, once the request has ended.

        Raises:
            InvalidInput: it has not, or was never queued.
        """
        if self._mailbox is None or self._mailbox.result is None:
            raise InvalidInput("result: the stream has not ended; read it to its end, or close it")
        return self._mailbox.result

    async def aclose(self) -> None:
        """Cancel the request where it has not ended, and wait until it has given back what it held."""
        self._over = True
        if self._mailbox is not None:
            box = self._mailbox
            self._give_up()
            await self._until(box, lambda: box.ended)
            box.pieces.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._give_up()

    async def _until(self, box: Mailbox, happened: Callable[[], bool]) -> None:
        """Wait for news; a task that is cancelled meanwhile cancels the request."""
        try:
            while not happened():
                box.changed.clear()
                await box.changed.wait()
        except asyncio.CancelledError:
            self._over = True
            self._give_up()
            raise

    def _give_up(self) -> None:
        if self._mailbox is not None and self._cancel is not None and not self._mailbox.ended:
            self._cancel()
