"""The digest over the sources that decide a verdict: it ties a record, and the matrix of faults, to the suite that made it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

KINDS: Final = (".py", ".toml", ".jinja")
"""Endings of the files that decide something."""
JUDGING: Final[Mapping[str, tuple[str, ...]]] = {
    "specs": ("*.*", "suite/**/*.*"),
    "runtime": ("suite_entry.py", "suite_plugin.py", "suite_parts.py", "models/suite_model.py"),
}
"""By package: the contract with the checks and counts in front of every driver, the suite with its judge, reports and verifier, and
what the runtime hands to it. The backends, the engine and the faults are what is judged."""


def suite_hash() -> str:
    """SHA-256 over the names and bytes of all sources that decide a verdict, in the order of their names."""
    digest = hashlib.sha256()
    for name, path in sorted(_judging()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _judging() -> Iterator[tuple[str, Path]]:
    for package, patterns in JUDGING.items():
        folder = _folder(package)
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            if path.suffix in KINDS and path.is_file():
                yield f"{package}/{path.relative_to(folder).as_posix()}", path


def _folder(package: str) -> Path:
    """Where a package of Forebay (``specs``, ``runtime``) is installed; the package is not imported.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    spec = find_spec(f"forebay.{package}")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"forebay.{package} is not installed; pip install --force-reinstall forebay")
    return Path(spec.submodule_search_locations[0])
