"""Seeds faults, each in a process of its own, and collects what the suite said of them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

from forebay.specs.errors import InvalidInput
from forebay.specs.faults.catalogue import Fault
from forebay.specs.faults.seeding import check_applies, seed

Verdict = Literal["killed", "survived", "killed by another clause", "killed otherwise", "too coarse", "does not apply"]
TIMEOUT_S: Final = 240.0
FULL_TIMEOUT_S: Final = 1200.0
"""Longest time of one fault, for the tests of its clause and for the whole suite, on a machine that does other work too."""
OWN: Final = Path(__file__).resolve().parents[2]
"""The folder of the package."""


@dataclass(frozen=True)
class Result:
    """What became of one fault.

    Attributes:
        verdict: ``killed otherwise`` by tests of its clause, but not by its counter, or its pair by nothing but that counter.
        killed_by: tests that fell, by id, with the clauses they carry.
        detail: what else there is to say: the error, the plainest test that fell, a timeout.
        about: by test that fell, the names its failed assertion is about.
    """

    fault: Fault
    verdict: Verdict
    killed_by: dict[str, list[str]]
    ran: int
    seconds: float
    detail: str = ""
    about: dict[str, list[str]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether the suite caught the fault by a test of its clause, and the fault leaves the plainest run right."""
        return self.verdict == "killed"

    @property
    def killers(self) -> list[str]:
        """The tests that catch it: those of its clause, by its counter where it has one."""
        return [
            test
            for test, clauses in self.killed_by.items()
            if self.fault.is_killed_by(clauses, self.about.get(test, ()))
        ]


def run(faults: Sequence[Fault], *, everything: bool, workers: int, timeout_s: float | None = None) -> Iterator[Result]:
    """Seed each fault, ``workers`` at a time; results as they come.

    ``everything`` runs the whole suite on each; else the tests of its clause up to the first that catches it.

    Raises:
        InvalidInput: at the first result, on a system without fork.
    """
    _fork()
    waiting, running = list(faults), list[_Running]()
    clauses = {} if everything or not faults else _warmed()
    if timeout_s is None:
        timeout_s = FULL_TIMEOUT_S if everything else TIMEOUT_S
    gc.freeze()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_Running(waiting.pop(0), clauses, timeout_s))
            multiprocessing.connection.wait([one.end for one in running], timeout=1.0)
            for one in list(running):
                result = one.result()
                if result is not None:
                    running.remove(one)
                    yield result
    finally:
        gc.unfreeze()
        for one in running:
            one.stop()


def _fork() -> multiprocessing.context.ForkContext:
    """Processes that begin as copies of this one.

    Raises:
        InvalidInput: the system makes none.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise InvalidInput(
            f"seeding faults starts each from a copy of one process (fork), which {sys.platform} does not make; run it on Linux"
        )
    return multiprocessing.get_context("fork")


def _warmed() -> dict[str, list[str]]:
    """The clauses of every test of the suite.

    The suite is collected in a process of its own; what that imports of other people's libraries is imported here too, so that it need
    not be in the process of each fault.
    """
    end, there = _fork().Pipe(duplex=False)
    process = _fork().Process(target=_collect, args=(there,))
    process.start()
    there.close()
    clauses: dict[str, list[str]]
    names: list[str]
    clauses, names = end.recv()
    process.join()
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # no module of a library, or one that wants another surrounding
                import_module(name)
    return clauses


def _collect(there: multiprocessing.connection.Connection) -> None:
    from forebay.specs.faults.judging import collect

    before = set(sys.modules)
    clauses = collect()
    there.send((clauses, [name for name in sys.modules if name not in before and _is_of_others(name)]))
    there.close()


def _is_of_others(name: str) -> bool:
    """Whether a module is a library's: none of Forebay's own, which pytest also imports under names of its making."""
    spec = getattr(sys.modules[name], "__spec__", None)
    return spec is not None and OWN not in Path(spec.origin or "").resolve().parents


class _Running:
    """One fault in its process."""

    def __init__(self, fault: Fault, clauses: Mapping[str, list[str]], timeout_s: float) -> None:
        self._fault, self._timeout_s = fault, timeout_s
        self._began = time.monotonic()
        self.end, there = _fork().Pipe(duplex=False)
        self._process = _fork().Process(target=_seed_and_judge, args=(fault, clauses, there))
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

    def stop(self) -> None:
        """End the process, whatever it is at."""
        self._process.kill()
        self._joined()
        self.end.close()

    def _joined(self) -> int | None:
        self._process.join(10)
        return self._process.exitcode


def _seed_and_judge(
    fault: Fault, clauses: Mapping[str, list[str]], there: multiprocessing.connection.Connection
) -> None:
    """The child process: nothing of Forebay that a fault may patch is kept from the parent. Without ``clauses`` it runs everything."""
    try:
        check_applies(fault)
    except InvalidInput as error:
        there.send({"applies": False, "error": str(error)})
        return
    try:
        seed(fault)
        from forebay.specs.faults.judging import files_of, judge

        said = vars(judge(fault, "clause", files_of(fault.clause, clauses)) if clauses else judge(fault, "all"))
        if clauses and not said["failed"] and not said["plain_failed"] and not said["error"]:
            said = vars(judge(fault, "first"))
    except Exception as error:  # noqa: BLE001  # whatever a fault breaks is what there is to say of it
        said = {"error": f"{type(error).__name__}: {error}"}
    there.send(said)
    there.close()


def _result(fault: Fault, said: dict[str, Any], seconds: float) -> Result:
    plain, failed, error = said.get("plain_failed", []), said.get("failed", {}), said.get("error", "")
    made = Result(fault, "killed", failed, said.get("ran", 0), seconds, about=said.get("about", {}))
    verdict, detail = _verdict(made, plain, "" if said.get("applies", True) else error, error)
    return dataclasses.replace(made, verdict=verdict, detail=detail)


def _verdict(made: Result, plain: Sequence[str], no_longer: str, error: str) -> tuple[Verdict, str]:
    fault, failed = made.fault, made.killed_by
    if no_longer:
        return "does not apply", no_longer
    if plain or (error and not failed):
        return "too coarse", error or f"the plainest run falls: {plain[0]}"
    if made.killers:
        return "killed", ""
    if any(fault.clause in clauses for clauses in failed.values()):
        if fault.pair_of:
            return "killed otherwise", f"no assertion about a value fell, {fault.counter} apart"
        return "killed otherwise", f"no assertion about {fault.counter} fell"
    if failed:
        return "killed by another clause", ", ".join(sorted({c for clauses in failed.values() for c in clauses}))
    return "survived", ""
