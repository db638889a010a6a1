"""What is printed at the end of a run, from its record alone: the failures, the likely cause first, the problems, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from forebay.specs.clauses import catalogue
from forebay.specs.suite.failure import rerun_command
from forebay.specs.suite.outcome import AFTERWARDS
from forebay.specs.suite.record import Record, clauses_of

_ABOUT_OTHERS: Final = ("B", "G")
"""Groups of clauses about a backend and its judging as a whole: their tests fail too where a kernel is wrong."""
_PLAINEST: Final = "test_plainest.py::"
"""The plainest run there is: where it fails, most of the rest does."""


def failures_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The failed results, those first that lie nearest to the cause.

    The main clause of a test is the first it names. Clauses are ordered by how many failed tests are about them, and come before those
    about a backend as a whole; of equal ones that is first whose test names fewest others. The first failure of each clause is told
    before the second of any, and the plainest run before all of them.
    """
    failed = [result for result in record["results"] if result["outcome"] == "fail"]
    about = Counter(map(_main, failed))
    place = {clause: number for number, clause in enumerate(catalogue().clauses)}
    seen: Counter[str] = Counter()
    distances = []
    for number, result in enumerate(failed):
        clause = _main(result)
        whole, last = clause[:1] in _ABOUT_OTHERS, len(place)
        near = (whole, -about[clause], len(clauses_of(result)), place.get(clause, last), number)
        plainest = result["test"].startswith(_PLAINEST)
        distances.append((not plainest, bool(seen[clause]), near))
        seen[clause] += 1
    return [failed[near[-1]] for *_, near in sorted(distances)]


def clause_lines(result: Mapping[str, Any]) -> list[str]:
    """The main clause of a test with its text, then the others by name alone; a clause of another contract has only its id."""
    contract = catalogue().clauses
    named = [f"{name} ({contract[name].title})" if name in contract else name for name in clauses_of(result)]
    main = contract.get(_main(result))
    first = [f"clause {named[0]}" + (f": {main.text}" if main else "")] if named else []
    return first + ([f"also a test of: {', '.join(named[1:])}"] if named[1:] else [])


def told(result: Mapping[str, Any], backend: str) -> str:
    """A failed result of a record as a block of text."""
    lines = [f"FAILED {result['test']}", *(f"  {line}" for line in clause_lines(result))]
    failure = result.get("failure") or {}
    for part, title in (("input", "smallest failing input"), ("expected", "expected"), ("got", "got")):
        if failure.get(part):
            lines += [f"  {title}: " + failure[part].replace("\n", "\n    ")]
    lines += _reasons(result["message"])
    lines += [f"  run it alone: {rerun_command(backend, result['test'])}"]
    return "\n".join(lines)


def summary_lines(record: Record, shown: int) -> list[str]:
    """The first ``shown`` failures of a record, each a block, the names of the others, the problems, and the verdict."""
    failed = failures_of(record)
    lines = [told(result, record["requested"]) for result in failed[:shown]]
    if failed[shown:]:
        where = "in full on the page (--html FILE), in the record (--record FILE), or here with a larger --show"
        lines += [f"AND {len(failed) - shown} more failed; {where}:", *_names(failed[shown:])]
    lines += [f"PROBLEM {problem}" for problem in record["problems"]]
    lines += [f"STOPPED {record['stopped']}"] if record["stopped"] else []
    counts = ", ".join(f"{count} {outcome}" for outcome, count in record["summary"].items())
    part = record["profile"] + ("" if record["complete"] else ", a selection")
    verdict = "nothing was judged" if record["backend"] is None and record["stopped"] else record["verdict"]
    return [*lines, f"{record['requested']} ({part}): {verdict}: {counts}"]


def _main(result: Mapping[str, Any]) -> str:
    return next(iter(clauses_of(result)), "")


def _reasons(message: str) -> list[str]:
    """The first line of what was raised, and what failed after the test."""
    lines = message.splitlines()
    later = [line for line in lines[1:] if line.startswith(AFTERWARDS)]
    return [f"  why: {line}" for line in (*lines[:1], *later)]


def _names(failed: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each test function, with how many of its cases failed and the clause it is about."""
    cases = Counter((result["test"].partition("[")[0], _main(result)) for result in failed)
    return [
        f"  {name} ({count} {'case' if count == 1 else 'cases'}; {clause})" for (name, clause), count in cases.items()
    ]
