"""Counts that the reports share, from a record alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from forebay.specs.clauses import catalogue
from forebay.specs.suite.failure import rerun_command
from forebay.specs.suite.summary import clause_lines, failures_of

ORDER: Final = ("pass", "refused", "waived", "fail", "not-run")

Record = Mapping[str, Any]


def clause_matrix(record: Record) -> dict[str, Counter[str]]:
    """How often each clause's tests, of values and of refusals, came to each outcome; in the clauses' order."""
    matrix: dict[str, Counter[str]] = {}
    for result in record["results"]:
        for clause in dict.fromkeys([*result["clauses"], *result["refuses"]]):
            matrix.setdefault(clause, Counter())[result["outcome"]] += 1
    order = [*catalogue().clauses, *matrix]  # clauses of another contract come last
    return {clause: matrix[clause] for clause in dict.fromkeys(order) if clause in matrix}


def refusals(record: Record) -> list[tuple[str, str, int]]:
    """Every declared limit that was met, the value asked for, and how many tests met it."""
    met = Counter(
        (result["refusal"]["capability"], result["refusal"]["value"])
        for result in record["results"]
        if result["outcome"] == "refused"
    )
    return [(capability, value, count) for (capability, value), count in sorted(met.items())]


def named(record: Record) -> str:
    """The backend as the record names it, with distribution and version once it was opened."""
    backend = record["backend"]
    if backend is None:
        return f"{record['requested']} (never opened)"
    label = f"{backend['name']}:{backend['mode']}" if backend["mode"] else backend["name"]
    return f"{label} ({backend['distribution']} {backend['version']})"


def ran_on(record: Record) -> str:
    """What ran the kernels: hardware, an interpreter, a simulator, or nothing."""
    backend = record["backend"]
    if backend is None:
        return "nothing: the backend could not be opened"
    words = {
        "accelerator": "on the accelerator itself",
        "host": "on the host's processor",
        "reference": "on a reference, not on a device",
        "interpreted": "INTERPRETED, not on a device",
        "simulated": "SIMULATED, not on a device",
    }
    return f"{words.get(backend['kind'], 'on something undeclared')}: {backend['info'].get('device', 'unnamed device')}"


def failed(record: Record) -> list[dict[str, Any]]:
    """The failed results, the likely cause first, each with the lines about its clauses and the command that runs it alone."""
    return [
        {**result, "about": clause_lines(result), "rerun": rerun_command(record["requested"], result["test"])}
        for result in failures_of(record)
    ]


def declared(record: Record) -> dict[str, str]:
    """What the backend declares, in words; ``{}`` where it was never opened."""
    backend = record["backend"]
    return {} if backend is None else {name: _in_words(value) for name, value in backend["capabilities"].items()}


def _in_words(value: object) -> str:
    if value is None:
        return "no limit"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
