"""``forebay backends``."""

from __future__ import annotations

import json

import pytest

from tests.cli.running import Run, assert_one_line
from tests.selection.fakes import AWAY_HOOK, Site


@pytest.mark.clause("B1", "B3")
@pytest.mark.case("F01")
def test_backends_lists_usable_unavailable_and_broken(run: Run, site: Site) -> None:
    site.install("bad-chip", {"bad": "import stale_dep"}, version="2.5")
    site.install("away-chip", {"away": AWAY_HOOK.format(hint="plug one in")})
    site.install(
        "cracked-chip",
        {
            "cracked": """
            def crack():
                raise OSError("libchip.so: cannot open")

            @hookimpl
            def forebay_backend():
                return describe("cracked", probe=crack)
            """
        },
    )
    shown = run("backends")
    assert (shown.code, shown.err) == (0, "")
    for part in (
        "bad (bad-chip 2.5)",
        "broken       ModuleNotFoundError: No module named 'stale_dep'",
        "away (away-chip 1.0): a fake",
        "unavailable  accelerator: no device found; to make it usable: plug one in",
        "broken       accelerator: its probe failed: OSError: libchip.so: cannot open",
        "cpu (forebay ",
        "selected: cpu (auto, default)",
    ):
        assert part in shown.out
    assert "Traceback" not in shown.out
    assert "import stale_dep" in run("--traceback", "backends").out

    data = json.loads(run("backends", "--json").out)
    found = {plugin["name"]: plugin for plugin in data["backends"]}
    assert {name: plugin["status"] for name, plugin in found.items()} == {
        "away": "unavailable",
        "bad": "broken",
        "cpu": "usable",
        "cuda": "usable",
        "cracked": "broken",
        "sim": "usable",
        "tpu": "usable",
    }
    assert (found["bad"]["distribution"], found["bad"]["version"]) == ("bad-chip", "2.5")
    assert found["bad"]["cause"] == "ModuleNotFoundError: No module named 'stale_dep'"
    assert "Traceback (most recent call last)" in found["bad"]["traceback"]
    assert found["away"]["modes"] == [
        {
            "label": "away",
            "kind": "accelerator",
            "status": "unavailable",
            "reason": "no device found",
            "hint": "plug one in",
        }
    ]
    assert data["selection"]["selected"] == "cpu"
    reasons = {candidate["name"]: candidate["passed_over"] for candidate in data["selection"]["considered"]}
    assert set(reasons) == {
        "away",
        "bad",
        "cpu",
        "cracked",
        "cuda",
        "cuda:interpret",
        "sim",
        "tpu",
        "tpu:interpret",
        "tpu:xla",
    }
    assert reasons["sim"] == "its kind is simulated: auto takes an accelerator, else cpu"
    assert [mode["kind"] for mode in found["sim"]["modes"]] == ["simulated"]


@pytest.mark.clause("B5")
def test_backends_shows_duplicates_and_generate_refuses_them(run: Run, site: Site) -> None:
    site.install_good("first-chip", "chip")
    site.install_good("second-chip", "chip")
    shown = run("backends")
    assert shown.code == 0
    assert "registered by second-chip 1.0 too" in shown.out
    assert "registered by first-chip 1.0 too" in shown.out
    assert "selected: none, backend 'chip' is registered by 2 distributions" in shown.out
    for choice in ("chip", "auto"):
        outcome = run("generate", "--model", "m", "--backend", choice, "hello")
        assert_one_line(outcome, "first-chip 1.0 and second-chip 1.0")


@pytest.mark.clause("B2")
def test_backends_says_where_the_choice_came_from(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_BACKEND", "cpu")
    assert "selected: cpu (cpu, environment FOREBAY_BACKEND)" in run("backends").out
    monkeypatch.setenv("FOREBAY_BACKEND", "cpuu")
    outcome = run("backends")
    assert outcome.code == 0
    assert "selected: none, no backend 'cpuu' is installed" in outcome.out
