"""How long-running model work reports where it stands."""

from __future__ import annotations

from typing import Literal, Protocol

Phase = Literal["wait", "locate", "download", "convert", "finish"]


class ProgressCallback(Protocol):
    """Called often and cheaply; an exception it raises stops the work and leaves nothing half done behind."""

    def __call__(self, bytes_done: int, bytes_total: int | None, phase: Phase, /) -> None:
        """``bytes_done`` of ``bytes_total`` (``None``: not known) bytes of ``phase`` are done."""


def no_progress(bytes_done: int, bytes_total: int | None, phase: Phase, /) -> None:
    """Report nothing: the callback of callers that did not ask for one."""
