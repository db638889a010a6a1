"""What tests that passed imply of a record, on tests of the real suite: each stands in a record of its own."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from forebay.runtime.settings import isolated_environment
from forebay.specs.suite.command import suite_arguments
from forebay.specs.suite.verifier import Asked
from forebay.specs.suite.verifier.implied import COUNTED, MADE, MEASURING, implied_faults
from forebay.specs.suite.verifier.installed import collect, membership_faults

LAYOUT = "test_doors.py::test_sink_ids_are_dropped_and_counted[HND-host]"


def record_of(test: str, *, outcome: str = "pass", **changes: Any) -> dict[str, Any]:
    """A record of one test, with counters of zero but for many launches."""
    result = {"test": test, "refuses": [], "outcome": outcome, "seconds": 0.1, "errors": {}}
    counters = {"launches": {"paged_decode": 9}, "delegated": {}, **dict.fromkeys(COUNTED, 0)}
    backend = {"capabilities": {"layouts": ["NHD", "KV2"]}}
    return {"backend": backend, "counters": counters, "results": [{**result, **changes}]}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """What the suite of this checkout asks sim."""
    folder = tmp_path_factory.mktemp("asked")
    command = [sys.executable, "-m", "pytest", *suite_arguments(folder)]
    return collect("sim", "full", command, isolated_environment(folder))


def test_every_test_that_implies_something_is_in_the_suite(asked: Asked) -> None:
    functions = {name.partition("[")[0] for name in asked.tests}
    assert set(MEASURING) | set(COUNTED.values()) <= functions
    assert set(MADE) <= {name.partition("::")[0] for name in asked.tests}
    assert {name.partition("[")[0] for name in asked.tests if name.partition("[")[0] in COUNTED.values()} <= {
        name.partition("[")[0] for name in asked.asks_backend
    }, "they count on the backend that is judged"


@pytest.mark.refuses("G2")
def test_that_it_is_a_selection_is_named_before_what_it_lacks(asked: Asked) -> None:
    part = {"complete": False, "selection": ["-k none"], "results": [], "backend": None, "seeds": dict(asked.seeds)}
    first, second = membership_faults(part, asked)
    assert first.startswith("it calls itself a selection")
    assert second.startswith(f"{len(asked.tests)} missing result(s)")


@pytest.mark.refuses("G2")
@pytest.mark.parametrize("counter", COUNTED)
def test_a_counter_that_a_test_moves_has_moved(counter: str) -> None:
    record = record_of(COUNTED[counter])
    assert list(implied_faults(record)) == [f"its counters know no {counter}, and {COUNTED[counter]} passed"]
    record["counters"][counter] = 1
    assert list(implied_faults(record)) == []
    assert list(implied_faults(record_of(COUNTED[counter], outcome="refused"))) == []


@pytest.mark.refuses("G2")
@pytest.mark.parametrize("test", MEASURING)
def test_a_test_that_compares_has_an_error_in_the_dtype_it_names(test: str) -> None:
    assert list(implied_faults(record_of(test))) == [f"{test}: pass, and it measured no error"]
    assert list(implied_faults(record_of(test, errors={"float32": [0.0, 1.0]}))) == []
    named = f"{test}[3-bfloat16]"
    (fault,) = implied_faults(record_of(named, errors={"float32": [0.0, 1.0]}))
    assert fault == f"{named}: pass, and it measured no error in bfloat16"
    assert list(implied_faults(record_of(named, errors={"bfloat16": [0.0, 1.0]}))) == []
    assert list(implied_faults(record_of(named, outcome="refused"))) == []


@pytest.mark.refuses("G2")
def test_a_test_of_a_layout_passes_where_the_backend_makes_such_pools() -> None:
    (fault,) = implied_faults(record_of(LAYOUT))
    assert fault == f"{LAYOUT}: pass, where the backend makes pools of NHD, KV2 alone"
    assert list(implied_faults(record_of(LAYOUT.replace("HND", "KV2")))) == []
    assert list(implied_faults(record_of(LAYOUT, refuses=["W6"]))) == []


@pytest.mark.refuses("G2")
def test_what_was_compared_was_launched() -> None:
    record = record_of("test_any.py::test_it", errors={"float32": [0.0, 1.0]})
    assert list(implied_faults(record)) == []
    record["counters"]["launches"].clear()
    assert list(implied_faults(record)) == [
        "1 tests compared what was decoded, and 0 launches of paged_decode, merge_partials were counted"
    ]
    record["counters"]["delegated"]["paged_decode"] = 1
    assert list(implied_faults(record)) == []
