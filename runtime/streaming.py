"""Results as they come: the tokens and the text of one prompt, piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from forebay.specs.errors import ForebayError, InvalidInput

from .models.tokenizer import Tokenizer
from .request import GenerationResult, Request
from .sampler import TokenLogprobs
from .stop_strings import held_back


@dataclass(frozen=True)
class Piece:
    """What a sample has got since its last piece. The pieces of a sample join to its ``token_ids`` and its ``text``.

    Attributes:
        sample: which of the ``n`` samples of the prompt, from 0.
        token_ids: its new tokens, the one that ended it included; none where only held-back text comes.
        text: its new text. It may lag behind the tokens: a character waits for its last byte, and what may be the beginning of a
            stop string waits until it is known not to be.
        logprobs: log-probabilities of the new tokens, where they were asked for.
    """

    sample: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None


class SampleReader:
    """Reads along with one request as the engine releases its tokens."""

    def __init__(self, tokenizer: Tokenizer, request: Request, sample: int) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._sample = sample
        self._stream = tokenizer.stream()
        self._tokens = 0
        self._sent = 0
        self._unsent = ""

    def read(self) -> Piece | None:
        """What has come since the last call, None if nothing has."""
        request = self._request
        tokens = tuple(request.token_ids[self._tokens :])
        logprobs = None if request.params.logprobs is None else tuple(request.logprobs[self._tokens :])
        self._tokens += len(tokens)
        if request.finished:
            text = request.text(self._tokenizer)[self._sent :]
        else:
            self._unsent += "".join(map(self._stream.push, tokens))
            ready = len(self._unsent) - held_back(self._unsent, request.params.stop)
            text, self._unsent = self._unsent[:ready], self._unsent[ready:]
        self._sent += len(text)
        return Piece(self._sample, tokens, text, logprobs) if tokens or text else None


class Reader:
    """Reads along with a request and its siblings, the samples of one prompt."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self.members: Final = (request, *request.siblings)
        self._tokenizer = tokenizer
        self._samples = [SampleReader(tokenizer, member, i) for i, member in enumerate(self.members)]
        self._ended = False

    def read(self) -> list[Piece]:
        """What has come since the last call, at most one piece a sample."""
        if self._ended:
            return []
        self._ended = self.finished
        return [piece for sample in self._samples if (piece := sample.read()) is not None]

    @property
    def finished(self) -> bool:
        """True once every sample has ended; the last pieces may be unread."""
        return all(member.finished for member in self.members)

    @property
    def error(self) -> ForebayError | None:
        """Why a sample was cut off, None if none was."""
        return next((member.error for member in self.members if member.error is not None), None)

    def result(self) -> GenerationResult:
        """The samples as they stand."""
        return self.members[0].result(self._tokenizer)


class Stream(Iterator[Piece]):
    """The pieces of one request; made by ``Engine.stream``.

    Pulling steps the engine, for this request and whatever else runs in it. Closing the stream cancels the request; dropping it
    does so too, at the engine's next act. One thread uses the engine and its streams.

    Args:
        reader: of a queued request.
        step: steps the engine.
        cancel: ends a request now.
        drop: has a request ended later; may be called at any moment, a step's too.
    """

    def __init__(
        self,
        reader: Reader,
        step: Callable[[], object],
        cancel: Callable[[Request], None],
        drop: Callable[[Request], None],
    ) -> None:
        self._reader = reader
        self._step = step
        self._cancel = cancel
        self._drop = drop
        self._ready: deque[Piece] = deque()
        self._ended = False

    def __next__(self) -> Piece:
        """The next piece.

        Raises:
            ForebayError: a sample was cut off, for the reason given; once, behind the last piece.
            StaleTrace, CaptureDeclined: as ``Engine.step``.
        """
        while not self._ready:
            if self._ended:
                raise StopIteration
            finished = self._reader.finished
            self._ready.extend(self._reader.read())
            if self._ready:
                break
            if finished:
                self._ended = True
                if self._reader.error is not None:
                    raise self._reader.error
            else:
                self._step()
        return self._ready.popleft()

    @property
    def finished(self) -> bool:
        """True once every sample has ended; its last pieces may still come."""
        return self._reader.finished

    @property
    def result(self) -> GenerationResult:
        """What the prompt became, once the stream has ended or was closed.

        Raises:
            InvalidInput: it has not.
        """
        if not self.finished:
            raise InvalidInput("result: the stream has not ended; pull it to its end, or close it")
        return self._reader.result()

    def close(self) -> None:
        """Cancel the request where it has not ended; no further piece comes."""
        self._ended = True
        self._ready.clear()
        if not self.finished:
            self._cancel(self._reader.members[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not self.finished:
            self._drop(self._reader.members[0])
