"""How a page of a pool is laid out in lanes, and what the attention over it needs to know at compile time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LANES: Final = 128
"""Lanes of a vector register: slices of the last axis that begin and end at multiples of it are free."""
MOST_ROWS: Final = 128
"""Query rows (queries of a block times the query heads of a KV head) that share one pass over the keys."""
CHUNK_TOKENS: Final = 128
"""Tokens a chunk holds, at least one page; as many pages are in flight at a time."""
CHUNK_BYTES: Final = 4 << 20
"""What the two halves of the double buffer may take of vector memory, of which a kernel gets 16 MiB on the smallest chip."""
MOST_SCALARS: Final = 256_000
"""Entries of a flattened table and of what its rows see that scalar memory, 262,144 words, holds beside what else lies there."""


@dataclass(frozen=True)
class PageFormat:
    """Where K and V lie in the lanes of a page ``[Hkv, BS, lanes]``.

    Attributes:
        lanes: elements of a token and KV head, what belongs to nobody included.
        key_dim: D; K is lanes 0 to D - 1.
        value_offset: the first lane of V; 0 in LATENT, where V is the first columns of K.
        value_dim: Dv.
    """

    lanes: int
    key_dim: int
    value_offset: int
    value_dim: int

    @property
    def key_lanes(self) -> int:
        """Lanes that a product with queries runs over: those of K alone where they are whole registers, else all."""
        return self.key_dim if self.key_dim % LANES == 0 else self.lanes

    @property
    def value_slice(self) -> tuple[int, int]:
        """First lane and number of lanes that are summed up: those of V alone where they are whole registers, else all."""
        if self.value_offset % LANES == 0 and self.value_dim % LANES == 0:
            return self.value_offset, self.value_dim
        return 0, self.lanes


def pages_of_chunk(block_size: int, heads: int, lanes: int, itemsize: int) -> int:
    """Pages of a chunk: about CHUNK_TOKENS tokens, fewer where two chunks would take more than CHUNK_BYTES; at least one."""
    row_bytes = heads * -(-lanes // LANES) * LANES * itemsize
    most = CHUNK_BYTES // (2 * row_bytes * block_size)
    return max(1, min(CHUNK_TOKENS // block_size, most))


def queries_of_block(query_len: int, group: int) -> int:
    """Queries of a sequence that share one pass over its keys."""
    return max(1, min(query_len, MOST_ROWS // group))


def rows_of_tile(itemsize: int) -> int:
    """Rows of a tile of the vector memory, on the chip that has the most: eight of elements of four bytes, more of narrower ones."""
    return 32 // itemsize


def scalars_of(rows: int, table_len: int) -> int:
    """Words of scalar memory that a table takes: its columns, and for each row the number of visible keys."""
    return rows * (table_len + 1)
