"""The runs that CI has no time for have passed and left their records."""

from __future__ import annotations

import json

import pytest

from tests.full import RECORDS, RUNS


@pytest.mark.parametrize("name", RUNS)
def test_a_long_run_has_a_record_of_its_passing(name: str) -> None:
    made = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    module, *arguments = RUNS[name]
    assert made["command"] == " ".join(["python", "-m", module, *arguments])
    assert made["passed"], made["output"]
    assert made["output"]
