"""Stop strings: found in the text of a request as its tokens are released."""

from __future__ import annotations

from .models.tokenizer import Tokenizer
from .request import Request


class StopStrings:
    """Ends a request whose text contains one of its stop strings; the text is cut before it.

    Text is decoded as a whole each time, because a token's text depends on its neighbours; only requests with stop strings pay.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def check(self, request: Request) -> None:
        """Set ``finish_reason`` and ``text_end`` where a stop string has come up."""
        if not request.params.stop or request.finish_reason == "stop":
            return
        text = self._tokenizer.decode(request.token_ids)
        found = [at for s in request.params.stop if (at := text.find(s)) >= 0]
        if found:
            request.finish_reason, request.text_end = "stop", min(found)
