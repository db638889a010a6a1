"""``forebay doctor``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from forebay.runtime.cli import doctor as doctor_module
from tests.cli.running import ROOT, Run, assert_one_line, run_process
from tests.selection.fakes import AWAY_HOOK, GOOD_HOOK, Site

WRONG_DEVICE = """
def wrong():
    from tests.selection.numpy_driver import NumpyDriver, WrongArrays

    return NumpyDriver(WrongArrays)

@hookimpl
def forebay_backend():
    return describe("wrong", load=wrong, kind="simulated")
"""
CRASHING_DEVICE = """
def crash():
    import os

    os._exit(7)

@hookimpl
def forebay_backend():
    return describe("crashing", load=crash, kind="simulated")
"""
HANGING_DEVICE = """
def hang():
    import time

    time.sleep(60)

@hookimpl
def forebay_backend():
    return describe("hanging", load=hang, kind="simulated")
"""


def test_doctor_runs_real_operations_and_reports_each_backend(site: Site, tmp_path: Path) -> None:
    site.install_good("good-chip", "good")
    site.install("wrong-chip", {"wrong": WRONG_DEVICE})
    site.install("crashing-chip", {"crashing": CRASHING_DEVICE})
    site.install("bad-chip", {"bad": "import stale_dep"})
    outcome = run_process("doctor", "--json", cwd=tmp_path, path=[site.path])
    data = json.loads(outcome.out)
    checks = {mode["label"]: mode["check"] for plugin in data["backends"] for mode in plugin["modes"]}
    assert checks["good"]["ok"]
    assert [step["name"] for step in checks["good"]["steps"]] == ["round trip", "matmul", "paged decode"]
    for step in checks["good"]["steps"]:
        assert step["first_s"] > 0
        assert step["again_s"] > 0
        assert step["error"] < 1e-5
    assert not checks["wrong"]["ok"]
    assert "matmul: the largest error against numpy is 1" in checks["wrong"]["error"]
    assert "its process ended with code 7" in checks["crashing"]["error"]
    assert (data["selection"]["selected"], data["works"], outcome.code) == ("good", True, 0)


@pytest.mark.parametrize(("name", "source"), [("wrong", WRONG_DEVICE), ("crashing", CRASHING_DEVICE)])
def test_doctor_is_code_1_when_the_selected_backend_does_not_work(
    site: Site, tmp_path: Path, name: str, source: str
) -> None:
    site.install(f"{name}-chip", {name: source})
    outcome = run_process("doctor", "--backend", name, cwd=tmp_path, path=[site.path])
    assert outcome.code == 1
    assert f"selected: {name} ({name}, call): does not work" in outcome.out
    assert f"{name:<20} fails " in outcome.out


def test_doctor_gives_up_on_a_backend_that_hangs(
    run: Run, site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site.install("hanging-chip", {"hanging": HANGING_DEVICE})
    monkeypatch.setenv("PYTHONPATH", f"{site.path}{os.pathsep}{ROOT}")
    start = time.perf_counter()
    assert doctor_module.check_backend("hanging", timeout=2) == {"ok": False, "error": "no outcome after 2 s"}
    assert time.perf_counter() - start < 30


def test_doctor_says_what_the_unavailable_need(run: Run, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("away-chip", {"away": AWAY_HOOK.format(hint="pip install 'forebay[away]'")})
    site.install("bad-chip", {"bad": GOOD_HOOK.format(name="worse")})
    steps = [{"name": "matmul", "first_s": 0.5, "again_s": 0.001, "error": 0.0}]
    monkeypatch.setattr(doctor_module, "check_backend", lambda label, timeout: {"ok": True, "steps": steps})
    shown = run("doctor")
    assert shown.code == 0
    for part in (
        f"{'away':<20} unavailable  no device found; to make it usable: pip install 'forebay[away]'",
        f"{'bad':<20} broken       InvalidInput: the entry point is named 'bad' and its descriptor 'worse'",
        f"{'cpu':<20} works        matmul 1.00 ms (first 500.0 ms)",
        "selected: cpu (auto, default): works",
    ):
        assert part in shown.out
    unknown = run("doctor", "--backend", "nope")
    assert (unknown.code, unknown.err) == (1, "")
    assert "selected: none, no backend 'nope' is installed; known backends: away, bad, cpu" in unknown.out
    assert_one_line(run("doctor", "--backend", ""), "backend = '' (call)")
