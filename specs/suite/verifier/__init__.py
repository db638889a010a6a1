"""Whether a file is a record that a run of the installed suite can have written. Shares no code with what runs the suite and reports.

A valid record says what happened; whether that is conformance is its verdict, which has to follow from the rest of it. Everything that
follows from something else is derived anew: the tests and their clauses from the installed suite, every count, largest error, limit,
state of a waiver, problem and the verdict from the results, the capabilities and the counters. A record is not signed: whoever invents
results, errors and counters that agree with each other and with the suite has written a valid record of a run that never was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from forebay.specs.files import read_regular
from forebay.specs.suite.verifier.content import content_faults
from forebay.specs.suite.verifier.installed import Asked, Installed, identity_faults, membership_faults
from forebay.specs.suite.verifier.shape import NotARecord, read_record

__all__ = ["LARGEST", "Asked", "Installed", "faults_of"]

LARGEST: Final = 64 << 20
"""Bytes that a record has at most; one of the whole suite has less than a megabyte."""


def faults_of(
    path: Path, collect: Callable[[str, str], Asked], installed: Callable[[str, str], Installed | None]
) -> list[str]:
    """What is wrong with the record in a file, each in one printable line; ``[]`` if nothing is.

    ``collect(requested, profile)`` says what the installed suite asks a backend; it raises ValueError where that cannot be known.
    ``installed(name, mode)`` says what is installed under a backend's name, None where nothing is; then its kind, its distribution and
    its version are taken as they stand.

    Raises:
        InvalidInput: the file cannot be read, is no regular one, or is too large for a record.
    """
    data = read_regular(path, LARGEST, f"record {path}")
    try:
        record = read_record(data)
    except NotARecord as error:
        return [_printable(fault) for fault in error.faults]
    faults = list(identity_faults(record, installed))
    try:
        asked = collect(record["requested"], record["profile"])
    except ValueError as error:
        return [_printable(fault) for fault in (*faults, *content_faults(record, None), str(error))]
    return [_printable(fault) for fault in (*faults, *membership_faults(record, asked), *content_faults(record, asked))]


def _printable(fault: str) -> str:
    """Texts of a record are anybody's: none of them may move the cursor, end the line, or have no form in an encoding."""
    text = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in fault)
    return text if len(text) <= 600 else f"{text[:600]} …"
