"""What a process does when it is told to end: by a terminal that hangs up, or by whoever stops it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

INTERRUPT: Final = ("SIGINT",)
ENDING: Final = ("SIGTERM", "SIGHUP")
"""Signals that end a process which does nothing about them, without a word; a system may lack some."""


@contextlib.contextmanager
def heard(names: tuple[str, ...], act: Callable[[str], None]) -> Iterator[None]:
    """Call ``act`` with the name of each of these signals that comes during the ``with`` block; then the old handlers are back.

    A signal that is ignored stays ignored (``nohup``). Outside the main thread nothing is heard: signals are the main thread's.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        act(signal.Signals(number).name)

    before = {}
    if threading.current_thread() is threading.main_thread():
        known = [signal.Signals[name] for name in names if name in signal.Signals.__members__]
        before = {number: signal.getsignal(number) for number in known}
    # None is a handler of a library in C, which could not be put back.
    before = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def interrupted_by(name: str) -> None:
    """End what runs as a Ctrl-C does, so that it can clean up and say what it knows.

    Raises:
        KeyboardInterrupt: always, with the signal's name.
    """
    raise KeyboardInterrupt(name)


def exit_code(name: str) -> int:
    """What a shell shows of a process that ended by this signal."""
    return 128 + signal.Signals[name]
