"""How faults reach the user: one line on stderr and an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.runtime.cli import generate as generate_module
from forebay.specs.errors import ForebayError
from tests.cli.running import Run, assert_one_line

BAD_COMMAND_LINES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("generat",), ("No such command 'generat'", "see 'forebay --help'")),
    (("--bogus",), ("--bogus", "see 'forebay --help'")),
    (("backends", "--jsn"), ("--jsn", "see 'forebay backends --help'")),
    (("backends", "extra"), ("extra", "see 'forebay backends --help'")),
    (("model",), ("see 'forebay model --help'",)),
    (("model", "fetch"), ("see 'forebay model fetch --help'",)),
    (("model", "fetch", "smolm2-135m"), ("'smolm2-135m'", "smollm2-135m")),
    (("generate",), ("no prompt", "--prompt-file")),
    (("generate", "a", ""), ("prompt 2 of 2 is empty",)),
    (("generate", "hello"), ("no model", "--model")),
    (("generate", "--prompt-file", "gone.txt"), ("'gone.txt'", "No such file")),
    (("generate", "--max-tokens", "0", "hello"), ("--max-tokens", "see 'forebay generate --help'")),
    (("generate", "--max-tokens", "many", "hello"), ("--max-tokens",)),
    (("generate", "--slots", "0", "hello"), ("slots = 0 (call); expected an integer of at least 1",)),
    (("generate", "--num-blocks", "1", "hello"), ("num_blocks = 1 (call); expected an integer of at least 2",)),
    (("generate", "--attention", "both", "hello"), ("attention = 'both' (call); expected 'direct' or 'gather'",)),
    (("generate", "--capture", "on", "hello"), ("capture = 'on' (call); expected 'off' or 'auto' or 'required'",)),
    (("generate", "--arm", "lazy", "hello"), ("arm = 'lazy' (call); expected 'eager' or 'hostfree' or 'captured'",)),
    (("generate", "--dtype", "int4", "hello"), ("dtype = 'int4' (call); expected 'float32' or 'bfloat16'",)),
    (("generate", "--model", "m", "--backend", "cpuu", "hello"), ("no backend 'cpuu'", "did you mean 'cpu'")),
    (("generate", "--model", "m", "--backend", "cpu:fast", "hello"), ("no mode 'fast'", "its modes: cpu")),
    (("generate", "--model", "m", "--backend", "cpu:", "hello"), ("backend = 'cpu:' (call)",)),
    (("--config", "gone.toml", "backends"), ("no settings file 'gone.toml'",)),
]


@pytest.mark.parametrize(("arguments", "parts"), BAD_COMMAND_LINES)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    assert_one_line(run(*arguments), *parts)
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_a_prompt_file_that_is_no_text_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_bytes(b"\xff\xfe")
    assert_one_line(run("generate", "--prompt-file", "prompts"), "'prompts'", "UTF-8")
    (tmp_path / "prompts").write_text("\n  \n")
    assert_one_line(run("generate", "--prompt-file", "prompts"), "no prompt")


@pytest.mark.clause("B2")
def test_faults_of_environment_and_file_name_their_source(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_SLOTZ", "1")
    assert_one_line(run("backends"), "environment FOREBAY_SLOTZ", "did you mean 'FOREBAY_SLOTS'?")
    monkeypatch.delenv("FOREBAY_SLOTZ")
    (tmp_path / "forebay.toml").write_text("\nslotz = 1\n")
    assert_one_line(run("backends"), f"file {tmp_path}/forebay.toml:2", "did you mean 'slots'?")
    (tmp_path / "forebay.toml").write_text("slots =\n")
    assert_one_line(run("model", "list"), "forebay.toml", "cannot be read")


def test_a_message_of_many_lines_is_told_in_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_arguments: Any) -> None:
        raise ForebayError("first\n  second\nthird")

    monkeypatch.setattr(generate_module, "collect_prompts", fails)
    assert run("generate", "hello").err == "error: first second third\n"


def test_tracebacks_are_shown_where_they_are_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = ("generate", "--attention", "both", "hello")
    shown = run("--traceback", *bad)
    assert shown.code == 2
    assert "Traceback (most recent call last)" in shown.err
    assert shown.err.splitlines()[-1].startswith("error: attention = 'both'")
    monkeypatch.setenv("FOREBAY_TRACEBACK", "1")
    assert "Traceback" in run(*bad).err
    assert "Traceback" not in run("--no-traceback", *bad).err
    monkeypatch.setenv("FOREBAY_SLOTZ", "1")
    assert "Traceback" in run("backends").err, "also when the settings themselves are at fault"


def test_a_fault_of_our_own_is_code_1_and_says_how_to_see_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_arguments: Any) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(generate_module, "collect_prompts", fails)
    outcome = run("generate", "hello")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "error: unexpected ZeroDivisionError: division by zero; run 'forebay --traceback ...' to see where\n"
    )


def test_an_interrupt_is_code_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_module, "collect_prompts", interrupted)
    outcome = run("generate", "hello")
    assert (outcome.code, outcome.out, outcome.err.strip()) == (130, "", "interrupted")
