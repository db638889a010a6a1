"""SentencePiece's BPE as a list of merges: it joins whichever neighbours make the token of the best score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from forebay.specs.errors import InvalidModel

_MAX_WORK: Final = 2**28
"""Characters that cutting every token in two everywhere may copy; a vocabulary of 256,000 tokens takes about 2**24."""


def merges_of_scores(ids: Mapping[str, int], scores: Sequence[float], *, source: str) -> list[tuple[str, str]]:
    """Every pair of tokens that join to a token, the best score first, as transformers derives them from SentencePiece.

    ``ids``: token text → id; ``scores``: of each id. ``source`` names the file in errors.

    Raises:
        InvalidModel: a score is NaN, or tokens are so long that cutting them would take unreasonable time.
    """
    if any(math.isnan(score) for score in scores):
        raise InvalidModel(f"{source}: a token has the score NaN; expected a number; fetch the file again")
    work = sum(len(token) ** 2 for token in ids)
    if work > _MAX_WORK:
        raise InvalidModel(f"{source}: tokens are up to {max(map(len, ids))} characters long; expected pieces of words")
    merges: list[tuple[float, int, int, str, str]] = []
    for token, own in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[own], left, right, token[:cut], token[cut:]))
    return [(left, right) for _, _, _, left, right in sorted(merges)]
