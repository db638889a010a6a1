"""Waivers: known failures of one backend on one device, each with a reason and the day it ends.

.. code-block:: toml

    [[waiver]]
    test = "test_decode.py::test_lengths[NHD-float32]"
    clause = "D6"
    device = "simulated accelerator"
    reason = "the unit rounds to tf32; mended in driver 4.2"
    expiry = 2027-03-31

``device`` is the backend's ``info["device"]``; a waiver of another device waives nothing here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any, Final

from forebay.specs.errors import InvalidInput
from forebay.specs.files import read_regular

FIELDS: Final = ("test", "clause", "device", "reason", "expiry")
LARGEST: Final = 1 << 20
"""Bytes that a file of waivers has at most."""


@dataclass(frozen=True)
class Waiver:
    """One entry: the test's name, a clause of it, the device, why, and the last day it holds."""

    test: str
    clause: str
    device: str
    reason: str
    expiry: date

    def as_dict(self) -> dict[str, str]:
        """Plain data for the record."""
        return {**vars(self), "expiry": self.expiry.isoformat()}


def load_waivers(path: Path, today: date) -> tuple[Waiver, ...]:
    """Read a file of waivers.

    Raises:
        InvalidInput: it cannot be read, is no regular file or not of waivers, or a waiver lacks a field, has an unknown one, or has
            expired.
    """
    text = read_regular(path, LARGEST, f"waivers {path}")
    try:
        data = tomllib.loads(text.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"waivers {path}: {error}") from error
    entries = data.get("waiver", [])
    if set(data) - {"waiver"} or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidInput(
            f"waivers {path}: got the keys {', '.join(data)}; expected [[waiver]] tables and nothing else"
        )
    made = tuple(_waiver(entry, f"waiver {number} of {path}") for number, entry in enumerate(entries, 1))
    for number, waiver in enumerate(made, 1):
        where = f"waiver {number} of {path} ({waiver.test})"
        if waiver.expiry < today:
            raise InvalidInput(f"{where}: it expired on {waiver.expiry}; mend the backend, or give a reason for longer")
        if any((other.test, other.device) == (waiver.test, waiver.device) for other in made[: number - 1]):
            raise InvalidInput(f"{where}: the test is waived twice for {waiver.device!r}")
    return made


def check_matched(waivers: tuple[Waiver, ...], clauses: Mapping[str, tuple[str, ...]], *, whole: bool) -> None:
    """Raise InvalidInput if a waiver names a clause that its test in ``clauses`` (test to clause ids) has not.

    So it is too if ``clauses`` are those of the ``whole`` suite and the test is not among them.
    """
    for waiver in waivers:
        if waiver.test not in clauses:
            if not whole:
                continue
            raise InvalidInput(
                f"waiver of {waiver.test}: the suite has no such test; take the waiver out or mend its name"
            )
        if waiver.clause not in clauses[waiver.test]:
            raise InvalidInput(
                f"waiver of {waiver.test}: clause {waiver.clause!r} is not one of the test's: {', '.join(clauses[waiver.test])}"
            )


def _waiver(entry: dict[str, Any], where: str) -> Waiver:
    missing = [name for name in FIELDS if name not in entry]
    unknown = sorted(set(entry) - set(FIELDS))
    if missing or unknown:
        told = [f"it lacks {', '.join(missing)}"] if missing else []
        told += [f"it has the unknown {', '.join(unknown)}"] if unknown else []
        raise InvalidInput(f"{where}: {' and '.join(told)}; expected exactly {', '.join(FIELDS)}")
    for name in FIELDS[:-1]:
        if not isinstance(entry[name], str) or not entry[name].strip():
            raise InvalidInput(f"{where}: {name} = {entry[name]!r}; expected a text that says something")
    if not isinstance(entry["expiry"], date) or isinstance(entry["expiry"], datetime):
        raise InvalidInput(f"{where}: expiry = {entry['expiry']!r}; expected a date such as 2027-03-31, without quotes")
    return Waiver(**entry)
