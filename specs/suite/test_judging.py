"""The suite's own rules: every clause is asked, no outcome is a skip, a waiver is exact, and doing nothing fails (clauses G1 to G3)."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from forebay.specs import Backend, Capabilities, ForebayError, InvalidInput, Unsupported
from forebay.specs.clauses import catalogue
from forebay.specs.geometry import storage_shapes
from forebay.specs.suite.collected import asked_of, check_whole
from forebay.specs.suite.command import FOLDER
from forebay.specs.suite.kv import geometry, held, new_pool, put
from forebay.specs.suite.outcome import Phase, Refusal, judge_phase, judge_test
from forebay.specs.suite.record import OWN_KERNELS, assemble
from forebay.specs.suite.scenes import scene
from forebay.specs.suite.staging import G
from forebay.specs.suite.waivers import check_matched, load_waivers
from forebay.specs.testing import claiming, doing

TODAY = date(2030, 6, 15)
WAIVER = {
    "test": '"test_a.py::test_b"',
    "clause": '"D6"',
    "device": '"a device"',
    "reason": '"the unit rounds"',
    "expiry": "2030-06-15",
}
DEVICE_NAMES = frozenset({"open_backend", "backend_name", "backend"})
NO_LIMITS = ("tf32", "recapture_at_boundary", "traces_run", "deferred")


@dataclass(frozen=True)
class Asked:
    """A call that asks for ``value`` of a field of Capabilities, claims that leave it out, and the module that refuses it then."""

    value: Any
    claims: Any
    call: Callable[[Backend], object]
    raised_in: str = "forebay.specs.attention"


def of_scene(feature: dict[str, Any] | None = None, **sizes: Any) -> Callable[[Backend], None]:
    """A small decode with a feature, or in a pool of these sizes."""

    def call(backend: Backend) -> None:
        with scene(backend, (5, 9), **sizes) as s:
            s.decode(**(feature or {}))

    return call


def of_memory(backend: Backend) -> None:
    g = geometry()
    backend.wrap_pool(np.zeros(storage_shapes("KV2", g)[0], np.float32), layout="KV2", geometry=g)


SINKS = np.zeros(4, np.float32)
BEYOND_CORE = {
    "head_dims": Asked(96, (64, 128), of_scene(head_dim=96)),
    "block_sizes": Asked(8, (16, 32), of_scene(block_size=8)),
    "max_group": Asked(16, 8, of_scene(heads=16, num_kv_heads=1)),
    "max_query_len": Asked(2, 1, of_scene(query_len=2)),
    "sinks": Asked("given", False, of_scene({"sinks": SINKS})),
    "softcap": Asked(0.5, False, of_scene({"softcap": 0.5})),
    "layouts": Asked("HND", ("NHD",), of_scene(layout="HND"), "forebay.specs.backend"),
    "kv_dtypes": Asked("float16", ("float32", "bfloat16"), of_scene(dtype="float16"), "forebay.specs.backend"),
    "addressable": Asked(True, False, of_memory, "forebay.specs.backend"),
    "max_pool_elements": Asked(
        2**24 + 1, 2**24, lambda b: b.reserve("large", (2**24 + 1,), "bool"), "forebay.specs.backend_memory"
    ),
}
OF_CORE = {
    "head_dims": Asked(64, (32, 128), of_scene()),
    "block_sizes": Asked(16, (8, 32), of_scene()),
    "max_group": Asked(3, 2, of_scene(heads=3, num_kv_heads=1)),
    "kv_dtypes": Asked("bfloat16", ("float32",), of_scene(dtype="bfloat16")),
    "window": Asked(5, False, of_scene({"window": 5})),
    "lse": Asked(True, False, of_scene()),
    "max_pool_elements": Asked(4096, 1024, lambda b: b.reserve("small", (4096,), "bool")),
}


class Marked:
    """What the checks look at of a collected test: its name and its markers."""

    def __init__(self, *, fixtures: Collection[str] = DEVICE_NAMES, **marks: tuple[str, ...]) -> None:
        self.path, self.nodeid, self._marks = FOLDER / "test_a.py", "test_a.py::test_b", marks
        self.fixturenames = list(fixtures)

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
def test_a_clause_without_its_tests_stops_the_run(backend_name: str, lacking: str, says: str) -> None:
    """Whether the suite lacks them, or has none that this backend is asked."""
    every = tuple(clause.id for clause in catalogue().in_force())
    whole: list[Any] = [Marked(clause=(name,), refuses=(name,)) for name in every]
    marks = {"D3": {}, "D8": {"clause": ("D8",)}, "all": {}}[lacking]
    rest = [marked for marked, name in zip(whole, every, strict=True) if name != lacking]
    rest += [Marked(**marks)] if marks or lacking == "all" else []
    for backend in ("", backend_name):
        check_whole(whole, catalogue(), backend)
        with pytest.raises(pytest.UsageError, match=says):
            check_whole(rest, catalogue(), backend)


@pytest.mark.refuses("G1")
def test_a_clause_that_a_backend_is_not_asked_stops_the_run() -> None:
    """Tests that need no device judge the runtime alone: what a backend has to hold needs others."""
    every = [clause.id for clause in catalogue().in_force()]
    items: Any = [
        Marked(clause=(name,), refuses=(name,), fixtures=() if name == "D3" else DEVICE_NAMES) for name in every
    ]
    check_whole(asked_of(items, "sim", "full"), catalogue(), "sim")
    asked = asked_of(items, "mine:fast", "full")
    with pytest.raises(pytest.UsageError, match=r"^D3: in force in contract .*, and mine:fast is asked no test of it"):
        check_whole(asked, catalogue(), "mine:fast")
    runtime = {clause.id for clause in catalogue().in_force() if clause.subject == "runtime"}
    assert len(items) - len(asked) == len(runtime) + 1
    more: Any = Marked(clause=("D3",), refuses=("D3",))
    check_whole([*asked, more], catalogue(), "mine:fast")


def phase_of(error: BaseException | None, capabilities: Capabilities, **report: Any) -> Phase:
    """A phase whose report says so, and which raised ``error``, on a backend of these capabilities."""
    outcome = report.pop("outcome", "passed" if error is None else "failed")
    made = pytest.TestReport("test_a.py::test_b", ("", 0, ""), {}, outcome, report.pop("longrepr", None), "call")
    vars(made).update(report)
    return judge_phase(made, error, capabilities)


def unsupported(capability: str, value: object) -> NoReturn:
    raise Unsupported("not here", capability=capability, value=value)


def raised_by(call: Callable[[Backend], object], backend: Backend) -> Unsupported:
    """What a call of a backend says it does not support."""
    with pytest.raises(Unsupported) as caught:
        call(backend)
    return caught.value


@pytest.mark.clause("G2")
def test_what_is_skipped_or_expected_to_fail_has_failed(backend: Backend) -> None:
    decoded(backend)
    can = backend.capabilities
    assert phase_of(None, can) == Phase("pass")
    assert phase_of(AssertionError("1 == 2"), can) == Phase("fail", "AssertionError: 1 == 2")
    skipped = phase_of(
        pytest.skip.Exception("no time"), can, outcome="skipped", longrepr=("a.py", 1, "Skipped: no time")
    )
    assert skipped == Phase("fail", "skipped (Skipped: no time), which is not an outcome")
    for error, outcome in ((AssertionError(), "skipped"), (None, "passed")):
        marked = phase_of(error, can, outcome=outcome, wasxfail="known")
        assert marked == Phase("fail", "marked as an expected failure (known), which is not an outcome")


@pytest.mark.refuses("G2")
@pytest.mark.parametrize("name", BEYOND_CORE)
def test_a_refusal_is_the_contracts_for_a_limit_that_is_declared(backend: Backend, name: str) -> None:
    asked = BEYOND_CORE[name]
    with claiming(backend, **{name: asked.claims}):
        can, error = backend.capabilities, raised_by(asked.call, backend)
    phase = phase_of(error, can)
    assert phase == Phase("refused", str(error), Refusal(name, str(error.value), str(error), asked.raised_in))
    assert phase_of(ExceptionGroup("two", [error, AssertionError("wrong")]), can).outcome == "fail"
    assert judge_test([Phase("pass"), phase, Phase("fail", "leaked")]).message == "leaked"
    wide: Any = {bool: True, tuple: (*can.layouts, *can.kv_dtypes, error.value), int: None}[type(asked.claims)]
    allowed = phase_of(error, replace(can, **{name: wide}))
    assert (allowed.outcome, "allows" in allowed.message) == ("fail", True)
    behind = phase_of(Unsupported("not here", capability=name, value=error.value), can)
    assert (behind.outcome, "raised behind them (not here)" in behind.message) == ("fail", True)


@pytest.mark.refuses("G2")
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("", None, "without a declared capability"),
        ("speed", 3, "no field of Capabilities"),
        ("max_group", "many", "expected an int"),
        *((name, True, "no limit of what can be asked") for name in NO_LIMITS),
    ],
)
def test_what_is_no_declared_limit_refuses_nothing(backend: Backend, name: str, value: object, why: str) -> None:
    claims: dict[str, Any] = dict.fromkeys(NO_LIMITS, False)
    narrow = replace(backend.capabilities, max_group=8, **claims)
    error = raised_by(lambda _: unsupported(name, value), backend)
    phase = phase_of(error, narrow)
    assert (phase.outcome, why in phase.message) == ("fail", True), phase


@pytest.mark.refuses("G2")
@pytest.mark.parametrize("name", OF_CORE)
def test_the_core_cannot_be_refused(backend: Backend, name: str) -> None:
    asked = OF_CORE[name]
    with claiming(backend, **{name: asked.claims}):
        phase = phase_of(raised_by(asked.call, backend), backend.capabilities)
    assert phase.outcome == "fail"
    assert "of the core: it cannot be refused" in phase.message


@pytest.mark.clause("G2")
@pytest.mark.parametrize(
    ("outcomes", "tf32", "largest", "verdict", "problem"),
    [
        (("pass", "pass"), False, 1e-6, "conformant", ""),
        (("pass", "waived"), False, 1e-6, "conformant with waivers", ""),
        (("waived", "waived"), False, 1e-6, "failed", "clause D6: every test of it was waived (2)"),
        (("refused", "waived"), False, 1e-6, "failed", "clause D6: no test of it passed (1 refused, 1 waived)"),
        (("pass", "fail"), False, 1e-6, "failed", ""),
        (("pass", "pass"), True, 3e-4, "conformant", ""),
        (("pass", "pass"), True, 5e-6, "failed", "tf32 is claimed, and the largest error in float32, 5.00e-06"),
    ],
)
def test_a_verdict_names_what_is_waived_and_holds_claims_against_what_was_seen(
    outcomes: tuple[str, str], tf32: bool, largest: float, verdict: str, problem: str
) -> None:
    tests = [{"test": f"test_a.py::test_{n}", "clauses": ["D6"], "refuses": [], "cases": []} for n in range(2)]
    run: dict[str, Any] = dict.fromkeys(
        ("spec_version", "suite_hash", "requested", "selection", "versions", "seeds", "started")
    )
    run |= {"profile": "full", "complete": True, "tests": tests, "waivers": []}
    opened = {"capabilities": {"tf32": tf32}, "core_gaps": [], "info": {}}
    done: list[dict[str, Any]] = [
        {"entry": "result", "test": test["test"], "outcome": outcome, "errors": {"float32": [largest, 1e-3]}}
        for test, outcome in zip(tests, outcomes, strict=True)
    ]
    counters = {"launches": dict.fromkeys(OWN_KERNELS, 1), "delegated": {}}
    entries = [{"entry": "run", **run}, {"entry": "backend", **opened}, *done, {"entry": "counters", **counters}]
    record = assemble([*entries, {"entry": "end", "ended": ""}])
    assert record["verdict"] == verdict
    assert len(record["problems"]) == bool(problem)
    assert all(each.startswith(problem) for each in record["problems"])


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
def test_a_waiver_is_complete_in_time_and_matched(
    backend: Backend, tmp_path: Path, changes: dict[str, str | None], says: str
) -> None:
    good = {**WAIVER, "device": json.dumps(str(backend.info.get("device", "a device")))}

    def waivers(entry: dict[str, Any]) -> Path:
        path = tmp_path / "waivers.toml"
        lines = [f"{key} = {value}" for key, value in entry.items() if value is not None]
        path.write_text("\n".join(["[[waiver]]", *lines]), encoding="utf-8")
        return path

    known = {"test_a.py::test_b": ("D6", "L1")}
    check_matched(load_waivers(waivers(good), TODAY), known, whole=True)
    with pytest.raises(InvalidInput, match=says):
        check_matched(load_waivers(waivers({**good, **changes}), TODAY), known, whole="test" in changes)


def decoded(backend: Backend) -> None:
    with scene(backend, (5, 3)) as s:
        s.check()


def written(backend: Backend) -> None:
    with new_pool(backend, G) as pool:
        rows = np.ones((1, G.num_kv_heads, G.head_dim), np.float32)
        put(backend, pool, [G.block_size + 1], rows, rows)
        assert held(backend, pool, [G.block_size + 1]) == 1


def noise(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape)


@pytest.mark.clause("G3")
@pytest.mark.parametrize(("asked", "answer"), [(decoded, np.zeros), (decoded, noise), (written, np.zeros)])
def test_a_device_that_does_nothing_fails(
    backend: Backend,
    asked: Callable[[Backend], None],
    answer: Callable[[tuple[int, ...]], np.ndarray[Any, Any]],
) -> None:
    """The judged backend, then the same one where no row is written and every answer is zero, or anything."""
    asked(backend)
    xp = backend.xp

    def answers(call: Any) -> tuple[Any, Any]:
        rows = xp.shape(call.q)[:3]
        out = backend.to_device(answer((*rows, call.pool.geometry.value_dim)).astype(np.float32))
        return out, backend.to_device(answer(rows).astype(np.float32))

    nothing = doing(backend, write_kv=lambda *_: None, paged_decode=answers)
    poison_stays = np.errstate(invalid="ignore")
    with nothing, poison_stays, pytest.raises((AssertionError, ForebayError)):
        asked(backend)
