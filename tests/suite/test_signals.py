"""What signals do to ``forebay conform`` and ``forebay faults``: no process is left behind, and what was known is told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forebay.specs.faults.catalogue import faults
from forebay.specs.signals import ENDING, heard, interrupted_by
from tests.suite.small import PROGRAM, SLOW, Small

IMPATIENT = """
import sys
from forebay.runtime.cli import suite_process

suite_process._GRACE_S = 3.0
print(suite_process.run_pytest(sys.argv[1:], {**__import__("os").environ}))
"""
SLOW_BEGAN = '"started", "test": "test_slow.py::test_slow"'
"""What a journal holds from then on."""


def interrupted(
    small: Small,
    arguments: list[str],
    ready: Path,
    *,
    group: bool,
    by: signal.Signals = signal.SIGINT,
    word: str = SLOW_BEGAN,
) -> tuple[int, str, str]:
    """Start a process, signal it, or its whole group as a terminal does, once the file ``ready`` holds ``word``, and wait for its end,
    and that of all it started."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", *arguments],
        cwd=small.work,
        env=small.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (ready.exists() and word in ready.read_text(encoding="utf-8")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        (os.killpg if group else os.kill)(process.pid, by)
        out, err = process.communicate(timeout=60)
        with pytest.raises(ProcessLookupError):  # nobody of its group is left
            os.killpg(process.pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def outcomes(record: dict[str, Any]) -> dict[str, str]:
    return {result["test"]: result["outcome"] for result in record["results"]}


ENDS = [
    (signal.SIGINT, True, 130, "interrupted\n", "KeyboardInterrupt"),
    (signal.SIGTERM, False, 143, "ended by SIGTERM\n", "KeyboardInterrupt: SIGTERM"),
    (signal.SIGTERM, True, 143, "ended by SIGTERM\n", "KeyboardInterrupt: SIGTERM"),
    (signal.SIGHUP, False, 129, "ended by SIGHUP\n", "KeyboardInterrupt: SIGHUP"),
]


@pytest.mark.clause("G2")
@pytest.mark.parametrize(("by", "group", "code", "told", "why"), ENDS)
def test_a_signal_ends_the_run_with_a_record_of_what_was_known(
    by: signal.Signals, group: bool, code: int, told: str, why: str, small: Small
) -> None:
    """A terminal signals every process of the command, a supervisor often the first alone."""
    small.add("test_first.py", SLOW.replace("60", "0").replace("slow", "quick"))
    small.add("test_slow.py", SLOW)
    arguments = [PROGRAM, "conform", "sim", "--record", "record.json", "--statement", "statement.md"]
    got, out, err = interrupted(small, arguments, small.work / "record.json.journal", group=group, by=by)
    assert (got, err) == (code, told)
    assert f"STOPPED {why}" in out
    record = json.loads((small.work / "record.json").read_text(encoding="utf-8"))
    assert record["stopped"].startswith(why)
    assert outcomes(record)["test_first.py::test_quick"] == "pass"
    assert outcomes(record)["test_slow.py::test_slow"] == "not-run"
    assert record["verdict"] == "failed"
    assert {path.name for path in small.work.iterdir()} == {"record.json", "statement.md"}


@pytest.mark.parametrize(("by", "group", "code", "told", "why"), ENDS)
def test_a_signal_that_comes_before_the_tests_are_known_ends_the_run_alike(
    by: signal.Signals, group: bool, code: int, told: str, why: str, small: Small
) -> None:
    """There is no record then, of this run or of an older one, and no verdict."""
    small.add(
        "test_slow.py", "import time\nfrom pathlib import Path\n\nPath('ready').write_text('ready')\ntime.sleep(60)\n"
    )
    (small.work / "record.json").write_text("an older record", encoding="utf-8")
    arguments = [PROGRAM, "conform", "sim", "--record", "record.json", "--html", "page.html"]
    got, out, err = interrupted(small, arguments, small.work / "ready", group=group, by=by, word="ready")
    assert (got, err) == (code, told)
    assert out.endswith(f"STOPPED by {by.name} before the suite was collected: nothing was judged\n")
    assert {path.name for path in small.work.iterdir()} == {"ready"}


@pytest.mark.parametrize("asked", [("-k", "stage"), ("-k", "zzz"), ("--test", "test_every.py::test_none")])
def test_no_warning_is_left_to_the_user(asked: tuple[str, ...], small: Small) -> None:
    """Where every warning is an error, as of a file that nobody closed, the command says what it says elsewhere."""
    plain = small.forebay("conform", "sim", *asked)
    strict = small.forebay("conform", "sim", *asked, PYTHONWARNINGS="error")
    assert (strict.code, strict.err) == (plain.code, plain.err)
    assert "Warning" not in strict.out + strict.err


def test_plain_pytest_leaves_a_record_too(small: Small) -> None:
    small.add("test_slow.py", SLOW)
    arguments = ["import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))", "--pyargs", "forebay.specs.suite"]
    arguments += ["-p", "no:cacheprovider", "--backend", "sim", "--suite-record", "record.json"]
    code, _, _ = interrupted(small, arguments, small.work / "record.json.journal", group=False, by=signal.SIGTERM)
    record = json.loads((small.work / "record.json").read_text(encoding="utf-8"))
    assert (code, record["stopped"]) == (2, "KeyboardInterrupt: SIGTERM, in test_slow.py::test_slow")


def test_an_interrupt_that_pytest_did_not_get_is_passed_on(small: Small) -> None:
    ready = small.work / "ready"
    test = "def test_slow():\n    import pathlib, time\n    pathlib.Path('ready').write_text('ready')\n    time.sleep(60)\n"
    (small.work / "test_slow.py").write_text(test, encoding="utf-8")
    arguments = [IMPATIENT, "-p", "no:cacheprovider", "test_slow.py"]
    code, out, _ = interrupted(small, arguments, ready, group=False, word="ready")
    assert code == 0
    assert "Ended(status=2, complaint='', interrupted='SIGINT', stalled_s=None)" in out


def test_a_process_that_heeds_no_signal_is_killed(small: Small) -> None:
    """It is asked twice, and given its time both times."""
    ready = small.work / "ready"
    test = (
        "import pathlib, signal, time\n\n\ndef test_deaf():\n"
        "    for number in (signal.SIGINT, signal.SIGTERM):\n        signal.signal(number, signal.SIG_IGN)\n"
        "    pathlib.Path('ready').write_text('ready')\n    time.sleep(60)\n"
    )
    (small.work / "test_deaf.py").write_text(test, encoding="utf-8")
    arguments = [IMPATIENT, "-p", "no:cacheprovider", "test_deaf.py"]
    code, out, _ = interrupted(small, arguments, ready, group=False, by=signal.SIGTERM, word="ready")
    assert code == 0
    assert "Ended(status=-9, complaint='', interrupted='SIGTERM', stalled_s=None)" in out


@pytest.mark.parametrize("group", [False, True], ids=["the first alone", "its group"])
@pytest.mark.parametrize("after_s", [0.0, 1.0, 4.0])
def test_faults_leaves_no_process_behind(group: bool, after_s: float, tmp_path: Path) -> None:
    """The processes that collect the suite and judge faults end with the command, and it says how far it came."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "forebay.runtime.cli", "faults", "--workers", "2"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        deadline = time.monotonic() + 60
        while not children.read_text(encoding="utf-8").split():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(after_s)
        (os.killpg if group else os.kill)(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 143
    assert out.splitlines()[-1] == f"STOPPED by SIGTERM: 0 of {len(faults())} faults were judged"
    assert err.splitlines()[-1] == "ended by SIGTERM"


# -- hearing them ----------------------------------------------------------------------------------------------------------


def test_signals_are_heard_in_the_block_alone_and_ignored_ones_not() -> None:
    old = signal.getsignal(signal.SIGTERM)
    told: list[str] = []
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with heard((*ENDING, "SIGNONE"), told.append):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert told == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is old
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), heard(ENDING, interrupted_by):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is old


def test_another_thread_hears_nothing() -> None:
    found: list[object] = []

    def look() -> None:
        with heard(ENDING, interrupted_by):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
