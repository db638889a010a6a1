"""pytest over the suite in a process of its own: what it complains of, how it ends, and what an interrupt does to it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TextIO

USAGE_ERROR: Final = 4
NO_TESTS: Final = 5
PYTEST: Final = (sys.executable, "-P", "-m", "pytest")
"""The command; no module is looked for in the folder it runs in, whatever lies there."""
_COMPLAINT: Final = "ERROR: "
_GRACE_S: Final = 10.0
"""Seconds an interrupted run has to end by itself before it is interrupted again, and then killed."""


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit status (minus the signal that killed it), what a usage error said, whether the user stopped it."""

    status: int
    complaint: str
    interrupted: bool

    def told(self) -> str:
        """In words, after the name of the process."""
        if self.status >= 0:
            return f"died with status {self.status}"
        return f"was killed by {signal.Signals(-self.status).name}"


def run_pytest(arguments: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Run pytest to its end; what it prints is passed on at once, but for the text of a usage error."""
    process = subprocess.Popen(  # noqa: S603  # this interpreter
        [*PYTEST, *arguments], env=dict(environment), stderr=subprocess.PIPE, text=True, errors="backslashreplace"
    )
    complaint: list[str] = []
    relay = threading.Thread(target=_relay, args=(process.stderr, complaint), daemon=True)
    relay.start()
    interrupted = False
    while True:
        try:
            status = process.wait(_GRACE_S if interrupted else None)
            break
        except KeyboardInterrupt:  # from a terminal pytest got it too: it ends the run and writes what it knows
            interrupted = True
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                status = process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            break
    relay.join(_GRACE_S)
    text = "".join(complaint)
    if status != USAGE_ERROR:
        sys.stderr.write(text)
    return Ended(status, " ".join(text.removeprefix(_COMPLAINT).split()), interrupted)


def _relay(stream: TextIO, complaint: list[str]) -> None:
    for line in stream:
        if complaint or line.startswith(_COMPLAINT):
            complaint.append(line)
        else:
            sys.stderr.write(line)
            sys.stderr.flush()
