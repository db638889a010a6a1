"""The record of a run, made from its journal: what was asked, what came of it, and the verdict."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from forebay.specs.clauses import catalogue
from forebay.specs.files import write_text
from forebay.specs.suite.digest import digest_of
from forebay.specs.suite.journal import Entry

FORMAT: Final = 1
OUTCOMES: Final = ("pass", "fail", "refused", "waived", "not-run")
OWN_KERNELS: Final = ("paged_decode", "gather", "write_kv", "stage")
"""Operations that must have been done, by the backend's own kernels or, named, by numpy."""
WITH_WAIVERS: Final = " with waivers"
"""What a verdict ends in where tests failed that are waived."""
_BECAME: Final = {"fail": "failed", "refused": "was refused", "waived": "was waived", "not-run": "was not run"}

Record = dict[str, Any]


def assemble(entries: Sequence[Entry]) -> Record:
    """Make the record out of a journal that holds at least its ``run`` entry.

    A test that was expected and has no result was not run; one that began and did not end is the one that was ``running``.
    ``verdict`` is ``conformant`` for a complete run of the full profile without a failure, a test that was not run or a problem;
    ``passed`` for a run of less; either ``with waivers`` where one excused a failure; else ``failed``.
    """
    by_kind: dict[str, Entry] = {entry["entry"]: entry for entry in entries}
    run, backend, end = by_kind["run"], by_kind.get("backend"), by_kind.get("end")
    found = {entry["test"]: entry for entry in entries if entry["entry"] == "result"}
    results = [_result(test, found.get(test["test"])) for test in run["tests"]]
    counters = _content(by_kind.get("counters", {}))
    waivers = [_waiver(waiver, backend, found) for waiver in run["waivers"]]
    summary = Counter(result["outcome"] for result in results)
    stopped, running = _stop(entries, by_kind)
    record: Record = {
        "format": FORMAT,
        **{key: run[key] for key in ("spec_version", "suite_hash", "requested", "profile", "complete", "selection")},
        "backend": None if backend is None else _content(backend),
        "versions": run["versions"],
        "seeds": run["seeds"],
        "started": run["started"],
        "ended": None if end is None else end["ended"],
        "stopped": stopped,
        "running": running,
        "tolerances": _tolerances(results),
        "counters": counters,
        "delegated": dict(counters.get("delegated", {})),
        "waivers": waivers,
        "results": results,
        "summary": {outcome: summary[outcome] for outcome in OUTCOMES} | {"total": len(results)},
    }
    record["problems"] = _problems(record)
    bad = summary["fail"] or summary["not-run"] or record["problems"] or stopped or not results
    full = record["profile"] == "full" and record["complete"]
    good = ("conformant" if full else "passed") + (WITH_WAIVERS if summary["waived"] else "")
    record["verdict"] = "failed" if bad else good
    record["digest"] = digest_of(record)
    return record


def write_record(record: Record, path: Path) -> None:
    """Write a record as indented JSON, at once, into a file that :func:`~forebay.specs.files.output_at` gave."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def clauses_of(result: Mapping[str, Any]) -> list[str]:
    """The ids of a result's clauses, of its values and then of its refusals."""
    return list(dict.fromkeys([*result["clauses"], *result["refuses"]]))


def _content(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "entry"}


def _result(test: Mapping[str, Any], entry: Mapping[str, Any] | None) -> dict[str, Any]:
    known = {"outcome": "not-run", "seconds": 0.0, "message": "", "failure": None, "refusal": None, "errors": {}}
    return {**test, **known, **({} if entry is None else _content(entry))}


def _stop(entries: Sequence[Entry], by_kind: Mapping[str, Entry]) -> tuple[str, str]:
    """Why the run stopped before its end, and in which test; ``""`` where it did not, or in none."""
    if "stopped" not in by_kind and "end" in by_kind:
        return "", ""
    stop = by_kind.get("stopped", {"reason": "its process ended in the middle", "by_test": True})
    ended = {entry["test"] for entry in entries if entry["entry"] == "result"}
    began = [entry["test"] for entry in entries if entry["entry"] == "started" and entry["test"] not in ended]
    running = began[-1] if began and stop["by_test"] else ""
    return f"{stop['reason']}, in {running}" if running else stop["reason"], running


def _waiver(waiver: Mapping[str, Any], backend: Entry | None, found: Mapping[str, Entry]) -> dict[str, Any]:
    """``state``: used, stale (the test does not fail), elsewhere (another device), idle (the test was not run)."""
    outcome = found[waiver["test"]]["outcome"] if waiver["test"] in found else ""
    if backend is None or not outcome:
        state = "idle"
    elif waiver["device"] != backend["info"].get("device"):
        state = "elsewhere"
    else:
        state = "used" if outcome == "waived" else "stale"
    return {**waiver, "state": state}


def _tolerances(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By dtype the largest error seen, the limit it was held against (both relative, clause D6), and the test that saw it."""
    largest: dict[str, dict[str, Any]] = {}
    for result in results:
        for dtype, (error, limit) in result["errors"].items():
            if dtype not in largest or error > largest[dtype]["largest"]:
                largest[dtype] = {"limit": limit, "largest": error, "test": result["test"]}
    return largest


def _by_clause(results: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for result in results:
        for clause in result[kind]:
            counts.setdefault(clause, Counter())[result["outcome"]] += 1
    return counts


def _problems(record: Record) -> list[str]:
    """What is wrong with the run as a whole, whatever its tests say."""
    found = [] if record["backend"] is None else list(record["backend"]["core_gaps"])
    found += [
        f"stale waiver: {waiver['test']} does not fail on {waiver['device']}; take the waiver out"
        for waiver in record["waivers"]
        if waiver["state"] == "stale"
    ]
    if not record["complete"] or record["stopped"] or record["backend"] is None:
        return found
    found += _never_shown(record["results"])
    if record["profile"] == "full":
        found += _vain_claims(record)
        launches, delegated = record["counters"].get("launches", {}), record["delegated"]
        found += [
            f"no launch of {operation} was counted, of the backend's own kernels or delegated to numpy"
            for operation in OWN_KERNELS
            if not launches.get(operation) and not delegated.get(operation)
        ]
    return found


def _never_shown(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The clauses, in the contract's order, of whose values no test passed, nor of its refusals where it has no other tests."""
    values, refusing = (_by_clause(results, kind) for kind in ("clauses", "refuses"))
    seen = {**refusing, **values}
    found = []
    for clause in [*filter(seen.get, catalogue().clauses), *(each for each in seen if each not in catalogue().clauses)]:
        counts = seen[clause]
        if counts["pass"]:
            continue
        which = "of its values" if clause in values and clause in refusing else "of it"
        if len(counts) == 1:
            (outcome,) = counts
            found.append(f"clause {clause}: every test {which} {_BECAME[outcome]} ({counts[outcome]})")
        else:
            told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
            found.append(f"clause {clause}: no test {which} passed ({told})")
    return found


def _vain_claims(record: Record) -> list[str]:
    """Claims that loosen a tolerance and that the run shows no need of."""
    seen, limit = record["tolerances"].get("float32"), catalogue().tolerance("float32")
    if not record["backend"]["capabilities"]["tf32"] or seen is None or seen["largest"] > limit:
        return []
    return [
        (
            f"tf32 is claimed, and the largest error in float32, {seen['largest']:.2e}, is within {limit:g}, which is allowed without "
            "it; take the claim out"
        )
    ]
