"""Runs one part of the check in a process of its own, with a time limit; whatever becomes of it, there is a result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

Status = Literal[
    "passed",
    "failed",
    "crashed",
    "over its time",
    "not run: time",
    "not run: not asked for",
    "not present",
    "measured",
    "dry",
]
LEAST_S: Final = 5.0
"""A part that has less time than this is not begun."""
GRACE_S: Final = 8.0
"""Seconds a part has between being told to end and being killed: the suite writes what it knows of itself."""
TAIL: Final = 6_000
"""Characters that are kept of what a part prints."""


@dataclass
class Outcome:
    """What became of one part.

    Attributes:
        name: of the part.
        status: ``measured`` and ``dry`` are those of a part that holds nothing and only takes numbers, the latter where these say
            nothing of a device.
        seconds: it took.
        data: what it found, as JSON.
        problems: in words, what is wrong.
        tail: the end of what it printed.
    """

    name: str
    status: Status
    seconds: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    tail: str = ""


@dataclass(frozen=True)
class Ended:
    """How a process ended: ``status`` as subprocess has it, None where it was over its time."""

    status: int | None
    seconds: float
    output: str


def run_process(
    command: Sequence[str],
    limit_s: float,
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    own_group: bool = False,
) -> Ended:
    """Run ``command``; one that is over ``limit_s`` is told to end, then killed.

    What it prints goes to ``log``, of which the end is returned. With ``own_group`` it leads a process group, of which nothing is left
    when this returns; without, it ends with the group of this process.
    """
    start = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=own_group,
        )
        signalled = partial(_signal, process.pid if own_group else None, process)
        status: int | None = None
        try:
            status = process.wait(max(limit_s, 0.1))
        except subprocess.TimeoutExpired:
            signalled(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:
            signalled(signal.SIGKILL)
            process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    return Ended(status, time.monotonic() - start, text[-TAIL:])


def run_part(package: str, name: str, arguments: Sequence[str], limit_s: float, work: Path) -> Outcome:
    """Run ``python -m forebay.hardware.checking.part PACKAGE NAME ...`` and read the result it wrote."""
    if limit_s < LEAST_S:
        return Outcome(name, "not run: time", problems=["the parts before it took all the time"])
    result = work / f"{name}.json"
    command = [
        sys.executable,
        "-m",
        "forebay.hardware.checking.part",
        package,
        name,
        "--result",
        str(result),
        *arguments,
    ]
    ended = run_process([*command, "--limit", str(limit_s)], limit_s, work / f"{name}.log", own_group=True)
    seconds = round(ended.seconds, 1)
    made = _read(result)
    if made is not None:  # a part writes its result as it goes; one that was cut keeps what it had
        outcome = Outcome(name, made["status"], seconds, made["data"], made["problems"], ended.output)
        if ended.status == 0:
            return outcome
    else:
        outcome = Outcome(name, "crashed", seconds, tail=ended.output)
    if ended.status is None:
        outcome.status = "over its time"
        outcome.problems.append(f"over its time of {limit_s:.0f} s; what it had found until then is kept")
    else:
        outcome.status = "crashed"
        outcome.problems.append(f"its process ended with status {ended.status}")
    return outcome


def write_result(path: Path, status: Status, data: Mapping[str, Any], problems: Sequence[str] = ()) -> None:
    """Write a part's result, by one rename."""
    beside = path.with_name(f"{path.name}.making")
    text = json.dumps({"status": status, "data": dict(data), "problems": list(problems)}, indent=1)
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return made


def _signal(group: int | None, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if group is None:
        process.send_signal(number)
        return
    with suppress(ProcessLookupError):
        os.killpg(group, number)
