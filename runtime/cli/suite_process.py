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
        interrupted: whether the user stopped it.
        stalled_s: seconds without progress after which it was killed, None where it was not.
    """

    status: int
    complaint: str
    interrupted: bool
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

    It is killed once the file ``progress`` has not grown for ``stall_s`` seconds.
    """
    process = subprocess.Popen(  # noqa: S603  # this interpreter
        [*PYTEST, *arguments], env=dict(environment), stderr=subprocess.PIPE, text=True, errors="backslashreplace"
    )
    complaint: list[str] = []
    relay = threading.Thread(target=_relay, args=(process.stderr, complaint), daemon=True)
    relay.start()
    watched = None if progress is None else Progress(progress)
    interrupted = stalled = False
    while True:
        try:
            status = process.wait(_GRACE_S if interrupted else _LOOK_S)
            break
        except KeyboardInterrupt:  # from a terminal pytest got it too: it ends the run and writes what it knows
            interrupted = True
        except subprocess.TimeoutExpired:
            stalled = not interrupted and watched is not None and watched.still_s() > stall_s
            if interrupted or stalled:
                status = _made_to_end(process, at_once=stalled)
                break
    relay.join(_GRACE_S)
    text = "".join(complaint)
    if status != USAGE_ERROR:
        sys.stderr.write(text)
    told = " ".join(text.removeprefix(_COMPLAINT).split())
    return Ended(status, told, interrupted, stall_s if stalled else None)


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
    for line in stream:
        if complaint or line.startswith(_COMPLAINT):
            complaint.append(line)
        else:
            sys.stderr.write(line)
            sys.stderr.flush()
