"""The contract as data: typed access to ``clauses.toml``, the catalogue of what backends and the runtime must hold.

>>> catalogue().clause("D3").title
'Empty rows are zero'
>>> catalogue().tolerance("float32")
5e-06
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from .errors import InvalidInput

Level = Literal["MUST", "SHOULD"]
Subject = Literal["backend", "runtime", "both"]

_ID: Final = re.compile(r"[LWDSCBG][1-9][0-9]*")
_VERSION: Final = re.compile(r"[0-9]+(\.[0-9]+)*")


@dataclass(frozen=True)
class Clause:
    """One clause of the contract.

    Attributes:
        id: group letter and number (``D6``); lasts for ever, never used for another clause.
        title: short name.
        text: everything that MUST hold, as one paragraph.
        level: ``MUST`` or ``SHOULD``.
        subject: who has to hold it.
        since: first contract version in which it is in force.
        refusal: whether a refusal test applies beside the test of the value.
        needs: capability without which the clause asks nothing of a backend; ``""`` if it always applies.
    """

    id: str
    title: str
    text: str
    level: Level
    subject: Subject
    since: str
    refusal: bool
    needs: str = ""

    @property
    def digest(self) -> str:
        """First 16 hex digits of a SHA-256 over every field."""
        return _digest(asdict(self))


@dataclass(frozen=True)
class Tolerance:
    """The tolerance table of clause D6: max |result - reference| <= limit * scale, up to ``max_visible`` tokens.

    ``limit`` maps the name of a KV dtype (``float32``, ``bfloat16``, ``float16``), or of the rounding a unit declares
    (``tf32``), to the relative limit.
    """

    limit: Mapping[str, float]
    reference: str
    scale: str
    max_visible: int
    accumulate: str

    @property
    def digest(self) -> str:
        """First 16 hex digits of a SHA-256 over every field."""
        return _digest({**vars(self), "limit": dict(self.limit)})


@dataclass(frozen=True)
class Catalogue:
    """The whole contract: its version, the clauses by id, the tolerance table, and the words the clauses use."""

    version: str
    clauses: Mapping[str, Clause]
    tolerances: Tolerance
    nouns: Mapping[str, str]
    symbols: Mapping[str, str]

    def clause(self, clause_id: str) -> Clause:
        """Return the clause of that id; raises :class:`InvalidInput` with the nearest known ids for an unknown one."""
        if clause_id not in self.clauses:
            near = difflib.get_close_matches(clause_id, self.clauses, n=3, cutoff=0.5)
            hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(self.clauses)}"
            raise InvalidInput(f"no clause {clause_id!r} in contract {self.version}; {hint}")
        return self.clauses[clause_id]

    def in_force(self, version: str | None = None) -> tuple[Clause, ...]:
        """Return the clauses in force at a contract version (default: the present one), in catalogue order.

        Raises:
            InvalidInput: ``version`` is not dotted numbers.
        """
        at = version_key(self.version if version is None else version)
        return tuple(clause for clause in self.clauses.values() if version_key(clause.since) <= at)

    def tolerance(self, dtype: str) -> float:
        """Return D6's limit, relative to max |V|, for a KV dtype name or a declared rounding (``tf32``).

        Raises:
            InvalidInput: the contract has no limit for ``dtype``.
        """
        if dtype not in self.tolerances.limit:
            known = ", ".join(self.tolerances.limit)
            raise InvalidInput(f"clause D6 has no tolerance for {dtype!r}; it has one for {known}")
        return self.tolerances.limit[dtype]


def version_key(version: str) -> tuple[int, ...]:
    """Turn dotted numbers into a key that orders versions; trailing zeros do not count (``1`` is ``1.0``)."""
    if not _VERSION.fullmatch(version):
        raise InvalidInput(f"contract version {version!r}: expected dotted numbers such as '0.1'")
    numbers = [int(part) for part in version.split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


@functools.cache
def catalogue() -> Catalogue:
    """Return the catalogue that ships with this package, read once."""
    return parse(resources.files(__package__).joinpath("clauses.toml").read_text(encoding="utf-8"))


def parse(text: str) -> Catalogue:
    """Read a catalogue from TOML text.

    Raises:
        InvalidInput: the text is not TOML, or a field is missing, unknown or malformed; the message names the field.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"clause catalogue: not TOML: {error}") from error
    _only(data, {"version", "nouns", "symbols", "tolerance", "clause"}, "clause catalogue")
    version = _string(data, "version", "clause catalogue")
    version_key(version)
    table = _table(data, "clause", "clause catalogue")
    if not table:
        raise InvalidInput("clause catalogue: it has no clause; expected [clause.ID] tables")
    return Catalogue(
        version=version,
        clauses=MappingProxyType({clause_id: _clause(clause_id, table) for clause_id in table}),
        tolerances=_tolerance(_table(data, "tolerance", "clause catalogue")),
        nouns=_words(data, "nouns"),
        symbols=_words(data, "symbols"),
    )


def _clause(clause_id: str, table: Mapping[str, Any]) -> Clause:
    where = f"clause {clause_id}"
    if not _ID.fullmatch(clause_id):
        raise InvalidInput(f"{where}: an id is a group letter of LWDSCBG and a number, such as 'D6'")
    data = _table(table, clause_id, "clause catalogue")
    _only(data, {"title", "text", "level", "subject", "since", "refusal", "needs"}, where)
    level: Level = _one_of(data, "level", get_args(Level), where)
    subject: Subject = _one_of(data, "subject", get_args(Subject), where)
    text = " ".join(_string(data, "text", where).split())
    if level not in text:
        raise InvalidInput(f"{where}: its level is {level}, but the text has no {level}")
    since = _string(data, "since", where)
    version_key(since)
    refusal = data.get("refusal")
    if not isinstance(refusal, bool):
        raise InvalidInput(f"{where}: refusal = {refusal!r}; expected true or false")
    needs = _string(data, "needs", where) if "needs" in data else ""
    return Clause(clause_id, _string(data, "title", where), text, level, subject, since, refusal, needs)


def _tolerance(data: Mapping[str, Any]) -> Tolerance:
    where = "tolerance"
    _only(data, {"limit", "reference", "scale", "max_visible", "accumulate"}, where)
    limit = _table(data, "limit", where)
    for dtype, value in limit.items():
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise InvalidInput(f"{where}.limit.{dtype} = {value!r}; expected a positive finite float")
    if "float32" not in limit:
        raise InvalidInput(f"{where}.limit has no float32; it has {', '.join(limit) or 'nothing'}")
    max_visible = data.get("max_visible")
    if not isinstance(max_visible, int) or isinstance(max_visible, bool) or max_visible < 1:
        raise InvalidInput(f"{where}.max_visible = {max_visible!r}; expected a positive integer")
    return Tolerance(
        limit=MappingProxyType(dict(limit)),
        reference=_string(data, "reference", where),
        scale=_string(data, "scale", where),
        max_visible=max_visible,
        accumulate=_string(data, "accumulate", where),
    )


def _words(data: Mapping[str, Any], key: str) -> Mapping[str, str]:
    table = _table(data, key, "clause catalogue")
    return MappingProxyType({word: " ".join(_string(table, word, key).split()) for word in table})


def _table(data: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: {key} is {_given(value)}; expected a table")
    return value


def _string(data: Mapping[str, Any], key: str, where: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value.strip():
        raise InvalidInput(f"{where}: {key} is {_given(value)}; expected a non-empty string")
    return value


def _one_of(data: Mapping[str, Any], key: str, allowed: tuple[str, ...], where: str) -> Any:
    value = _string(data, key, where)
    if value not in allowed:
        raise InvalidInput(f"{where}: {key} = {value!r}; expected one of {', '.join(allowed)}")
    return value


def _only(data: Mapping[str, Any], allowed: set[str], where: str) -> None:
    unknown = sorted(set(data) - allowed)
    if unknown:
        raise InvalidInput(f"{where}: unknown key {', '.join(unknown)}; expected {', '.join(sorted(allowed))}")


def _given(value: object) -> str:
    return "missing" if value is None else repr(value)


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
