"""Keeps the contract from changing silently.

``clauses.lock`` has one line for every change of a clause or of the tolerance table: ``ID VERSION VERB DIGEST``. The
last line of an id must have the digest of the present entry, every line must be announced in ``specs/CHANGELOG.md``,
and lines are only ever appended. ``python -m tests.house.contract_lock`` appends the announced lines that are missing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.specs.clauses import Catalogue, parse, version_key

from .tree import ROOT

VERBS: Final = ("added", "reworded", "sharpened", "loosened", "dropped")
LOCK: Final = "tests/house/clauses.lock"
CHANGELOG: Final = "specs/CHANGELOG.md"
TOLERANCE: Final = "tolerance"
NO_DIGEST: Final = "-"
SHORTEST_REASON: Final = 10

_BULLET: Final = re.compile(rf"- ({'|'.join(VERBS)}) ([A-Za-z0-9, ]+): (.*)")
_HEADING: Final = re.compile(r"## ([0-9.]+)")


@dataclass(frozen=True)
class Change:
    """One change of one clause, as the lock and the changelog both name it."""

    id: str
    version: str
    verb: str


@dataclass(frozen=True)
class Line:
    """A line of the lock: a change and the digest of the entry after it (``-`` once it is dropped)."""

    change: Change
    digest: str

    def __str__(self) -> str:
        """The line as it stands in the file."""
        return f"{self.change.id} {self.change.version} {self.change.verb} {self.digest}"


def digests(catalogue: Catalogue) -> dict[str, str]:
    """Digest of every clause by id, and of the tolerance table."""
    return {name: c.digest for name, c in catalogue.clauses.items()} | {TOLERANCE: catalogue.tolerances.digest}


def read_lock(text: str) -> list[Line]:
    """Parse the lock; raises ValueError on a malformed line."""
    lines = []
    for number, row in enumerate(text.splitlines(), start=1):
        fields = row.split()
        if len(fields) != 4 or fields[2] not in VERBS:
            raise ValueError(f"{LOCK}:{number}: {row!r}; expected 'ID VERSION VERB DIGEST'")
        lines.append(Line(Change(*fields[:3]), fields[3]))
    return lines


def read_changelog(text: str) -> list[Change]:
    """Every change the changelog announces, in its order; raises ValueError on a bullet that announces nothing."""
    changes: list[Change] = []
    version = ""
    for number, row in enumerate(text.splitlines(), start=1):
        if heading := _HEADING.fullmatch(row):
            version = heading[1]
        elif version and row.startswith("- "):
            bullet = _BULLET.fullmatch(row)
            if bullet is None or len(bullet[3]) < SHORTEST_REASON:
                raise ValueError(f"{CHANGELOG}:{number}: {row!r}; expected '- VERB ID, ID: reason', VERB of {VERBS}")
            changes += [Change(name.strip(), version, bullet[1]) for name in bullet[2].split(",")]
    return changes


def findings(catalogue: Catalogue, lock: list[Line], announced: Iterable[Change]) -> list[str]:
    """What is wrong between the catalogue, the lock and the changelog; empty if nothing is."""
    present = digests(catalogue)
    last: dict[str, Line] = {}
    found = []
    for line in lock:
        known = last.get(line.change.id)
        if (known is None) != (line.change.verb == "added") or (known is not None and known.digest == NO_DIGEST):
            found.append(f"{line}: an id is added once, first, and never again after it was dropped")
        if version_key(line.change.version) > version_key(catalogue.version):
            found.append(f"{line}: later than the contract's version {catalogue.version}")
        last[line.change.id] = line
    for name in sorted(last.keys() | present.keys()):
        recorded = last[name].digest if name in last else NO_DIGEST
        if recorded != present.get(name, NO_DIGEST):
            found.append(f"{name}: changed without a record: announce it in {CHANGELOG}, then run {__name__}")
    locked, said = Counter(line.change for line in lock), Counter(announced)
    found += [f"{change}: locked, but not announced in {CHANGELOG}" for change in (locked - said).elements()]
    found += [f"{change}: announced, but not locked; run {__name__}" for change in (said - locked).elements()]
    return found


def append(catalogue: Catalogue, lock: list[Line], announced: Iterable[Change]) -> list[Line]:
    """The lock with the announced changes it lacks, at the digests of the present catalogue."""
    present = digests(catalogue)
    missing = Counter(announced) - Counter(line.change for line in lock)
    return lock + [Line(change, present.get(change.id, NO_DIGEST)) for change in missing.elements()]


def rewritten(root: Path) -> list[str]:
    """Commits whose lock is not a beginning of the present one; empty where there is no history to compare with."""
    git = ["git", "-c", "safe.directory=*", "-C", str(root)]
    log = subprocess.run([*git, "log", "--format=%H", "--", LOCK], capture_output=True, text=True, check=False)
    present = (root / LOCK).read_text(encoding="utf-8")
    found = []
    for commit in log.stdout.split():
        old = subprocess.run([*git, "show", f"{commit}:{LOCK}"], capture_output=True, text=True, check=False)
        if not present.startswith(old.stdout):
            found.append(f"{LOCK} at {commit[:12]} is not a beginning of the present file: its lines are only appended")
    return found


def main() -> int:
    """Append what the changelog announces; print what is still wrong; 1 if anything is."""
    catalogue = parse((ROOT / "specs/clauses.toml").read_text(encoding="utf-8"))
    path = ROOT / LOCK
    lock = read_lock(path.read_text(encoding="utf-8")) if path.exists() else []
    announced = read_changelog((ROOT / CHANGELOG).read_text(encoding="utf-8"))
    new = append(catalogue, lock, announced)
    found = findings(catalogue, new, announced)
    if found:
        sys.stderr.write("\n".join(found) + "\n")
        return 1
    path.write_text("".join(f"{line}\n" for line in new), encoding="utf-8")
    sys.stdout.write(f"{len(new) - len(lock)} lines appended to {LOCK}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
