"""The conformance statement: one page of Markdown that says what was shown, what was refused, and what was not."""

from __future__ import annotations

from forebay.specs.suite.reports.counting import ORDER, Record, clause_matrix, named, ran_on, refusals

_VERDICTS = {
    "conformant": "CONFORMANT: every test of the full profile was run, and none failed.",
    "passed": "NOT A FULL RUN: what was asked passed; conformance is stated by a complete run of the full profile alone.",
    "failed": "NOT CONFORMANT.",
}
_LISTED = 20
"""Entries of one list at most; the record has them all."""


def statement(record: Record) -> str:
    """Markdown made from a record alone."""
    counts, matrix = record["summary"], clause_matrix(record)
    words = {"pass": "passed", "refused": "refused", "waived": "waived", "fail": "failed", "not-run": "not run"}
    told = ", ".join(f"{counts[outcome]} {words[outcome]}" for outcome in ORDER)
    lines = [
        f"# Conformance statement: {named(record)}",
        "",
        f"**{_VERDICTS[record['verdict']]}**",
        "",
        f"- Run {ran_on(record)}",
        f"- Contract {record['spec_version']}, suite {record['suite_hash'][:16]}, profile {record['profile']}"
        + ("" if record["complete"] else ", a selection of it"),
        f"- From {record['started']} to {record['ended'] or 'an end it did not reach'}"
        + (f"; stopped: {record['stopped']}" if record["stopped"] else ""),
        f"- {counts['total']} tests of {len(matrix)} clauses: {told}",
        f"- Record {record['digest'][:16]}",
    ]
    for dtype, seen in record["tolerances"].items():
        lines.append(f"- Largest error in {dtype}: {seen['largest']:.2e} of max |V|, {seen['limit']:g} allowed (D6)")
    launches = record["counters"].get("launches", {})
    own = [f"{operation} {count}" for operation, count in sorted(launches.items())]
    delegated = [f"{operation} {count}" for operation, count in sorted(record["delegated"].items())]
    met = [f"{name} = {value}: {count} tests" for name, value, count in refusals(record)]
    waived = [
        f"{waiver['test']} ({waiver['clause']}, {waiver['device']}, until {waiver['expiry']}, {waiver['state']}): {waiver['reason']}"
        for waiver in record["waivers"]
    ]
    lines += _section(f"Refused, as declared: {counts['refused']}", met, "nothing was refused")
    lines += _section("Delegated to numpy", delegated, "nothing: every operation ran on kernels of the backend")
    lines += _section("Launches of the backend's own kernels", own, "none")
    lines += _section(f"Waivers: {len(waived)}", waived, "none")
    for outcome, title in (("fail", "Failed"), ("not-run", "Not run")):
        tests = [result["test"] for result in record["results"] if result["outcome"] == outcome]
        lines += _section(f"{title}: {len(tests)}", tests, "none")
    if record["problems"]:
        lines += _section(f"Problems of the run: {len(record['problems'])}", list(record["problems"]), "")
    return "\n".join(lines) + "\n"


def _section(title: str, entries: list[str], none: str) -> list[str]:
    listed = [f"- {entry}" for entry in entries[:_LISTED]]
    if len(entries) > _LISTED:
        listed.append(f"- and {len(entries) - _LISTED} more")
    return ["", f"## {title}", "", *(listed or [none])]
