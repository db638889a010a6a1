"""Whether a record agrees with itself and with the contract: what follows from its results, capabilities and counters, derived anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from forebay.specs.suite.verifier.implied import implied_faults
from forebay.specs.suite.verifier.installed import Asked
from forebay.specs.suite.verifier.results import result_faults
from forebay.specs.suite.verifier.shape import KINDS
from forebay.specs.suite.verifier.whole import core_gaps, problems_of, state_of

_SLACK: Final = timedelta(seconds=5)
"""Clocks that tests and runs are timed by differ a little."""
_SKEW: Final = timedelta(hours=1)
"""Clocks of two machines may differ by more."""
_COUNTED_BY_CORE: Final = ("run", "capture", "replay", "uploads", "upload_bytes", "downloads")
"""Acts that no backend can pass the whole suite without: the contract itself counts them, and nobody can declare them away."""

Record = Mapping[str, Any]


def content_faults(record: Record, asked: Asked | None) -> Iterator[str]:
    """Everything that does not follow; ``asked`` is None where the installed suite could not be collected."""
    for result in record["results"]:
        yield from result_faults(result, record)
    yield from _tolerance_faults(record)
    yield from _waiver_faults(record, asked)
    yield from _counter_faults(record)
    yield from implied_faults(record)
    yield from _time_faults(record)
    yield from _stop_faults(record)
    yield from _verdict_faults(record)


def _verdict_faults(record: Record) -> Iterator[str]:
    counts = Counter(result["outcome"] for result in record["results"])
    told = {**{kind: counts[kind] for kind in KINDS}, "total": len(record["results"])}
    if record["summary"] != told:
        yield f"its summary says {record['summary']}, its results {told}"
    backend = record["backend"]
    if backend is not None and backend["core_gaps"] != core_gaps(backend["capabilities"]):
        yield f"its gaps in the core are {backend['core_gaps']}, those of its capabilities {core_gaps(backend['capabilities'])}"
    wrong = problems_of(record)
    for problem in wrong:
        if problem not in record["problems"]:
            yield f"a problem it does not name: {problem}"
    for problem in record["problems"]:
        if problem not in wrong:
            yield f"a problem that it has not: {problem}"
    failed = (
        counts["fail"] or counts["not-run"] or wrong or record["stopped"] or record["backend"] is None or not counts
    )
    right = "failed" if failed else "conformant" if record["profile"] == "full" and record["complete"] else "passed"
    if counts["waived"] and not failed:
        right += " with waivers"
    if record["verdict"] != right:
        because = f" ({wrong[0]})" if wrong else f" ({record['stopped']})" if record["stopped"] else ""
        yield f"its verdict is {record['verdict']!r}, its content says {right!r}{because}"


def _stop_faults(record: Record) -> Iterator[str]:
    """The test that was running when the run stopped began, and did not come to its end; those after it did not begin."""
    running, outcomes = record["running"], {result["test"]: result["outcome"] for result in record["results"]}
    if running and not record["stopped"].endswith(f", in {running}"):
        yield f"{running} was running when it stopped, and why it stopped ({record['stopped']!r}) does not say so"
    if running and outcomes.get(running) != "not-run":
        yield f"{running} was running when it stopped, and its outcome is {outcomes.get(running)!r}"
    names = list(outcomes)
    later = names[names.index(running) + 1 :] if running in outcomes else []
    begun = next((name for name in later if outcomes[name] != "not-run"), None)
    if begun is not None:
        yield f"{running} was running when it stopped, and {begun}, which comes after it, has an outcome"


def _tolerance_faults(record: Record) -> Iterator[str]:
    seen: dict[str, dict[str, Any]] = {}
    for result in record["results"]:
        for dtype, (error, limit) in result["errors"].items():
            if dtype not in seen or error > seen[dtype]["largest"]:
                seen[dtype] = {"limit": limit, "largest": error, "test": result["test"]}
    if record["tolerances"] != seen:
        yield f"its largest errors are {record['tolerances']}, those of its results {seen}"


def _waiver_faults(record: Record, asked: Asked | None) -> Iterator[str]:
    waived = Counter((waiver["test"], waiver["device"]) for waiver in record["waivers"])
    for (test, device), count in waived.items():
        if count > 1:
            yield f"waiver of {test}: {count} of them for {device!r}"
    for waiver in record["waivers"]:
        where = f"waiver of {waiver['test']}"
        if asked is not None and waiver["test"] not in asked.all_clauses:
            yield f"{where}: the suite has no such test"
        elif asked is not None and waiver["clause"] not in asked.all_clauses[waiver["test"]]:
            yield f"{where}: clause {waiver['clause']} is not the test's"
        try:
            expired = date.fromisoformat(waiver["expiry"]) < datetime.fromisoformat(record["started"]).date()
        except ValueError:
            yield f"{where}: its expiry {waiver['expiry']!r} is no date"
        else:
            if expired:
                yield f"{where}: it had expired on {waiver['expiry']}"
        state = state_of(waiver, record)
        if waiver["state"] != state:
            yield f"{where}: its state is {waiver['state']!r}, its test's outcome says {state!r}"


def _counter_faults(record: Record) -> Iterator[str]:
    counters, backend = record["counters"], record["backend"]
    if record["delegated"] != counters.get("delegated", {}):
        yield "its delegated operations are not those of its counters"
    if backend is None and counters:
        yield "it has counters of a backend that was never opened"
    if backend is not None and not counters and not record["stopped"]:
        yield "it has no counters of its backend"
    claims = record["complete"] and record["verdict"] != "failed"
    if claims and "unreadable" in counters:
        yield f"its counters could not be read ({counters['unreadable']}), and nothing of it failed"
    if claims and record["profile"] == "full":
        never = [name for name in _COUNTED_BY_CORE if not counters.get(name)]
        if never:
            yield f"its counters know no {', '.join(never)}, which every backend that passes does"


def _time_faults(record: Record) -> Iterator[str]:
    try:
        started = datetime.fromisoformat(record["started"])
        ended = None if record["ended"] is None else datetime.fromisoformat(record["ended"])
        took = None if ended is None else ended - started
    except (TypeError, ValueError):
        yield f"its times are {record['started']!r} and {record['ended']!r}"
        return
    now = datetime.now(UTC)
    if started.tzinfo is None:
        yield f"its times {record['started']} and {record['ended']} name no zone"
    elif max(started, ended or started) > now + _SKEW:
        yield f"it is of the future: {record['started']} to {record['ended']}, and now it is {now.isoformat(timespec='seconds')}"
    if took is None:
        if not record["stopped"]:
            yield "it has no end and does not say that it was stopped"
    elif took < timedelta(0):
        yield f"it ended before it started: {record['started']}, {record['ended']}"
    else:
        tests = sum(result["seconds"] for result in record["results"])
        if tests > (took * 1.1 + _SLACK).total_seconds():
            yield f"its tests took {tests:.0f} s in a run of {took.total_seconds():.0f} s"
