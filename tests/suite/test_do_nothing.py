"""A backend that does nothing fails every test of the suite that shows a value; those that show a refusal alone may pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.selection.fakes import Site
from tests.suite.test_backends import judge

NOTHING = """
from tests.suite.core_only import CORE
from tests.suite.do_nothing import EVERYTHING, IdleDriver


@hookimpl
def forebay_backend():
    return describe("nothing", load=lambda: IdleDriver({claims}))
"""
CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize("claims", ["EVERYTHING", "CORE"])
def test_a_backend_that_does_nothing_fails_every_test_but_those_of_refusals(claims: str, tmp_path: Path) -> None:
    """Claiming less buys nothing: what is beyond a claim may be refused, and never passes."""
    site, work = tmp_path / "site", tmp_path / "work"
    for folder in (site, work):
        folder.mkdir()
    Site(site).install("does-nothing", {"nothing": NOTHING.format(claims=claims)})
    (site / "tests").symlink_to(CHECKOUT / "tests")
    result = judge("nothing", work, "-p", "tests.suite.few_examples", "--suite-record", "record.json", path=(site,))
    assert result.returncode == 1, result.stdout[-3000:]
    record = json.loads((work / "record.json").read_text())
    assert record["complete"], record["problems"]
    shown = {each["test"]: each["outcome"] for each in record["results"] if each["clauses"]}
    refusals = {each["test"]: each["outcome"] for each in record["results"] if not each["clauses"]}
    assert len(shown) > 900, "most tests show a value"
    failing = {"fail"} if claims == "EVERYTHING" else {"fail", "refused"}
    assert [name for name, outcome in shown.items() if outcome not in failing] == []
    assert set(refusals.values()) <= {"pass", *failing}, "a device that claims everything is refused nothing"
    passed = [name for name, outcome in refusals.items() if outcome == "pass"]
    assert len(passed) > 0.9 * len(refusals), "most refusals are those of the host, in front of every device"
    assert "test_decode_inputs.py::test_a_ragged_page_list_is_refused" in passed
