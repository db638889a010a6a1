"""The clause × fault matrix: which clauses' tests fall by which fault, as data and as a page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from forebay.specs.clauses import catalogue
from forebay.specs.faults.catalogue import without_fault
from forebay.specs.faults.runner import Result
from forebay.specs.files import output_at, write_text
from forebay.specs.sources import suite_hash

MATRIX_JSON: Final = "matrix.json"
MATRIX_PAGE: Final = "MATRIX.md"
PARTIAL: Final = "matrix.partial"
"""Results of a run that has not come to its end."""


def matrix(results: Iterable[Result]) -> dict[str, Any]:
    """The matrix as plain data: for each fault its clause, verdict, how many tests fell and caught it, and how many fell by clause.

    A fault with a counter is caught only by assertions about that counter, its pair only by others. The digest is that of the fault.
    """
    faults = {}
    for result in sorted(results, key=lambda result: result.fault.id):
        fallen = Counter(clause for clauses in result.killed_by.values() for clause in clauses)
        faults[result.fault.id] = {
            "clause": result.fault.clause,
            "title": result.fault.title,
            "counter": result.fault.counter,
            "raises": result.fault.raises,
            "pair_of": result.fault.pair_of,
            "digest": result.fault.digest,
            "verdict": result.verdict,
            "tests_catching": len(result.killers),
            "tests_fallen": len(result.killed_by),
            "tests_run": result.ran,
            "fallen_by_clause": {c.id: fallen[c.id] for c in catalogue().in_force() if fallen[c.id]},
        }
    return {
        "spec_version": catalogue().version,
        "suite_hash": suite_hash(),
        "faults": faults,
        "clauses_without_fault": list(without_fault()),
    }


def page(data: dict[str, Any]) -> str:
    """The matrix as Markdown: a line a fault."""
    faults = data["faults"]
    killed = sum(fault["verdict"] == "killed" for fault in faults.values())
    pairs = sum(bool(fault["pair_of"]) for fault in faults.values())
    lines = [
        "# Clause × fault matrix",
        "",
        "Written by `forebay faults --full --matrix FOLDER`: every seeded fault, the clause it breaks, and how many tests of which",
        f"clauses fell in the whole suite on `sim`. Contract {data['spec_version']}, suite {data['suite_hash'][:16]}.",
        "",
        f"{killed} of {len(faults)} faults were killed by a test of their own clause; {pairs} of them are pairs.",
        "Clauses without a fault: " + (", ".join(data["clauses_without_fault"]) or "none") + ".",
        "",
        "A fault with a counter leaves every value right, so only tests whose failed assertion is about that counter catch it. Where a",
        "guard absorbs it there is a pair, `-unguarded`: the same fault without the guard, which only assertions about values catch.",
        "Where `shown by` names an error, the mistake is that it is raised, at all or in the place of another; every other fault is",
        "caught by an assertion, never by a mere crash.",
        "",
        "| fault | clause | verdict | shown by | tests catching | tests fallen | by clause |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, fault in faults.items():
        by_clause = " ".join(f"{clause}:{n}" for clause, n in fault["fallen_by_clause"].items())
        shown_by = "" if fault["pair_of"] else fault["counter"] or fault["raises"]
        cells = (
            f"`{name}`",
            fault["clause"],
            fault["verdict"],
            shown_by,
            fault["tests_catching"],
            fault["tests_fallen"],
        )
        lines.append("| " + " | ".join(str(cell) for cell in (*cells, by_clause)) + " |")
    return "\n".join(lines) + "\n"


def outputs(folder: Path) -> tuple[Path, Path]:
    """Where ``matrix.json`` and ``MATRIX.md`` of a folder are to be written.

    Raises:
        InvalidInput: one of them cannot be written there.
    """
    data, as_page = (output_at(folder / name, f"matrix {folder / name}") for name in (MATRIX_JSON, MATRIX_PAGE))
    return data, as_page


def write(results: Iterable[Result], folder: Path) -> None:
    """Write ``matrix.json`` and ``MATRIX.md`` into ``folder``.

    Raises:
        InvalidInput: as :func:`outputs`.
        OSError: one of them could not be written.
    """
    as_data, as_page = outputs(folder)
    data = matrix(results)
    write_text(as_data, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    write_text(as_page, page(data))
