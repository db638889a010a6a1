"""The ahead-of-time gate: every kernel in every used configuration compiles for every target, on a machine without a device.

.. code-block:: console

   python -m forebay.backends.cuda.compile_gate             # compile all, compare with compiled.json; status 1 where it differs
   python -m forebay.backends.cuda.compile_gate --write     # compile all, write compiled.json
   python -m forebay.backends.cuda.compile_gate --sample    # one configuration of every kernel on every target
   python -m forebay.backends.cuda.compile_gate --names     # compile nothing: is every case in the table, every kernel in a case
   python -m forebay.backends.cuda.compile_gate --only decode_kernel --only sm_90    # rows whose text holds all of these

A fault is a kernel of ``kernels/triton`` in no case, a launch that does not compile, one that spills registers to memory or takes more
shared memory than the device gives a program, and a difference from the table: a row too few or too many, or another number of
registers, of bytes of shared memory or of warps. Another version of Triton than the table's allocates otherwise, so under one the
numbers are not compared, which is said. Scalars that AMD's compiler keeps in lanes of vector registers (``lanes``) are counted beside:
no memory is touched.

What is compiled stays in Triton's own cache (``TRITON_CACHE_DIR``), which knows kernels by their source: a run that was stopped goes on
where it was. The process must not interpret Triton.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import pkgutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

import forebay.kernels.triton

from .compile_cases import recorded
from .compile_recording import Launch
from .compile_table import TABLE, Row, Table, change_faults, name_faults, read, rule_faults, write
from .compile_targets import TARGETS, Usage, compiled, specialisation

PROGRESS: Final = 100
"""Rows between two lines of progress."""


def kernels_of(modules: Iterable[ModuleType]) -> set[str]:
    """Names of the kernels of modules: their compiled functions that no other one calls."""
    functions = {
        id(held): held for module in modules for held in vars(module).values() if isinstance(held, JITFunction)
    }
    called = {
        id(function.fn.__globals__.get(name))
        for function in functions.values()
        for name in function.fn.__code__.co_names
    }
    return {function.fn.__name__ for key, function in functions.items() if key not in called}


def kernel_modules() -> list[ModuleType]:
    """The modules of ``kernels/triton``, but for those that serve the interpreter alone."""
    package = forebay.kernels.triton
    return [
        importlib.import_module(f"{package.__name__}.{found.name}")
        for found in pkgutil.iter_modules(package.__path__)
        if not found.name.startswith("interpreter")
    ]


def work_of(launches: Sequence[Launch], targets: Iterable[str] = TARGETS) -> dict[Row, Launch]:
    """One launch for everything that would be compiled, by the first case that needs it."""
    work: dict[Row, Launch] = {}
    for name in targets:
        seen: set[tuple[str, str]] = set()
        for launch in launches:
            known = (launch.name, specialisation(launch, TARGETS[name]))
            if known in seen:
                continue
            seen.add(known)
            row, again = Row(launch.name, launch.case, name), 1
            while row in work:
                again += 1
                row = Row(launch.name, f"{launch.case} ({again})", name)
            work[row] = launch
    return work


def sampled(work: Mapping[Row, Launch]) -> dict[Row, Launch]:
    """The first configuration of every kernel on every target."""
    first: dict[tuple[str, str], Row] = {}
    for row in work:
        first.setdefault((row.kernel, row.target), row)
    return {row: work[row] for row in first.values()}


_work: list[tuple[Row, Launch]] = []
"""What a worker compiles, by index: workers are forked, so that launches need not be packed."""


def _compiled(index: int) -> Usage | str:
    row, launch = _work[index]
    try:
        return compiled(launch, TARGETS[row.target])
    except Exception as error:  # noqa: BLE001  (whatever a compiler refuses with is a fault of the row, not of the gate)
        return f"{type(error).__name__}: {str(error).strip() or 'no message'}"


def measured(work: Mapping[Row, Launch], workers: int) -> dict[Row, Usage | str]:
    """What each row takes, or why it does not compile; ``workers`` processes compile."""
    _work[:] = work.items()
    found: dict[Row, Usage | str] = {}
    began = time.monotonic()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        for (row, _), result in zip(_work, pool.map(_compiled, range(len(_work))), strict=True):
            found[row] = result
            for fault in result_faults({row: result}, None):
                print(fault, file=sys.stderr, flush=True)
            if len(found) % PROGRESS == 0:
                print(
                    f"{len(found)} of {len(work)} rows, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True
                )
    return found


def result_faults(found: Mapping[Row, Usage | str], table: Table | None) -> list[str]:
    """What is wrong with measured rows by themselves, and beside a table, where it was made by this version of Triton."""
    faults = []
    for row, result in found.items():
        if isinstance(result, str):
            faults.append(f"{row}: does not compile: {result}")
            continue
        faults += rule_faults(row, result)
        if table is not None and table.triton == triton.__version__:
            faults += change_faults(row, result, table)
    return faults


def coverage_faults(kernels: Iterable[str], launches: Iterable[Launch]) -> list[str]:
    """Kernels that no case launches."""
    launched = {launch.name for launch in launches}
    return [f"{name}: a kernel in no case; add one to compile_cases" for name in sorted(set(kernels) - launched)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the status is 1 where there is a fault, 2 where nothing could be done."""
    given = _parser().parse_args(arguments)
    if knobs.runtime.interpret:
        print(
            "this process interprets Triton (TRITON_INTERPRET is set); compiling takes one that does not",
            file=sys.stderr,
        )
        return 2
    try:
        table = None if given.write else read(given.table)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    launches = recorded()
    everything = work_of(launches)
    selected = {row for row in everything if all(text in str(row) for text in given.only)}
    work = {row: launch for row, launch in everything.items() if row in selected}
    if given.sample:
        work = sampled(work)
    if not work:
        print(f"no row holds {' and '.join(given.only)}", file=sys.stderr)
        return 2
    faults = coverage_faults(kernels_of(kernel_modules()), launches)
    if table is not None:
        held = (row for row in table.rows if all(text in str(row) for text in given.only))
        faults += name_faults(selected, held)
        if table.triton != triton.__version__:
            print(
                f"the table is of triton {table.triton}, this is {triton.__version__}: no numbers are compared with it"
            )
    found = {} if given.names else measured(work, given.workers)
    faults += result_faults(found, table)
    if given.write:
        write(_renewed(given.table, everything, found), given.table)
    for fault in faults:
        print(fault)
    print(_summary(everything, found, faults))
    return 1 if faults else 0


def _renewed(path: Path, everything: Iterable[Row], found: Mapping[Row, Usage | str]) -> Table:
    """The table with what was ``found``, and of other rows what it held; a row that breaks a rule is left out, and is missed later."""
    rows: dict[Row, Usage] = {}
    if path.exists() and set(everything) - set(found):
        before = read(path)
        if before.triton != triton.__version__:
            raise SystemExit(
                f"{path} is of triton {before.triton}, this is {triton.__version__}: write all rows anew, not some"
            )
        rows = {row: before.rows[row] for row in everything if row in before.rows and row not in found}
    good = {row: x for row, x in found.items() if isinstance(x, Usage) and not rule_faults(row, x)}
    return Table(triton.__version__, rows | good)


def _summary(everything: Mapping[Row, Any], found: Mapping[Row, Usage | str], faults: Sequence[str]) -> str:
    usages = [usage for usage in found.values() if isinstance(usage, Usage)]
    kernels = {row.kernel for row in everything}
    targets = Counter(row.target for row in everything)
    return (
        f"triton {triton.__version__}: {len(kernels)} kernels, {len(everything)} rows on {len(targets)} targets, "
        f"{len(found)} compiled: "
        f"{sum(usage.spilled > 0 for usage in usages)} spill, {sum(usage.lanes > 0 for usage in usages)} keep scalars in lanes; "
        f"{len(faults)} faults"
    )


def _workers(text: str) -> int:
    """A number of processes, for argparse; raises ValueError."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, expected at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m forebay.backends.cuda.compile_gate",
        description="Compile every kernel for every target, and compare.",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true", help="write the table instead of comparing with it")
    how.add_argument("--names", action="store_true", help="compile nothing, compare what there is to compile")
    parser.add_argument("--sample", action="store_true", help="one configuration of every kernel and target")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="rows that hold TEXT; several: all of them"
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="the table (default: the package's)")
    parser.add_argument(
        "--workers", type=_workers, default=os.cpu_count() or 1, help="processes that compile (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
