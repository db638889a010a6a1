"""Tiles of operations over the last axis of ``[B, N]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .launching import power_of_two


@dataclass(frozen=True)
class SpanTiles:
    """How much one program of a row operation does.

    Attributes:
        columns: at most so many columns of a row at once, a power of two.
        elements: at most so many elements at once where several rows share a program, a power of two.
        fitted: fewer rows where a call has fewer; else the rows of a tile depend on the width alone.
    """

    columns: int
    elements: int
    fitted: bool

    def column_tile(self, width: int) -> int:
        """Columns of a tile of rows of ``width``."""
        return min(self.columns, power_of_two(width))

    def row_tile(self, rows: int, width: int) -> int:
        """Rows of a tile of ``rows`` of ``width``."""
        fitting = max(self.elements // self.column_tile(width), 1)
        return min(fitting, power_of_two(rows)) if self.fitted else fitting


DEVICE_SPANS: Final = SpanTiles(columns=2048, elements=2048, fitted=False)
INTERPRETER_SPANS: Final = SpanTiles(columns=65536, elements=131072, fitted=True)
