"""What the suite's own guide says: its commands exist, its waiver is one, its outcomes and verdicts are those of records."""

from __future__ import annotations

import re
import shlex
from datetime import date
from pathlib import Path
from typing import get_args

import pytest

from forebay.runtime.cli.app import main
from forebay.specs.suite.outcome import Outcome
from forebay.specs.suite.waivers import check_matched, load_waivers
from tests.cli.running import ROOT

GUIDE = (ROOT / "specs" / "suite" / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    return str(text)


def test_every_option_it_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "--help"]) == 0
    shown = capsys.readouterr().out
    commands = [shlex.split(line, comments=True) for line in block("sh").splitlines() if line.startswith("forebay")]
    assert len(commands) > 4
    named = {word for words in commands for word in words if word.startswith("-")} | set(re.findall(r"`(--\w+)", GUIDE))
    assert [option for option in named if option not in shown and option not in ("--pyargs", "--backend")] == []


def test_its_waiver_is_one(tmp_path: Path) -> None:
    (tmp_path / "waivers.toml").write_text(block("toml"), encoding="utf-8")
    (waiver,) = load_waivers(tmp_path / "waivers.toml", date(2026, 1, 1))
    check_matched((waiver,), {waiver.test: marked(waiver.test)}, whole=True)
    assert set(re.findall(r"test_\w+\.py::[^'\"]+", GUIDE)) == {waiver.test}


def marked(test: str) -> tuple[str, ...]:
    """The clauses that a test of the suite has in its source."""
    module, _, name = test.partition("::")
    text = (ROOT / "specs" / "suite" / module).read_text(encoding="utf-8")
    (marks,) = re.findall(rf"@pytest.mark.clause\((.*)\)\n(?:(?!def ).*\n)*def {name.partition('[')[0]}\(", text)
    return tuple(re.findall(r'"(\w+)"', marks))


def test_it_names_every_outcome_and_verdict() -> None:
    assert set(re.findall(r"^\| `([\w-]+)` \|", GUIDE, re.MULTILINE)) == set(get_args(Outcome))
    assert re.findall(r"^- `(\w+)`: ", GUIDE, re.MULTILINE) == ["conformant", "passed", "failed"]
