"""Pools of paged KV and their doors: the only ways in and out (clauses L1 to L4, W1 to W9).

The checks here are final; a backend gets a location that has been checked and whose arrays are on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np

from .attention import check_int_array, check_table
from .dtypes import FLOAT_DTYPES, Array, HostArray, is_host
from .errors import InvalidInput, UnmarkedWriteLoc
from .geometry import KVGeometry, storage_shapes
from .segment import Buffer
from .slots import check_host_slots, lower_paged
from .write_loc import BlockTable, WriteLoc

if TYPE_CHECKING:
    from .backend import Backend

_generations = count(1)


class Pool:
    """Paged KV storage: Buffers and a layout.

    Attributes:
        geometry, layout: sizes and the layout tag.
        first_block: 1 where block 0 is the sink, 0 for wrapped foreign memory.
        requires_physical_write_loc: True for pools that translate ids; their doors refuse unmarked locations.
        generation: differs between any two pools of a process; part of trace keys.
    """

    def __init__(
        self,
        backend: Backend,
        geometry: KVGeometry,
        layout: str,
        make_buffer: Callable[[str, int, int, tuple[int, ...]], Buffer],
        *,
        sink: bool,
        requires_physical_write_loc: bool = False,
    ) -> None:
        self._backend = backend
        self.geometry: Final = geometry
        self.layout: Final = layout
        self.first_block: Final = 1 if sink else 0
        self.requires_physical_write_loc: Final = requires_physical_write_loc
        self.generation: Final = next(_generations)
        shapes = storage_shapes(layout, geometry)
        self._layers = tuple(
            tuple(make_buffer(f"kv{layer}.{part}", layer, part, shape) for part, shape in enumerate(shapes))
            for layer in range(geometry.num_layers)
        )
        zeros = np.zeros(1, np.int32)
        self.dropped_buffer: Final = backend.buffer("pool.dropped", zeros)
        self.invalid_buffer: Final = backend.buffer("pool.invalid", zeros)

    # -- sizes and counts ----------------------------------------------------------------------------------------------
    @property
    def num_slots(self) -> int:
        """NB * BS: the bound of slot ids."""
        return self.geometry.num_slots

    @property
    def capacity(self) -> int:
        """Tokens that can be stored: the sink's are not counted."""
        return (self.geometry.num_blocks - self.first_block) * self.geometry.block_size

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Every Buffer of the pool, the two counts last."""
        return (
            *(b for layer in self._layers for b in layer),
            *self._extra_buffers,
            self.dropped_buffer,
            self.invalid_buffer,
        )

    @property
    def _extra_buffers(self) -> tuple[Buffer, ...]:
        return ()

    def storage(self, layer: int) -> tuple[Buffer, ...]:
        """The Buffers of one layer, as ``geometry.storage_shapes`` orders them."""
        return self._layers[layer]

    @property
    def dropped(self) -> int:
        """Rows that doors dropped and counted; reads the device."""
        return int(self._backend.fetch(self.dropped_buffer)[0])

    @property
    def invalid(self) -> int:
        """Invalid table entries met inside visible ranges; reads the device."""
        return int(self._backend.fetch(self.invalid_buffer)[0])

    def translate(self, ids: Array) -> Array:
        """Virtual to physical ids under the pool's present map; a static pool's ids are physical as they are."""
        return ids

    # -- doors ---------------------------------------------------------------------------------------------------------
    def write(self, layer: int, loc: WriteLoc, k: Array, v: Array | None = None) -> None:
        """Store ``k [N, Hkv, D]``, ``v [N, Hkv, Dv]`` (device arrays; ``v`` is None in LATENT) at ``loc``; rounds to the pool's dtype.

        Host-known ids are checked before any device work; bad device ids are dropped and counted (clause W6).

        Raises:
            UnmarkedWriteLoc: the pool translates ids and the location is not marked physical.
            InvalidInput: a wrong shape, dtype, layer or host-known id; nothing was written.
            CaptureViolation: host ids inside a Segment, or a pool the Segment does not declare.
        """
        what = f"pool.write(layer={layer})"
        self.check_layer(layer, what)
        device_loc, rows = self._check_loc(loc, what, unique=True)
        self._check_rows(k, rows, self.geometry.key_dim, f"{what} k")
        if (v is None) != (self.layout == "LATENT"):
            raise InvalidInput(
                f"{what}: layout {self.layout} {'keeps V inside K, so pass v=None' if v is not None else 'needs v'}"
            )
        if v is not None:
            self._check_rows(v, rows, self.geometry.value_dim, f"{what} v")
        self._backend.dispatch_write(self, layer, device_loc(), k, v)

    def read(self, layer: int, loc: WriteLoc) -> tuple[Array, Array]:
        """Rows ``k [N, Hkv, D]``, ``v [N, Hkv, Dv]`` at ``loc`` in the pool's dtype; dropped and padded rows are zero.

        Raises: as :meth:`write`.
        """
        what = f"pool.read(layer={layer})"
        self.check_layer(layer, what)
        device_loc, _ = self._check_loc(loc, what, unique=False)
        return self._backend.dispatch_read(self, layer, device_loc())

    def copy(self, src: WriteLoc, dst: WriteLoc) -> None:
        """Copy rows of every layer from ``src`` to ``dst`` bit for bit, as if all reads came before all writes.

        Raises: as :meth:`write`; InvalidInput where the two differ in length.
        """
        source, n_src = self._check_loc(src, "pool.copy src", unique=False)
        target, n_dst = self._check_loc(dst, "pool.copy dst", unique=True)
        if n_src != n_dst:
            raise InvalidInput(
                f"pool.copy: {n_src} source rows and {n_dst} target rows; expected equal counts; nothing was copied"
            )
        self._backend.dispatch_copy(self, source(), target())

    # -- checks --------------------------------------------------------------------------------------------------------
    def check_layer(self, layer: object, what: str) -> None:
        """Raise InvalidInput unless ``layer`` is one of the pool's."""
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.geometry.num_layers:
            raise InvalidInput(f"{what}: got layer {layer!r}, expected 0 to {self.geometry.num_layers - 1}")

    def _check_loc(self, loc: object, what: str, *, unique: bool) -> tuple[Callable[[], WriteLoc], int]:
        """(a function that puts the location on the device, its row count). Host-known ids are checked here, before device work."""
        if self.requires_physical_write_loc and not (isinstance(loc, WriteLoc) and loc.physical):
            kind = "an unmarked WriteLoc" if isinstance(loc, WriteLoc) else f"a bare {type(loc).__name__}"
            raise UnmarkedWriteLoc(
                f"{what}: got {kind}; this pool translates ids, so translate them and pass physical=True; nothing was changed"
            )
        if not isinstance(loc, WriteLoc):
            raise InvalidInput(
                f"{what}: got {type(loc).__name__}, expected a WriteLoc (WriteLoc.slots or WriteLoc.paged)"
            )
        if loc.ids is not None:
            return self._check_slots(loc, what, unique=unique)
        if loc.table is None or loc.positions is None or loc.table_len is None:
            raise InvalidInput(f"{what}: an empty WriteLoc; build it with WriteLoc.slots or WriteLoc.paged")
        return self._check_paged(loc, loc.table, loc.table_len, what, unique=unique)

    def _check_slots(self, loc: WriteLoc, what: str, *, unique: bool) -> tuple[Callable[[], WriteLoc], int]:
        backend = self._backend
        ids = check_int_array(loc.ids, backend.xp, f"{what} slot ids", ndim=1)
        if is_host(ids):
            backend.forbid_in_segment(f"{what}: numpy slot ids")
            self._check_host_slots(ids, what, unique=unique)
            return (lambda: WriteLoc.slots(backend.to_device(ids), loc.physical)), len(ids)
        checked = WriteLoc.slots(ids, loc.physical)
        return (lambda: checked), backend.xp.shape(ids)[0]

    def _check_paged(
        self, loc: WriteLoc, table: BlockTable, table_len: int, what: str, *, unique: bool
    ) -> tuple[Callable[[], WriteLoc], int]:
        backend = self._backend
        blocks = check_table(table, backend.xp, what, needs_mark=self.requires_physical_write_loc)
        positions = check_int_array(loc.positions, backend.xp, f"{what} positions", ndim=(1, 2))
        shapes = [x.shape if is_host(x) else backend.xp.shape(x) for x in (blocks, positions)]
        if shapes[0][0] != shapes[1][0] or table_len > shapes[0][1]:
            raise InvalidInput(
                f"{what}: table {shapes[0]}, positions {shapes[1]}, table_len {table_len}; expected equal row counts and "
                "table_len at most the table's width"
            )
        if is_host(blocks) or is_host(positions):
            backend.forbid_in_segment(f"{what}: numpy table or positions")
        if is_host(blocks) and is_host(positions):
            slots = lower_paged(blocks, positions, table_len, self.geometry)
            self._check_host_slots(slots, what, unique=unique)

        def on_device() -> WriteLoc:
            placed = [backend.to_device(x) if is_host(x) else x for x in (blocks, positions)]
            return WriteLoc.paged(BlockTable(placed[0], table.physical), placed[1], table_len=table_len)

        return on_device, int(np.prod(shapes[1]))

    def _check_host_slots(self, slots: HostArray, what: str, *, unique: bool) -> None:
        check_host_slots(slots, self.geometry, self.first_block, what, unique=unique)

    def _check_rows(self, x: object, rows: int, dim: int, what: str) -> None:
        xp = self._backend.xp
        expected = (rows, self.geometry.num_kv_heads, dim)
        if not xp.is_array(x):
            raise InvalidInput(
                f"{what}: got {type(x).__name__}, expected a device array {list(expected)} (use backend.to_device)"
            )
        if xp.shape(x) != expected or xp.dtype(x) not in FLOAT_DTYPES:
            raise InvalidInput(
                f"{what}: got {xp.dtype(x)}{list(xp.shape(x))}, expected a float {list(expected)}; nothing was written"
            )
