"""Results on disk while a long run lasts, so that a run that was interrupted goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TextIO

from forebay.specs.faults.catalogue import Fault
from forebay.specs.faults.runner import Result

KEPT: Final = ("verdict", "killed_by", "ran", "seconds", "detail", "about")
JUDGED: Final = ("specs", "runtime", "backends")
"""Folders of the package whose sources decide a result."""


def sources_hash() -> str:
    """SHA-256 over the names and bytes of the sources that decide a result: contract, suite, runtime and backends, not the faults."""
    package = Path(str(resources.files("forebay.specs"))).parent
    files = [path for folder in JUDGED for path in (package / folder).rglob("*") if path.suffix in (".py", ".toml")]
    digest = hashlib.sha256()
    for path in sorted(files):
        name = path.relative_to(package).as_posix()
        if not (name.startswith("specs/faults/") and path.suffix == ".toml"):
            digest.update(f"{name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


class Results:
    """A file with a line of JSON a result. What other sources made, and what was not good, is made anew.

    Args:
        path: the file; made if need be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sources = sources_hash()
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def taken_up(self, faults: Iterable[Fault]) -> Iterator[Result]:
        """The good results of earlier runs on the same sources, for those of ``faults`` that are what they were."""
        held = {(entry.get("sources"), entry.get("fault")): entry for entry in self._entries()}
        for fault in faults:
            entry = held.get((self._sources, fault.digest))
            if entry is not None:
                result = Result(fault, **{name: entry[name] for name in KEPT})
                if result.good:
                    yield result

    def add(self, result: Result) -> None:
        """Keep one result; it is on disk when this returns."""
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
            self._file.write("\n")  # behind a line that an interruption cut off
        kept = {name: getattr(result, name) for name in KEPT}
        self._file.write(json.dumps({"sources": self._sources, "fault": result.fault.digest, **kept}) + "\n")
        self._file.flush()

    def discard(self) -> None:
        """Delete the file: what is in it is in the matrix."""
        self._path.unlink(missing_ok=True)

    def _entries(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        for line in self._path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # a line that an interruption cut off
                continue
            yield entry
