"""Errors seen against the oracle, told by the helpers that compare and heard by whoever judges; a channel of ``logging``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

CHANNEL: Final = logging.getLogger("forebay.suite.measured")

Listener = Callable[[str, float, float], None]
"""``(dtype, error, limit)``: error and limit are relative to the largest |V|."""


def tell(dtype: str, error: float, limit: float) -> None:
    """Say that a result in a pool of ``dtype`` was off by ``error``, where ``limit`` is allowed (both relative, clause D6)."""
    CHANNEL.debug("largest error", extra={"measured": (dtype, error, limit)})


class _Hearing(logging.Handler):
    def __init__(self, listener: Listener) -> None:
        super().__init__(logging.DEBUG)
        self._listener = listener

    def emit(self, record: logging.LogRecord) -> None:
        self._listener(*record.__dict__["measured"])


@contextmanager
def hearing(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with every error told inside the block."""
    handler, level, propagate = _Hearing(listener), CHANNEL.level, CHANNEL.propagate
    CHANNEL.addHandler(handler)
    CHANNEL.setLevel(logging.DEBUG)
    CHANNEL.propagate = False
    try:
        yield
    finally:
        CHANNEL.removeHandler(handler)
        CHANNEL.setLevel(level)
        CHANNEL.propagate = propagate
