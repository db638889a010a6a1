"""Stop strings: found in the text of a request as its tokens are released, and held back from whoever reads along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from .models.tokenizer import INCOMPLETE, TextStream, Tokenizer
from .request import Request


@dataclass
class _Reading:
    """How far the text of one request has been read: tokens taken, text that no later token changes."""

    stream: TextStream
    tokens: int = 0
    settled: str = ""


class StopStrings:
    """Ends a request whose text contains one of its stop strings; the text is cut before it.

    Only what is new is decoded and searched, so a token costs the same at any length; only requests with stop strings pay.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._readings: WeakKeyDictionary[Request, _Reading] = WeakKeyDictionary()

    def check(self, request: Request) -> None:
        """Set ``finish_reason`` and ``text_end`` where a stop string has come up."""
        stop = request.params.stop
        if not stop or request.finish_reason == "stop":
            return
        reading = self._readings.setdefault(request, _Reading(self._tokenizer.stream()))
        searched = max(len(reading.settled) - max(map(len, stop)) + 1, 0)
        for token in request.token_ids[reading.tokens :]:
            reading.settled += reading.stream.push(token)
        reading.tokens = len(request.token_ids)
        # A character of which only some bytes are there is no part of a stop string yet.
        text = reading.settled[searched:] + reading.stream.held.rstrip(INCOMPLETE)
        found = [at for s in stop if (at := text.find(s)) >= 0]
        if found:
            request.finish_reason, request.text_end = "stop", searched + min(found)


def held_back(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of ``text`` that may be the beginning of one of the ``stop`` strings."""
    longest = min(max(map(len, stop), default=1) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)
