"""The runs that CI has no time for have passed and left their records."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from forebay.specs.sources import suite_hash
from forebay.specs.suite.reports.statement import statement
from forebay.specs.suite.verifier.content import content_faults
from forebay.specs.suite.verifier.shape import read_record
from tests.cli.running import run_process
from tests.full import CONFORM, RECORDS, ROOT, RUNS

MINUTES = {"conform_cuda_interpret": 12}
"""Longest time of the whole suite where it is not six minutes."""


@pytest.mark.parametrize("name", RUNS)
def test_a_long_run_has_a_record_of_its_passing(name: str) -> None:
    made = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    module, *arguments = RUNS[name]
    assert made["command"] == " ".join(["python", "-m", module, *arguments])
    assert made["passed"], made["output"]
    assert made["output"]
    if name.startswith("conform_"):
        most = MINUTES.get(name, 6)
        assert made["seconds"] < 60 * most, f"the whole suite is to take less than {most} minutes"


@pytest.mark.parametrize("backend", ["cpu", "cuda:interpret", "sim"])
def test_a_backend_of_this_tree_has_a_record_of_its_conformance(backend: str, tmp_path: Path) -> None:
    """Everything was asked, and held. A record of another state of the suite cannot be verified as a whole, and says so."""
    name = backend.replace(":", "_")
    path = ROOT / CONFORM / f"{name}.json"
    record = read_record(path.read_bytes())
    assert (record["requested"], record["profile"], record["selection"]) == (backend, "full", [])
    assert record["verdict"] == "conformant"
    assert record["summary"]["not-run"] == record["summary"]["waived"] == 0
    assert path.with_suffix(".md").read_text(encoding="utf-8") == statement(record)
    if record["suite_hash"] == suite_hash():
        assert run_process("conform", "--verify", str(path), cwd=tmp_path).code == 0
    else:
        assert list(content_faults(record, None)) == []
        warnings.warn(
            f"{path.name} is of another state of the suite; python -m tests.full conform_{name}", stacklevel=1
        )
