"""A record as JUnit XML, for whatever collects test results; clauses and outcomes are properties of each test case."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from xml.etree import ElementTree

_NO_XML: Final = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")
"""Characters that XML 1.0 has no form for."""


def junit_xml(record: Mapping[str, Any]) -> str:
    """One ``testsuite``; a failure and a problem of the run are failures, a test that was not run is an error."""
    cases = [_case(result) for result in record["results"]]
    cases += [_problem(number, text) for number, text in enumerate(_run_faults(record), 1)]
    suite = ElementTree.Element(
        "testsuite",
        name=f"forebay conform {record['requested']}",
        tests=str(len(cases)),
        failures=str(sum(case.find("failure") is not None for case in cases)),
        errors=str(sum(case.find("error") is not None for case in cases)),
        skipped="0",
        time=f"{sum(result['seconds'] for result in record['results']):.3f}",
        timestamp=record["started"],
    )
    keys = ("spec_version", "suite_hash", "profile", "verdict", "digest")
    _properties(suite, [(key, str(record[key])) for key in keys])
    suite.extend(cases)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(result: Mapping[str, Any]) -> ElementTree.Element:
    module, _, name = result["test"].partition("::")
    case = ElementTree.Element(
        "testcase", classname=_clean(module.removesuffix(".py")), name=_clean(name), time=f"{result['seconds']:.3f}"
    )
    marks = [(kind, name) for kind, key in (("clause", "clauses"), ("refuses", "refuses")) for name in result[key]]
    _properties(case, [*marks, ("outcome", result["outcome"])])
    if result["outcome"] == "fail":
        failure = result["failure"] or {}
        text = "\n".join(f"{part}: {failure[part]}" for part in ("input", "expected", "got") if failure.get(part))
        _child(case, "failure", result["message"], text)
    elif result["outcome"] == "not-run":
        _child(case, "error", "not run", "")
    elif result["outcome"] in ("refused", "waived"):
        ElementTree.SubElement(case, "system-out").text = _clean(f"{result['outcome']}: {result['message']}")
    return case


def _problem(number: int, text: str) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname="run", name=f"problem {number}", time="0")
    _child(case, "failure", text, "")
    return case


def _run_faults(record: Mapping[str, Any]) -> list[str]:
    return [*record["problems"], *([f"stopped: {record['stopped']}"] if record["stopped"] else [])]


def _child(case: ElementTree.Element, kind: str, message: str, text: str) -> None:
    ElementTree.SubElement(case, kind, message=_clean(message)).text = _clean(text)


def _properties(parent: ElementTree.Element, pairs: list[tuple[str, str]]) -> None:
    properties = ElementTree.SubElement(parent, "properties")
    for name, value in pairs:
        ElementTree.SubElement(properties, "property", name=name, value=_clean(value))


def _clean(text: str) -> str:
    return _NO_XML.sub("�", text)
