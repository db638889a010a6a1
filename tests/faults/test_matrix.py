"""The committed matrix is of the faults of this tree, and none survives."""

from __future__ import annotations

import json
import warnings
from importlib import resources
from typing import Any

import pytest

from forebay.specs.clauses import catalogue
from forebay.specs.faults.catalogue import faults, without_fault
from forebay.specs.faults.matrix import MATRIX_JSON, MATRIX_PAGE, page
from forebay.specs.sources import suite_hash

ANEW = "write it anew: python -m tests.full faults"


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_text(MATRIX_JSON))
    return data


def test_it_is_of_these_faults(committed: dict[str, Any]) -> None:
    """Of each of them, patch by patch. Of another state of the suite it may be, and says so: to write it takes hours."""
    assert committed["spec_version"] == catalogue().version, ANEW
    fields = ("clause", "title", "counter", "pair_of", "digest")
    of_tree = {fault.id: tuple(getattr(fault, name) for name in fields) for fault in faults().values()}
    assert {name: tuple(row[key] for key in fields) for name, row in committed["faults"].items()} == of_tree, ANEW
    if committed["suite_hash"] != suite_hash():
        warnings.warn(f"the matrix of faults is of another state of the suite; {ANEW}", stacklevel=1)


def test_every_fault_was_killed_and_every_clause_has_one(committed: dict[str, Any]) -> None:
    rows = committed["faults"]
    assert [name for name, row in rows.items() if row["verdict"] != "killed" or not row["tests_catching"]] == []
    assert [name for name, row in rows.items() if not row["fallen_by_clause"].get(row["clause"])] == []
    assert committed["clauses_without_fault"] == list(without_fault()) == []


def test_the_page_says_what_the_data_say(committed: dict[str, Any]) -> None:
    assert _text(MATRIX_PAGE) == page(committed)


def _text(name: str) -> str:
    return resources.files("forebay.specs.faults").joinpath(name).read_text(encoding="utf-8")
