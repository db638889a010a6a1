"""Seeds faults, each in a process of its own, and collects what the suite said of them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

from forebay.specs.errors import InvalidInput
from forebay.specs.faults.catalogue import PLAINEST, SIM, UNSEEDED, Fault
from forebay.specs.faults.seeding import check_applies, seed
from forebay.specs.signals import ENDING, INTERRUPT

Verdict = Literal[
    "killed", "survived", "killed by another clause", "killed otherwise", "too coarse", "no end", "does not apply"
]
TIMEOUT_S: Final = 240.0
FULL_TIMEOUT_S: Final = 1200.0
"""Longest time of one fault, for the tests of its clause and for the whole suite, on a machine that does other work too."""
OWN: Final = Path(__file__).resolve().parents[2]
"""The folder of the package."""
_ENDS: Final = frozenset(signal.Signals[name] for name in (*INTERRUPT, *ENDING) if name in signal.Signals.__members__)
WHOLE: Final = "the whole suite"
"""What a process sends instead of a test's name, when no test of the clause fell."""


@dataclass(frozen=True)
class Result:
    """What became of one fault.

    Attributes:
        verdict: ``killed otherwise`` by tests of its clause, but by a mere crash, not by its counter, or its pair only by that; ``no
            end`` where a test ran into the time limit: a fault that hangs it, or a slow machine, which is no proof of either.
        killed_by: tests that fell, by id, with the clauses they carry.
        detail: what else there is to say: the error, the plainest test that fell, a timeout.
        fell: by test that fell, the name of the error, then the names its failed assertion is about.
    """

    fault: Fault
    verdict: Verdict
    killed_by: dict[str, list[str]]
    ran: int
    seconds: float
    detail: str = ""
    fell: dict[str, list[str]] = field(default_factory=dict)

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
            if self.fault.is_killed_by(clauses, self.fell.get(test, ("",)))
        ]


def run(faults: Sequence[Fault], *, everything: bool, workers: int, timeout_s: float | None = None) -> Iterator[Result]:
    """Seed each fault, ``workers`` at a time; results as they come.

    ``everything`` runs the whole suite on each; else the tests of its clause up to the first that catches it. The same tests run once
    without a fault, among the first; no result is given before that has passed.

    Raises:
        InvalidInput: a test falls, or comes to no end, without any fault: it would "catch" every fault of its clause; the faults are of
            several backends, which may not share a process; or the system has no fork.
    """
    if not faults:
        return
    backend, *others = dict.fromkeys(fault.backend for fault in faults)
    if others:
        raise InvalidInput(f"faults of {backend} and of {', '.join(others)}; expected those of one backend at a time")
    unseeded = dataclasses.replace(UNSEEDED, backend=backend)
    _fork()
    waiting, running, held = list(faults), list[_Running](), list[Result]()
    clauses = {} if everything else _warmed(unseeded)
    if timeout_s is None:
        timeout_s = FULL_TIMEOUT_S if everything else TIMEOUT_S
    passed = False
    gc.freeze()
    try:
        broken = {fault.clause for fault in faults}
        with _undisturbed():
            running.append(_Running(unseeded, clauses, max(timeout_s, FULL_TIMEOUT_S), () if everything else broken))
        while waiting or running:
            while waiting and len(running) < workers:
                with _undisturbed():
                    running.append(_Running(waiting.pop(0), clauses, timeout_s))
            multiprocessing.connection.wait([one.end for one in running], timeout=1.0)
            for one in list(running):
                result = one.result()
                if result is not None:
                    running.remove(one)
                    if result.fault is unseeded:
                        _check_unseeded(result)
                        passed = True
                    else:
                        held.append(result)
            if passed:
                yield from held
                held.clear()
    finally:
        gc.unfreeze()
        for one in running:
            one.stop()


def _check_unseeded(result: Result) -> None:
    if result.verdict != "survived":
        names = list(result.killed_by)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        fallen = ", ".join(names[:3]) + more if names else result.detail
        raise InvalidInput(
            f"no fault was seeded, and the suite does not pass: {fallen}; see forebay conform {result.fault.backend}, "
            "and mend that first"
        )


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that end this process come behind the block: who starts a process in it has noted it before, and can end it.

    The process inherits this, and lifts it with :func:`_disturbed`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _disturbed() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)


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


def _warmed(unseeded: Fault) -> dict[str, list[str]]:
    """The clauses of every test of the suite on the backend of ``unseeded``.

    The suite is collected, and its plainest tests run, in a process of its own; what that imports of other people's libraries is
    imported here too, so that it need not be in the process of each fault. Of another backend than ``sim`` it is not: a library may
    want to be imported in a way that only the backend, when it is opened, sees to.

    Raises:
        InvalidInput: that process died.
    """
    end, there = _fork().Pipe(duplex=False)
    process = _fork().Process(target=_collect, args=(unseeded, there), daemon=True)
    clauses: dict[str, list[str]]
    names: list[str]
    try:
        with _undisturbed():
            process.start()
        there.close()
        clauses, names = end.recv()
    except EOFError:
        raise InvalidInput(
            f"no fault was seeded, and the suite cannot be collected; see forebay conform {unseeded.backend}, and mend that first"
        ) from None
    finally:  # it has said all it has to say, or this process is to end: nothing of it may go on
        if process.pid is not None:
            process.kill()
            process.join()
        end.close()
    for name in names if unseeded.backend == SIM else ():
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # no module of a library, or one that wants another surrounding
                import_module(name)
    return clauses


def _collect(unseeded: Fault, there: multiprocessing.connection.Connection) -> None:
    _disturbed()
    from forebay.specs.faults.judging import collect, files_of, judge

    before = set(sys.modules)
    clauses = collect(unseeded.backend)
    judge(unseeded, "all", files_of("", clauses))
    there.send((clauses, [name for name in sys.modules if name not in before and _is_of_others(name)]))
    there.close()


def _is_of_others(name: str) -> bool:
    """Whether a module is a library's: none of Forebay's own, which pytest also imports under names of its making."""
    spec = getattr(sys.modules[name], "__spec__", None)
    return spec is not None and OWN not in Path(spec.origin or "").resolve().parents


class _Running:
    """One fault in its process, or none: then the tests of the clauses ``broken`` run, all of them if there is none."""

    def __init__(
        self, fault: Fault, clauses: Mapping[str, list[str]], timeout_s: float, broken: Collection[str] = ()
    ) -> None:
        self._fault, self._timeout_s = fault, timeout_s
        self._began = time.monotonic()
        self._at = ""
        self.end, there = _fork().Pipe(duplex=False)
        self._process = _fork().Process(
            target=_seed_and_judge, args=(fault, clauses, tuple(broken), there), daemon=True
        )
        self._process.start()
        there.close()

    def result(self) -> Result | None:
        """The result, or None while there is none."""
        seconds = round(time.monotonic() - self._began, 1)
        said = self._said()
        if said is None and seconds > self._timeout_s:
            self._process.kill()
            said = {"error": f"no end within {self._timeout_s:g} s, in {self._at or 'its import'}", "hung": self._at}
        if said is None:
            return None
        self._joined()
        self.end.close()
        return _result(self._fault, said, seconds)

    def _said(self) -> dict[str, Any] | None:
        """What the process said in the end; None while it says no more than which test it is at."""
        while self.end.poll():
            try:
                said = self.end.recv()
            except EOFError:
                return {"error": f"the process died (exit code {self._joined()}), in {self._at or 'its import'}"}
            if isinstance(said, dict):
                return said
            if said == WHOLE:  # no test of its clause fell: to tell who else catches it takes as long as the suite does
                self._timeout_s = max(self._timeout_s, FULL_TIMEOUT_S)
            else:
                self._at = said
        return None

    def stop(self) -> None:
        """End the process, whatever it is at."""
        self._process.kill()
        self._joined()
        self.end.close()

    def _joined(self) -> int | None:
        self._process.join(10)
        return self._process.exitcode


def _seed_and_judge(
    fault: Fault,
    clauses: Mapping[str, list[str]],
    broken: Collection[str],
    there: multiprocessing.connection.Connection,
) -> None:
    """The child process: nothing of Forebay that a fault may patch is kept from the parent. Without ``clauses`` it runs everything.

    It sends the name of each test that begins, and in the end a dictionary.
    """
    _disturbed()
    try:
        check_applies(fault)
    except InvalidInput as error:
        there.send({"applies": False, "error": str(error)})
        return
    try:
        if fault.backend != SIM:
            _open_once(fault.backend)
        seed(fault)
        from forebay.specs.faults.judging import files_of, judge

        wanted = broken or ({fault.clause} if clauses and fault.clause else ())
        files = dict.fromkeys(file for clause in wanted for file in files_of(clause, clauses))
        scope: Literal["clause", "all"] = "clause" if fault.clause and clauses else "all"
        said = vars(judge(fault, scope, list(files), wanted=wanted, tell=there.send))
        if scope == "clause" and not said["failed"] and not said["plain_failed"] and not said["error"]:
            there.send(WHOLE)
            said = vars(judge(fault, "first", tell=there.send))
    except Exception as error:  # noqa: BLE001  # whatever a fault breaks is what there is to say of it
        said = {"error": f"{type(error).__name__}: {error}"}
    there.send(said)
    there.close()


def _open_once(backend: str) -> None:
    """Run the plainest tests without a fault, so that the backend's libraries are imported as the backend wants them.

    A fault's modules are imported before the suite opens the backend, and with them these libraries.
    """
    from forebay.specs.faults.judging import files_of, judge

    judge(dataclasses.replace(UNSEEDED, backend=backend), "all", files_of("", {}))


def _result(fault: Fault, said: dict[str, Any], seconds: float) -> Result:
    plain, failed, error = said.get("plain_failed", []), said.get("failed", {}), said.get("error", "")
    made = Result(fault, "killed", failed, said.get("ran", 0), seconds, fell=said.get("fell", {}))
    hung = said.get("hung", "")
    if hung and not hung.startswith(PLAINEST):
        return dataclasses.replace(made, verdict="no end", detail=f"{error}; the plainest run had ended")
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
        if fault.counter:
            return "killed otherwise", f"no assertion about {fault.counter} fell"
        return "killed otherwise", f"only by {', '.join(sorted({by for by, *_ in made.fell.values()}))}"
    if failed:
        return "killed by another clause", ", ".join(sorted({c for clauses in failed.values() for c in clauses}))
    return "survived", ""
