"""Edits of a record, as a forger makes them: each takes a record and changes it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from datetime import datetime, timedelta
from typing import Any

Record = dict[str, Any]
Edit = Callable[[Record], object]
KINDS = ("pass", "fail", "refused", "waived", "not-run")
DECODE = "test_every.py::test_decode[direct]"
GATHER = "test_every.py::test_decode[gather]"
REFUSAL = "test_every.py::test_refusal"
STAGE = "test_every.py::test_stage"
HEAD = "test_rich.py::test_head_size"
SINKS = "test_rich.py::test_sinks"
QUERY = "test_rich.py::test_long_query"
WAIVED = "test_rich.py::test_wrong[1]"
WAIVED_CLAUSE = "D5"
RIGHT = "test_rich.py::test_wrong[2]"


def of(record: Record, test: str) -> Record:
    """One result."""
    found: Record = next(result for result in record["results"] if result["test"] == test)
    return found


def count_again(record: Record) -> None:
    """Make the summary agree, as a forger would."""
    outcomes = [result["outcome"] for result in record["results"]]
    record["summary"] = {kind: outcomes.count(kind) for kind in KINDS} | {"total": len(outcomes)}


def become(test: str, outcome: str, /, **changes: Any) -> Edit:
    """Give a test another outcome and make the summary agree."""

    def edit(record: Record) -> None:
        of(record, test).update(outcome=outcome, **changes)
        count_again(record)

    return edit


def change(test: str, /, **changes: Any) -> Edit:
    """Change parts of a result."""
    return lambda record: of(record, test).update(changes)


def top(**changes: Any) -> Edit:
    """Change parts of the record itself."""
    return lambda record: record.update(changes)


def within(*path: str | int, **changes: Any) -> Edit:
    """Change parts of what lies at a path."""

    def edit(record: Any) -> None:
        for key in path:
            record = record[key]
        record.update(changes)

    return edit


def drop(*tests: str) -> Edit:
    """Take results out, and make the summary agree."""

    def edit(record: Record) -> None:
        record["results"] = [result for result in record["results"] if result["test"] not in tests]
        count_again(record)

    return edit


def add(test: str, /, **changes: Any) -> Edit:
    """Append a copy of a result, changed."""

    def edit(record: Record) -> None:
        record["results"].append({**deepcopy(of(record, test)), **changes})
        count_again(record)

    return edit


def widen(record: Record) -> None:
    """Loosen a limit everywhere it is written, to let a large error pass."""
    dtype, (_, limit) = next(iter(of(record, DECODE)["errors"].items()))
    for result in record["results"]:
        if dtype in result["errors"]:
            result["errors"][dtype][1] = 10 * limit
    of(record, DECODE)["errors"][dtype][0] = 5 * limit
    record["tolerances"][dtype] = {"limit": 10 * limit, "largest": 5 * limit, "test": DECODE}


def exceed(record: Record) -> None:
    """An error above its limit, the largest of all."""
    dtype, pair = next(iter(of(record, DECODE)["errors"].items()))
    pair[0] = 2 * pair[1]
    record["tolerances"][dtype] = {"limit": pair[1], "largest": pair[0], "test": DECODE}


def claim_tf32(record: Record) -> None:
    """Claim the looser limit everywhere, after a run that had no need of it."""
    record["backend"]["capabilities"]["tf32"] = True
    for result in record["results"]:
        for pair in result["errors"].values():
            pair[1] = max(pair[1], 1e-3)
    for seen in record["tolerances"].values():
        seen["limit"] = max(seen["limit"], 1e-3)


def waive_all(record: Record) -> None:
    """Excuse every test that carries the waived test's clause."""
    for result in record["results"]:
        if WAIVED_CLAUSE in result["clauses"] and result["test"] != WAIVED:
            become(result["test"], "waived", message="why", failure=of(record, WAIVED)["failure"])(record)
            waive(result["test"])(record)


def unread(record: Record) -> None:
    """Let the counters be those of a device that was lost."""
    counters = record["counters"]
    record["counters"] = {"launches": counters["launches"], "delegated": counters["delegated"], "unreadable": "why"}


def waive(test: str, /, **changes: Any) -> Edit:
    """Add a waiver like the one there is."""
    return lambda record: record["waivers"].append({**record["waivers"][0], "test": test, **changes})


def waiver(**changes: Any) -> Edit:
    """Change the waiver there is."""
    return within("waivers", 0, **changes)


def days_after_start(record: Record, days: int) -> str:
    """A date some days after the run."""
    return str(datetime.fromisoformat(record["started"]).date() + timedelta(days=days))


def smuggle_fail(record: Record) -> None:
    """Excuse a failure by a waiver after the run, but leave the verdict."""
    become(WAIVED, "waived")(record)
    record["waivers"] = [
        {
            "test": WAIVED,
            "clause": "D5",
            "device": record["backend"]["info"]["device"],
            "reason": "later",
            "expiry": days_after_start(record, 1),
            "state": "used",
        }
    ]


def shift(**edges: int) -> Edit:
    """Move ``started`` or ``ended`` by seconds."""

    def edit(record: Record) -> None:
        for name, seconds in edges.items():
            record[name] = (datetime.fromisoformat(record[name]) + timedelta(seconds=seconds)).isoformat()

    return edit


def each(key: str, value: Any) -> Edit:
    """Set a key of every result."""
    return lambda record: [result.update({key: deepcopy(value)}) for result in record["results"]]


def both(*edits: Edit) -> Edit:
    """One edit after the other."""
    return lambda record: [edit(record) for edit in edits]
