"""A record as JUnit XML, for whatever collects test results; clauses and outcomes are properties of each test case."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from xml.etree import ElementTree as ET

from forebay.specs.suite.failure import rerun_command
from forebay.specs.suite.summary import clause_lines

_NO_XML: Final = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")
"""Characters that XML 1.0 has no form for."""


def junit_xml(record: Mapping[str, Any]) -> str:
    """One ``testsuite``; a failure and a problem of the run are failures, a test that was not run is an error."""
    cases = [_case(result, record["requested"]) for result in record["results"]]
    cases += [_problem(number, text) for number, text in enumerate(_run_faults(record), 1)]
    suite = ET.Element(
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
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(result: Mapping[str, Any], backend: str) -> ET.Element:
    module, _, name = result["test"].partition("::")
    case = ET.Element(
        "testcase", classname=_clean(module.removesuffix(".py")), name=_clean(name), time=f"{result['seconds']:.3f}"
    )
    marks = [(kind, name) for kind, key in (("clause", "clauses"), ("refuses", "refuses")) for name in result[key]]
    _properties(case, [*marks, ("outcome", result["outcome"])])
    if result["outcome"] == "fail":
        failure = result["failure"] or {}
        lines = [f"{part}: {failure[part]}" for part in ("input", "expected", "got") if failure.get(part)]
        alone = f"run it alone: {rerun_command(backend, result['test'])}"
        _child(case, "failure", result["message"], "\n".join([*clause_lines(result), *lines, alone]))
    elif result["outcome"] == "not-run":
        _child(case, "error", "not run", "")
    elif result["outcome"] in ("refused", "waived"):
        ET.SubElement(case, "system-out").text = _clean(f"{result['outcome']}: {result['message']}")
    return case


def _problem(number: int, text: str) -> ET.Element:
    case = ET.Element("testcase", classname="run", name=f"problem {number}", time="0")
    _child(case, "failure", text, "")
    return case


def _run_faults(record: Mapping[str, Any]) -> list[str]:
    return [*record["problems"], *([f"stopped: {record['stopped']}"] if record["stopped"] else [])]


def _child(case: ET.Element, kind: str, message: str, text: str) -> None:
    ET.SubElement(case, kind, message=_clean(message)).text = _clean(text)


def _properties(parent: ET.Element, pairs: list[tuple[str, str]]) -> None:
    properties = ET.SubElement(parent, "properties")
    for name, value in pairs:
        ET.SubElement(properties, "property", name=name, value=_clean(value))


def _clean(text: str) -> str:
    return _NO_XML.sub("�", text)
