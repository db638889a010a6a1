"""What code of a plugin changes or raises reaches nobody else, and a Ctrl-C of the user still ends the command (clause B1)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from forebay.runtime.plugin_guard import PluginGuard
from forebay.runtime.plugins import PluginManager, probe
from forebay.runtime.selection import open_backend
from forebay.specs.descriptor import Availability
from forebay.specs.errors import BackendUnavailable
from tests.selection.fakes import GOOD_HOOK, USABLE, Site, descriptor, manager_of, mode
from tests.selection.numpy_driver import NumpyDriver

ROOT = Path(__file__).parents[2]

MEDDLING = """
import os
import signal
import sys

os.chdir("/")
os.environ["FOREBAY_BACKEND"] = "sim"
os.environ["KEPT"] = "changed"
del os.environ["TAKEN"]
print("a banner")
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.stdin = sys.stdout = sys.stderr = None
"""


def meddle() -> None:
    exec(MEDDLING, {})  # noqa: S102  # the same acts as the plugin above


def surroundings() -> tuple[object, ...]:
    return (Path.cwd(), dict(os.environ), sys.stdin, sys.stdout, sys.stderr, signal.getsignal(signal.SIGINT))


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "as it was")
    monkeypatch.setenv("TAKEN", "there")


@pytest.mark.clause("B1")
@pytest.mark.parametrize("end", ["", "raise OSError('gone')\n"])
def test_an_import_leaves_the_surroundings_as_they_were(
    end: str, site: Site, variables: None, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install("meddling-chip", {"meddling": MEDDLING + end + GOOD_HOOK.format(name="meddling")})
    before = surroundings()
    manager = PluginManager.discover()
    assert surroundings() == before
    record = next(plugin for plugin in manager if plugin.name == "meddling")
    assert (record.descriptor is None) is bool(end)
    assert capsys.readouterr() == ("", "a banner\n")


@pytest.mark.clause("B1")
def test_a_probe_leaves_the_surroundings_as_they_were(variables: None, capsys: pytest.CaptureFixture[str]) -> None:
    def probing() -> Availability:
        meddle()
        return USABLE

    before = surroundings()
    assert probe(mode(probe=probing), "hint") == USABLE
    assert surroundings() == before
    assert capsys.readouterr() == ("", "a banner\n")


@pytest.mark.clause("B1")
def test_a_driver_keeps_the_variables_it_sets_and_nothing_else(
    variables: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> NumpyDriver:
        meddle()
        return NumpyDriver()

    before = surroundings()
    with open_backend("chip", manager=manager_of(descriptor("chip", mode(load=load)))):
        after = surroundings()
    assert (after[0], *after[2:]) == (before[0], *before[2:])
    assert (os.environ["KEPT"], "TAKEN" in os.environ) == ("changed", False)
    assert capsys.readouterr() == ("", "a banner\n")


ESCAPES = (
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    GeneratorExit(),
    BaseExceptionGroup("g", [KeyboardInterrupt()]),
)


@pytest.mark.clause("B1", "B3")
@pytest.mark.parametrize("error", ESCAPES, ids=lambda error: type(error).__name__)
def test_whatever_a_probe_or_a_driver_raises_is_its_own(error: BaseException) -> None:
    def fails() -> Availability:
        raise error

    assert probe(mode(probe=fails), "hint").cause is error
    with pytest.raises(BackendUnavailable) as caught:
        open_backend("chip", manager=manager_of(descriptor("chip", mode(load=lambda: fails()))))  # type: ignore[arg-type,return-value]
    assert caught.value.__cause__ is error


def test_a_folder_that_was_deleted_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with PluginGuard() as guard:
        pass
    assert guard.error is None


def test_outside_the_main_thread_it_leaves_signals_alone() -> None:
    found: list[BaseException | None] = []

    def run() -> None:
        with PluginGuard() as guard:
            raise KeyboardInterrupt
        found.append(guard.error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [type(error) for error in found] == [KeyboardInterrupt]


# -- the user's own Ctrl-C -------------------------------------------------------------------------------------------------

PRESSED = "signal.raise_signal(signal.SIGINT)"
SWALLOWED = {
    "left alone": f"import signal\n{PRESSED}\n",
    "swallowed": f"import signal\ntry:\n    {PRESSED}\nexcept BaseException:\n    pass\n",
    "wrapped": f"import signal\ntry:\n    {PRESSED}\nexcept BaseException as e:\n    raise OSError('gone') from e\n",
}


@pytest.mark.parametrize("how", SWALLOWED)
def test_a_ctrl_c_during_an_import_ends_the_discovery(how: str, site: Site) -> None:
    site.install("slow-chip", {"slow": SWALLOWED[how] + GOOD_HOOK.format(name="slow")})
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        PluginManager.discover()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_raises_nothing_decides_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As asyncio's does, which cancels its task instead: then a KeyboardInterrupt is the plugin's own."""
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with PluginGuard() as guard:
            signal.raise_signal(signal.SIGINT)
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]
    assert isinstance(guard.error, KeyboardInterrupt)


def test_a_ctrl_c_ends_the_command_whatever_plugin_it_hits(site: Site, tmp_path: Path) -> None:
    """``forebay backends`` while a plugin is imported that never ends: code 130, and no report of a broken plugin."""
    ready = tmp_path / "ready"
    slow = f"import pathlib, time\npathlib.Path({str(ready)!r}).touch()\ntime.sleep(60)\n"
    site.install("slow-chip", {"slow": slow})
    command = [sys.executable, "-P", "-m", "forebay.runtime.cli"]
    process = subprocess.Popen(
        [*command, "backends"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(site.path), *filter(None, sys.path), str(ROOT)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
