"""What the suite's plugin does to other people's runs, which is nothing, and what theirs may do to the suite's, which is little."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.specs.suite.command import FOLDER
from tests.suite.small import Outcome, Small

USAGE = 4
SUITE = ("--pyargs", "forebay.specs.suite", "--backend", "sim")
ENTRY = ("-p", "forebay.runtime.suite_entry")
"""What the entry point of the distribution loads; plugins that are found by themselves are left out beside it."""
THEIR_CONFTEST = """
import pytest


def pytest_addoption(parser):
    parser.addoption("--backend", default="theirs")
    parser.addoption("--suite-profile", default="theirs")


@pytest.fixture
def backend(request):
    return request.config.getoption("--backend")
"""
THEIR_TEST = """
import sys

import pytest


def test_theirs(backend, pytestconfig, request):
    assert backend == "mine"
    assert pytestconfig.getoption("--suite-profile") == "theirs"
    assert [name for name in sys.modules if name == "numpy" or name.startswith("forebay.specs")] == []
    for name in ("open_backend", "model", "runtime", "internals", "make_engine"):
        with pytest.raises(pytest.FixtureLookupError):
            request.getfixturevalue(name)
"""
RUNTIME = "[name for name in sys.modules if name.startswith('forebay.runtime')]"
"""The runtime's modules that a process has imported."""
WHERE = """
import sys


def pytest_collection_modifyitems(items):
    assert {item.module.__name__ for item in items} == {"forebay.specs.suite.test_every"}


def pytest_sessionfinish():
    strangers = [name for name in sys.modules if name.partition(".")[0] in ("specs", "suite", "conftest", "test_every")]
    print("strangers", strangers, [place for place in sys.path if place.endswith("forebay")])
"""


def run(small: Small, *arguments: str, cwd: Path | None = None, flags: tuple[str, ...] = ()) -> Outcome:
    """pytest with the entry of the suite and no plugin that is found by itself."""
    command = [sys.executable, *flags, "-m", "pytest", "-q", "-p", "no:cacheprovider", *ENTRY, *arguments]
    done = subprocess.run(
        command,
        cwd=cwd or small.work,
        env=small.environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


# -- other people's runs ---------------------------------------------------------------------------------------------------


def test_a_project_with_options_of_the_same_names_sees_nothing_of_the_suite(small: Small) -> None:
    (small.work / "conftest.py").write_text(THEIR_CONFTEST, encoding="utf-8")
    (small.work / "test_theirs.py").write_text(THEIR_TEST, encoding="utf-8")
    for arguments in ((), ("test_theirs.py",), (".",)):
        said = run(small, "--backend", "mine", *arguments)
        assert (said.code, "1 passed" in said.out) == (0, True), said.out + said.err


# -- who names the suite ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["package", "module", "test", "folder", "file", "addopts", "testpaths", "main", "plugin"]
)
def test_whoever_names_the_suite_gets_it(small: Small, how: str) -> None:
    small.add("test_more.py", '\n@pytest.mark.clause("D1")\ndef test_it(backend: Backend) -> None: pass\n')
    file = small.suite / "test_every.py"
    arguments: dict[str, tuple[str, ...]] = {
        "package": ("--pyargs", "forebay.specs.suite"),
        "module": ("--pyargs", "forebay.specs.suite.test_every"),
        "test": (f"{file}::test_refusal",),
        "folder": (str(small.suite),),
        "file": (os.path.relpath(file, small.work),),
        "plugin": ("-p", "forebay.specs.suite.plugin", str(file)),
    }
    if how in ("addopts", "testpaths"):
        value = "--pyargs forebay.specs.suite" if how == "addopts" else str(small.suite)
        (small.work / "pytest.ini").write_text(f"[pytest]\n{how} = {value}\n", encoding="utf-8")
    if how == "main":
        script = f"import sys, pytest; sys.exit(pytest.main({[*ENTRY, '-q', '-p', 'no:cacheprovider', *SUITE]}))"
        said = small.python(script, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    else:
        said = run(small, *arguments.get(how, ()), "--backend", "sim")
    count = {"test": 1, "module": 4, "file": 4, "plugin": 4}.get(how, 5)
    assert (said.code, f"{count} pass, 0 fail" in said.out) == (0, True), said.out + said.err


def test_a_folder_above_the_suite_does_not_name_it(small: Small) -> None:
    said = run(small, str(small.folder / "forebay"), "--backend", "sim")
    assert said.code == USAGE
    assert "--backend" in said.err


def test_modules_of_the_suite_have_their_own_names_and_leave_the_path_alone(small: Small) -> None:
    (small.work / "where.py").write_text(WHERE, encoding="utf-8")
    for how in (SUITE, (str(small.suite), "--backend", "sim"), (*SUITE, "--import-mode=append")):
        said = small.python(
            f"import sys, pytest; sys.path.insert(0, {str(small.work)!r}); "
            f"sys.exit(pytest.main({[*ENTRY, '-q', '-p', 'no:cacheprovider', '-p', 'where', *how]}))",
            PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        )
        assert (said.code, "strangers [] []" in said.out) == (0, True), said.out + said.err


def test_the_suite_gets_a_runtime_from_others_and_says_so_where_none_is(small: Small) -> None:
    """Its plugin imports no module of the runtime, by name or by string."""
    arguments = ["-p", "no:cacheprovider", "-p", "forebay.specs.suite.plugin", str(small.suite), "--backend", "sim"]
    script = f"import sys, pytest; code = pytest.main({arguments}); print('came', int(code), {RUNTIME})"
    said = small.python(script, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert (f"came {USAGE} []" in said.out, "the suite is given a runtime by a plugin" in said.err) == (True, True)
    handed = small.python(script, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_PLUGINS="forebay.runtime.suite_plugin")
    assert ("conformant: 4 pass" in handed.out, "came 0" in handed.out) == (True, True), handed.out + handed.err


# -- what may not be done to it ---------------------------------------------------------------------------------------------


@pytest.mark.refuses("G2")
@pytest.mark.parametrize("arguments", [("-n", "2"), ("--dist", "load", "--tx", "popen")])
def test_a_run_in_several_processes_is_refused(small: Small, arguments: tuple[str, ...]) -> None:
    record = ("--suite-record", "record.json")
    said = run(small, *SUITE, "-p", "xdist", *record, *arguments)
    assert (said.code, "the suite runs in one process" in said.err) == (USAGE, True), said.out + said.err
    assert not (small.work / "record.json").exists()
    assert run(small, *SUITE, "-p", "xdist", "-n", "0", *record).code == 0


@pytest.mark.refuses("G2")
@pytest.mark.parametrize(
    ("flags", "arguments", "says"),
    [
        (("-O",), (), "run python without -O"),
        (("-OO",), (), "run python without -O"),
        ((), ("--assert=plain",), "run pytest without --assert=plain"),
    ],
)
def test_a_run_without_assertions_is_refused(
    small: Small, flags: tuple[str, ...], arguments: tuple[str, ...], says: str
) -> None:
    said = run(small, *SUITE, *arguments, flags=flags)
    assert (said.code, says in said.err) == (USAGE, True), said.out + said.err


@pytest.mark.refuses("G2")
def test_conform_judges_with_assertions_whatever_python_was_told(small: Small) -> None:
    small.add(
        "test_more.py", '\n@pytest.mark.clause("D1")\ndef test_wrong(backend: Backend) -> None: assert not backend\n'
    )
    said = small.forebay("conform", "sim", "--test", "test_more.py::test_wrong", PYTHONOPTIMIZE="1")
    assert (said.code, "1 fail" in said.out) == (1, True), said.out + said.err


@pytest.mark.refuses("G2")
@pytest.mark.parametrize("name", ["open_backend", "model", "runtime", "internals", "make_engine"])
def test_a_fixture_of_the_runtime_cannot_be_replaced(small: Small, name: str) -> None:
    """By a plugin that is loaded later; the tests that use it, and those that use what is made of it."""
    uses = "make_engine, model" if name in ("make_engine", "model") else f"backend, {name}"
    small.add("test_more.py", f'\n@pytest.mark.clause("D1")\ndef test_it({uses}) -> None: pass\n')
    theirs = f"import pytest\n\n\n@pytest.fixture\ndef {name}():\n    return None\n"
    (small.work / "conftest.py").write_text(theirs, encoding="utf-8")
    said = run(small, *SUITE)
    assert (said.code, f"its fixture {name!r} is that of conftest" in said.err) == (USAGE, True), said.out + said.err


def test_fixtures_of_the_folder_a_run_starts_in_do_not_reach_the_suites_own(small: Small) -> None:
    theirs = "import pytest\n\n\n@pytest.fixture\ndef backend():\n    return None\n\n\n@pytest.fixture\ndef unasked():\n    return 1\n"
    (small.work / "conftest.py").write_text(theirs, encoding="utf-8")
    said = run(small, *SUITE)
    assert (said.code, "conformant: 4 pass" in said.out) == (0, True), said.out + said.err


def test_every_module_that_asserts_has_its_assertions_explained() -> None:
    """pytest rewrites the tests' own; of other modules those it is told of, before they are imported."""
    asserting = {
        path.stem
        for path in FOLDER.glob("*.py")
        if any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    }
    told = ast.parse((FOLDER / "provided.py").read_text(encoding="utf-8"))
    (loop,) = [node for node in told.body if isinstance(node, ast.For)]
    assert set(ast.literal_eval(loop.iter)) == {name for name in asserting if not name.startswith("test_")}
