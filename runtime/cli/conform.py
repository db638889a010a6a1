"""``forebay conform``: judge a backend by the shared suite, write what came of it, and verify such records."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from forebay.runtime.settings import isolated_environment
from forebay.specs.errors import ForebayError, InvalidInput

SUITE: Final = "forebay.specs.suite"
PLUGINS: Final = ("forebay.specs.suite.plugin", "forebay.runtime.suite_plugin", "_hypothesis_pytestplugin")
"""All that pytest loads beside its own parts: what else is installed must not decide how a backend is judged."""
NEEDED: Final = ("pytest", "hypothesis", "matplotlib")
SHOWN: Final = 20
"""Faults of a record that are printed at most."""
CONFORMING: Final = ("conformant", "passed")


def conform(
    backend: Annotated[str | None, typer.Argument(metavar="[NAME[:MODE]]", help="The backend to judge.")] = None,
    profile: Annotated[
        Literal["smoke", "full"], typer.Option(help="smoke asks every clause once, full everything.")
    ] = "full",
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the run's record, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the record as a page.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the record as JUnit XML.")] = None,
    statement: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the conformance statement.")] = None,
    waivers: Annotated[Path | None, typer.Option(metavar="FILE", help="The backend's waivers, as TOML.")] = None,
    test: Annotated[
        list[str] | None, typer.Option(metavar="TEST", help="Only this test, as a record names it.")
    ] = None,
    select: Annotated[
        str, typer.Option("-k", metavar="WORDS", help="Only tests whose names match, as pytest's -k.")
    ] = "",
    verify: Annotated[Path | None, typer.Option(metavar="FILE", help="Verify a record instead of judging.")] = None,
) -> None:
    """Judge a backend by the shared suite; exit code 0 if it holds everything that was asked."""
    _check_installed()
    if verify is not None:
        if backend is not None:
            raise InvalidInput(f"conform: got the backend {backend!r} and --verify; a record says whom it judges")
        _verify(verify)
    if backend is None:
        raise InvalidInput("conform: name the backend to judge, or a record with --verify FILE")
    with tempfile.TemporaryDirectory(prefix="forebay-conform-") as folder:
        path = Path(folder, "record.json") if record is None else record.absolute()
        arguments = ["--backend", backend, "--suite-profile", profile, "--suite-record", str(path)]
        arguments += [] if waivers is None else ["--suite-waivers", str(waivers.absolute())]
        arguments += ["-k", select] if select else []
        status = _run_pytest(Path(folder), arguments, test or [])
        made = _finished(path, status)
        if made is None:
            raise typer.Exit(1 if status in (0, None) else 2)
    _write_reports(made, html=html, junit=junit, statement=statement)
    if made["verdict"] not in CONFORMING:
        raise typer.Exit(1 if made["backend"] is not None else 2)


def suite_arguments(folder: Path, tests: list[str]) -> list[str]:
    """pytest's arguments for the suite, or some tests of it, free of any configuration but an empty one in ``folder``.

    Raises:
        InvalidInput: a test is not named as a record names it.
    """
    root = _suite_folder()
    for name in tests:
        if "::" not in name or not (root / name.partition("::")[0]).is_file():
            raise InvalidInput(
                f"conform --test: got {name!r}, expected FILE::TEST with a file of the suite, as records name it"
            )
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    arguments = ["-c", str(folder / "pytest.ini"), "--rootdir", str(root), "-p", "no:cacheprovider", "--strict-markers"]
    for plugin in PLUGINS:
        arguments += ["-p", plugin]
    return [*arguments, *(str(root / name) for name in tests or [""])]


def _suite_folder() -> Path:
    spec = importlib.util.find_spec(SUITE)
    if spec is None or spec.origin is None:
        raise InvalidInput(f"conform: {SUITE} is not installed; pip install --force-reinstall 'forebay[suite]'")
    return Path(spec.origin).parent


def _check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidInput(f"conform needs {', '.join(missing)}: pip install 'forebay[suite]'")


def _run_pytest(folder: Path, arguments: list[str], tests: list[str]) -> int | None:
    """Run the suite in a process of its own and return its exit status, None if the user interrupted it."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "--tb=no",
        "-r",
        "",
        *suite_arguments(folder, tests),
    ]
    process = subprocess.Popen([*command, *arguments], env=isolated_environment(folder))  # noqa: S603  # this interpreter
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # pytest got it too: it ends the run and writes what it knows
            continue


def _finished(path: Path, status: int | None) -> dict[str, Any] | None:
    """The record of the run; made here from the journal where the process died, None where nothing was asked."""
    from forebay.specs.suite.journal import read_journal
    from forebay.specs.suite.record import assemble, write_record

    journal = path.with_name(path.name + ".journal")
    if journal.exists():
        entries = read_journal(journal)
        journal.unlink()
        if not any(entry["entry"] == "run" for entry in entries):
            return None
        if not any(entry["entry"] == "stopped" for entry in entries):
            entries.append({"entry": "stopped", "reason": f"its process died with status {status}"})
        made = assemble(entries)
        write_record(made, path)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in made["summary"].items())
        print(f"STOPPED {made['stopped']}\n{made['requested']} ({made['profile']}): {made['verdict']}: {counts}")
        return made
    if status == 0 or (status in (1, 2) and path.exists()):
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return record
    return None


def _write_reports(record: dict[str, Any], *, html: Path | None, junit: Path | None, statement: Path | None) -> None:
    if html is not None:
        from forebay.specs.suite.reports.page import page

        html.write_text(page(record), encoding="utf-8")
    if junit is not None:
        from forebay.specs.suite.reports.junit import junit_xml

        junit.write_text(junit_xml(record), encoding="utf-8")
    if statement is not None:
        from forebay.specs.suite.reports.statement import statement as state

        statement.write_text(state(record), encoding="utf-8")


def _verify(path: Path) -> None:
    """Print what is wrong with a record, or that nothing is, and end the command."""
    from forebay.specs.suite.verifier import faults_of
    from forebay.specs.suite.verifier.installed import Asked, collect

    with tempfile.TemporaryDirectory(prefix="forebay-conform-") as folder:

        def collected(requested: str, profile: str) -> Asked:
            command = [sys.executable, "-m", "pytest", *suite_arguments(Path(folder), [])]
            return collect(requested, profile, command, isolated_environment(Path(folder)))

        try:
            faults = faults_of(path, collected)
        except OSError as error:
            raise ForebayError(f"conform --verify {path}: {error}") from error
    for fault in faults[:SHOWN]:
        print(f"{path}: {fault}")
    if len(faults) > SHOWN:
        print(f"{path}: and {len(faults) - SHOWN} more")
    print(f"{path}: {'not a valid record' if faults else 'valid'}")
    raise typer.Exit(1 if faults else 0)
