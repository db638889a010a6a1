"""What the commands share: the global options, settings with those of the call, messages and progress bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from forebay.runtime.settings import SETTINGS, Settings

if TYPE_CHECKING:
    from rich.progress import Progress


@dataclass
class Shared:
    """The global options of one run of the command line; None is "not given"."""

    traceback: bool | None = None
    progress: bool | None = None
    config: Path | None = None


def shared_of(context: typer.Context) -> Shared:
    """The global options that came before the command's name."""
    return context.ensure_object(Shared)


def resolve_settings(context: typer.Context, **given: Any) -> Settings:
    """The settings, where options that were given (not None) are the call's values.

    Raises:
        InvalidSetting: as :meth:`Settings.resolve`.
    """
    shared = shared_of(context)
    calls = {key: value for key, value in {"traceback": shared.traceback, **given}.items() if value is not None}
    return Settings.resolve(config=shared.config, **calls)


def setting_option(key: str, metavar: str) -> Any:
    """An option ``--key`` whose help is the setting's; the value is checked with the settings, not here."""
    return typer.Option(f"--{key.replace('_', '-')}", help=SETTINGS[key].__metadata__[0].doc, metavar=metavar)


def print_error(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)


def print_json(data: Any) -> None:
    """``data`` as indented JSON on stdout; paths and other objects as their text."""
    print(json.dumps(data, indent=2, default=str, ensure_ascii=False))


class Bars:
    """Progress bars on stderr; made by :func:`progress_bars`. Without a display every report is dropped."""

    def __init__(self, display: Progress | None) -> None:
        self._display = display

    def for_bytes(self, title: str) -> Callable[[int, int | None, str], None]:
        """A callback ``(bytes_done, bytes_total or None, phase)`` that shows one bar a phase."""
        display = self._display
        if display is None:
            return _ignore
        tasks: dict[str, Any] = {}

        def report(done: int, total: int | None, phase: str) -> None:
            if phase not in tasks:
                tasks[phase] = display.add_task(f"{title}: {phase}".removeprefix(": "), total=total)
            display.update(tasks[phase], completed=done, total=total)

        return report

    def for_count(self, title: str) -> Callable[[int, int], None]:
        """A callback ``(done, total)`` that shows one bar, from its first call on."""
        report = self.for_bytes("")
        return lambda done, total: report(done, total, title)


def _ignore(*_report: object) -> None:
    """Drop one progress report."""


@contextmanager
def progress_bars(context: typer.Context) -> Iterator[Bars]:
    """Bars that live as long as the block: shown on a terminal, or where ``--progress`` asks for them."""
    wanted = shared_of(context).progress
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield Bars(None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, force_terminal=wanted or None)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as display:
        yield Bars(display)
