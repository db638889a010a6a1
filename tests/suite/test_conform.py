"""``forebay conform`` as a user meets it: in a folder of theirs, with what they mistype, and with backends that die."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime.cli import suite_process
from forebay.runtime.cli.app import main
from forebay.specs.clauses import catalogue
from forebay.specs.faults.catalogue import faults
from tests.cli.running import ROOT
from tests.selection.fakes import Site
from tests.suite.conftest import Records
from tests.suite.small import PROGRAM, SLOW, Outcome, Small

NONSENSE = {
    "pytest.ini": "[pytest]\naddopts = --nonsense\npython_files = *.txt\n",
    "tox.ini": "[pytest]\naddopts = --nonsense\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--nonsense'\n",
    "setup.cfg": "[tool:pytest]\naddopts = --nonsense\n",
    **{
        f"{name}.py": f"raise RuntimeError('{name} of the user')\n"
        for name in ("conftest", "numpy", "pytest", "typing")
    },
}
SURROUNDINGS = {
    "PYTEST_ADDOPTS": "--nonsense -x --collect-only",
    "PYTEST_PLUGINS": "nonsense",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "",
    "HYPOTHESIS_STORAGE_DIRECTORY": "/nowhere",
}
OLD = "an older record\n"
SUITE = "forebay.specs.suite"


def assert_told(said: Outcome, *parts: str) -> None:
    """Exit code 2 and one clear line on stderr."""
    assert said.code == 2, said
    assert said.err.startswith("error: conform"), said.err
    assert said.err.count("\n") == 1, said.err
    assert "Traceback" not in said.out
    for part in parts:
        assert part in said.err


def test_what_only_the_page_needs_is_asked_for_only_with_it(small: Small) -> None:
    absent = "import sys; sys.modules.update(matplotlib=None, jinja2=None); " + PROGRAM
    plain = small.python(absent, "conform", "sim", "--junit", "a.xml", "--statement", "a.md")
    assert (plain.code, plain.err) == (0, "")
    said = small.python(absent, "conform", "sim", "--html", "a.html")
    assert_told(said, "conform needs jinja2, matplotlib: pip install 'forebay[suite]'")


# -- where it runs ---------------------------------------------------------------------------------------------------------


def test_nothing_of_the_users_own_folder_or_pytest_settings_reaches_the_run(
    records: Records, elsewhere: Path, tmp_path: Path
) -> None:
    for name, text in NONSENSE.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    said = records.small.forebay(
        "conform", "limited", "--waivers", str(records.small.work / "waivers.toml"), "--record", "record.json",
        path=elsewhere, cwd=tmp_path, **SURROUNDINGS,
    )  # fmt: skip
    assert (said.code, said.err) == (0, "")
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert (record["verdict"], record["complete"]) == ("conformant with waivers", True)
    assert outcomes(record) == outcomes(records.record["good"])
    assert {path.name for path in tmp_path.iterdir()} == {*NONSENSE, "record.json"}


def test_a_folder_that_cannot_be_written_will_do(records: Records, elsewhere: Path, tmp_path: Path) -> None:
    locked = Path("/proc") if os.geteuid() == 0 else tmp_path / "locked"  # root writes wherever there is a disk
    if os.geteuid():
        locked.mkdir(mode=0o500)
    target = tmp_path / "record.json"
    one = ("--test", "test_every.py::test_stage")
    said = records.small.forebay("conform", "limited", *one, "--record", str(target), path=elsewhere, cwd=locked)
    assert (said.code, said.err) == (0, "")
    assert json.loads(target.read_text(encoding="utf-8"))["summary"]["pass"] == 1
    assert_told(
        records.small.forebay("conform", "limited", *one, "--record", "r.json", path=elsewhere, cwd=locked), "r.json"
    )


def outcomes(record: dict[str, Any]) -> dict[str, str]:
    return {result["test"]: result["outcome"] for result in record["results"]}


# -- what they mistype -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("sim", "--record", "none/record.json"), "no folder none; make it first"),
        (("sim", "--record", "folder"), "--record folder: is a folder, expected a regular file"),
        (("sim", "--html", "none/page.html"), "--html none/page.html: no folder none"),
        (("sim", "--junit", "folder"), "--junit folder: is a folder"),
        (("sim", "--statement", "old.json/x.md"), "no folder old.json"),
        (("sim", "--record", "one", "--html", "folder/../one"), "is the file of --record too"),
        (("sim", "--waivers", "none.toml", "--record", "old.json"), "none.toml: "),
        (("sim", "--waivers", "bad.toml", "--record", "old.json"), "it lacks clause, device, reason, expiry"),
        (("sim", "--waivers", "old.json"), "waivers old.json: "),
        (("sim", "--waivers", "old.json", "--record", "old.json"), "is the file of --waivers too"),
        (
            ("sim", "--record", "r", "--html", "r.journal"),
            "--html r.journal: is the file of the journal of --record too",
        ),
        (("sim", "--waivers", "expired.toml", "--record", "old.json"), "it expired on 2020-01-31"),
        (("sim", "--test", "test_decode", "--record", "old.json"), "expected FILE::TEST"),
        (("sim", "--test", "test_none.py::test_it", "--record", "old.json"), "expected FILE::TEST"),
        (("sim", "--profile", "quick"), "'quick'"),
        ((), "name the backend to judge"),
        (("sim:frob", "--record", "old.json"), "nothing was judged: backend 'sim' has no mode 'frob'; its modes: sim"),
        (("sim:frob", "-k", "test_a_mark_is_static"), "backend 'sim' has no mode 'frob'; its modes: sim"),
        (("sim:", "-k", "static"), "backend = 'sim:' (call); expected NAME, NAME:MODE or auto; its modes: sim"),
        (
            ("nosuch", "-k", "zzz"),
            "nothing was judged: no backend 'nosuch' is installed; known backends: cpu, cuda, sim, tpu",
        ),
        (("auto:frob", "--record", "old.json"), "auto takes no mode: name the backend, or write auto; known backends"),
        (
            ("", "-k", "static"),
            "backend = '' (call); expected NAME, NAME:MODE or auto; known backends: cpu, cuda, sim, tpu",
        ),
        (("sim", "--verify", "old.json"), "a record says whom it judges"),
    ],
)
def test_what_is_mistyped_is_told_before_anything_is_touched(
    arguments: tuple[str, ...], says: str, plain_surroundings: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder").mkdir()
    Path("old.json").write_text(OLD, encoding="utf-8")
    Path("bad.toml").write_text("[[waiver]]\ntest = 'a'\n", encoding="utf-8")
    Path("expired.toml").write_text(
        "[[waiver]]\ntest = 'a'\nclause = 'D1'\ndevice = 'd'\nreason = 'r'\nexpiry = 2020-01-31\n", encoding="utf-8"
    )
    code = main(["conform", *arguments])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert says in err
    assert Path("old.json").read_text(encoding="utf-8") == OLD


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--test", "test_every.py::test_none"), "test_every.py::test_none"),
        (("-k", "zzz"), "no test of the suite is left by -k and --test"),
        (("-k", "decode and ("), "-k"),
        (("--waivers", "unmatched.toml"), "the suite has no such test"),
    ],
)
def test_a_run_that_cannot_begin_leaves_no_older_record_in_its_place(
    arguments: tuple[str, ...], says: str, records: Records, elsewhere: Path, tmp_path: Path
) -> None:
    text = (records.small.work / "waivers.toml").read_text(encoding="utf-8")
    (tmp_path / "unmatched.toml").write_text(text.replace("test_wrong", "test_gone"), encoding="utf-8")
    for name in ("record.json", "page.html", "record.json.journal"):
        (tmp_path / name).write_text(OLD, encoding="utf-8")
    said = records.small.forebay(
        "conform", "limited", "--record", "record.json", "--html", "page.html", *arguments, path=elsewhere, cwd=tmp_path
    )
    assert_told(said, says)
    assert [path.name for path in tmp_path.iterdir()] == ["unmatched.toml"]


def test_plain_pytest_says_the_same_of_a_record_that_cannot_be_written(records: Records) -> None:
    said = records.small.pytest(
        "--pyargs", "forebay.specs.suite", "--backend", "sim", "--suite-record", "none/record.json"
    )
    assert said.code == 4
    assert re.fullmatch("ERROR: --suite-record none/record.json: no folder none; make it first", said.err.strip())


@pytest.mark.parametrize(
    ("died", "says"),
    [
        ("import os; os._exit(3)", "nothing was judged: pytest died with status 3 before the suite was collected"),
        ("raise OSError('no libdevice')", "test_broken.py cannot be collected: OSError: no libdevice"),
        (
            "import nonesuch",
            "test_broken.py cannot be collected: ModuleNotFoundError: No module named 'nonesuch'",
        ),
    ],
)
def test_a_suite_that_cannot_be_collected_is_no_verdict(small: Small, died: str, says: str) -> None:
    small.add("test_broken.py", died)
    assert_told(small.forebay("conform", "sim", "--record", "record.json"), f"error: conform: {says}")
    assert not list(small.work.iterdir())


# -- backends that do not start, or die ------------------------------------------------------------------------------------


MISNAMED = [
    ("sim:warp", "backend 'sim' has no mode 'warp'; its modes: sim"),
    ("sim:", "expected NAME, NAME:MODE or auto; its modes: sim"),
    ("dodging:frob", "backend 'dodging' has no mode 'frob'; its modes: dodging:"),
    ("smi", r"no backend 'smi' is installed; known backends: .*sim.*; did you mean 'sim'\?"),
    ("torn", "backend 'torn' cannot be used, its plugin .* is broken: ModuleNotFoundError: No module named 'nonesuch'"),
]
NO_BACKEND = """
@pytest.mark.clause("D1")
def test_without_a_backend() -> None:
    pass
"""


@pytest.mark.clause("B3")
@pytest.mark.parametrize(("backend", "says"), MISNAMED)
@pytest.mark.parametrize("command", ["conform", "pytest"])
def test_a_backend_or_mode_that_nobody_has_is_not_judged(
    command: str, backend: str, says: str, small: Small, elsewhere: Path, tmp_path: Path
) -> None:
    """Not even by tests that never open it; a backend that is only absent here has a record that says why."""
    small.add("test_plain.py", NO_BACKEND)
    torn = tmp_path / "torn"
    torn.mkdir()
    Site(torn).install("torn-dist", {"torn": "import nonesuch"})
    path = f"{elsewhere}{os.pathsep}{torn}"
    select = ("-k", "without_a_backend")
    if command == "conform":
        said = small.forebay("conform", backend, "--record", "r", *select, path=path)
        assert (said.code, said.out) == (2, "")
        begins = "error: conform: "
    else:
        said = small.pytest("--pyargs", SUITE, "--backend", backend, "--suite-record", "r", *select, path=path)
        assert (said.code, "passed" in said.out) == (4, False)
        begins = f"ERROR: --backend {backend}: "
    assert re.fullmatch(f"{begins}nothing was judged: .*{says}.*", said.err.strip()), said.err
    assert not list(small.work.iterdir())


def test_what_a_backend_elsewhere_is_asked_can_be_listed(small: Small) -> None:
    """Nobody need have it: so a record of another machine's backend is verified."""
    said = small.pytest("--pyargs", SUITE, "--backend", "nosuch:frob", "--collect-only")
    assert (said.code, "test_every.py::test_stage" in said.out) == (0, True), said


@pytest.mark.clause("G2")
def test_a_process_that_is_killed_leaves_a_record_and_every_report(
    records: Records, elsewhere: Path, tmp_path: Path
) -> None:
    files = {"--record": "record.json", "--html": "page.html", "--junit": "junit.xml", "--statement": "statement.md"}
    said = records.small.forebay(
        "conform", "killed", *(part for pair in files.items() for part in pair), path=elsewhere, cwd=tmp_path
    )
    assert said.code == 1
    assert "STOPPED its process was killed by SIGKILL" in said.out
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    found = outcomes(record)
    assert (found["test_every.py::test_decode[gather]"], found["test_every.py::test_stage"]) == ("pass", "not-run")
    assert found.keys() == outcomes(records.record["good"]).keys()
    assert {path.name for path in tmp_path.iterdir()} == set(files.values())
    for name in files.values():
        assert "its process was killed by SIGKILL" in (tmp_path / name).read_text(encoding="utf-8")


# -- devices that hang -----------------------------------------------------------------------------------------------------

HUNG = """
@pytest.mark.clause("D1")
def test_hung(backend: Backend) -> None:
    import signal, time

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    time.sleep(600)
"""


@pytest.mark.clause("G2")
def test_a_run_that_hangs_is_killed_and_says_in_which_test(small: Small) -> None:
    """In a test that no signal reaches, as one that waits in a driver; what came before is known, and the record is valid."""
    small.add("test_hung.py", HUNG)
    small.add("test_later.py", SLOW)
    files = {"--record": "record.json", "--statement": "statement.md", "--junit": "junit.xml"}
    began = time.monotonic()
    said = small.forebay("conform", "sim", "--stall-s", "10", *(part for pair in files.items() for part in pair))
    assert time.monotonic() - began < 60
    why = "its process made no progress for 10 s and was killed, in test_hung.py::test_hung"
    assert (said.code, f"STOPPED {why}" in said.out) == (1, True), said
    record = json.loads((small.work / "record.json").read_text(encoding="utf-8"))
    assert (record["verdict"], record["stopped"], record["running"]) == ("failed", why, "test_hung.py::test_hung")
    assert outcomes(record)["test_every.py::test_stage"] == "pass"
    assert [name for name, outcome in outcomes(record).items() if outcome == "not-run"] == [
        "test_hung.py::test_hung",
        "test_later.py::test_slow",
    ]
    for name in files.values():
        assert why in (small.work / name).read_text(encoding="utf-8")
    assert small.forebay("conform", "--verify", "record.json").out == "record.json: valid\n"


def test_a_suite_that_hangs_while_it_is_collected_is_no_verdict(small: Small) -> None:
    small.add("test_hung.py", "import time\n\ntime.sleep(600)\n")
    said = small.forebay("conform", "sim", "--record", "record.json", "--stall-s", "5")
    assert_told(said, "pytest made no progress for 5 s and was killed before the suite was collected")
    assert not list(small.work.iterdir())


def test_progress_is_a_file_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time without a file counts; every byte more begins anew, however long it took in all."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    journal = tmp_path / "journal"
    progress = suite_process.Progress(journal)
    for text in ("", "a", "ab"):
        now += 50
        assert progress.still_s() == 50
        journal.write_text(text, encoding="utf-8")
        assert progress.still_s() == 0


# -- a failing clause, of a backend with a real fault ----------------------------------------------------------------------

FAULT = "doors.pad-wraps"
DRAWN = "test_any_device_ids_do_what_the_rule_says"
LISTED = "test_a_pad_writes_nothing_and_never_wraps"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The real suite over a sim with a fault in it: a package whose patched modules are copies, and all else links."""
    made = Small(tmp_path_factory.mktemp("faulty"))
    made.work.mkdir()
    package = made.folder / "forebay"
    package.mkdir()
    for name in ("specs", "runtime", "kernels", "hardware"):
        (package / name).symlink_to(ROOT / name)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "backends", package / "backends", ignore=ignored)
    for patch in faults()[FAULT].patches:
        path = made.folder.joinpath(*patch.module.split(".")).with_suffix(".py")
        path.write_text(patch.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
    return made


@pytest.mark.clause("G2")
def test_what_is_printed_of_a_real_fault_reproduces_it(faulty: Small) -> None:
    """Clause, smallest failing input (drawn, or from a list), expected, got, and a command that fails alike as it stands."""
    said = faulty.forebay("conform", "sim", "-k", f"{DRAWN} or {LISTED} and NHD and device")
    assert (said.code, said.err) == (1, "")
    told = re.findall(r"^FAILED (\S+)\n((?:  .+\n)+)", said.out, re.MULTILINE)
    drawn = next(block for test, block in told if DRAWN in test)
    listed = next(block for test, block in told if LISTED in test)
    clause = catalogue().clause(faults()[FAULT].clause)
    for block, asked in ((drawn, "Draw 1"), (listed, "layout='NHD'")):
        assert asked in block[block.index("smallest failing input: ") : block.index("expected: ")]
        assert " at 0x" not in block
        assert f"  clause {clause.id} ({clause.title}): {clause.text.split()[0]}" in block
        for part in ("smallest failing input: ", "expected: ", "got: "):
            assert part in block
        (command,) = re.findall(r"^  run it alone: (.+)$", block, re.MULTILINE)
        again = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=faulty.work,
            env=faulty.environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (again.returncode, again.stderr) == (1, ""), again
        assert block in again.stdout
        assert "0 pass, 1 fail" in again.stdout
