"""Seeds faults, each in a process of its own, and collects what the suite said of them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from forebay.specs.errors import InvalidInput
from forebay.specs.faults.catalogue import Fault

Verdict = Literal["killed", "survived", "killed by another clause", "too coarse", "does not apply"]
TIMEOUT_S: Final = 240.0


@dataclass(frozen=True)
class Result:
    """What became of one fault.

    Attributes:
        killed_by: tests that fell, by id, with the clauses they carry.
        detail: what else there is to say: the error, the plainest test that fell, a timeout.
    """

    fault: Fault
    verdict: Verdict
    killed_by: dict[str, list[str]]
    ran: int
    seconds: float
    detail: str = ""

    @property
    def good(self) -> bool:
        """Whether the suite caught the fault by a test of its clause, and the fault leaves the plainest run right."""
        return self.verdict == "killed"


def run(faults: Sequence[Fault], *, everything: bool, workers: int, timeout_s: float = TIMEOUT_S) -> Iterator[Result]:
    """Seed each fault, ``workers`` at a time; results as they come.

    ``everything`` runs the whole suite on each; else the tests of its clause up to the first that falls.
    """
    waiting, running = list(faults), list[_Running]()
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(_Running(waiting.pop(0), everything, timeout_s))
        multiprocessing.connection.wait([one.end for one in running], timeout=1.0)
        for one in list(running):
            result = one.result()
            if result is not None:
                running.remove(one)
                yield result


class _Running:
    """One fault in its process."""

    def __init__(self, fault: Fault, everything: bool, timeout_s: float) -> None:
        context = multiprocessing.get_context("fork")
        self._fault, self._timeout_s = fault, timeout_s
        self._began = time.monotonic()
        self.end, there = context.Pipe(duplex=False)
        self._process = context.Process(target=_seed_and_judge, args=(fault, everything, there))
        self._process.start()
        there.close()

    def result(self) -> Result | None:
        """The result, or None while there is none."""
        seconds = round(time.monotonic() - self._began, 1)
        if self.end.poll():
            try:
                said = self.end.recv()
            except EOFError:
                said = {"error": f"the process died (exit code {self._joined()})"}
        elif seconds > self._timeout_s:
            self._process.kill()
            said = {"error": f"no end within {self._timeout_s:g} s"}
        else:
            return None
        self._joined()
        self.end.close()
        return _result(self._fault, said, seconds)

    def _joined(self) -> int | None:
        self._process.join(10)
        return self._process.exitcode


def _seed_and_judge(fault: Fault, everything: bool, there: multiprocessing.connection.Connection) -> None:
    """The child process: nothing of Forebay that a fault may patch is kept from the parent."""
    from forebay.specs.faults.seeding import check_applies, seed

    try:
        check_applies(fault)
    except InvalidInput as error:
        there.send({"applies": False, "error": str(error)})
        return
    try:
        seed(fault)
        from forebay.specs.faults.judging import judge

        said = vars(judge(fault, everything=everything))
        if not everything and not said["failed"] and not said["plain_failed"] and not said["error"]:
            others = judge(fault, everything=True)
            said = vars(others)
    except Exception as error:  # noqa: BLE001  # whatever a fault breaks is what there is to say of it
        said = {"error": f"{type(error).__name__}: {error}"}
    there.send(said)
    there.close()


def _result(fault: Fault, said: dict[str, Any], seconds: float) -> Result:
    plain, failed, error = said.get("plain_failed", []), said.get("failed", {}), said.get("error", "")
    by_clause = any(fault.clause in clauses for clauses in failed.values())
    verdict: Verdict
    detail = ""
    if not said.get("applies", True):
        verdict, detail = "does not apply", error
    elif plain or (error and not failed):
        verdict, detail = "too coarse", error or f"the plainest run falls: {plain[0]}"
    elif by_clause:
        verdict = "killed"
    else:
        verdict = "killed by another clause" if failed else "survived"
    return Result(fault, verdict, failed, said.get("ran", 0), seconds, detail)
