"""The faults as data: what each breaks, and the patches of source text that seed it."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from forebay.specs.clauses import catalogue
from forebay.specs.errors import InvalidInput

_FIELDS: Final = {"clause", "title", "patch", "counter"}
_PATCH_FIELDS: Final = {"module", "old", "new"}


@dataclass(frozen=True)
class Patch:
    """One replacement in the source of a module: ``old`` occurs exactly once in it."""

    module: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        """The patched source.

        Raises:
            InvalidInput: ``old`` does not occur exactly once: the code has changed, and the fault has to be written anew.
        """
        count = source.count(self.old)
        if count != 1:
            raise InvalidInput(
                f"{self.module}: {self.old!r} occurs {count} times; expected once; the fault no longer applies, adapt it"
            )
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Fault:
    """One seeded fault.

    Attributes:
        id: its name, ``area.words-with-hyphens``.
        clause: the clause it breaks.
        title: the mistake of real life it stands for.
        patches: what seeds it.
        counter: the counter by which it shows although a guard absorbs it, or ``""``.
    """

    id: str
    clause: str
    title: str
    patches: tuple[Patch, ...]
    counter: str = ""


@functools.cache
def faults() -> Mapping[str, Fault]:
    """Every fault by id, in the order of the files' names."""
    folder = resources.files(__package__)
    files = sorted((item for item in folder.iterdir() if item.name.endswith(".toml")), key=lambda item: item.name)
    found: dict[str, Fault] = {}
    for file in files:
        area = file.name.removesuffix(".toml")
        for fault in parse(area, file.read_text(encoding="utf-8")):
            found[fault.id] = fault
    return found


def parse(area: str, text: str) -> tuple[Fault, ...]:
    """Read the faults of one file.

    Raises:
        InvalidInput: the text is not TOML, or a field is missing, unknown or malformed; the message names it.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"faults of {area}: not TOML: {error}") from error
    return tuple(_fault(f"{area}.{name}", fields) for name, fields in data.items())


def select(names: Iterable[str]) -> tuple[Fault, ...]:
    """The faults of these ids; all of them if there is none.

    Raises:
        InvalidInput: an id is unknown.
    """
    known = faults()
    wanted = list(names)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise InvalidInput(f"no fault {', '.join(unknown)}; forebay faults --list names all {len(known)}")
    return tuple(known[name] for name in wanted) if wanted else tuple(known.values())


def without_fault() -> tuple[str, ...]:
    """Ids of the MUST clauses in force for which there is no fault."""
    broken = {fault.clause for fault in faults().values()}
    return tuple(c.id for c in catalogue().in_force() if c.level == "MUST" and c.id not in broken)


def _fault(name: str, fields: Any) -> Fault:
    where = f"fault {name}"
    if not isinstance(fields, dict) or not {"clause", "title", "patch"} <= fields.keys() <= _FIELDS:
        raise InvalidInput(f"{where}: expected clause, title, [[patch]] and perhaps counter, and nothing else")
    if not isinstance(fields["patch"], list) or not fields["patch"]:
        raise InvalidInput(f"{where}: it has no [[patch]]")
    patches = []
    for patch in fields["patch"]:
        if not isinstance(patch, dict) or patch.keys() != _PATCH_FIELDS:
            raise InvalidInput(f"{where}: a patch has module, old and new; got {sorted(patch)}")
        if not patch["old"] or patch["old"] == patch["new"]:
            raise InvalidInput(f"{where}: a patch replaces some text by another; got {patch['old']!r}")
        patches.append(Patch(**patch))
    for field in ("clause", "title"):
        if not isinstance(fields[field], str) or not fields[field].strip():
            raise InvalidInput(f"{where}: {field} is {fields[field]!r}; expected a text")
    clause = catalogue().clause(fields["clause"]).id
    return Fault(name, clause, fields["title"], tuple(patches), str(fields.get("counter", "")))
