"""The gate's table: what every kernel takes of every device in every used configuration, and what is wrong with a measured one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from .compile_targets import TARGETS, Usage

TABLE: Final = Path(__file__).with_name("compiled.json")


@dataclass(frozen=True, order=True)
class Row:
    """What names a row: the kernel, its configuration in words, and the target."""

    kernel: str
    configuration: str
    target: str

    def __str__(self) -> str:
        return f"{self.kernel} [{self.configuration}] on {self.target}"


@dataclass(frozen=True)
class Table:
    """Usages by row, and the version of Triton that compiled them."""

    triton: str
    rows: Mapping[Row, Usage]


def read(path: Path = TABLE) -> Table:
    """The table of a file.

    Raises:
        ValueError: the file is no such table, or names a row twice.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        entries = [(Row(**entry["row"]), Usage(**entry["usage"])) for entry in map(_entry, held["rows"])]
        version = str(held["triton"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: got no table of compiled kernels ({error!r}); make it with --write") from error
    rows = dict(entries)
    if len(rows) != len(entries):
        raise ValueError(f"{path}: {len(entries) - len(rows)} rows are there twice; make it anew with --write")
    return Table(version, rows)


def _entry(fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    named = Row.__dataclass_fields__
    return {
        "row": {name: value for name, value in fields.items() if name in named},
        "usage": {name: value for name, value in fields.items() if name not in named},
    }


def write(table: Table, path: Path = TABLE) -> None:
    """Write a table, a row a line."""
    lines = [
        json.dumps({**asdict(row), **asdict(usage)}) for row, usage in sorted(table.rows.items(), key=lambda x: x[0])
    ]
    text = f'{{"triton": {json.dumps(table.triton)}, "rows": [\n' + ",\n".join(lines) + "\n]}\n"
    path.write_text(text, encoding="utf-8")


def rule_faults(row: Row, usage: Usage) -> list[str]:
    """What no row may show, whatever the table holds: a spill, or more shared memory than the device has."""
    found = []
    if usage.spilled:
        found.append(f"{row}: {usage.spilled} bytes a thread are spilled, expected none")
    limit = TARGETS[row.target].shared
    if usage.shared > limit:
        found.append(f"{row}: takes {usage.shared} bytes of shared memory, a program may have {limit}")
    return found


def name_faults(rows: Iterable[Row], held: Iterable[Row]) -> list[str]:
    """Rows of the cases that the table ``held`` lacks, and rows there that no case makes."""
    wanted, there = set(rows), set(held)
    return [
        *(f"{row}: the table has no such row; write it with --write" for row in sorted(wanted - there)),
        *(f"{row}: a row of the table that no case makes; drop it with --write" for row in sorted(there - wanted)),
    ]


def change_faults(row: Row, usage: Usage, table: Table) -> list[str]:
    """What differs from the row of the table; nothing where the table has no such row."""
    held = table.rows.get(row)
    if held is None or held == usage:
        return []
    now, before = asdict(usage), asdict(held)
    changed = ", ".join(f"{name} {before[name]} -> {now[name]}" for name in now if now[name] != before[name])
    return [f"{row}: differs from the table: {changed}; look why, then --write"]
