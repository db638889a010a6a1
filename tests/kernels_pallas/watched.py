"""Runs cases under the interpreters in a process of its own, for a wrong kernel may hang, or spoil the interpreter behind it.

``python -m tests.kernels_pallas.watched JSON`` reads a list of ``[mutant or "", case, mode]`` and prints a line of JSON for each run
that came to an end. A run that takes longer than it may ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import jax

from forebay.kernels import pallas as kernels
from tests.kernels_pallas.cases import FIRST_BLOCK, Call, build, run
from tests.kernels_pallas.mutants import CASES, MUTANTS, Mutant
from tests.kernels_pallas.oracle import complaint

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = Path(next(iter(kernels.__path__)))
SECONDS: Final = 60.0
HANG_SECONDS: Final = 20.0
"""What a run may take, and one that is to hang; compiled and begun it takes a second or two."""

Run = tuple[str, str, str]
"""Mutant or "", case and mode."""
Found = dict[Run, dict[str, Any]]
"""Kinds of findings with what was found, of each run: ``hang`` of one that did not end."""


def limit(run: Run) -> float:
    """Seconds that a run may take; the plain interpreter and XLA wait for nothing."""
    mutant, _, mode = run
    hangs = mode in ("on_wait", "eager") and mutant and MUTANTS[mutant].shown == "hang"
    return HANG_SECONDS if hangs else SECONDS


def mutated(mutant: Mutant, text: str) -> str:
    """The file's text with the change.

    Raises:
        ValueError: the text to be changed is not there exactly once.
    """
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(
            f"{mutant.file} has {count} times what the mutant changes, not once; mend the mutant: {mutant.old!r}"
        )
    return text.replace(mutant.old, mutant.new)


def package(mutant: str, folder: Path) -> ModuleType:
    """The module ``paged_decode`` of a copy of the kernels with a mutant's change; with "" of a copy as it is."""
    name = f"mutant_{len(list(folder.iterdir()))}"
    (folder / name).mkdir()
    for path in SOURCES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if mutant and MUTANTS[mutant].file == path.name:
            text = mutated(MUTANTS[mutant], text)
        (folder / name / path.name).write_text(text, encoding="utf-8")
    importlib.invalidate_caches()
    return importlib.import_module(f"{name}.paged_decode")


def expected_reads(call: Call) -> Counter[int]:
    """Pages that a call may read, each as often as blocks of queries see it (here all queries of a row are seen as one)."""
    case, blocks = call.case, len(call.pages)
    queries = max(1, min(case.query_len, 128 // case.group))
    found: Counter[int] = Counter()
    for b, visible in enumerate(case.visible):
        for first in range(0, case.query_len, queries):
            last = min(first + queries, case.query_len) - 1
            end = min(max(visible - (case.query_len - 1 - last), 0), case.table_len * case.block_size)
            start = max(max(visible - (case.query_len - 1 - first), 0) - case.window, 0)
            columns = range(start // case.block_size, -(-end // case.block_size))
            found.update(int(i) for i in call.table[b, columns.start : columns.stop] if FIRST_BLOCK <= i < blocks)
    return found


def observed(call: Call, mode: str, module: ModuleType) -> dict[str, Any]:
    """What one run shows: kinds of findings with what was found; empty if nothing is wrong."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
    from jax.experimental.pallas import tpu as pltpu

    watched = mode in ("on_wait", "eager")
    interpret: Any = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode) if watched else True  # type: ignore[arg-type]
    said = io.StringIO()
    findings: dict[str, Any] = {}
    try:
        with contextlib.redirect_stdout(said):
            out, lse = run(call, "xla" if mode == "xla" else "pallas", interpret, module=module)
    except Exception as error:  # noqa: BLE001 (a mutant may raise anything)
        pltpu.reset_tpu_interpret_mode_state()
        return {"raised": f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"}
    if wrong := complaint(call, out, lse):
        findings["value"] = wrong
    if "non-zero count" in said.getvalue():
        findings["left"] = next(line for line in said.getvalue().splitlines() if "non-zero count" in line)
    if watched and interpreter.races is not None:
        if interpreter.races.races_found:
            findings["race"] = said.getvalue()[:200]
        reads = [
            at for key, of in interpreter.races.reads.items() for *_, at, _ in of if key[0] == "hbm" and len(at) == 4
        ]
        read = Counter(int(at[0]) for at in reads)
        if read != (want := expected_reads(call)):
            findings["reads"] = f"read but not seen {dict(read - want)}, seen but not read {dict(want - read)}"
    return findings


def main() -> None:
    """Do the runs that the command line asks for."""
    jax.config.update("jax_platforms", "cpu")
    calls = {name: build(case) for name, case in CASES.items()}
    modules: dict[str, ModuleType] = {}
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for mutant, case, mode in json.loads(sys.argv[1]):
            if mutant not in modules:
                modules[mutant] = package(mutant, Path(folder))
            faulthandler.dump_traceback_later(limit((mutant, case, mode)), exit=True)
            findings = observed(calls[case], mode, modules[mutant])
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps([mutant, case, mode, findings]), flush=True)


def watch(runs: Sequence[Run]) -> Found:
    """The findings of runs, from processes of their own; behind a run that hangs the others go on in another.

    Raises:
        RuntimeError: a process ended otherwise.
    """
    found: Found = {}
    while left := [run for run in runs if run not in found]:
        command = [sys.executable, "-m", "tests.kernels_pallas.watched", json.dumps(left)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        for line in ended.stdout.splitlines():
            mutant, case, mode, findings = json.loads(line)
            found[mutant, case, mode] = findings
        stopped = next((run for run in left if run not in found), None)
        if stopped is not None and "Timeout" not in ended.stderr:
            raise RuntimeError(
                f"the process that was to run {stopped} ended with {ended.returncode}: {ended.stderr[-2000:]}"
            )
        if stopped is not None:
            found[stopped] = {"hang": f"no end within {limit(stopped):.0f} s"}
    return found


def watch_together(runs: Sequence[Run], processes: int = 2) -> Found:
    """The same, in several processes at a time; each run that may hang has its own, for it only waits."""
    hanging = [[run] for run in runs if limit(run) == HANG_SECONDS]
    rest = [run for run in runs if limit(run) != HANG_SECONDS]
    parts = [*hanging, *(rest[i::processes] for i in range(processes))]
    found: Found = {}
    with ThreadPoolExecutor(len(parts)) as pool:
        for part in pool.map(watch, parts):
            found |= part
    return found


if __name__ == "__main__":
    main()
