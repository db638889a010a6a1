"""Every kind of public fault report that one device can show has a test in the shared suite, so that it judges every backend."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import Final

from .tree import ROOT, python_files

SUITE: Final = ROOT / "specs" / "suite"
CASES: Final = (
    *("A01", "A03", "A04", "A05", "A07", "A09", "A10", "A11", "A12"),
    *("B01", "B02", "B04", "B05", "B06", "B09", "B10", "B12"),
    *("C01", "C02", "C03", "C05", "C06", "C07"),
    *("D01", "D02", "D03", "D05", "D06", "D07", "D09"),
    *("F01", "F02", "F03", "F04"),
    *("G02", "G04", "G05"),
    *("H02",),
    *("I02", "I03", "I04", "I05", "I07", "I08"),
)
OUT_OF_SCOPE: Final = {
    "B07": "a page shared by attention and recurrent state: unified pools",
    "E01": "quantised pools",
    "E04": "quantised pools",
    "E05": "quantised pools",
    "E06": "quantised pools",
    "H03": "several devices: KV heads replicated over ranks",
    "H04": "several devices: ranks with unlike pools",
    "H05": "several devices: tensor parallelism and the KV head count",
}
"""Cases of pools that are not in force yet, and of more than one device. The day one is tested it leaves this list."""


def cases_of(files: list[Path]) -> dict[str, list[str]]:
    """By case id the test functions that are marked with it, as ``file::function``."""
    found = defaultdict(list)
    for path in files:
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.case":
                    for argument in mark.args:
                        found[ast.literal_eval(argument)].append(f"{path.name}::{function.name}")
    return found


def test_every_case_of_one_device_is_in_the_suite() -> None:
    tested = cases_of(sorted(SUITE.glob("test_*.py")))
    assert [case for case in CASES if case not in tested] == [], "no test of the suite is marked with these cases"
    assert sorted(set(tested) - set(CASES)) == [], "the suite tests cases that CASES does not list"
    assert all(name.partition("::")[2].startswith("test_") for names in tested.values() for name in names)


def test_a_case_is_in_scope_or_not_and_every_mark_names_one() -> None:
    assert not set(CASES) & set(OUT_OF_SCOPE)
    assert len(set(CASES)) == len(CASES)
    marked = cases_of(python_files(ROOT, "specs", "tests"))
    assert {case: names for case, names in marked.items() if case not in (*CASES, *OUT_OF_SCOPE)} == {}


def test_a_case_without_a_test_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text('@pytest.mark.case("A01", "B02")\ndef test_it() -> None: ...\n\n\ndef test_other() -> None: ...\n')
    assert cases_of([file]) == {"A01": ["test_some.py::test_it"], "B02": ["test_some.py::test_it"]}
