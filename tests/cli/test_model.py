"""``forebay model``, and progress bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.runtime.cli import app as cli
from forebay.runtime.cli.console import progress_bars
from tests.cli.running import Outcome, Run


def test_model_list_reads_only(run: Run, tmp_path: Path) -> None:
    shown = run("model", "list", "--cache-dir", str(tmp_path / "cache"))
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith("smollm2-135m ")
    assert " absent " in shown.out
    assert not (tmp_path / "cache").exists()
    data = json.loads(run("model", "list", "--json", "--cache-dir", str(tmp_path / "cache")).out)
    assert [(model["name"], model["state"]) for model in data] == [("smollm2-135m", "absent")]


@pytest.mark.clause("B2")
def test_the_model_cache_follows_the_settings(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "one"))
    (path,) = [model["path"] for model in json.loads(run("model", "list", "--json").out)]
    assert path == str(tmp_path / "one" / "smollm2-135m")


def test_model_fetch_prints_the_folder_and_shows_progress_on_stderr(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.runtime.models import store

    def fetch(name: str, *, cache_dir: Path, progress: Callable[..., None], force: bool) -> Path:
        progress(0, None, "locate")
        progress(10, 20, "download")
        progress(20, 20, "download")
        return cache_dir / name / ("new" if force else "")

    monkeypatch.setattr(store, "fetch", fetch)
    arguments = ("model", "fetch", "tiny", "--cache-dir", str(tmp_path))
    assert run(*arguments) == Outcome(0, f"{tmp_path / 'tiny'}\n", "")
    assert run(*arguments, "--force").out == f"{tmp_path / 'tiny' / 'new'}\n"
    shown = run("--progress", *arguments)
    assert shown.out == f"{tmp_path / 'tiny'}\n"
    assert "tiny: locate" in shown.err
    assert "tiny: download" in shown.err
    assert "100%" in shown.err


def test_model_fetch_takes_a_hub_id(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.runtime.models import hub

    def fetch(name: str, *, cache_dir: Path, progress: Callable[..., None], force: bool) -> Path:
        return cache_dir / "hub" / name / ("new" if force else "")

    monkeypatch.setattr(hub, "fetch_from_hub", fetch)
    arguments = ("model", "fetch", "org/tiny", "--cache-dir", str(tmp_path))
    assert run(*arguments) == Outcome(0, f"{tmp_path / 'hub' / 'org' / 'tiny'}\n", "")
    assert run(*arguments, "--force").out == f"{tmp_path / 'hub' / 'org' / 'tiny' / 'new'}\n"


def test_bars_are_shown_on_a_terminal_and_not_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    context = typer.Context(typer.main.get_command(cli.app))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with progress_bars(context) as bars:
        assert bars._display is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bars(context) as bars:
        assert bars._display is not None
