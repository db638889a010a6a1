"""Tiles of the doors, of tables and of staging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .launching import power_of_two


@dataclass(frozen=True)
class RowTiles:
    """How much one program of a door does.

    Attributes:
        rows: rows of a program, a power of two.
        columns: at most so many of the ``Hkv * D`` elements of a row, a power of two.
        entries: entries of a table or list of ids that a program resolves, a power of two.
        fitted: fewer rows where a call has fewer: worth it where a masked lane costs as much as another, not where each
            size has to be compiled.
    """

    rows: int
    columns: int
    entries: int
    fitted: bool

    def row_tile(self, rows: int) -> int:
        """Rows of a program of a call of ``rows``."""
        return min(self.rows, power_of_two(rows)) if self.fitted else self.rows

    def column_tile(self, columns: int) -> int:
        """Elements of a row that a program moves."""
        return min(self.columns, power_of_two(columns))


DEVICE_TILES: Final = RowTiles(rows=4, columns=512, entries=128, fitted=False)
INTERPRETER_TILES: Final = RowTiles(rows=512, columns=1024, entries=1024, fitted=True)
