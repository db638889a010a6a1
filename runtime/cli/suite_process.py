"""pytest over the suite in a process of its own: what it complains of, how it ends, what an interrupt does to it, and when it hangs."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from forebay.specs.signals import ENDING, INTERRUPT, heard

USAGE_ERROR: Final = 4
NO_TESTS: Final = 5
PYTEST: Final = (sys.executable, "-P", "-m", "pytest")
"""The command; no module is looked for in the folder it runs in, whatever lies there."""
_COMPLAINT: Final = "ERROR: "
_LOOK_S: Final = 0.5
"""Seconds between two looks at the progress."""
_GRACE_S: Final = 10.0
"""Seconds an interrupted run has to end by itself before it is interrupted again, and then killed."""


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        status: its exit status, or minus the signal that killed it.
        complaint: what a usage error said.
        interrupted: the signal by which it was stopped, a user's Ctrl-C among them; ``""`` where it was not.
        stalled_s: seconds without progress after which it was killed, None where it was not.
    """

    status: int
    complaint: str
    interrupted: str
    stalled_s: float | None = None

    def told(self) -> str:
        """In words, after the name of the process."""
        if self.stalled_s is not None:
            return f"made no progress for {self.stalled_s:g} s and was killed"
        if self.status >= 0:
            return f"died with status {self.status}"
        return f"was killed by {signal.Signals(-self.status).name}"


class Progress:
    """A file that grows as long as there is progress; the time before there is one counts too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = -1
        self._since = time.monotonic()

    def still_s(self) -> float:
        """Seconds for which the file was seen not to grow."""
        size = self._path.stat().st_size if self._path.exists() else -1
        if size != self._size:
            self._size, self._since = size, time.monotonic()
        return time.monotonic() - self._since


def run_pytest(
    arguments: Sequence[str], environment: Mapping[str, str], progress: Path | None = None, stall_s: float = math.inf
) -> Ended:
    """Run pytest to its end; what it prints is passed on at once, but for the text of a usage error.

    It is killed once the file ``progress`` has not grown for ``stall_s`` seconds. A Ctrl-C, and a signal that would end this process,
    end pytest instead, and then ``Ended`` says so; none leaves it running behind.
    """
    told: list[str] = []
    with heard((*INTERRUPT, *ENDING), told.append):
        process = subprocess.Popen(  # noqa: S603  # this interpreter
            [*PYTEST, *arguments], env=dict(environment), stderr=subprocess.PIPE, text=True, errors="backslashreplace"
        )
        complaint: list[str] = []
        relay = threading.Thread(target=_relay, args=(process.stderr, complaint), daemon=True)
        relay.start()
        status, stalled = _wait(process, told, None if progress is None else Progress(progress), stall_s)
        relay.join(_GRACE_S)
    text = "".join(complaint)
    if status != USAGE_ERROR:
        sys.stderr.write(text)
    said = " ".join(text.removeprefix(_COMPLAINT).split())
    return Ended(status, said, told[0] if told else "", stall_s if stalled else None)


def _wait(
    process: subprocess.Popen[str], told: Sequence[str], watched: Progress | None, stall_s: float
) -> tuple[int, bool]:
    """Wait for the end, pass on the signals ``told`` as they come, and see to it that one of them is enough; whether it was killed
    for making no progress."""
    passed_on, since = 0, 0.0
    while True:
        try:
            return process.wait(_LOOK_S), False
        except subprocess.TimeoutExpired:
            pass
        for name in told[passed_on:]:
            passed_on, since = passed_on + 1, time.monotonic()
            if name not in INTERRUPT:  # from a terminal pytest got that too: it ends the run and writes what it knows
                process.send_signal(signal.Signals[name])
        if passed_on and time.monotonic() - since > _GRACE_S:
            return _made_to_end(process, at_once=False), False
        if not passed_on and watched is not None and watched.still_s() > stall_s:
            return _made_to_end(process, at_once=True), True


def _made_to_end(process: subprocess.Popen[str], *, at_once: bool) -> int:
    if not at_once:
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
    process.kill()
    return process.wait()


def _relay(stream: TextIO, complaint: list[str]) -> None:
    with stream:
        for line in stream:
            if complaint or line.startswith(_COMPLAINT):
                complaint.append(line)
            else:
                sys.stderr.write(line)
                sys.stderr.flush()
