"""The conformance statement: a page of Markdown that says what was shown, what was refused, and all that failed."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.specs.driver import OWN_COUNTS
from forebay.specs.suite.record import clauses_of
from forebay.specs.suite.reports.counting import ORDER, Record, clause_matrix, failed, named, ran_on, refusals

_VERDICTS = {
    "conformant": "CONFORMANT: every test of the full profile was run, and none failed.",
    "conformant with waivers": "CONFORMANT WITH WAIVERS: every test of the full profile was run, and {waived} failed and {are} waived.",
    "passed": "NOT A FULL RUN: what was asked passed; conformance is stated by a complete run of the full profile alone.",
    "passed with waivers": "NOT A FULL RUN: of what was asked {waived} failed and {are} waived; the rest passed.",
    "failed": "NOT CONFORMANT.",
}
_LISTED = {"refused": 10, "waived": 4, "not-run": 3}
"""Entries of one list at most, so that all of it fits a page where nothing failed; the record has them all."""
_IN_A_LINE = 24
"""Entries at most of a list within a line."""
_LONGEST = 300
"""Characters of one text."""


def statement(record: Record) -> str:
    """Markdown made from a record alone; every text of it is kept to its line."""
    counts, matrix = record["summary"], clause_matrix(record)
    words = {"pass": "passed", "refused": "refused", "waived": "waived", "fail": "failed", "not-run": "not run"}
    told = ", ".join(f"{counts[outcome]} {words[outcome]}" for outcome in ORDER)
    launches = [f"{operation} {count}" for operation, count in sorted(record["counters"].get("launches", {}).items())]
    delegated = [f"{operation} {count}" for operation, count in sorted(record["delegated"].items())]
    lines = [
        f"# Conformance statement: {_line(named(record))}",
        "",
        f"**{_VERDICTS[record['verdict']].format(waived=counts['waived'], are='is' if counts['waived'] == 1 else 'are')}**",
        "",
        f"- Run {_line(ran_on(record))}",
        f"- Contract {record['spec_version']}, suite {record['suite_hash'][:16]}, profile {record['profile']}"
        + ("" if record["complete"] else ", a selection of it"),
        f"- From {record['started']} to {record['ended'] or 'an end it did not reach'}"
        + (f"; stopped: {_line(record['stopped'])}" if record["stopped"] else ""),
        f"- {counts['total']} tests of {len(matrix)} clauses: {told}",
        f"- Record {record['digest'][:16]}",
    ]
    for dtype, seen in record["tolerances"].items():
        lines.append(f"- Largest error in {dtype}: {seen['largest']:.2e} of max |V|, {seen['limit']:g} allowed (D6)")
    lines += [
        f"- Launches of the backend's own kernels: {_joined(launches) or 'none'}",
        f"- Delegated to numpy: {_joined(delegated) or ('nothing' if launches else 'nothing is known')}",
        f"- No host read and no sync in decode (D7), by the counts in front of the driver {_own_counts(record)}",
    ]
    lines += _section("refused", "Refused, as declared", counts["refused"], _refused(record))
    waived = [
        f"{waiver['test']} ({waiver['clause']}, {waiver['device']}, until {waiver['expiry']}, {waiver['state']}): {waiver['reason']}"
        for waiver in record["waivers"]
    ]
    lines += _section("waived", "Waivers", len(waived), waived)
    wrong = failed(record)
    lines += _section(
        "fail", "Failed", len(wrong), [f"{each['test']} ({', '.join(clauses_of(each))})" for each in wrong]
    )
    if wrong:
        lines += ["", "The first of them alone:", "", f"    {_line(wrong[0]['rerun'])}"]
    left = [result["test"] for result in record["results"] if result["outcome"] == "not-run"]
    lines += _section("not-run", "Not run", len(left), left)
    if record["problems"]:
        lines += _section("problem", "Problems of the run", len(record["problems"]), record["problems"])
    return "\n".join(lines) + "\n"


def _own_counts(record: Record) -> str:
    """What else was looked at: a driver may count what it does inside its own methods."""
    kept = [name for name in OWN_COUNTS if name in (record["backend"] or {"info": {}})["info"]]
    return (
        f"and its own: {', '.join(kept)}"
        if kept
        else "alone: it keeps none of its own, so what it does inside itself is not seen"
    )


def _refused(record: Record) -> list[str]:
    """A line for each declared limit: the values that were asked for, and how many tests met it."""
    met: dict[str, dict[str, int]] = {}
    for name, value, count in refusals(record):
        met.setdefault(name, {})[value] = count
    return [
        f"{name}: {_joined(list(values))} ({total} test{'s' if total > 1 else ''})"
        for name, values in met.items()
        if (total := sum(values.values()))
    ]


def _section(kind: str, title: str, count: int, entries: Sequence[str]) -> list[str]:
    most = _LISTED.get(kind, len(entries))
    listed = [f"- {_line(entry)}" for entry in entries[:most]]
    if len(entries) > most:
        listed.append(f"- and {len(entries) - most} more, in the record")
    return ["", f"## {title}: {count}", "", *(listed or ["none"])]


def _joined(entries: Sequence[str]) -> str:
    more = [f"and {len(entries) - _IN_A_LINE} more"] if len(entries) > _IN_A_LINE else []
    return _line(", ".join([*entries[:_IN_A_LINE], *more]))


def _line(text: str) -> str:
    """Texts of a record are anybody's: one that ends its line could say what the statement does not."""
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]} …"
