"""The gate's table: what every program takes of every chip, of which sources it was made, and what is wrong with a measured row."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import forebay.kernels.pallas

from .compile_cases import Case
from .compile_targets import Refused, Usage

TABLE: Final = Path(__file__).with_name("compiled.json")
SMALL: Final = 8
"""A program may hold this part of a layer of a pool for itself."""


@dataclass(frozen=True, order=True)
class Row:
    """What names a row: the operation, its configuration in words, and the target."""

    kernel: str
    configuration: str
    target: str

    def __str__(self) -> str:
        return f"{self.kernel} [{self.configuration}] on {self.target}"


@dataclass(frozen=True)
class Table:
    """Results by row, the versions of what compiled them, and digests of the sources they were compiled from."""

    versions: Mapping[str, str]
    sources: Mapping[str, str]
    rows: Mapping[Row, Usage | Refused]


def sources() -> dict[str, str]:
    """Digests of the modules that decide what is compiled: the kernels, and the functions that the driver makes of them."""
    kernels = (Path(folder) for folder in forebay.kernels.pallas.__path__)
    own = [Path(__file__).with_name(name) for name in ("calls.py", "formats.py")]
    paths = [*sorted(path for folder in kernels for path in folder.glob("*.py")), *own]
    return {f"{path.parent.name}/{path.name}": digest(path.read_text(encoding="utf-8")) for path in paths}


def digest(text: str) -> str:
    """Of what a module does: how it is laid out and what it says in comments and docstrings is left out."""
    return hashlib.sha256(repr(_plain(ast.parse(text))).encode()).hexdigest()[:32]


def _plain(node: Any) -> Any:
    """A syntax tree as lists, alike in all versions of Python: without what is empty, and without strings that stand alone."""
    if isinstance(node, list):
        return [_plain(x) for x in node if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _plain(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return [type(node).__name__, fields]


def read(path: Path = TABLE) -> Table:
    """The table of a file.

    Raises:
        ValueError: the file is no such table, or names a row twice.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        entries = [_entry(fields) for fields in held["rows"]]
        made = Table(dict(held["versions"]), dict(held["sources"]), dict(entries))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: got no table of compiled programs ({error!r}); make it with --write") from error
    if len(made.rows) != len(entries):
        raise ValueError(f"{path}: {len(entries) - len(made.rows)} rows are there twice; make it anew with --write")
    return made


def _entry(fields: Mapping[str, Any]) -> tuple[Row, Usage | Refused]:
    named = Row.__dataclass_fields__
    result = {name: value for name, value in fields.items() if name not in named}
    row = Row(**{name: value for name, value in fields.items() if name in named})
    return row, Refused(**result) if "error" in result else Usage(**result)


def write(table: Table, path: Path = TABLE) -> None:
    """Write a table, a row a line."""
    lines = [
        json.dumps({**asdict(row), **asdict(found)}) for row, found in sorted(table.rows.items(), key=lambda x: x[0])
    ]
    head = "".join(f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in (
        ("versions", dict(table.versions)), ("sources", dict(table.sources)),
    ))  # fmt: skip
    path.write_text(f'{{{head}"rows": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


def rule_faults(row: Row, case: Case, found: Usage | Refused) -> list[str]:
    """What no row of ours may show, whatever the table holds: an error, a copy of a pool, or a donation that was not taken."""
    if not case.judged:
        return []
    if isinstance(found, Refused):
        return [f"{row}: does not compile: {found.error}"]
    faults = []
    most = temporaries_allowed(case, found)
    if found.temporaries > most:
        faults.append(f"{row}: holds {found.temporaries} bytes of temporaries, {most} at most")
    if found.copies:
        faults.append(f"{row}: copies a layer of a pool {found.copies} times, expected never")
    if found.aliased != found.donated:
        faults.append(f"{row}: takes over {found.aliased} of {found.donated} donated arguments, expected all")
    if found.kernels != case.kernels:
        faults.append(f"{row}: consists of {found.kernels} Pallas kernels, expected {case.kernels}")
    return faults


def temporaries_allowed(case: Case, found: Usage) -> int:
    """Bytes: a part of a layer, twice what the case is meant to hold, and four times the rows on their way; never a whole layer."""
    rows = found.others if case.beside is None else case.beside
    most = case.layer_bytes // SMALL + 2 * case.passes + 4 * rows + (1 << 20)
    return min(most, case.layer_bytes - 1) if case.layer_bytes else most


def name_faults(rows: Iterable[Row], held: Iterable[Row]) -> list[str]:
    """Rows of the cases that the table ``held`` lacks, and rows there that no case makes."""
    wanted, there = set(rows), set(held)
    return [
        *(f"{row}: the table has no such row; write it with --write" for row in sorted(wanted - there)),
        *(f"{row}: a row of the table that no case makes; drop it with --write" for row in sorted(there - wanted)),
    ]


def source_faults(table: Table) -> list[str]:
    """Sources that are not those the table was made from."""
    now = sources()
    return [
        f"{name}: is not what the table was made from; compile anew with --write"
        for name in sorted(set(now) | set(table.sources))
        if now.get(name) != table.sources.get(name)
    ]


def change_faults(row: Row, found: Usage | Refused, table: Table) -> list[str]:
    """What differs from the row of the table; nothing where the table has no such row."""
    held = table.rows.get(row)
    if held is None or held == found:
        return []
    now, before = asdict(found), asdict(held)
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    changed = ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in names)
    return [f"{row}: differs from the table: {changed}; look why, then --write"]
