"""What is checked once the suite is collected, which tests a backend is asked, and that other people's tests are left alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from forebay.specs.clauses import catalogue
from tests.suite.small import Small, every_clause

USAGE = 4
TEST = "\n@pytest.mark.{kind}({ids})\ndef test_it(backend: Backend) -> None: pass\n"
SUBJECTS = """
@pytest.mark.clause("L5", "W2")
def test_of_the_runtime(backend: Backend) -> None: pass


@pytest.mark.clause("W1")
def test_without_a_device() -> None: pass


@pytest.fixture
def made(another: Another) -> Any:
    return another


@pytest.mark.clause("W1")
def test_with_a_device_behind_a_fixture(made: Any) -> None: pass


@pytest.mark.clause("L5", "D6")
def test_of_both(backend: Backend) -> None: pass
"""


def judged(small: Small, *arguments: str) -> str:
    """The usage error that stops the run of a small suite, ``""`` if it passes."""
    said = small.pytest("--pyargs", "forebay.specs.suite", "--backend", "sim", *arguments)
    assert said.code in (0, USAGE), said.out + said.err
    return said.out + said.err if said.code == USAGE else ""


@pytest.mark.refuses("G1")
@pytest.mark.parametrize(
    ("kind", "ids"), [("clause", "'D99'"), ("refuses", "'D6', 'X1'"), ("clause", ""), ("refuses", "id='D6'")]
)
def test_an_unknown_clause_stops_the_run(small: Small, kind: str, ids: str) -> None:
    assert judged(small) == ""
    small.add("test_more.py", TEST.format(kind=kind, ids=ids))
    said = judged(small)
    assert "test_more.py::test_it" in said
    assert "expected clause ids, all of them known" in said
    assert judged(small, "-k", "test_decode") != ""


@pytest.mark.refuses("G1")
@pytest.mark.parametrize(
    ("lacking", "what"), [("D6", "no refusal test"), ("D8", "no refusal test"), ("D6", "no test"), ("B4", "no test")]
)
def test_a_clause_in_force_without_a_test_stops_the_run(small: Small, lacking: str, what: str) -> None:
    text = every_clause()
    shown, refusing = re.findall(r"(?:clause|refuses)\(\*(\(.+\))\)", text)
    replaced = [(refusing, refusing.replace(f"'{lacking}', ", ""))]
    replaced += [(shown, shown.replace(f"'{lacking}', ", ""))] if what == "no test" else []
    for before, after in replaced:
        assert after != before
        text = text.replace(before, after)
    (small.suite / "test_every.py").unlink()
    small.add("test_every.py", text)
    applies = what == "no test" or catalogue().clause(lacking).refusal
    assert (
        f"{lacking}: in force in contract {catalogue().version}, and the suite has {what} of it" in judged(small)
    ) == applies
    assert judged(small, "-k", "test_decode") == ""
    assert judged(small, "-m", "clause") == ""


@pytest.mark.refuses("G1")
def test_a_test_without_a_clause_stops_the_run(small: Small) -> None:
    small.add("test_more.py", "\ndef test_it(backend: Backend) -> None: pass\n")
    assert "test_more.py::test_it: no clause" in judged(small)
    only = small.forebay("conform", "sim", "--test", "test_more.py::test_it")
    assert only.code == 0, only.out


def test_the_suite_asks_for_the_name_of_a_backend(small: Small) -> None:
    said = small.pytest("--pyargs", "forebay.specs.suite")
    assert said.code == USAGE
    assert "name it with --backend NAME[:MODE]" in said.out + said.err


def test_other_peoples_tests_are_left_alone(small: Small) -> None:
    (small.work / "test_theirs.py").write_text(
        "import pytest\n@pytest.mark.clause('of a contract of theirs')\ndef test_it(): pass\n"
        "@pytest.mark.skip\ndef test_later(): pass\n"
    )
    said = small.pytest("test_theirs.py")
    assert (said.code, "1 passed, 1 skipped" in said.out) == (0, True)
    both = small.pytest("--pyargs", "forebay.specs.suite", "test_theirs.py", "--backend", "sim")
    assert (both.code, "conformant: 4 pass" in both.out, "5 passed, 1 skipped" in both.out) == (0, True, True)


@pytest.mark.clause("G1")
@pytest.mark.parametrize(("backend", "more"), [("sim", 4), ("limited", 2)])
def test_what_judges_the_runtime_alone_is_asked_of_sim(small: Small, elsewhere: Any, backend: str, more: int) -> None:
    small.add("test_subjects.py", SUBJECTS)
    _, record = small.record(backend=backend, path=elsewhere)
    asked = [result["test"].partition("::")[2] for result in record["results"]]
    assert ("test_of_the_runtime" in asked, "test_without_a_device" in asked) == (backend == "sim", backend == "sim")
    assert {"test_with_a_device_behind_a_fixture", "test_of_both"} <= set(asked)
    assert len(asked) == 4 + more
    assert record["complete"]


@pytest.mark.refuses("G1")
@pytest.mark.parametrize("profile", ["full", "smoke"])
@pytest.mark.parametrize("what", ["no test", "no refusal test"])
def test_a_clause_of_which_a_backend_is_asked_nothing_stops_the_run(
    small: Small, elsewhere: Any, what: str, profile: str
) -> None:
    """Tests without a device are asked of sim alone: whoever else is judged needs others."""
    kinds = ("clause", "refuses") if what == "no test" else ("refuses",)
    text = every_clause()
    for kind in kinds:
        text = re.sub(rf"({kind}\(.+)'D8', ", r"\1", text)
        small.add(f"test_{kind}.py", TEST.format(kind=kind, ids="'D8'").replace("backend: Backend", ""))
    (small.suite / "test_every.py").unlink()
    small.add("test_every.py", text)
    assert small.forebay("conform", "sim", "--profile", profile).code == 0
    said = small.forebay("conform", "limited", "--profile", profile, path=elsewhere)
    assert said.code == 2
    assert f"D8: in force in contract {catalogue().version}, and limited is asked {what} of it" in said.err


@pytest.mark.clause("G1")
def test_smoke_asks_every_clause_once_and_rather_without_drawing(small: Small) -> None:
    small.add(
        "test_also.py",
        '\n@pytest.mark.clause("D9", "D10")\n@given(st.integers(0, 3))\n'
        "def test_drawn(backend: Backend, n: int) -> None: pass\n"
        '\n@pytest.mark.clause("D9")\ndef test_listed(backend: Backend) -> None: pass\n'
        '\n@pytest.mark.clause("D9")\ndef test_again(backend: Backend) -> None: pass\n',
    )
    runs = [small.record("--profile", "smoke") for _ in range(2)]
    first, second = ([result["test"] for result in record["results"]] for _, record in runs)
    assert first == second
    every = {
        name for _, record in runs for result in record["results"] for name in result["clauses"] + result["refuses"]
    }
    assert every == {clause.id for clause in catalogue().in_force()}
    assert first == [
        "test_also.py::test_listed",
        "test_every.py::test_decode[direct]",
        "test_every.py::test_refusal",
        "test_every.py::test_stage",
    ]
    said, record = runs[0]
    assert (said.code, record["verdict"], record["complete"]) == (0, "passed", True)


MARKED = """
@pytest.mark.clause("{first}", "D4")
@pytest.mark.parametrize("how", ["eager", pytest.param("replay", marks=[pytest.mark.clause("D5"), pytest.mark.smoke("D5")])])
@pytest.mark.parametrize("layout", [None, "NHD"])
def test_marked(backend: Backend, layout: str | None, how: str) -> None: pass


@pytest.mark.beyond_core
@pytest.mark.clause("D2")
@pytest.mark.smoke("D2")
def test_beyond(backend: Backend) -> None: pass


@pytest.mark.clause("D3", "D2")
def test_of_the_core(backend: Backend) -> None: pass
"""


@pytest.mark.clause("G1")
def test_smoke_takes_what_is_marked_and_what_names_a_clause_first(small: Small) -> None:
    """One item of a marked function, with what is marked at its parameters; beside one that may be refused, one that may not."""
    small.add("test_also.py", MARKED.format(first="D9"))
    _, record = small.record("--profile", "smoke")
    asked = [each["test"].partition("::")[2] for each in record["results"] if each["test"].startswith("test_also.py")]
    assert asked == ["test_marked[None-replay]", "test_beyond", "test_of_the_core"]
    small.add("test_also.py", MARKED.format(first="S3"))
    _, record = small.record("--profile", "smoke")
    asked = [each["test"].partition("::")[2] for each in record["results"]]
    assert "test_marked[None-eager]" not in asked, "the marked item names S3 first as well"


@pytest.mark.refuses("G1")
def test_a_test_is_in_smoke_for_clauses_it_carries(small: Small) -> None:
    small.add("test_more.py", TEST.format(kind="clause", ids='"D5"').replace("def", '@pytest.mark.smoke("D4")\ndef'))
    assert "smoke('D4',): expected clauses that the test carries" in judged(small)
