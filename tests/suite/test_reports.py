"""The reports of a record: JUnit XML, the page and the statement, of runs of every ending and of texts that are markup."""

from __future__ import annotations

import re
from copy import deepcopy
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from forebay.specs.clauses import catalogue
from forebay.specs.suite.reports.junit import junit_xml
from forebay.specs.suite.reports.page import page
from forebay.specs.suite.reports.statement import statement
from tests.suite.conftest import Records
from tests.suite.edits import HEAD, QUERY, STAGE, WAIVED, of

ENDINGS = ("good", "smoke", "bad", "crashed", "away")
NASTY = "<script>alert('x')</script> & \"quoted\" ]]> \x00\x1b[31m\ud800 http://example.org/a.js"
MOST_LINES = 60

Record = dict[str, Any]


class Page(HTMLParser):
    """The tags with their attributes, the text, and the tables as rows of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open:
            self.rows[-1][-1] += data


def nasty(record: Record) -> Record:
    """The record with markup and control characters wherever a text is anybody's."""
    made = deepcopy(record)
    for result in made["results"]:
        result["test"] += NASTY
        result["message"] = NASTY if result["message"] else ""
        result["failure"] = result["failure"] and dict.fromkeys(result["failure"], NASTY)
        result["refusal"] = result["refusal"] and {**result["refusal"], "value": NASTY, "message": NASTY}
    made["stopped"] = NASTY
    made["problems"] = [NASTY]
    made["waivers"] = [{**waiver, "reason": NASTY, "test": NASTY} for waiver in made["waivers"]]
    if made["backend"] is not None:
        made["backend"]["info"]["device"] = NASTY
        made["backend"]["version"] = NASTY
    made["versions"]["platform"] = NASTY
    return made


# -- JUnit -----------------------------------------------------------------------------------------------------------------


def cases(text: str) -> tuple[ET.Element, dict[str, ET.Element]]:
    """The suite and its cases by file and name."""
    (suite,) = ET.fromstring(text.encode())  # noqa: S314  # made here
    return suite, {f"{case.get('classname')}::{case.get('name')}": case for case in suite.iter("testcase")}


def properties(element: ET.Element) -> list[tuple[str | None, str | None]]:
    return [(each.get("name"), each.get("value")) for each in element.findall("properties/property")]


@pytest.mark.parametrize("name", ENDINGS)
def test_junit_counts_what_the_record_holds(records: Records, name: str) -> None:
    record = records.record[name]
    suite, found = cases(junit_xml(record))
    faults = len(record["problems"]) + bool(record["stopped"])
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": str(len(record["results"]) + faults),
        "failures": str(record["summary"]["fail"] + faults),
        "errors": str(record["summary"]["not-run"]),
        "skipped": "0",
    }
    assert len(found) == len(record["results"]) + faults
    assert ("verdict", record["verdict"]) in properties(suite)
    for result in record["results"]:
        case = found[result["test"].replace(".py::", "::", 1)]
        marks = [("clause", each) for each in result["clauses"]] + [("refuses", each) for each in result["refuses"]]
        assert properties(case) == [*marks, ("outcome", result["outcome"])]
        told = {child.tag for child in case} - {"properties"}
        kinds = {"pass": set(), "fail": {"failure"}, "not-run": {"error"}}
        assert told == kinds.get(result["outcome"], {"system-out"})


def test_junit_tells_a_failure(records: Records) -> None:
    _, found = cases(junit_xml(records.record["bad"]))
    failure = found[WAIVED.replace(".py", "")].find("failure")
    assert failure is not None
    assert failure.get("message") == "AssertionError: assert 1 == 2"
    clause = catalogue().clause("D5")
    assert (failure.text or "").splitlines() == [
        f"clause D5 ({clause.title}): {clause.text}",
        "input: n=1",
        "expected: == 2",
        "got: 1",
        f"run it alone: forebay conform limited --test '{WAIVED}'",
    ]


@pytest.mark.parametrize("name", ENDINGS)
def test_junit_is_xml_whatever_the_texts_are(records: Records, name: str) -> None:
    suite, found = cases(junit_xml(nasty(records.record[name])))
    assert {each.tag for each in suite.iter()} <= {
        "testsuite", "properties", "property", "testcase", "failure", "error", "system-out",
    }  # fmt: skip
    messages = [failure.get("message") or "" for failure in suite.iter("failure")]
    escaped = NASTY.replace("\x00", "�").replace("\x1b", "�").replace("\ud800", "�")
    assert escaped in messages
    assert f"stopped: {escaped}" in messages
    assert any(escaped in name for name in found)


# -- the page --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [deepcopy, nasty])
@pytest.mark.parametrize("name", ENDINGS)
def test_the_page_loads_nothing_and_runs_nothing(records: Records, name: str, changed: Any) -> None:
    made = Page(page(changed(records.record[name])))
    assert not {tag for tag, _ in made.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in made.tags:
        for key, value in attributes.items():
            if key.startswith("xmlns"):  # a name, which nothing fetches
                continue
            assert not key.startswith("on")
            assert key not in ("src", "action", "data", "formaction"), (tag, key)
            if key.endswith("href"):
                assert (value or "").startswith("#"), (tag, key, value)
            for place in re.findall(r"url\(([^)]*)\)|https?:", value or ""):
                assert place.startswith("#"), (tag, key, value)
    style = re.findall(r"<style[^>]*>(.*?)</style>", page(records.record[name]), re.DOTALL)
    assert style
    assert not any("url(" in each or "@import" in each for each in style)


def test_the_page_holds_clauses_by_outcome_and_the_errors(records: Records) -> None:
    record = records.record["good"]
    text = page(record)
    made = Page(text)
    heads = ["clause", "", "pass", "refused", "waived", "fail", "not-run"]
    rows = {row[0]: row[2:] for row in made.rows[made.rows.index(heads) + 1 :] if len(row) == len(heads)}
    marked = {clause for result in record["results"] for clause in (*result["clauses"], *result["refuses"])}
    assert rows.keys() == marked
    of_d5 = [result["outcome"] for result in record["results"] if "D5" in result["clauses"] + result["refuses"]]
    count = [of_d5.count(kind) for kind in heads[2:]]
    assert rows["D5"] == [str(number or "") for number in count]
    assert count[2] == 1
    dots = text.count("<use ")
    seen = [error for result in record["results"] for error in result["errors"].values()]
    assert "<svg" in text
    assert dots >= len(seen) > 0
    for dtype in record["tolerances"]:
        assert f">{dtype}</text>" in text
    assert "<svg" not in page({**record, "results": [{**result, "errors": {}} for result in record["results"]]})


def test_the_page_tells_a_failure_with_its_clause_and_then_the_problems(records: Records) -> None:
    record = deepcopy(records.record["bad"])
    record["problems"] = ["a problem"]
    text = Page(page(record)).text
    clause = catalogue().clause("D5")
    told = text[text.index("What failed") : text.index("Problems of the run")]
    assert f"clause D5 ({clause.title}): {clause.text}" in told
    assert f"Run it alone: forebay conform limited --test '{WAIVED}'" in told
    assert "a problem" not in told
    assert "a problem" in text


def test_the_page_tells_in_words_what_is_declared(records: Records) -> None:
    record = deepcopy(records.record["good"])
    record["backend"]["capabilities"].update(layouts=["NHD", "HND"], max_group=None, window=True, capture=False)
    rows = Page(page(record)).rows
    for row in (["layouts", "NHD, HND"], ["max_group", "no limit"], ["window", "yes"], ["capture", "no"]):
        assert row in rows


def test_a_failed_test_of_a_clause_that_is_not_known_here_is_told(records: Records) -> None:
    """Of a record of another contract."""
    record = deepcopy(records.record["bad"])
    of(record, WAIVED)["clauses"] = ["Z9"]
    assert "clause Z9" in Page(page(record)).text
    assert "clause Z9\ninput: n=1" in (cases(junit_xml(record))[1][WAIVED.replace(".py", "")].findtext("failure") or "")
    assert f"- {WAIVED} (Z9)" in section(statement(record), "Failed: 1")


def test_the_page_shows_markup_as_text(records: Records) -> None:
    text = page(nasty(records.record["bad"]))
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 5


# -- the statement ---------------------------------------------------------------------------------------------------------


def section(text: str, title: str) -> list[str]:
    """The lines of the section whose title begins so."""
    found = re.search(rf"^## {re.escape(title)}.*\n\n((?:.+\n)+)", text, re.MULTILINE)
    assert found, text
    return found[1].splitlines()


@pytest.mark.clause("G2")
def test_the_statement_says_what_was_shown_and_what_was_not(records: Records) -> None:
    text = statement(records.record["good"])
    assert text.startswith("# Conformance statement: limited (forebay-limited 2.5)\n\n**CONFORMANT WITH WAIVERS: ")
    assert "1 failed and is waived" in text
    assert "none failed" not in text
    assert "SIMULATED, not on a device: simulated accelerator" in text
    refused = section(text, "Refused, as declared: 3")
    assert refused[:2] == ["- head_dims: 16 (1 test)", "- max_query_len: 3 (1 test)"]
    assert re.fullmatch(r"- sinks: .+ \(1 test\)", refused[2])
    assert "- Delegated to numpy: nothing\n" in text
    for operation, count in records.record["good"]["counters"]["launches"].items():
        assert f"{operation} {count}" in text
    (waived,) = section(text, "Waivers: 1")
    assert all(part in waived for part in (WAIVED, "D5", "simulated accelerator", "used", "it splits by <batch> & co"))
    assert section(text, "Not run: 0") == ["none"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smoke", "**NOT A FULL RUN: "),
        ("bad", "**NOT CONFORMANT.**"),
        ("crashed", "stopped: its process died with status 7"),
        ("away", "Run nothing: the backend could not be opened"),
    ],
)
def test_the_statement_of_another_ending_says_so(records: Records, name: str, says: str) -> None:
    record = records.record[name]
    text = statement(record)
    assert says in text
    assert "CONFORMANT: every test" not in text
    names = {
        kind: [each["test"] for each in record["results"] if each["outcome"] == kind] for kind in ("fail", "not-run")
    }
    failed, left = names["fail"], names["not-run"]
    assert section(text, f"Failed: {len(failed)}") == ([f"- {each} (D5)" for each in failed] or ["none"])
    assert ("The first of them alone:\n\n    forebay conform " in text) == bool(failed)
    more = [f"- and {len(left) - 3} more, in the record"] if len(left) > 3 else []
    assert section(text, f"Not run: {len(left)}") == ([*(f"- {each}" for each in left[:3]), *more] or ["none"])


def test_delegated_operations_are_named(records: Records) -> None:
    record = deepcopy(records.record["good"])
    record["delegated"] = record["counters"]["delegated"] = {"merge_partials": 7, "gather": 1}
    assert "- Delegated to numpy: gather 1, merge_partials 7\n" in statement(record)
    assert ["gather", str(record["counters"]["launches"]["gather"]), "1"] in Page(page(record)).rows


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({}, "alone: it keeps none of its own, so what it does inside itself is not seen"),
        ({"waits": 3}, "and its own: waits"),
        ({"waits": 3, "bytes_down": 0}, "and its own: bytes_down, waits"),
    ],
)
def test_the_statement_says_by_what_d7_was_shown(counts: dict[str, int], says: str, records: Records) -> None:
    record = deepcopy(records.record["good"])
    record["backend"]["info"] = {"device": "d", **counts}
    assert f"- No host read and no sync in decode (D7), by the counts in front of the driver {says}\n" in statement(
        record
    )


def test_the_statement_keeps_to_a_page_but_for_what_failed(records: Records) -> None:
    """However much is refused, waived or left out: counted all, listed as far as there is room. What failed is listed in full."""
    record = deepcopy(records.record["bad"])
    refused, failed, passed = (of(record, test) for test in (HEAD, WAIVED, STAGE))
    limits = [(f"limit_{i % 14}", str(i)) for i in range(200)]
    many = [
        *({**refused, "refusal": {"capability": name, "value": value, "message": ""}} for name, value in limits),
        *({**failed, "test": f"b{i}"} for i in range(300)),
        *({**passed, "test": f"c{i}", "outcome": "not-run"} for i in range(400)),
    ]
    record["results"] += many
    record["summary"].update({"refused": 203, "fail": 301, "not-run": 400, "total": len(record["results"])})
    record["problems"] = [f"problem {i}" for i in range(50)]
    operations = {f"operation_{i}": i for i in range(40)}
    record["counters"]["launches"] = record["counters"]["delegated"] = record["delegated"] = operations
    waiver = {"test": WAIVED, "clause": "D5", "device": "d", "reason": "r", "expiry": "2099-01-01", "state": "used"}
    record["waivers"] = [waiver] * 30
    text = statement(record)
    assert len(text.splitlines()) <= MOST_LINES + 301 + 50
    assert {f"- b{i} (D5)" for i in range(300)} < set(section(text, "Failed: 301"))
    assert section(text, "Problems of the run: 50") == [f"- problem {i}" for i in range(50)]
    for title in ("Refused, as declared: 203", "Waivers: 30", "Not run: 400"):
        listed = section(text, title)
        assert len(listed) > 3
        assert re.fullmatch(r"- and \d+ more, in the record", listed[-1])
    for line in text.splitlines():
        assert line.isprintable()


@pytest.mark.parametrize("name", ENDINGS)
def test_the_statement_keeps_every_text_to_its_line(records: Records, name: str) -> None:
    record = nasty(records.record[name])
    record["stopped"] = record["stopped"] + "\n# Conformance statement: all well\n\n**CONFORMANT: every test"
    lines = statement(record).splitlines()
    assert sum(line.startswith("# ") for line in lines) == 1
    conforms = records.record[name]["verdict"].startswith("conformant")
    assert sum(line.startswith("**CONFORMANT") for line in lines) == conforms
    assert all(line.isprintable() for line in lines)


def test_reports_are_of_one_record(records: Records) -> None:
    record = records.record["good"]
    for text in (statement(record), page(record), junit_xml(record)):
        assert record["digest"][:16] in text
        assert record["suite_hash"][:16] in text
    assert QUERY in {result["test"] for result in record["results"]}
