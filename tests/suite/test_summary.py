"""What is printed at the end of a run: which failure first, how many, and what is wrong with the run as a whole."""

from __future__ import annotations

import itertools
import re
from typing import Any, Final

import pytest

from forebay.specs import Capabilities
from forebay.specs.clauses import catalogue
from forebay.specs.suite.record import OUTCOMES, OWN_KERNELS, assemble
from forebay.specs.suite.verifier.whole import problems_of
from tests.suite.small import Small

CORE: Final = Capabilities(("NHD",), ("float32", "bfloat16"), window=True, lse=True, capture=True).as_dict()
CAUSE_AND_EFFECTS = """
@pytest.mark.clause("G2", "D6")
def test_judging(backend: Backend) -> None:
    assert backend is None


@pytest.mark.clause("L1", "D3", "C1")
def test_composite(backend: Backend) -> None:
    assert backend is None


@pytest.mark.clause("L3")
def test_layout(backend: Backend) -> None:
    assert backend is None


@pytest.mark.clause("D6", "W5")
@pytest.mark.parametrize("n", range(11))
def test_decode(backend: Backend, n: int) -> None:
    assert n == 11
"""


def test_the_plainest_run_is_told_before_all_else(small: Small) -> None:
    small.add("test_cause.py", CAUSE_AND_EFFECTS)
    small.add("test_plainest.py", '\n@pytest.mark.clause("B4")\ndef test_it(backend: Backend) -> None: assert 0\n')
    said = small.forebay("conform", "sim", "--test", "test_cause.py", "--test", "test_plainest.py")
    assert re.findall(r"^FAILED (\S+)$", said.out, re.MULTILINE)[:2] == [
        "test_plainest.py::test_it",
        "test_cause.py::test_decode[0]",
    ]


def test_the_likely_cause_is_told_first_and_not_every_case_in_full(small: Small) -> None:
    small.add("test_cause.py", CAUSE_AND_EFFECTS)
    tests = ("--test", "test_cause.py")
    said = small.forebay("conform", "sim", *tests)
    told = re.findall(r"^FAILED test_cause.py::(\S+)$", said.out, re.MULTILINE)
    decoded = [f"test_decode[{n}]" for n in range(1, 7)]
    assert told == ["test_decode[0]", "test_layout", "test_composite", "test_judging", *decoded]
    assert "\nAND 4 more failed; " in said.out
    assert "\n  test_cause.py::test_decode (4 cases; D6)\n" in said.out
    contract = catalogue()
    first = said.out[
        said.out.index("FAILED test_cause.py::test_decode[0]") : said.out.index("FAILED test_cause.py::test_layout")
    ]
    assert f"  clause D6 ({contract.clause('D6').title}): {contract.clause('D6').text}\n" in first
    assert f"  also a test of: W5 ({contract.clause('W5').title})\n" in first
    assert contract.clause("W5").text not in said.out
    assert len(re.findall(r"^FAILED ", small.forebay("conform", "sim", *tests, "--show", "14").out, re.MULTILINE)) == 14


@pytest.mark.clause("G2")
@pytest.mark.parametrize(("options", "failed"), [(("-x",), 1), (("--maxfail", "3"), 3)])
def test_a_run_that_stops_at_so_many_failures_says_so(small: Small, options: tuple[str, ...], failed: int) -> None:
    small.add("test_cause.py", CAUSE_AND_EFFECTS)
    said, record = small.record(*options)
    assert (said.code, record["verdict"], record["summary"]["fail"]) == (1, "failed", failed)
    why = f"after {failed} failure{'s' if failed > 1 else ''}, as asked by --maxfail"
    assert (record["stopped"], record["running"]) == (why, "")
    assert f"STOPPED {why}\n" in said.out
    assert record["summary"]["not-run"] >= 14 - failed
    assert record["counters"]["run"] >= 0
    assert small.forebay("conform", "--verify", "record.json").out == "record.json: valid\n"


def test_what_failed_before_the_process_died_is_told(small: Small) -> None:
    act = '@pytest.mark.clause("D1")\ndef test_dies(backend: Backend) -> None:\n    import os; os.abort()\n'
    small.add("test_cause.py", f"{CAUSE_AND_EFFECTS}\n\n{act}")
    said = small.forebay("conform", "sim", "--test", "test_cause.py", "--show", "2")
    assert re.findall(r"^FAILED (\S+)$", said.out, re.MULTILINE) == [
        "test_cause.py::test_decode[0]",
        "test_cause.py::test_layout",
    ]
    assert "\nAND 12 more failed; " in said.out
    assert "\nSTOPPED its process was killed by SIGABRT, in test_cause.py::test_dies\n" in said.out


def test_the_summary_alone_counts_and_warnings_are_left_out(small: Small) -> None:
    small.add(
        "test_warns.py",
        '\nimport warnings\n\n\n@pytest.mark.clause("D1")\ndef test_warns(backend: Backend) -> None:\n    warnings.warn("noise")\n',
    )
    said = small.forebay("conform", "sim", "--test", "test_warns.py")
    assert said.code == 0
    assert said.out.splitlines()[1:] == [
        "sim (full, a selection): passed: 1 pass, 0 fail, 0 refused, 0 waived, 0 not-run, 1 total"
    ]
    assert "warning" not in said.out


# -- problems of a run -----------------------------------------------------------------------------------------------------


def assembled(*tests: tuple[str, list[str], list[str]]) -> dict[str, Any]:
    """The record of a whole run of smoke whose tests have an outcome, clauses of their values, and of their refusals."""
    keys = ("spec_version", "suite_hash", "requested", "selection", "versions", "seeds", "started")
    named = [
        {"test": f"test_a.py::test_{n}", "clauses": clauses, "refuses": refuses, "cases": []}
        for n, (_, clauses, refuses) in enumerate(tests)
    ]
    run = {**dict.fromkeys(keys), "profile": "smoke", "complete": True, "tests": named, "waivers": []}
    backend = {"entry": "backend", "capabilities": CORE, "core_gaps": [], "info": {}}
    done = [
        {"entry": "result", "test": test["test"], "outcome": outcome, "errors": {}}
        for test, (outcome, _, _) in zip(named, tests, strict=True)
    ]
    counters = {"entry": "counters", "launches": dict.fromkeys(OWN_KERNELS, 1), "delegated": {}}
    return assemble([{"entry": "run", **run}, backend, *done, counters, {"entry": "end", "ended": ""}])


def test_a_clause_without_a_test_that_passed_is_a_problem_in_the_order_of_the_contract() -> None:
    record = assembled(
        ("fail", ["G2", "B4"], []),
        ("fail", ["B4"], ["D8"]),
        ("refused", ["L2"], []),
        ("fail", ["L2"], []),
        ("waived", ["D8", "Z9"], []),
        ("pass", ["L1"], ["D8"]),
        ("waived", [], ["W2"]),
    )
    assert record["problems"] == [
        "clause L2: no test of it passed (1 fail, 1 refused)",
        "clause W2: every test of it was waived (1)",
        "clause D8: every test of its values was waived (1)",
        "clause B4: every test of it failed (2)",
        "clause G2: every test of it failed (1)",
        "clause Z9: every test of it was waived (1)",
    ]


def test_the_verifier_finds_the_problems_that_runs_name_in_their_order() -> None:
    """Two derivations that share no code, over every pair of outcomes of a clause's tests, of values and of refusals."""
    for first, second, third in itertools.product(OUTCOMES, repeat=3):
        record = assembled((first, ["G2", "D6"], ["L1"]), (second, ["D6"], ["G2", "L1"]), (third, ["X1", "L1"], ["D6"]))
        assert problems_of(record) == record["problems"]
        shown = {"D6": (first, second), "G2": (first,), "L1": (third,), "X1": (third,)}
        named = [re.findall(r"^clause (\w+): ", problem)[0] for problem in record["problems"]]
        assert sorted(named) == [clause for clause, outcomes in shown.items() if "pass" not in outcomes]
