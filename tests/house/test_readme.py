"""What the README says can be run: its commands exist, its settings are read, its folders are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from forebay.runtime.cli.app import main
from forebay.runtime.settings import Settings

from .checks import THIRD_PARTY
from .tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMAND_LINES = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
FOREBAY = [part for line in COMMAND_LINES for part in line.split(" && ") if re.match(r"(\.venv/bin/)?forebay ", part)]


def test_ci_runs_the_second_command_line() -> None:
    assert (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()[-1] == COMMAND_LINES[1]
    assert all(line.startswith("python3.11 -m venv .venv && ") for line in COMMAND_LINES[:2])


@pytest.mark.parametrize("command", FOREBAY)
def test_every_command_and_option_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command, comments=True)[1:]
    names = [word for word in words[:2] if re.fullmatch("[a-z]+", word)]
    assert main([*names, "--help"]) == 0
    shown = capsys.readouterr().out
    assert [word for word in words if word.startswith("--") and word not in shown] == []


def test_the_settings_file_is_read(tmp_path: Path) -> None:
    (text,) = [text for language, text in BLOCKS if language == "toml"]
    (tmp_path / "forebay.toml").write_text(text, encoding="utf-8")
    settings = Settings.resolve(start_dir=tmp_path, environ={})
    assert (settings.backend, settings.source("backend")) == ("cpu", "file")


def test_every_path_it_links_or_maps_exists() -> None:
    paths = re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r"^\| `([^`]+/)` \|", README, re.MULTILINE)
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_house_names_what_suite_and_faults_import() -> None:
    """Beside numpy, which all of the contract may import, what the rules of the house let them."""
    (row,) = re.findall(r"^\| `specs/` \|.*\|$", README, re.MULTILINE)
    for part in ("suite", "faults"):
        (named,) = re.findall(rf"{part}: also ([\w, ]+)", row)
        assert set(named.split(", ")) == THIRD_PARTY[f"specs/{part}"]


@pytest.mark.model
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [text for language, text in BLOCKS if language == "python"]
    exec(compile(example, "<example>", "exec"), {})  # noqa: S102  # the example as a reader would paste it
    assert capsys.readouterr().out.startswith(" Paris")
