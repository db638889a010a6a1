"""The journal of a run: one entry after the other, out of the process at once, so that its crash loses nothing that was known.

The operating system holds what was written; it is not forced onto the disk, so that a machine that goes down may lose the last of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from forebay.specs.errors import InvalidInput
from forebay.specs.files import output_at

Entry = dict[str, Any]
"""``entry`` names its kind: ``run``, ``backend``, ``started`` (a test), ``result``, ``counters``, ``stopped`` or ``end``; the rest is
its content."""


def journal_of(record: Path) -> Path:
    """Where the journal of a run is while it lasts, or after it crashed: beside the file its record goes to."""
    return record.with_name(f"{record.name}.journal")


class Journal:
    """Entries in memory and, with a path, a line of JSON each in a file; an older one is replaced.

    Raises:
        InvalidInput: no file can be made there.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.entries: list[Entry] = []
        self._path = path
        self._file: TextIO | None = None
        if path is not None:
            output_at(path, f"journal {path}")
            path.unlink(missing_ok=True)  # a symlink goes, what it leads to stays as it is
            self._file = path.open("x", encoding="utf-8")

    def add(self, kind: str, content: Mapping[str, Any]) -> None:
        """Append one entry; the operating system has it when this returns. What JSON has no form for is kept as its text."""
        line = json.dumps({"entry": kind, **content}, default=str)
        self.entries.append(json.loads(line))
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()

    def discard(self) -> None:
        """Close the file, if there is one, and take it away: what it holds is in a record, or worth nothing."""
        self.entries = []
        if self._file is not None and self._path is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()


def read_journal(path: Path) -> list[Entry]:
    """The entries of a file; a last line that a crash cut off is left out.

    Raises:
        InvalidInput: there is no such file.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise InvalidInput(f"journal {path}: {error}") from error
    return [json.loads(line) for line in lines[:-1]]
