"""The command line ``forebay``: its global options, and how errors reach the user."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from forebay.runtime.cli import backends, conform, doctor, faults, generate, model
from forebay.runtime.cli.console import Shared, print_error, shared_of
from forebay.runtime.settings import traceback_wanted
from forebay.specs.errors import ForebayError
from forebay.specs.signals import ENDING, INTERRUPT, exit_code, heard, interrupted_by

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
USAGE_ERROR: Final[Any] = typer.BadParameter.mro()[1]
"""The parser's error for a wrong command line; which library defines it depends on typer's version."""

app = typer.Typer(
    name="forebay",
    help="Paged-KV decode that is the same on every accelerator.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(generate.generate)
app.command()(backends.backends)
app.command()(doctor.doctor)
app.command()(conform.conform)
app.command()(faults.faults)
app.add_typer(model.app, name="model")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"forebay {version('forebay')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _global_options(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    show_traceback: Annotated[
        bool | None,
        typer.Option("--traceback/--no-traceback", help="Show the traceback of errors.", show_default=False),
    ] = None,
    progress: Annotated[
        bool | None, typer.Option("--progress/--no-progress", help="Progress bars (default: on a terminal).")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file to read.", metavar="PATH")] = None,
) -> None:
    shared = shared_of(context)
    shared.traceback, shared.progress, shared.config = show_traceback, progress, config
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv`` when None) and return the exit code.

    0: done. 1: a check failed, or an error that is a fault of Forebay itself. 2: an error the user can act on, told in one
    line on stderr. 130: interrupted. 143 and 129: ended by SIGTERM, and by SIGHUP, after the same cleaning up.
    """
    shared = Shared()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model's text may hold what the terminal's encoding lacks
    command = typer.main.get_command(app)
    told: list[str] = []

    def end(name: str) -> None:
        told.append(name)
        interrupted_by(name)

    try:
        with heard(ENDING, end):
            code = command.main(
                args=None if arguments is None else list(arguments),
                prog_name="forebay",
                standalone_mode=False,
                obj=shared,
            )
            sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = exit_code(INTERRUPT[0])
    except BrokenPipeError:  # the reader of our output has gone; what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FAILURE
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the last stop: every error becomes a line and a code
        code = _report(error, shared)
    if told:
        code = exit_code(told[0])
    by_signal = {exit_code(name): name for name in (*INTERRUPT, *ENDING) if name in signal.Signals.__members__}
    if code in by_signal:
        print("interrupted" if by_signal[code] in INTERRUPT else f"ended by {by_signal[code]}", file=sys.stderr)
    return int(code or 0)


def _report(error: BaseException, shared: Shared) -> int:
    """Tell the user about ``error`` and return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_FAILURE
    wanted = shared.traceback if shared.traceback is not None else traceback_wanted(config=shared.config)
    if wanted:
        traceback.print_exception(error)
    if isinstance(error, USAGE_ERROR):
        path = error.ctx.command_path if error.ctx is not None else "forebay"
        print_error(f"{error.format_message()} (see '{path} --help')")
        return EXIT_USAGE
    if isinstance(error, ForebayError):
        print_error(str(error))
        return EXIT_USAGE
    more = "" if wanted else "; run 'forebay --traceback ...' to see where"
    print_error(f"unexpected {type(error).__name__}: {error}{more}")
    return EXIT_FAILURE
