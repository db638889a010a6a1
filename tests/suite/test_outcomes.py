"""What becomes of each test, how a failure is told, and what a run is worth that did not end."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from forebay.specs.clauses import catalogue
from tests.suite.small import Outcome, Small, make_small

EVERY_OUTCOME = """
@pytest.mark.clause("D1")
def test_passes(backend: Backend) -> None:
    assert backend.name == "limited"


@pytest.mark.clause("D2")
@pytest.mark.parametrize("rows", [1, 2])
def test_fails(backend: Backend, rows: int) -> None:
    assert rows == 1


@pytest.mark.clause("D2")
def test_skips(backend: Backend) -> None:
    pytest.skip("no time today")


@pytest.mark.clause("D2")
@pytest.mark.xfail(reason="known")
def test_is_expected_to_fail(backend: Backend) -> None:
    assert backend is None


@pytest.mark.clause("D2")
@pytest.mark.xfail(reason="known")
def test_passes_unexpectedly(backend: Backend) -> None:
    assert backend is not None


@pytest.mark.clause("D8")
def test_is_refused(backend: Backend) -> None:
    with scene(backend, (5,), head_dim=16) as s:
        s.check()


@pytest.mark.clause("D9")
@given(st.integers(1, 3))
def test_is_refused_with_examples(backend: Backend, seed: int) -> None:
    with scene(backend, (5,), seed=seed) as s:
        s.check(sinks=np.zeros(4, np.float32))


@pytest.mark.clause("D2")
def test_refuses_what_nobody_declared(backend: Backend) -> None:
    raise Unsupported("not on a Monday")


@pytest.mark.clause("D2")
def test_refuses_what_is_declared_to_work(backend: Backend) -> None:
    raise Unsupported("64 is odd", capability="head_dims", value=64)


@pytest.mark.clause("D2")
def test_fails_and_refuses(backend: Backend) -> None:
    raise ExceptionGroup("both", [Unsupported("no", capability="sinks", value="given"), AssertionError("wrong")])


@pytest.mark.clause("D2")
def test_leaves_a_mess(backend: Backend, mess: None) -> None:
    pass


@pytest.mark.clause("D2")
def test_fails_and_leaves_a_mess(backend: Backend, mess: None) -> None:
    assert backend is None, "first"


@pytest.fixture
def mess() -> Any:
    yield
    raise RuntimeError("not cleaned up")


@pytest.mark.clause("D3")
@given(st.integers(0, 1000))
def test_draws(backend: Backend, n: int) -> None:
    assert n < 17


@pytest.mark.clause("D4")
def test_differs(backend: Backend) -> None:
    np.testing.assert_array_equal(np.array([1, 2]), np.array([1, 3]))


def holds(n: int) -> bool:
    try:
        assert n in [2]
    except AssertionError:
        return False
    return True


@pytest.mark.clause("D2")
def test_compares_in_vain(backend: Backend) -> None:
    assert not holds(1)


@pytest.mark.clause("D2")
def test_holds_in_vain(backend: Backend) -> None:
    assert holds(3)


@pytest.mark.clause("D2")
def test_holds_in_part(backend: Backend) -> None:
    assert holds(2) and not holds(
        5
    ) and holds(
        7
    )


@pytest.mark.clause("D2")
def test_compares_over_lines(backend: Backend) -> None:
    assert [
        backend.name,
        2,
    ] == [
        "another",
        3,
    ]


@pytest.mark.refuses("D8")
def test_is_not_refused(backend: Backend) -> None:
    with pytest.raises(Unsupported):
        backend.synchronize()
"""
EXPECTED = {
    "test_passes": "pass",
    "test_fails[1]": "pass",
    "test_fails[2]": "fail",
    "test_skips": "fail",
    "test_is_expected_to_fail": "fail",
    "test_passes_unexpectedly": "fail",
    "test_is_refused": "refused",
    "test_is_refused_with_examples": "refused",
    "test_refuses_what_nobody_declared": "fail",
    "test_refuses_what_is_declared_to_work": "fail",
    "test_fails_and_refuses": "fail",
    "test_leaves_a_mess": "fail",
    "test_fails_and_leaves_a_mess": "fail",
    "test_draws": "fail",
    "test_differs": "fail",
    "test_compares_in_vain": "pass",
    "test_holds_in_vain": "fail",
    "test_holds_in_part": "fail",
    "test_compares_over_lines": "fail",
    "test_is_not_refused": "fail",
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory, elsewhere: Path) -> tuple[Small, Outcome, dict[str, Any]]:
    """A backend with limits, judged by a suite in which everything happens; as a selection, for it lacks most clauses."""
    small = make_small(tmp_path_factory.mktemp("outcomes") / "small")
    small.add("test_kinds.py", EVERY_OUTCOME)
    said, record = small.record("-k", "test_", "--show", "99", backend="limited", path=elsewhere)
    return small, said, record


def results(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {result["test"].partition("::")[2]: result for result in record["results"]}


def block(out: str, test: str) -> str:
    """What is printed of one failed test."""
    (found,) = re.findall(rf"^FAILED \S+::{re.escape(test)}\n(?:  .+\n)+", out, flags=re.MULTILINE)
    return str(found)


@pytest.mark.clause("G2")
def test_every_test_has_its_outcome(judged: Any) -> None:
    _, said, record = judged
    assert {name: result["outcome"] for name, result in results(record).items()} == EXPECTED
    assert (said.code, record["verdict"]) == (1, "failed")
    assert record["summary"] == {"pass": 3, "fail": 15, "refused": 2, "waived": 0, "not-run": 0, "total": 20}
    assert "limited (full, a selection): failed: 3 pass, 15 fail, 2 refused" in said.out
    assert "Traceback" not in said.out + said.err


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("test_skips", "skipped (Skipped: no time today), which is not an outcome"),
        ("test_is_expected_to_fail", "marked as an expected failure"),
        ("test_passes_unexpectedly", "marked as an expected failure"),
        ("test_refuses_what_nobody_declared", "Unsupported without a declared capability"),
        ("test_refuses_what_is_declared_to_work", "head_dims=64, which the declared head_dims=(8, 64, 128) allows"),
        ("test_fails_and_refuses", "AssertionError: wrong"),
        ("test_leaves_a_mess", "why: after the test: RuntimeError: not cleaned up\n"),
        ("test_fails_and_leaves_a_mess", "\n  why: after the test: RuntimeError: not cleaned up\n"),
    ],
)
def test_a_failure_says_why(judged: Any, test: str, message: str) -> None:
    _, said, record = judged
    assert message in results(record)[test]["message"] or message in block(said.out, test)


def test_a_refusal_names_the_declared_limit(judged: Any) -> None:
    found = results(judged[2])
    assert found["test_is_refused"]["refusal"]["capability"] == "head_dims"
    assert found["test_is_refused"]["refusal"]["value"] == "16"
    assert found["test_is_refused_with_examples"]["refusal"]["capability"] == "sinks"


@pytest.mark.parametrize(
    ("test", "clause", "asked", "expected", "got"),
    [
        ("test_fails[2]", "D2", "rows=2", "expected: == 1", "got: 2"),
        ("test_draws", "D3", "n=17", "expected: < 17", "got: 17"),
        ("test_holds_in_vain", "D2", "none", "expected: assert holds(3)", "got: assert False"),
        ("test_holds_in_part", "D2", "none", "expected: assert holds(2) and not", "got: assert ("),
        ("test_compares_over_lines", "D2", "none", "expected: == ['another', 3]", "got: ['limited', 2]"),
        ("test_differs", "D4", "none: the test has one case", "expected: array([1, 3])", "got: array([1, 2])"),
        ("test_is_not_refused", "D8", "none", "Unsupported", "got: no error"),
        ("test_leaves_a_mess", "D2", "none", "no error from: raise RuntimeError", "got: RuntimeError: not cleaned up"),
    ],
)
def test_a_failure_tells_the_clause_the_input_what_was_expected_and_what_came(
    judged: Any, test: str, clause: str, asked: str, expected: str, got: str
) -> None:
    told = block(judged[1].out, test)
    assert re.search(rf"^  clause {clause} \(.+\): .+", told, re.MULTILINE)
    asked_for = told[told.index("smallest failing input") : told.index("expected:")]
    assert asked in asked_for
    assert expected in told
    assert got in told


def test_a_failure_can_be_run_alone_by_what_is_printed(judged: Any, elsewhere: Path) -> None:
    small, said, _ = judged
    for test in ("test_fails[2]", "test_draws"):
        (command,) = re.findall(r"run it alone: (.+)", block(said.out, test))
        program, *arguments = shlex.split(command)
        assert program == "forebay"
        again = small.forebay(*arguments, path=elsewhere)
        assert again.code == 1
        assert block(again.out, test) == block(said.out, test)
        assert "0 pass, 1 fail" in again.out


CRASHES = {
    "abort": ("os.abort()", "its process was killed by SIGABRT", 1),
    "exit": ("os._exit(0)", "its process died with status 0", 1),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt", 1),
    "stop": ("pytest.exit('enough')", "enough", 1),
}


@pytest.mark.clause("G2")
@pytest.mark.parametrize("kind", CRASHES)
def test_what_a_crash_or_an_interrupt_leaves_was_not_run(small: Small, kind: str) -> None:
    act, reason, code = CRASHES[kind]
    small.add("test_first.py", '\n@pytest.mark.clause("D1")\ndef test_before(backend: Backend) -> None: pass\n')
    small.add(
        "test_later.py", f'\n@pytest.mark.clause("D1")\ndef test_it(backend: Backend) -> None:\n    import os; {act}\n'
    )
    small.add("test_zuletzt.py", '\n@pytest.mark.clause("D1")\ndef test_after(backend: Backend) -> None: pass\n')
    said, record = small.record()
    found = {name: result["outcome"] for name, result in results(record).items()}
    assert (found["test_before"], found["test_it"], found["test_after"]) == ("pass", "not-run", "not-run")
    assert (said.code, record["verdict"]) == (code, "failed")
    assert (record["stopped"], record["running"]) == (f"{reason}, in test_later.py::test_it", "test_later.py::test_it")
    assert record["summary"]["not-run"] == 2
    assert f"STOPPED {reason}" in said.out
    assert list(small.work.iterdir()) == [small.work / "record.json"]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("away", "BackendUnavailable: backend 'away' (call) cannot run here: no device found"),
        ("broken", "failed while its driver was loaded: OSError: libdevice.so: no such file"),
    ],
)
def test_a_backend_that_cannot_start_fails_with_its_cause(small: Small, elsewhere: Path, name: str, cause: str) -> None:
    said, record = small.record(backend=name, path=elsewhere)
    assert said.code == 2
    assert f"STOPPED backend {name!r} cannot start: " in said.out
    assert said.out.count("cannot start") == 1
    assert "asked for by" not in said.out
    assert f"\n{name} (full): nothing was judged: 0 pass, " in said.out
    assert cause in said.out
    assert "Traceback" not in said.out + said.err
    assert record["backend"] is None
    assert (cause in record["stopped"], record["running"]) == (True, "")
    assert record["summary"]["not-run"] == record["summary"]["total"] > 0


@pytest.mark.clause("G2", "B4")
def test_the_core_is_declared(small: Small, elsewhere: Path) -> None:
    """Even where no test of the suite would ask for it."""
    said, record = small.record(backend="narrow", path=elsewhere)
    assert said.code == 1
    assert record["summary"]["fail"] == 0
    refused = "the core cannot be refused, and head_dims=(8, 32) refuses"
    assert record["problems"] == [f"{refused} 64", f"{refused} 128"]
    assert f"PROBLEM {refused} 64" in said.out


@pytest.mark.clause("G2")
def test_a_clause_all_of_whose_tests_were_refused_is_not_shown(small: Small, elsewhere: Path) -> None:
    said, record = small.record(backend="silent", path=elsewhere)
    assert said.code == 1
    assert record["summary"]["fail"] == 0
    assert "clause D6: every test of its values was refused (2)" in record["problems"]
    assert not any("clause S1:" in problem for problem in record["problems"])


@pytest.mark.clause("G2", "B4")
def test_a_tolerance_that_is_claimed_in_vain_fails(small: Small, elsewhere: Path) -> None:
    """Whoever claims tf32 is allowed errors 200 times as large: some error has to show the need."""
    said, record = small.record(backend="rounding", path=elsewhere)
    seen = record["tolerances"]["float32"]
    assert (said.code, record["verdict"], record["summary"]["fail"]) == (1, "failed", 0)
    assert seen["largest"] <= catalogue().tolerance("float32") < seen["limit"] == catalogue().tolerance("tf32")
    (problem,) = record["problems"]
    assert problem.startswith("tf32 is claimed, and the largest error in float32, ")
    assert f"PROBLEM {problem}" in said.out
    assert small.forebay("conform", "--verify", "record.json", path=elsewhere).code == 0


@pytest.mark.clause("G2", "C9")
def test_counters_prove_that_the_kernels_ran(small: Small, elsewhere: Path) -> None:
    text = (small.suite / "test_every.py").read_text()
    (small.suite / "test_every.py").write_text(text.replace('["direct", "gather"]', '["direct", "direct"]'))
    said, record = small.record()
    assert said.code == 1
    assert record["problems"] == ["no launch of gather was counted, of the backend's own kernels or delegated to numpy"]
    (small.suite / "test_every.py").write_text(text)
    said, record = small.record(backend="plain", path=elsewhere)
    assert {"paged_decode", "gather", "write_kv", "stage"} <= set(record["delegated"])
    assert not record["counters"]["launches"]
