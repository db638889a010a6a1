"""Waivers in a run: what they excuse, and that none outlives its reason."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from forebay.specs.errors import InvalidInput
from forebay.specs.suite.waivers import load_waivers
from tests.suite.small import CAPTURED, Small

FAILING = """
@pytest.mark.clause("D5")
@pytest.mark.parametrize("n", [1, 2])
def test_wrong(backend: Backend, n: int) -> None:
    assert n == 2
"""
WAIVER = {
    "test": "test_waived.py::test_wrong[1]",
    "clause": "D5",
    "device": "simulated accelerator",
    "reason": "the unit splits by batch",
    "expiry": datetime.now(UTC).date() + timedelta(days=2),
}


def write(path: Path, *waivers: dict[str, Any]) -> Path:
    """A file of waivers."""
    shown = {key: None for waiver in waivers for key in waiver}
    lines = []
    for waiver in waivers:
        lines.append("[[waiver]]")
        lines += [f"{key} = {v if isinstance(v := waiver[key], date) else repr(v)}" for key in shown if key in waiver]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def failing(small: Small) -> Small:
    small.add("test_captured.py", CAPTURED)
    small.add("test_waived.py", FAILING)
    return small


def judge(failing: Small, *waivers: dict[str, Any]) -> Any:
    write(failing.work.parent / "waivers.toml", *waivers)
    return failing.record("--waivers", "../waivers.toml")


@pytest.mark.clause("G2")
def test_a_waiver_excuses_one_test_on_one_device(failing: Small) -> None:
    said, record = judge(failing, WAIVER)
    assert (said.code, record["verdict"]) == (0, "conformant with waivers")
    assert "sim (full): conformant with waivers: " in said.out
    assert ", 1 waived" in said.out
    assert record["summary"] == {"pass": 6, "fail": 0, "refused": 0, "waived": 1, "not-run": 0, "total": 7}
    (waived,) = [result for result in record["results"] if result["outcome"] == "waived"]
    assert (waived["test"], waived["message"]) == (WAIVER["test"], "AssertionError: assert 1 == 2")
    assert record["waivers"] == [{**WAIVER, "expiry": str(WAIVER["expiry"]), "state": "used"}]
    assert failing.forebay("conform", "--verify", "record.json").code == 0


@pytest.mark.clause("G2")
def test_a_waived_test_shows_no_clause(failing: Small) -> None:
    """A clause whose every test is waived was not shown, however good the reasons are."""
    every = ("test_every.py::test_decode[direct]", "test_every.py::test_decode[gather]")
    text = (failing.suite / "test_every.py").read_text(encoding="utf-8")
    text = text.replace("        s.check(path=path)", "        s.check(path=path)\n    raise AssertionError('known')")
    (failing.suite / "test_every.py").write_text(text, encoding="utf-8")
    waived = [{**WAIVER, "test": test, "clause": "D6"} for test in every]
    said, record = judge(failing, WAIVER, *waived)
    assert (said.code, record["verdict"], record["summary"]["fail"]) == (1, "failed", 0)
    assert "clause D6: every test of its values was waived (2)" in record["problems"]
    assert not any("clause D5" in problem for problem in record["problems"])
    assert failing.forebay("conform", "--verify", "record.json").out.endswith("record.json: valid\n")


@pytest.mark.clause("G2")
def test_a_waiver_of_another_device_excuses_nothing(failing: Small) -> None:
    said, record = judge(failing, {**WAIVER, "device": "a newer one"})
    assert said.code == 1
    assert (record["summary"]["fail"], record["waivers"][0]["state"]) == (1, "elsewhere")
    assert record["problems"] == []


@pytest.mark.refuses("G2")
def test_a_stale_waiver_fails(failing: Small) -> None:
    said, record = judge(failing, WAIVER, {**WAIVER, "test": "test_waived.py::test_wrong[2]"})
    assert said.code == 1
    assert record["summary"]["fail"] == 0
    stale = "stale waiver: test_waived.py::test_wrong[2] does not fail on simulated accelerator; take the waiver out"
    assert record["problems"] == [stale]
    assert f"PROBLEM {stale}" in said.out


@pytest.mark.refuses("G2")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"test": "test_waived.py::test_wrong[3]"}, "the suite has no such test"),
        ({"clause": "D6"}, "clause 'D6' is not one of the test's: D5"),
        ({"expiry": datetime.now(UTC).date() - timedelta(days=1)}, "it expired on"),
        ({"reason": ""}, "reason = ''; expected a text"),
    ],
)
@pytest.mark.parametrize("selected", [(), ("-k", "captured")], ids=["all of it", "a selection"])
def test_an_unmatched_or_expired_waiver_stops_the_run(
    failing: Small, selected: tuple[str, ...], changes: dict[str, Any], says: str
) -> None:
    write(failing.work / "waivers.toml", {**WAIVER, **changes})
    said = failing.forebay("conform", "sim", "--record", "record.json", "--waivers", "waivers.toml", *selected)
    assert said.code == 2
    assert says in said.out + said.err
    assert not (failing.work / "record.json").exists()


@pytest.mark.clause("G2")
@pytest.mark.refuses("G2")
def test_of_tests_that_are_asked_alone_the_clauses_are_matched(failing: Small) -> None:
    """Whether the suite has another test is not known then."""
    for changes, says in (
        ({"clause": "D6"}, "clause 'D6' is not one of"),
        ({"test": "test_captured.py::test_not"}, ""),
    ):
        write(failing.work / "waivers.toml", {**WAIVER, **changes})
        said = failing.forebay("conform", "sim", "--waivers", "waivers.toml", "--test", "test_waived.py::test_wrong[1]")
        assert (said.code, says in said.out + said.err) == (2 if says else 1, True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[waiver]\ntest = 'a'\n", "expected [[waiver]] tables and nothing else"),
        ("[[waivers]]\n", "got the keys waivers"),
        ("waiver = [1]\n", "expected [[waiver]] tables"),
        ("[[waiver]\n", "waivers.toml: "),
        (
            "[[waiver]]\nexpiry = 2030-01-01T00:00:00\ntest='a'\nclause='D1'\ndevice='d'\nreason='r'\n",
            "expected a date",
        ),
    ],
)
def test_a_file_that_is_no_list_of_waivers_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "waivers.toml").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput) as caught:
        load_waivers(tmp_path / "waivers.toml", date(2026, 1, 1))
    assert says in str(caught.value)
    with pytest.raises(InvalidInput, match="No such file"):
        load_waivers(tmp_path / "none.toml", date(2026, 1, 1))


def test_a_test_is_waived_once_for_a_device(tmp_path: Path) -> None:
    path = write(tmp_path / "waivers.toml", WAIVER, {**WAIVER, "device": "another"})
    assert len(load_waivers(path, date(2026, 1, 1))) == 2
    with pytest.raises(InvalidInput, match="waived twice for 'simulated accelerator'"):
        load_waivers(write(path, WAIVER, {**WAIVER, "reason": "again"}), date(2026, 1, 1))
