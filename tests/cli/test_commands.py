"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime.cli import app as cli
from forebay.runtime.cli import doctor as doctor_module
from forebay.runtime.cli import generate as generate_module
from forebay.runtime.cli.console import progress_bars
from forebay.specs.errors import ForebayError
from tests.selection.fakes import GOOD_HOOK, Site

ROOT = Path(__file__).parents[2]


@dataclass
class Outcome:
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process."""

    def run(*arguments: str) -> Outcome:
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


def run_process(*arguments: str, cwd: Path, path: Sequence[Path] = (), **environ: str) -> Outcome:
    """Run a command line in a process of its own, with the folders ``path`` first on the import path."""
    environ = {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), "HOME": str(cwd), **environ}
    program = "import sys; from forebay.runtime.cli.app import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=cwd, env=environ, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def assert_one_line(outcome: Outcome, *parts: str) -> None:
    """One clear line on stderr, exit code 2, nothing else said."""
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("error: ")
    for part in parts:
        assert part in outcome.err


# -- the program itself ------------------------------------------------------------------------------------------------


def test_version_and_help(run: Run) -> None:
    assert run("--version").out == f"forebay {version('forebay')}\n"
    for arguments in ((), ("--help",)):
        shown = run(*arguments)
        assert shown.code == 0
        for command in ("generate", "backends", "doctor", "model"):
            assert f"\n  {command} " in shown.out
    for command in (("generate",), ("backends",), ("doctor",), ("model",), ("model", "fetch"), ("model", "list")):
        assert run(*command, "--help").out.startswith(f"Usage: forebay {' '.join(command)} ")


def test_the_installed_script_runs() -> None:
    script = Path(sys.executable).with_name("forebay")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"forebay {version('forebay')}\n"


LIGHT = """
import json, sys
from forebay.runtime.cli.app import main
code = main(sys.argv[1:])
vendor = {"torch", "triton", "jax", "jaxlib", "numba", "llvmlite", "ttnn", "ttl", "transformers", "gguf"}
print(json.dumps([code, sorted(vendor & set(sys.modules))]), file=sys.stderr)
"""


@pytest.mark.clause("B1")
@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), ("backends",), ("model", "list"), ("generate", "--help")]
)
def test_light_commands_import_no_vendor_library_and_start_fast(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", LIGHT, *arguments]
    environ = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, check=True)
        seconds.append(time.perf_counter() - start)
        assert json.loads(done.stderr) == [0, []]
    assert min(seconds) < 2.0, "0.2 to 0.4 s on a quiet machine; a vendor library would add seconds"


# -- errors ------------------------------------------------------------------------------------------------------------

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


# -- backends ----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("B1", "B3")
@pytest.mark.case("F01")
def test_backends_lists_usable_unavailable_and_broken(run: Run, site: Site) -> None:
    site.install("bad-chip", {"bad": "import stale_dep"}, version="2.5")
    site.install(
        "away-chip",
        {
            "away": """
            @hookimpl
            def forebay_backend():
                absent = Availability(usable=False, reason="no device found", hint="plug one in")
                return describe("away", probe=lambda: absent)
            """
        },
    )
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
        "cracked": "broken",
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
    assert set(reasons) == {"away", "bad", "cpu", "cracked"}


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


# -- doctor ------------------------------------------------------------------------------------------------------------

WRONG_DEVICE = """
def wrong():
    from tests.selection.numpy_driver import NumpyDriver, WrongNamespace

    return NumpyDriver(WrongNamespace())

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
    site.install(
        "away-chip",
        {
            "away": """
            @hookimpl
            def forebay_backend():
                absent = Availability(usable=False, reason="no device found", hint="pip install 'forebay[away]'")
                return describe("away", probe=lambda: absent)
            """
        },
    )
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


# -- model and progress ------------------------------------------------------------------------------------------------


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


def test_bars_are_shown_on_a_terminal_and_not_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    context = typer.Context(typer.main.get_command(cli.app))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with progress_bars(context) as bars:
        assert bars._display is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bars(context) as bars:
        assert bars._display is not None
