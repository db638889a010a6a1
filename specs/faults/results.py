"""Results on disk while a long run lasts, so that a run that was interrupted goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TextIO

from filelock import FileLock, Timeout

from forebay.specs.errors import InvalidInput
from forebay.specs.faults.catalogue import Fault
from forebay.specs.faults.runner import Result
from forebay.specs.files import output_at

KEPT: Final = ("verdict", "killed_by", "ran", "seconds", "detail", "fell")
LIBRARIES: Final = ("numpy", "pytest", "hypothesis", "pluggy")
"""Distributions whose version decides a result, beside Python's."""
JUDGED: Final = ("specs", "runtime", "backends")
"""Folders of the package whose sources decide a result."""


def sources_hash() -> str:
    """SHA-256 over what decides a result: the sources of contract, suite, runtime and backends, not of the faults, and the versions of
    Python and of the libraries under them."""
    package = Path(str(resources.files("forebay.specs"))).parent
    files = [path for folder in JUDGED for path in (package / folder).rglob("*") if path.suffix in (".py", ".toml")]
    versions = {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}
    digest = hashlib.sha256(json.dumps(versions).encode())
    for path in sorted(files):
        name = path.relative_to(package).as_posix()
        if not (name.startswith("specs/faults/") and path.suffix == ".toml"):
            digest.update(f"{name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


class Results:
    """A file with a line of JSON a result. What other sources made, what was not good, and what is no result is made anew.

    Only one process at a time has the file: others would add to it what this one takes away.

    Args:
        path: the file; made if need be. Beside it lies a lock as long as somebody has it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sources = sources_hash()
        self._file: TextIO | None = None
        self._lock = FileLock(path.with_name(f"{path.name}.lock"))

    def __enter__(self) -> Self:
        """Take the file.

        Raises:
            InvalidInput: another process has it, or it cannot be a file.
        """
        lock = Path(self._lock.lock_file)
        self._path = output_at(self._path, f"kept results {self._path}")
        output_at(lock, f"lock {lock} of kept results")
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise InvalidInput(f"{self._path}: another process keeps its results there; wait for its end") from None
        except OSError as error:
            raise InvalidInput(f"{self._path}: cannot be locked: {error}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        Path(self._lock.lock_file).unlink(missing_ok=True)  # before anybody else can take it
        self._lock.release()

    def taken_up(self, faults: Iterable[Fault]) -> Iterator[Result]:
        """The good results of earlier runs on the same sources, for those of ``faults`` that are what they were.

        What a line calls good does not count unless the tests that fell bear it out.
        """
        held = {(entry["sources"], entry["fault"]): entry for entry in self._entries()}
        for fault in faults:
            entry = held.get((self._sources, fault.digest))
            if entry is not None:
                result = Result(fault, **{name: entry[name] for name in KEPT})
                if result.good and result.killers and not result.detail:
                    yield result

    def add(self, result: Result) -> None:
        """Keep one result; it is on disk when this returns."""
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
            self._file.write("\n")  # behind a line that an interruption cut off
        kept = {name: getattr(result, name) for name in KEPT}
        self._file.write(json.dumps({"sources": self._sources, "fault": result.fault.digest, **kept}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def discard(self) -> None:
        """Delete the file: what is in it is in the matrix."""
        self._path.unlink(missing_ok=True)

    def _entries(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        for line in self._path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                entry = json.loads(line)
            except (json.JSONDecodeError, RecursionError):  # a line that an interruption cut off
                continue
            if isinstance(entry, dict) and entry.keys() == _FORM.keys() and all(_FORM[k](entry[k]) for k in _FORM):
                yield entry


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _lists_of_texts(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in value.values()
    )


_FORM: Final[Mapping[str, Callable[[object], bool]]] = {
    **dict.fromkeys(("sources", "fault", "verdict", "detail"), _is_text),
    **dict.fromkeys(("killed_by", "fell"), _lists_of_texts),
    "ran": _is_count,
    "seconds": _is_time,
}
"""What a line holds, and what each value has to be."""
