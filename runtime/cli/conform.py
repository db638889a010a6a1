"""``forebay conform``: judge a backend by the shared suite, write what came of it, and verify such records."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from forebay.runtime.cli.suite_process import NO_TESTS, PYTEST, USAGE_ERROR, Ended, run_pytest
from forebay.runtime.plugins import PluginManager
from forebay.runtime.selection import check_known
from forebay.runtime.settings import isolated_environment
from forebay.specs.errors import ForebayError, InvalidInput
from forebay.specs.files import output_at, write_text
from forebay.specs.signals import exit_code
from forebay.specs.suite.command import SHOWN, suite_arguments

if TYPE_CHECKING:
    from forebay.specs.suite.verifier import Installed

NEEDED: Final = ("pytest", "hypothesis")
NEEDED_BY_PAGE: Final = ("jinja2", "matplotlib")
SHOWN_FAULTS: Final = 20
"""Faults of a record that are printed at most."""


def conform(
    backend: Annotated[str | None, typer.Argument(metavar="NAME[:MODE]", help="The backend to judge.")] = None,
    profile: Annotated[
        Literal["smoke", "full"], typer.Option(help="smoke asks a sample of every clause, full everything.")
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
    maxfail: Annotated[
        int, typer.Option(min=0, metavar="N", help="Stop after N failures; with 0, the default, none stops the run.")
    ] = 0,
    first: Annotated[bool, typer.Option("-x", help="Stop after the first failure, as --maxfail 1.")] = False,
    show: Annotated[int, typer.Option(min=0, metavar="N", help="Tell at most N failures in full.")] = SHOWN,
    stall_s: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Kill a run in which no test begins or ends for so long.")
    ] = 600.0,
    verify: Annotated[Path | None, typer.Option(metavar="FILE", help="Verify a record instead of judging.")] = None,
) -> None:
    """Judge a backend by the shared suite.

    Exit code 0: it holds everything that was asked. 1: it does not, or the record that was to be verified is not valid. 2: nothing
    could be judged; the reason is told. 130: interrupted, 143: told to end (SIGTERM), 129: the terminal hung up (SIGHUP);
    the record holds what was known.
    """
    _check_installed(NEEDED if html is None else (*NEEDED, *NEEDED_BY_PAGE))
    from forebay.specs.suite.journal import journal_of

    if verify is not None:
        if backend is not None:
            raise InvalidInput(f"conform: got the backend {backend!r} and --verify; a record says whom it judges")
        _verify(verify)
    if backend is None:
        raise InvalidInput("conform: name the backend to judge, or a record with --verify FILE")
    named = {"--record": record, "--html": html, "--junit": junit, "--statement": statement}
    outputs = _checked_outputs({option: path for option, path in named.items() if path is not None}, waivers)
    _check_waivers(waivers)
    try:
        check_known(backend, "call", PluginManager.discover())
    except ForebayError as error:
        raise InvalidInput(f"conform: nothing was judged: {error}") from error
    with tempfile.TemporaryDirectory(prefix="forebay-conform-") as folder:
        path = outputs.get("--record", Path(folder, "record.json"))
        arguments = [f"--backend={backend}", f"--suite-profile={profile}", f"--suite-record={path}"]
        # The summary counts the tests; pytest counts their phases, and its warnings are of no concern to a backend.
        arguments += [f"--suite-show={show}", f"--maxfail={1 if first else maxfail}", "-q", "--disable-warnings"]
        arguments += [] if waivers is None else [f"--suite-waivers={waivers.absolute()}"]
        arguments += [f"-k={select}"] if select else []
        command = [*suite_arguments(Path(folder), test or []), *arguments]
        # Whatever happens now, nothing of an earlier run is taken for this one.
        for old in (*outputs.values(), journal_of(path)):
            old.unlink(missing_ok=True)
        ended = run_pytest(command, isolated_environment(Path(folder)), progress=journal_of(path), stall_s=stall_s)
        made = _finished(path, ended, show)
    _write_reports(made, outputs)
    if ended.interrupted:
        raise typer.Exit(exit_code(ended.interrupted))
    if made["verdict"] == "failed":
        raise typer.Exit(1 if made["backend"] is not None else 2)


def _check_installed(needed: Sequence[str]) -> None:
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidInput(f"conform needs {', '.join(missing)}: pip install 'forebay[suite]'")


def _checked_outputs(named: Mapping[str, Path], waivers: Path | None) -> dict[str, Path]:
    """By option the file that is to be written; refuses before a long run what could not be written after it.

    Raises:
        InvalidInput: a file cannot be made there, or it is one that another option names, or the run's journal.
    """
    from forebay.specs.suite.journal import journal_of

    seen = {} if waivers is None else {Path(os.path.realpath(waivers)): "--waivers"}
    found = {}
    for option, path in named.items():
        found[option] = output_at(path, f"conform {option} {path}")
        if option == "--record":
            journal = journal_of(found[option])
            seen[output_at(journal, f"conform --record {path}: its journal {journal}")] = "the journal of --record"
        other = seen.setdefault(found[option], option)
        if other != option:
            raise InvalidInput(f"conform {option} {path}: is the file of {other} too; name another")
    return found


def _check_waivers(path: Path | None) -> None:
    from forebay.specs.suite.waivers import load_waivers

    if path is not None:
        load_waivers(path, datetime.now(UTC).date())


def _finished(path: Path, ended: Ended, show: int) -> dict[str, Any]:
    """The record of the run; made here from the journal where the process died.

    Raises:
        InvalidInput: nothing was asked, for a reason in the command line.
        ForebayError: nothing was asked, for another one.
        Exit: nothing was asked, for a signal came first.
    """
    from forebay.specs.suite.journal import journal_of, read_journal
    from forebay.specs.suite.record import assemble, write_record
    from forebay.specs.suite.summary import summary_lines

    if ended.status == USAGE_ERROR:
        raise InvalidInput(f"conform: {ended.complaint}")
    if ended.status == NO_TESTS:
        raise InvalidInput("conform: no test of the suite is left by -k and --test for this backend and profile")
    journal = journal_of(path)
    entries = read_journal(journal) if journal.exists() else []
    if any(entry["entry"] == "run" for entry in entries):
        if not any(entry["entry"] == "stopped" for entry in entries):
            entries.append({"entry": "stopped", "reason": f"its process {ended.told()}", "by_test": True})
        made = assemble(entries)
        write_record(made, path)
        journal.unlink()
        print("", *summary_lines(made, show), sep="\n")  # pytest died in the middle of a line
        return made
    journal.unlink(missing_ok=True)
    if not path.exists() and ended.interrupted:
        print(f"STOPPED by {ended.interrupted} before the suite was collected: nothing was judged")
        raise typer.Exit(exit_code(ended.interrupted))
    if not path.exists():
        raise ForebayError(f"conform: nothing was judged: pytest {ended.told()} before the suite was collected")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _write_reports(record: dict[str, Any], outputs: Mapping[str, Path]) -> None:
    """Write those that ``outputs`` names, by option."""
    if "--html" in outputs:
        from forebay.specs.suite.reports.page import page

        _write(outputs["--html"], page(record))
    if "--junit" in outputs:
        from forebay.specs.suite.reports.junit import junit_xml

        _write(outputs["--junit"], junit_xml(record))
    if "--statement" in outputs:
        from forebay.specs.suite.reports.statement import statement

        _write(outputs["--statement"], statement(record))


def _write(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise ForebayError(f"conform: {path}: {error}") from error


def installed(name: str, mode: str) -> Installed | None:
    """What is installed under a backend's name, None if there is no such backend or mode here."""
    from forebay.specs.suite.verifier import Installed

    try:
        plugin, descriptor = PluginManager.discover().find(name)
    except ForebayError:
        return None
    kind = next((each.kind for each in descriptor.modes if each.name == mode), None)
    return None if kind is None else Installed(kind, plugin.distribution, plugin.version)


def _verify(path: Path) -> None:
    """Print what is wrong with a record, or that nothing is, and end the command."""
    from forebay.specs.suite.verifier import faults_of
    from forebay.specs.suite.verifier.installed import Asked, collect

    with tempfile.TemporaryDirectory(prefix="forebay-conform-") as folder:

        def collected(requested: str, profile: str) -> Asked:
            command = [*PYTEST, *suite_arguments(Path(folder))]
            return collect(requested, profile, command, isolated_environment(Path(folder)))

        absent: list[str] = []

        def found(name: str, mode: str) -> Installed | None:
            here = installed(name, mode)
            absent.extend([] if here else [name])
            return here

        faults = faults_of(path, collected, found)
    for fault in faults[:SHOWN_FAULTS]:
        print(f"{path}: {fault}")
    if len(faults) > SHOWN_FAULTS:
        print(f"{path}: and {len(faults) - SHOWN_FAULTS} more")
    for name in absent:
        print(f"{path}: {name!r} is not installed here: its kind, distribution and version were not compared")
    print(f"{path}: {'not a valid record' if faults else 'valid'}")
    raise typer.Exit(1 if faults else 0)
