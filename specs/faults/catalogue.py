"""The faults as data: what each breaks, and the patches of source text that seed it.

.. code-block:: toml

    [stale-visible]
    clause = "C6"
    title = "The visible length of a slot is left at what the last request retired with."
    counter = "reseeds"          # only where tokens and bits stay right: the counter by which the fault shows
    [[stale-visible.patch]]      # what seeds it
    module = "forebay.runtime.state"
    old = "text that occurs once"
    new = "other text"
    [[stale-visible.guard]]      # only where a guard absorbs it: what takes the guard away as well
    ...

A line ``backend = "name:mode"`` above the tables of a file says where its faults show; without one it is ``sim``.

A fault with a guard makes two: itself, caught by its counter, and its pair ``stale-visible-unguarded``, caught by values.
"""

from __future__ import annotations

import functools
import hashlib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final

from forebay.specs.clauses import catalogue
from forebay.specs.errors import InvalidInput

_FIELDS: Final = {"clause", "title", "patch", "counter", "guard", "raises"}
_PATCH_FIELDS: Final = {"module", "old", "new"}
_COUNTER: Final = re.compile(r"[a-z_]+(\[[a-z_]+\])?")
SIM: Final = "sim"
"""The backend of faults whose file names none: strict, in numpy, and of this tree."""
_BACKEND: Final = re.compile(r"[a-z][a-z0-9_-]*(:[a-z][a-z0-9_-]*)?")
UNGUARDED: Final = "-unguarded"
"""What the id of a pair has more than that of the fault it was made of."""


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


ASSERTIONS: Final = ("AssertionError", "Failed")
"""Names of the errors by which an assertion falls: a value that is another, and what pytest raises where an error is missing."""


@dataclass(frozen=True)
class Fault:
    """One seeded fault.

    Attributes:
        id: its name, ``area.words-with-hyphens``.
        clause: the clause it breaks.
        title: the mistake of real life it stands for.
        patches: what seeds it.
        counter: the counter by which it shows although every value is right (``reseeds``, ``launches[gather]``), or ``""``.
        pair_of: the fault that a guard absorbs, where this is the same one without the guard: it shows by values; else ``""``.
        raises: the name of the error by which it shows, where that is no assertion's: the mistake is that it is raised at all, or in
            the place of the one a test asks for; else ``""``.
        backend: ``NAME[:MODE]`` of the backend on which the suite judges it.
    """

    id: str
    clause: str
    title: str
    patches: tuple[Patch, ...]
    counter: str = ""
    pair_of: str = ""
    raises: str = ""
    backend: str = field(default=SIM, repr=False)

    def is_killed_by(self, clauses: Iterable[str], fell: Sequence[str]) -> bool:
        """Whether a fallen test, of these clauses, catches it; ``fell`` is the name of its error, then what its assertion is about.

        It has to fall by an assertion, one that asks for an error included, for a fault that merely crashes is not the one its title
        names; or by the error the fault ``raises``. A fault with a counter has to fall by an assertion about that counter, its pair
        by one that is not.
        """
        by, *about = fell
        if self.clause not in clauses or not by or by not in (*ASSERTIONS, self.raises):
            return False
        names = set(about)
        by_counter = set(re.findall(r"\w+", self.counter)) <= names
        if self.pair_of:
            return bool(names) and not by_counter
        return by_counter

    @property
    def digest(self) -> str:
        """SHA-256 over every field."""
        where = "" if self.backend == SIM else self.backend  # the digests of faults on sim are older than the field
        return hashlib.sha256((repr(self) + where).encode()).hexdigest()


UNSEEDED: Final = Fault("unseeded", "", "Nothing is patched: what falls here falls by no fault.", ())
PLAINEST: Final = "test_plainest.py"
"""Tests of one request, one block, contiguous NHD, alone and through an engine: a fault that breaks them is too coarse."""


def faults(backend: str = SIM) -> Mapping[str, Fault]:
    """The faults of a backend by id, in the order of the files' names."""
    return {name: fault for name, fault in every_fault().items() if fault.backend == backend}


@functools.cache
def every_fault() -> Mapping[str, Fault]:
    """The faults of all backends by id, in the order of the files' names."""
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
    backend = (
        SIM if isinstance(data.get("backend"), dict) else data.pop("backend", SIM)
    )  # a table is a fault of that name
    if not (isinstance(backend, str) and _BACKEND.fullmatch(backend)):
        raise InvalidInput(f"faults of {area}: backend is {backend!r}; expected NAME or NAME:MODE")
    return tuple(fault for name, fields in data.items() for fault in _made(f"{area}.{name}", fields, backend))


def select(names: Iterable[str], backend: str = SIM) -> tuple[Fault, ...]:
    """The faults of ``backend`` of these names, each once: a name is a fault's id, or the area that ids begin with. Without names, all.

    Raises:
        InvalidInput: a name is neither, or the backend has no faults.
    """
    known = faults(backend)
    if not known:
        those = ", ".join(dict.fromkeys(fault.backend for fault in every_fault().values()))
        raise InvalidInput(f"no fault is judged on {backend}; expected one of {those}")
    meant = {name: [key for key in known if name in (key, key.partition(".")[0])] for name in names}
    unknown = [name for name, found in meant.items() if not found]
    if unknown:
        areas = ", ".join(dict.fromkeys(key.partition(".")[0] for key in known))
        raise InvalidInput(
            f"no fault {', '.join(unknown)} of {backend}; expected AREA.NAME as forebay faults --list names all {len(known)}, "
            f"or an area: {areas}"
        )
    wanted = dict.fromkeys(key for found in meant.values() for key in found)
    return tuple(known[name] for name in wanted or known)


def without_fault() -> tuple[str, ...]:
    """Ids of the MUST clauses in force for which there is no fault."""
    broken = {fault.clause for fault in faults().values()}
    return tuple(c.id for c in catalogue().in_force() if c.level == "MUST" and c.id not in broken)


def _made(name: str, fields: Any, backend: str) -> Iterator[Fault]:
    """The fault of one table, and its pair where it has a guard."""
    where = f"fault {name}"
    if not isinstance(fields, dict) or not {"clause", "title", "patch"} <= fields.keys() <= _FIELDS:
        raise InvalidInput(
            f"{where}: expected clause, title, [[patch]], perhaps counter and [[guard]], or raises, and nothing else"
        )
    for key in ("clause", "title"):
        if not isinstance(fields[key], str) or not fields[key].strip():
            raise InvalidInput(f"{where}: {key} is {fields[key]!r}; expected a text")
    counter = fields.get("counter", "")
    if "counter" in fields and not (isinstance(counter, str) and _COUNTER.fullmatch(counter)):
        raise InvalidInput(f"{where}: counter is {counter!r}; expected a name such as reseeds or launches[gather]")
    raises = fields.get("raises", "")
    if "raises" in fields and not (isinstance(raises, str) and raises.isidentifier() and not counter):
        raise InvalidInput(
            f"{where}: raises is {raises!r}; expected the name of an error, of a fault without a counter"
        )
    patches = _patches(fields["patch"], "patch", where)
    clause = catalogue().clause(fields["clause"]).id
    yield Fault(name, clause, fields["title"], patches, counter, raises=raises, backend=backend)
    if "guard" in fields:
        if not counter:
            raise InvalidInput(f"{where}: it has a [[guard]] and no counter that shows what the guard absorbs")
        guard = _patches(fields["guard"], "guard", where)
        yield Fault(
            name + UNGUARDED,
            clause,
            f"{fields['title']} Nothing absorbs it.",
            patches + guard,
            counter,
            pair_of=name,
            backend=backend,
        )


def _patches(data: Any, kind: str, where: str) -> tuple[Patch, ...]:
    if not isinstance(data, list) or not data:
        raise InvalidInput(f"{where}: it has no [[{kind}]]")
    for patch in data:
        if not isinstance(patch, dict) or patch.keys() != _PATCH_FIELDS:
            raise InvalidInput(f"{where}: a {kind} has module, old and new; got {sorted(patch)}")
        if not patch["old"] or patch["old"] == patch["new"]:
            raise InvalidInput(f"{where}: a {kind} replaces some text by another; got {patch['old']!r}")
    return tuple(Patch(**patch) for patch in data)
