"""The committed matrix is of this suite and of these faults, and none survives."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest

from forebay.specs.clauses import catalogue
from forebay.specs.faults.catalogue import faults
from forebay.specs.faults.matrix import MATRIX_JSON, MATRIX_PAGE, page
from forebay.specs.sources import suite_hash


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_text(MATRIX_JSON))
    return data


def test_it_is_of_this_suite_and_these_faults(committed: dict[str, Any]) -> None:
    made = "it is out of date; write it anew with forebay faults --full --matrix specs/faults"
    assert committed["suite_hash"] == suite_hash(), made
    assert committed["spec_version"] == catalogue().version, made
    known = {fault.id: (fault.clause, fault.title, fault.counter, fault.pair_of) for fault in faults().values()}
    fields = ("clause", "title", "counter", "pair_of")
    assert {name: tuple(row[key] for key in fields) for name, row in committed["faults"].items()} == known, made


def test_every_fault_was_killed_and_every_clause_has_one(committed: dict[str, Any]) -> None:
    rows = committed["faults"]
    assert [name for name, row in rows.items() if row["verdict"] != "killed" or not row["tests_catching"]] == []
    assert [name for name, row in rows.items() if not row["fallen_by_clause"].get(row["clause"])] == []
    assert committed["clauses_without_fault"] == []


def test_the_page_says_what_the_data_say(committed: dict[str, Any]) -> None:
    assert _text(MATRIX_PAGE) == page(committed)


def _text(name: str) -> str:
    return resources.files("forebay.specs.faults").joinpath(name).read_text(encoding="utf-8")
