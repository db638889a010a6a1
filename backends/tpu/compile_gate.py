"""The ahead-of-time gate: every operation in every used configuration compiles for every TPU, on a machine without one.

.. code-block:: console

   python -m forebay.backends.tpu.compile_gate             # compile all, compare with compiled.json; status 1 where it differs
   python -m forebay.backends.tpu.compile_gate --write     # compile all, write compiled.json
   python -m forebay.backends.tpu.compile_gate --sample    # one configuration of every operation on every target
   python -m forebay.backends.tpu.compile_gate --names     # compile nothing: is every case in the table, made from these sources
   python -m forebay.backends.tpu.compile_gate --only attend --only v5e    # rows whose text holds all of these
   python -m forebay.backends.tpu.compile_gate --cases MODULE --table FILE     # cases of another module, in a table of their own

A fault is an operation that does not compile, one that holds a copy of a pool or does not take over the memory it was given for it,
one whose attention is not the Pallas kernel, a source that the table was not made from, and a difference from the table: a row too few
or too many, or other numbers. Another version of JAX or libtpu than the table's compiles otherwise, so under one the numbers are not
compared, which is said. Cases that are not ours (``judged`` is False) may do what they like, as long as they do what the table says.

libtpu, which has the compiler, must be installed; a TPU need not be there.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import jax

from .compile_cases import Case
from .compile_table import (
    TABLE,
    Row,
    Table,
    change_faults,
    name_faults,
    read,
    rule_faults,
    source_faults,
    sources,
    write,
)
from .compile_targets import TARGETS, Refused, Usage, libtpu, measured

CASES: Final = f"{__package__}.compile_cases"
"""The module whose ``cases()`` are compiled."""
PROGRESS: Final = 100
"""Rows between two lines of progress."""
Work = Mapping[Row, Case]


def work_of(module: str) -> dict[Row, Case]:
    """A row for every case of a module and every target.

    Raises:
        ValueError: the module cannot be imported, has no cases, or names two of them alike.
    """
    try:
        found: list[Case] = importlib.import_module(module).cases()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--cases: got {module!r}, expected a module with a function cases() ({error})") from error
    work = {Row(case.kernel, case.configuration, target): case for case in found for target in TARGETS}
    if len(work) != len(found) * len(TARGETS):
        twice = [name for name, n in Counter((case.kernel, case.configuration) for case in found).items() if n > 1]
        raise ValueError(f"{module}: cases of one name: {twice}")
    return work


def sampled(work: Work) -> dict[Row, Case]:
    """The first configuration of every operation on every target."""
    first: dict[tuple[str, str], Row] = {}
    for row in work:
        first.setdefault((row.kernel, row.target), row)
    return {row: work[row] for row in first.values()}


_work: dict[Row, Case] = {}
"""What a worker compiles. Workers are started anew, not forked: they make the cases themselves, by the name of the module."""


def _prepared(module: str) -> None:
    _work.update(work_of(module))


def _compiled(row: Row) -> Usage | Refused:
    case = _work[row]
    return measured(case.compile, row.target, case.layer)


def compiled(module: str, work: Work, workers: int) -> dict[Row, Usage | Refused]:
    """What each row takes, or why it does not compile; ``workers`` processes compile."""
    found: dict[Row, Usage | Refused] = {}
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepared, initargs=(module,)) as pool:
        for (row, case), result in zip(work.items(), pool.map(_compiled, work), strict=True):
            found[row] = result
            for fault in rule_faults(row, case, result):
                print(fault, file=sys.stderr, flush=True)
            if len(found) % PROGRESS == 0:
                print(
                    f"{len(found)} of {len(work)} rows, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True
                )
    return found


def result_faults(work: Work, found: Mapping[Row, Usage | Refused], table: Table | None) -> list[str]:
    """What is wrong with measured rows by themselves, and beside a table, where it was made by these versions."""
    faults = []
    for row, result in found.items():
        faults += rule_faults(row, work[row], result)
        if table is not None and table.versions == versions():
            faults += change_faults(row, result, table)
    return faults


def versions() -> dict[str, str]:
    """Of what compiles."""
    return {"jax": jax.__version__, "libtpu": libtpu() or "none"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the status is 1 where there is a fault, 2 where nothing could be done."""
    given = _parser().parse_args(arguments)
    try:
        table = None if given.write else read(given.table)
        everything = work_of(given.cases)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    work = {row: case for row, case in everything.items() if all(text in str(row) for text in given.only)}
    selected = list(work)
    if given.sample:
        work = sampled(work)
    if not work:
        print(f"no row holds {' and '.join(given.only)}", file=sys.stderr)
        return 2
    if not given.names and libtpu() is None:
        print("libtpu is not installed, and it has the compiler; install it: pip install libtpu", file=sys.stderr)
        return 2
    faults = []
    if table is not None:
        held = (row for row in table.rows if all(text in str(row) for text in given.only))
        faults += [*name_faults(selected, held), *source_faults(table)]
        if table.versions != versions():
            print(f"the table is of {table.versions}, this is {versions()}: no numbers are compared with it")
    found = {} if given.names else compiled(given.cases, work, given.workers)
    faults += result_faults(work, found, table)
    if given.write:
        write(_renewed(given.table, everything, found), given.table)
    for fault in faults:
        print(fault)
    print(_summary(everything, found, faults))
    return 1 if faults else 0


def _renewed(path: Path, everything: Work, found: Mapping[Row, Usage | Refused]) -> Table:
    """The table with what was ``found``, and of other rows what it held; a row that breaks a rule is left out, and is missed later."""
    rows: dict[Row, Usage | Refused] = {}
    if path.exists() and set(everything) - set(found):
        before = read(path)
        if before.versions != versions() or source_faults(before):
            raise SystemExit(f"{path} is of other versions or sources: write all rows anew, not some")
        rows = {row: before.rows[row] for row in everything if row in before.rows and row not in found}
    good = {row: x for row, x in found.items() if not rule_faults(row, everything[row], x)}
    return Table(versions(), sources(), rows | good)


def _summary(everything: Work, found: Mapping[Row, Usage | Refused], faults: Sequence[str]) -> str:
    kernels, targets = {row.kernel for row in everything}, {row.target for row in everything}
    usages = [x for x in found.values() if isinstance(x, Usage)]
    held = max((x.temporaries for x in usages), default=0)
    return (
        f"{_said(versions())}: {len(kernels)} operations, {len(everything)} rows on {len(targets)} targets, {len(found)} compiled: "
        f"{len(found) - len(usages)} refused, {held} bytes of temporaries at most; {len(faults)} faults"
    )


def _said(names: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in names.items())


def _workers(text: str) -> int:
    """A number of processes, for argparse; raises ValueError."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, expected at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m forebay.backends.tpu.compile_gate",
        description="Compile every operation for every TPU, and compare.",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true", help="write the table instead of comparing with it")
    how.add_argument("--names", action="store_true", help="compile nothing, compare what there is to compile")
    parser.add_argument("--sample", action="store_true", help="one configuration of every operation and target")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="rows that hold TEXT; several: all of them"
    )
    parser.add_argument(
        "--cases", default=CASES, metavar="MODULE", help="whose cases() are compiled (default: %(default)s)"
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="the table (default: the package's)")
    parser.add_argument(
        "--workers", type=_workers, default=os.cpu_count() or 1, help="processes that compile (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
