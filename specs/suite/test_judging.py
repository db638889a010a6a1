"""The suite's own rules: every clause is asked, no outcome is a skip, a waiver is exact, and doing nothing fails (clauses G1 to G3)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, Capabilities, ForebayError, InvalidInput, Unsupported
from forebay.specs.clauses import catalogue
from forebay.specs.suite.collected import check_whole
from forebay.specs.suite.command import FOLDER
from forebay.specs.suite.kv import held, new_pool, put, scene
from forebay.specs.suite.outcome import Phase, judge_phase, judge_test
from forebay.specs.suite.staging import G
from forebay.specs.suite.waivers import check_matched, load_waivers
from forebay.specs.testing import doing

TODAY = date(2030, 6, 15)
WAIVER = {
    "test": '"test_a.py::test_b"',
    "clause": '"D6"',
    "device": '"a device"',
    "reason": '"the unit rounds"',
    "expiry": "2030-06-15",
}
LIMITED = Capabilities(
    layouts=("NHD",), kv_dtypes=("float32", "bfloat16"), head_dims=(32, 64, 128), max_group=8, sinks=False
)


class Marked:
    """What the checks look at of a collected test: its name and its markers."""

    def __init__(self, **marks: tuple[str, ...]) -> None:
        self.path, self.nodeid, self._marks = FOLDER / "test_a.py", "test_a.py::test_b", marks

    def iter_markers(self, kind: str) -> Iterator[pytest.Mark]:
        yield from (pytest.Mark(kind, (name,), {}, _ispytest=True) for name in self._marks.get(kind, ()))


def marks_of_the_suite(kind: str) -> set[str]:
    """Every clause id in a marker of one kind, read from the suite's sources."""
    calls = (
        node for path in FOLDER.glob("test_*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
    return {
        argument.value
        for call in calls
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == kind
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


@pytest.mark.clause("G1")
def test_every_clause_in_force_has_its_tests() -> None:
    shown, refusing = marks_of_the_suite("clause"), marks_of_the_suite("refuses")
    for clause in catalogue().in_force():
        assert clause.id in shown | refusing
        assert clause.id in refusing or not clause.refusal
    assert shown | refusing <= set(catalogue().clauses)


@pytest.mark.refuses("G1")
@pytest.mark.parametrize(
    ("lacking", "says"), [("D3", "^D3: .*no test of it"), ("D8", "^D8: .*no refusal test of it"), ("all", "no clause")]
)
def test_a_clause_without_its_tests_stops_the_run(lacking: str, says: str) -> None:
    every = tuple(clause.id for clause in catalogue().in_force())
    whole: Any = [Marked(clause=(name,), refuses=(name,)) for name in every]
    check_whole(whole, catalogue())
    marks = {"D3": {}, "D8": {"clause": ("D8",)}, "all": {}}[lacking]
    rest: Any = [Marked(clause=(name,), refuses=(name,)) for name in every if name != lacking]
    rest += [Marked(**marks)] if marks or lacking == "all" else []
    with pytest.raises(pytest.UsageError, match=says):
        check_whole(rest, catalogue())


def phase_of(error: BaseException | None, capabilities: Capabilities = LIMITED, **report: Any) -> Phase:
    """A phase whose report says so, and which raised ``error``, on a backend of these capabilities."""
    outcome = report.pop("outcome", "passed" if error is None else "failed")
    made = pytest.TestReport("test_a.py::test_b", ("", 0, ""), {}, outcome, report.pop("longrepr", None), "call")
    vars(made).update(report)
    return judge_phase(made, error, capabilities)


@pytest.mark.clause("G2")
def test_what_is_skipped_or_expected_to_fail_has_failed() -> None:
    assert phase_of(None) == Phase("pass")
    assert phase_of(AssertionError("1 == 2")) == Phase("fail", "AssertionError: 1 == 2")
    skipped = phase_of(pytest.skip.Exception("no time"), outcome="skipped", longrepr=("a.py", 1, "Skipped: no time"))
    assert skipped == Phase("fail", "skipped (Skipped: no time), which is not an outcome")
    for error, outcome in ((AssertionError(), "skipped"), (None, "passed")):
        marked = phase_of(error, outcome=outcome, wasxfail="known")
        assert marked == Phase("fail", "marked as an expected failure (known), which is not an outcome")


@pytest.mark.clause("G2")
@pytest.mark.parametrize(
    ("capability", "value", "why"),
    [
        ("head_dims", 256, ""),
        ("sinks", "given", ""),
        ("max_group", 16, ""),
        ("layouts", "HND", ""),
        ("", None, "without a declared capability"),
        ("speed", 3, "no field of Capabilities"),
        ("head_dims", 32, "allows"),
        ("softcap", 0.5, "allows"),
    ],
)
def test_a_refusal_is_one_that_the_backend_declares(capability: str, value: object, why: str) -> None:
    phase = phase_of(Unsupported("not here", capability=capability, value=value))
    assert phase.outcome == ("fail" if why else "refused")
    assert why in phase.message
    both = ExceptionGroup("two", [Unsupported("not here", capability=capability, value=value), AssertionError("wrong")])
    assert phase_of(both).outcome == "fail"
    assert judge_test([Phase("pass"), phase, Phase("fail", "leaked")]).message == (phase.message if why else "leaked")


@pytest.mark.refuses("G2")
@pytest.mark.parametrize(
    ("name", "value", "narrow"),
    [
        ("head_dims", 64, {"head_dims": (32, 128)}),
        ("block_sizes", 16, {"block_sizes": (8, 32)}),
        ("max_group", 3, {"max_group": 2}),
        ("kv_dtypes", "bfloat16", {"kv_dtypes": ("float32",)}),
        ("window", 5, {"window": False}),
        ("lse", True, {"lse": False}),
        ("max_pool_elements", 4096, {"max_pool_elements": 1024}),
    ],
)
def test_the_core_cannot_be_refused(name: str, value: object, narrow: dict[str, Any]) -> None:
    phase = phase_of(Unsupported("not here", capability=name, value=value), replace(LIMITED, **narrow))
    assert phase.outcome == "fail"
    assert "of the core: it cannot be refused" in phase.message


@pytest.mark.refuses("G2")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        *(({field: None}, f"lacks {field}") for field in WAIVER),
        ({"issue": '"7"'}, "unknown issue"),
        ({"reason": '" "'}, "reason = ' '"),
        ({"expiry": "2030-06-14"}, "expired on 2030-06-14"),
        ({"expiry": '"2030-07-01"'}, "expected a date"),
        ({"test": '"test_a.py::test_c"'}, "no such test"),
        ({"clause": '"D5"'}, "not one of the test's: D6, L1"),
    ],
)
def test_a_waiver_is_complete_in_time_and_matched(tmp_path: Path, changes: dict[str, str | None], says: str) -> None:
    def waivers(entry: dict[str, Any]) -> Path:
        path = tmp_path / "waivers.toml"
        lines = [f"{key} = {value}" for key, value in entry.items() if value is not None]
        path.write_text("\n".join(["[[waiver]]", *lines]), encoding="utf-8")
        return path

    known = {"test_a.py::test_b": ("D6", "L1")}
    check_matched(load_waivers(waivers(WAIVER), TODAY), known)
    with pytest.raises(InvalidInput, match=says):
        check_matched(load_waivers(waivers({**WAIVER, **changes}), TODAY), known)


def decoded(backend: Backend) -> None:
    with scene(backend, (5, 3)) as s:
        s.check()


def written(backend: Backend) -> None:
    with new_pool(backend, G) as pool:
        rows = np.ones((1, G.num_kv_heads, G.head_dim), np.float32)
        put(backend, pool, [G.block_size + 1], rows, rows)
        assert held(backend, pool, [G.block_size + 1]) == 1


@pytest.mark.clause("G3")
@pytest.mark.parametrize("asked", [decoded, written])
def test_a_device_that_does_nothing_fails(backend: Backend, asked: Callable[[Backend], None]) -> None:
    """The judged backend, then the same one where no row is written and every answer is zero."""
    asked(backend)
    xp = backend.xp

    def zeros(call: Any) -> tuple[Any, Any]:
        out = backend.to_device(np.zeros((*xp.shape(call.q)[:3], call.pool.geometry.value_dim), np.float32))
        return out, backend.to_device(np.zeros(xp.shape(call.q)[:3], np.float32))

    nothing = doing(backend, write_kv=lambda *_: None, paged_decode=zeros)
    poison_stays = np.errstate(invalid="ignore")
    with nothing, poison_stays, pytest.raises((AssertionError, ForebayError)):
        asked(backend)
