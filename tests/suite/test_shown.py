"""What only a driver can say is asked of it: that it gathered (D4, D12), and that it read and waited for nothing (D7)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.selection.fakes import Site
from tests.suite.test_backends import judge

PORT = """
import dataclasses

from tests.sample_backend.src.forebay_sample.driver import SampleDriver


class Port(SampleDriver):
    def __init__(self):
        super().__init__()
        self.info = {{"device": "sample", **{counts}}}

    def to_host(self, x):
        if "bytes_down" in self.info:
            self.info["bytes_down"] += x.bits.nbytes
        return super().to_host(x)

    def paged_decode(self, call):
        {act}


@hookimpl
def forebay_backend():
    return describe("port", load=Port)
"""
CHECKOUT = Path(__file__).parents[2]
RIGHT = "return super().paged_decode(call)"
IN_PLACE = 'return super().paged_decode(dataclasses.replace(call, path="direct"))'
READS = "self.to_host(call.visible); return super().paged_decode(call)"
GATHER = {
    "test_decode_bits.py::test_direct_equals_gather[9-3-64-1-float32]",
    "test_decode_bits.py::test_direct_equals_gather_for_any_call[NHD]",
    "test_decode_bits.py::test_only_the_switch_selects_gather[9-3-64]",
    "test_replay.py::test_direct_equals_gather_inside_a_captured_step",
}
HOST_FREE = {
    "test_decode_bits.py::test_no_host_read_and_no_sync[direct]",
    "test_decode_bits.py::test_no_host_read_and_no_sync[gather]",
    "test_replay.py::test_a_steady_replay_is_host_free",
}


def failed(folder: Path, act: str, counts: dict[str, int], asked: set[str]) -> set[str]:
    """Those of the tests ``asked`` that a port fails whose decode is ``act``, and which keeps these counts of its own."""
    site, work = folder / "site", folder / "work"
    for made in (site, work):
        made.mkdir()
    Site(site).install("one-port", {"port": PORT.format(act=act, counts=counts)})
    (site / "tests").symlink_to(CHECKOUT / "tests")
    words = " or ".join({name.partition("::")[2].partition("[")[0] for name in asked})
    said = judge("port", work, "-k", words, "--suite-record", "record.json", path=(site,))
    results = json.loads((work / "record.json").read_text())["results"]
    outcomes = {each["test"]: each["outcome"] for each in results if each["test"] in asked}
    assert outcomes.keys() == asked, said.stdout[-3000:]
    return {test for test, outcome in outcomes.items() if outcome == "fail"}


@pytest.mark.clause("D12", "D4")
@pytest.mark.parametrize(("act", "fails"), [(RIGHT, set[str]()), (IN_PLACE, GATHER)], ids=["gathers", "ignores path"])
def test_a_port_that_never_gathers_fails(act: str, fails: set[str], tmp_path: Path) -> None:
    """Its bits are right on either path, and its decodes are counted."""
    assert failed(tmp_path, act, {}, GATHER) == fails


@pytest.mark.clause("D7")
@pytest.mark.parametrize(
    ("act", "counts", "fails"),
    [
        (RIGHT, {"bytes_down": 0}, set[str]()),
        (READS, {"bytes_down": 0}, {test for test in HOST_FREE if "replay" not in test}),
        (RIGHT, {"bytes_down": 0, "waits": 0}, {test for test in HOST_FREE if "replay" not in test}),
        (READS, {}, set[str]()),
    ],
    ids=["counts", "reads", "a count that never grows", "reads and keeps no count"],
)
def test_a_port_is_held_to_the_counts_it_keeps(
    act: str, counts: dict[str, int], fails: set[str], tmp_path: Path
) -> None:
    """What a port does inside its own method and counts nowhere no test sees; the statement says that it keeps no counts."""
    assert failed(tmp_path, act, counts, HOST_FREE) == fails
