"""Where a write lands, and whether its ids are physical (clauses W1 to W6).

Ids are *virtual* until a pool's translator has mapped them; a pool that translates accepts only ids that carry the mark
``physical=True``. The mark is static: a flag on the Python object, describing that tensor alone, read without asking the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from .dtypes import Array
from .errors import InvalidInput

PAD_SLOT: Final = -1
"""The slot id of a padded row: writes nothing, counts nothing."""

IDLE_POSITION: Final = -1
"""The position of an idle row; its slot is PAD_SLOT."""


@dataclass(frozen=True, eq=False)
class BlockTable:
    """``array`` int32 ``[B, width]`` of block ids with the mark of that array (int64 accepted from the host)."""

    array: Array
    physical: bool = False


@dataclass(frozen=True, eq=False)
class WriteLoc:
    """Flat slots, or a table and positions; made by :meth:`slots` and :meth:`paged`, lowered by the backend.

    ``window`` is the location for sliding-window sub-pools and ``full`` the one for full-attention sub-pools, where a batch has
    separate ones (:meth:`for_batch`); each carries its own mark.
    """

    ids: Array | None = None
    table: BlockTable | None = None
    positions: Array | None = None
    table_len: int | None = None
    physical: bool = False
    window: WriteLoc | None = None
    full: WriteLoc | None = None

    @classmethod
    def slots(cls, ids: Array, physical: bool = False) -> WriteLoc:
        """``ids`` int ``[N]``: slot = block * BS + offset; -1 is a pad."""
        return cls(ids=ids, physical=bool(physical))

    @classmethod
    def paged(cls, table: BlockTable | Array, positions: Array, *, table_len: int) -> WriteLoc:
        """Rows at ``positions`` int ``[B]`` or ``[B, T]`` of the sequences in ``table``; the mark is the table's.

        Only the first ``table_len`` columns are ever read as blocks; position -1 is an idle row.
        """
        if not isinstance(table, BlockTable):
            table = BlockTable(table)
        if isinstance(table_len, bool) or not isinstance(table_len, int) or table_len < 0:
            raise InvalidInput(f"WriteLoc.paged table_len: got {table_len!r}, expected a non-negative int")
        return cls(table=table, positions=positions, table_len=table_len, physical=table.physical)

    @classmethod
    def for_batch(
        cls, batch: Batch, *, window_loc: WriteLoc | None = None, full_loc: WriteLoc | None = None
    ) -> WriteLoc:
        """The batch's own location with the batch's mark; the two extra locations state their own and are not wrapped."""
        for name, loc in (("window_loc", window_loc), ("full_loc", full_loc)):
            if loc is not None and not isinstance(loc, WriteLoc):
                raise InvalidInput(
                    f"WriteLoc.for_batch {name}: got {type(loc).__name__}, expected a WriteLoc that states its own mark"
                )
        return cls(ids=batch.out_loc, physical=bool(batch.physical), window=window_loc, full=full_loc)

    @classmethod
    def for_layer(cls, batch: Batch, layer: AttentionLayer) -> WriteLoc:
        """The location of one layer's writes: a cross-attention layer gets the encoder's ids, which are never marked."""
        if layer.is_cross_attention:
            return cls.slots(batch.encoder_out_loc, physical=False)
        return cls.for_batch(batch)


class AttentionLayer(Protocol):
    """What :meth:`WriteLoc.for_layer` asks of a layer."""

    @property
    def is_cross_attention(self) -> bool:
        """True if the layer attends to encoder KV."""


@dataclass
class Batch:
    """The write ids of one forward pass. ``physical`` describes ``out_loc`` alone; whoever builds a batch states it."""

    out_loc: Array
    physical: bool = False
    encoder_out_loc: Array | None = None

    def rebind(self, out_loc: Array, *, pool: Any) -> None:
        """Give the batch new virtual ids and set the mark as ``pool`` needs it (clause W4).

        Every pool sets the mark: a translating pool maps the ids through its present map, a static one leaves them as they are,
        and in both cases the result is physical for that pool.
        """
        self.out_loc = pool.translate(out_loc)
        self.physical = True
