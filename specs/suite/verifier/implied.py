"""What tests that passed imply of a record, for they could not have passed without it: errors measured, acts counted, time, layouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from forebay.specs.dtypes import FLOAT_DTYPES
from forebay.specs.geometry import LAYOUTS

MEASURING: Final = (
    "test_decode.py::test_any_call_meets_the_oracle",
    "test_decode.py::test_any_group_of_query_heads",
    "test_decode.py::test_any_head_size",
    "test_decode.py::test_any_layout",
    "test_decode.py::test_every_length",
    "test_decode.py::test_every_parameter",
    "test_decode.py::test_long_sequences_beside_short_ones",
)
"""Tests that compare with the oracle whatever they are asked; those with a dtype in their name, in that dtype."""
COUNTED: Final[Mapping[str, str]] = {
    "dropped": "test_doors.py::test_an_id_outside_the_pool_raises_on_the_host_and_is_counted_on_the_device",
    "invalid": "test_invalid_blocks.py::test_an_invalid_block_is_zero_rows_that_take_part",
    "syncs": "test_decode_bits.py::test_no_host_read_and_no_sync",
    "declined": "test_lanes.py::test_warming_again_is_bounded_and_says_so",
}
"""By counter a test that does, on the judged backend, what it counts."""
MADE: Final = ("test_decode.py", "test_door_rows.py", "test_doors.py", "test_invalid_blocks.py")
"""Files whose pools the backend makes: memory that it wraps may have layouts that it does not make."""
_COMPARED: Final = ("paged_decode", "merge_partials")

Result = Mapping[str, Any]
Record = Mapping[str, Any]


def implied_faults(record: Record) -> Iterator[str]:
    """What is not there, and which test says that it must be."""
    passed = [result for result in record["results"] if result["outcome"] == "pass"]
    for result in record["results"]:
        if result["outcome"] != "not-run" and result["seconds"] == 0:
            yield f"{result['test']}: {result['outcome']}, and it took no time"
    for result in passed:
        yield from _unmeasured(result)
        if record["backend"] is not None:
            yield from _undeclared(result, record["backend"]["capabilities"]["layouts"])
    counters = record["counters"]
    if counters and "unreadable" not in counters:
        functions = {result["test"].partition("[")[0] for result in passed}
        for name, test in COUNTED.items():
            if test in functions and not counters[name]:
                yield f"its counters know no {name}, and {test} passed"
    if counters:
        compared = sum(bool(result["errors"]) for result in passed)
        launched = sum(counters[kind].get(name, 0) for kind in ("launches", "delegated") for name in _COMPARED)
        if launched < compared:
            yield f"{compared} tests compared what was decoded, and {launched} launches of {', '.join(_COMPARED)} were counted"


def _words(result: Result) -> set[str]:
    """The words between brackets of a test's name: its parameters."""
    return set(re.split(r"[\[\]\-, ]", result["test"].partition("[")[2]))


def _unmeasured(result: Result) -> Iterator[str]:
    if result["test"].partition("[")[0] in MEASURING:
        named = _words(result) & set(FLOAT_DTYPES)
        if not result["errors"] or (named and not named & set(result["errors"])):
            yield f"{result['test']}: pass, and it measured no error{' in ' if named else ''}{', '.join(sorted(named))}"


def _undeclared(result: Result, declared: list[str]) -> Iterator[str]:
    named = _words(result) & set(LAYOUTS)
    if result["test"].partition("::")[0] in MADE and not result["refuses"] and named and not named & set(declared):
        yield f"{result['test']}: pass, where the backend makes pools of {', '.join(declared)} alone"
