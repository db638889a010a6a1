"""``forebay faults``: seed faults, and see that the shared suite catches each."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.runtime.settings import isolated
from forebay.specs.errors import InvalidInput

if TYPE_CHECKING:
    from forebay.specs.faults.catalogue import Fault
    from forebay.specs.faults.runner import Result


def faults(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="FAULT", help="Faults to seed, or areas of them; none for all.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Run the whole suite on each fault instead of its clause.")
    ] = False,
    backend: Annotated[
        str,
        typer.Option(metavar="NAME[:MODE]", help="The backend whose faults are seeded, and which the suite judges."),
    ] = "sim",
    list_only: Annotated[bool, typer.Option("--list", help="List the faults and their clauses.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Faults at a time.")] = os.cpu_count() or 1,
    matrix: Annotated[
        Path | None,
        typer.Option(
            help="With --full: the folder for matrix.json and MATRIX.md; a run that was interrupted goes on there.",
            metavar="FOLDER",
        ),
    ] = None,
) -> None:
    """Prove the suite: seed faults, and see it catch each.

    A fault is caught if a test of its clause fails and the plainest run stays right.

    Exit status 1 where a fault survives, is caught by another clause's tests only, breaks the plainest run, comes to no end or
    no longer applies; 2 where the suite falls without any fault.
    """
    # Imported here: the suite needs pytest and hypothesis, which the other commands do without.
    try:
        from forebay.specs.faults import catalogue, runner
        from forebay.specs.faults import matrix as matrices
        from forebay.specs.faults.results import Results
    except ImportError as error:
        raise InvalidInput(f"seeding faults needs {error.name}: pip install 'forebay[suite]'") from error
    chosen = catalogue.select(names or [], backend)
    if list_only:
        for fault in chosen:
            print(f"{fault.id:48} {fault.clause:4} {fault.title}")
        return
    if matrix is not None and (names or backend != catalogue.SIM or not (full and matrix.is_dir())):
        raise InvalidInput(
            f"--matrix {matrix}: expected an existing folder, --full, no FAULT and no other --backend, for it is of all of sim's"
        )
    if sys.flags.optimize:
        raise InvalidInput("the suite judges by assertions: run python without -O and without PYTHONOPTIMIZE")
    results: list[runner.Result] = []

    def show(result: runner.Result, when: str = "") -> None:
        results.append(result)
        by = next(iter(result.killers or result.killed_by), "")
        said = result.detail or by
        print(f"{result.verdict:24} {result.fault.clause:4} {result.fault.id}  {said}{when}", flush=True)

    try:
        if matrix is None:
            for result in _judged(chosen, full=full, workers=workers):
                show(result)
        else:
            matrices.outputs(matrix)  # refuse before a long run what could not be written after it
            with Results(matrix / matrices.PARTIAL) as kept:
                for result in kept.taken_up(chosen):
                    show(result, "  (an earlier run)")
                done = {result.fault.id for result in results}
                for result in _judged([f for f in chosen if f.id not in done], full=full, workers=workers):
                    kept.add(result)
                    show(result)
                matrices.write(results, matrix)
                if all(result.good for result in results):
                    kept.discard()  # else the next run need not judge the good ones anew
    except KeyboardInterrupt as error:
        by = str(error) or "an interrupt"
        print(f"STOPPED by {by}: {len(results)} of {len(chosen)} faults were judged", flush=True)
        raise
    bad = [result for result in results if not result.good]
    count = f"{len(results)} fault{'' if len(results) == 1 else 's'}"
    print(f"{count}, {len(results) - len(bad)} killed by a test of their clause, {len(bad)} not")
    raise typer.Exit(1 if bad else 0)


def _judged(chosen: Sequence[Fault], *, full: bool, workers: int) -> Iterator[Result]:
    """The results of seeding each; nothing of the machine's own pytest reaches the processes that judge."""
    from forebay.specs.faults import runner

    with tempfile.TemporaryDirectory(prefix="forebay-faults-") as folder, isolated(Path(folder)):
        yield from runner.run(chosen, everything=full, workers=workers)
