"""Runs code of a plugin so that whatever it raises or changes reaches nobody else (clause B1)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from forebay.runtime.settings import restored_environment
from forebay.specs.signals import ENDING, INTERRUPT


class PluginGuard:
    """A ``with`` block around code of a plugin: any exception ends the block and is kept in ``error``, none leaves it.

    What the code prints goes to ``sys.stderr``, for standard output is the command's. Afterwards the working directory, the
    environment, the three standard streams and the handlers of the signals that end a command are what they were. A Ctrl-C, or a
    signal that ends the command likewise, is no error of the plugin: it leaves the block as KeyboardInterrupt, also where the plugin
    swallowed it or wrapped it in something else.

    ``keep_environment`` leaves what the code changed of the environment.

    What one process cannot take back: output written past ``sys.stdout`` (by a library in C, or a child process), threads left
    behind, and the end of the process itself (``os._exit``, a crash).

    Attributes:
        error: what the code raised, None where it came to its end.
    """

    def __init__(self, *, keep_environment: bool = False) -> None:
        self._keep_environment = keep_environment
        self.error: BaseException | None = None
        self._interrupt: KeyboardInterrupt | None = None
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._undo.callback(_restore_streams, sys.stdin, sys.stdout, sys.stderr)
        self._undo.callback(_restore_folder, _folder())
        if not self._keep_environment:
            self._undo.enter_context(restored_environment())
        self._hear()
        sys.stdout = sys.stderr
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        self._undo.close()
        if self._interrupt is not None:
            raise KeyboardInterrupt(*self._interrupt.args) from None
        self.error = error
        return True

    def _hear(self) -> None:
        """Note every signal that the handler in force answers with KeyboardInterrupt; only the main thread ever gets one."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name in (*INTERRUPT, *ENDING):
            if name in signal.Signals.__members__:
                self._watch(signal.Signals[name])

    def _watch(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if before is None:  # of a library in C: it can be neither called nor put back
            return

        def handle(number: int, frame: FrameType | None) -> None:
            try:
                if callable(before):
                    before(number, frame)
            except KeyboardInterrupt as error:
                self._interrupt = error
                raise

        if callable(before):
            signal.signal(number, handle)
        self._undo.callback(signal.signal, number, before)


def message_of(error: BaseException | None) -> str:
    """``str(error)``; what stands in for it where that raises, for the exceptions of a plugin are the plugin's code."""
    text = ""
    with PluginGuard() as guard:
        text = str(error)
    return text if guard.error is None else f"(its message cannot be shown: {type(guard.error).__name__})"


def _folder() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # it was deleted
        return None


def _restore_folder(folder: Path | None) -> None:
    if folder is not None and _folder() != folder:
        os.chdir(folder)


def _restore_streams(*streams: object) -> None:
    for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
        setattr(sys, name, stream)
