"""Shadows: device copies of host KV, and the checks of ``stage`` (clauses S1 to S6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .dtypes import BITS_DTYPE, FLOAT_DTYPES, Array, HostArray, check_dtype
from .errors import InvalidInput, InvalidLayout, StaleShadow, UnmarkedWriteLoc, Unsupported
from .geometry import KVGeometry
from .pool import Pool
from .segment import Buffer
from .slots import lower_paged
from .write_loc import BlockTable, WriteLoc

if TYPE_CHECKING:
    from .backend import Backend


class Shadow(Pool):
    """A Pool that is filled by ``backend.stage``. Only blocks staged at the present version are ever read (clause S6).

    A block table or slot that names another block is treated as the contract treats an invalid block: a zero row that is counted
    where only the device knows the ids, StaleShadow where the host knows them.
    """

    def __init__(
        self,
        backend: Backend,
        geometry: KVGeometry,
        layout: str,
        make_buffer: Callable[[str, int, int, tuple[int, ...]], Buffer],
    ) -> None:
        super().__init__(backend, geometry, layout, make_buffer, sink=True)
        self._version = 1
        # Rows of each block that hold the present version, and the token at which each table column begins.
        self._staged = np.zeros((geometry.num_layers, geometry.num_blocks), np.int32)
        self._staged_buffer = backend.buffer("shadow.staged", self._staged.reshape(-1))
        starts = np.arange(geometry.num_blocks, dtype=np.int32)[None] * np.int32(geometry.block_size)
        self._starts_buffer = backend.buffer("shadow.starts", starts)

    @property
    def version(self) -> int:
        """Grows with every ``invalidate``."""
        return self._version

    @property
    def _extra_buffers(self) -> tuple[Buffer, ...]:
        return (self._staged_buffer, self._starts_buffer)

    def invalidate(self) -> None:
        """Make every staged row unreadable until it is staged again; one small upload, nothing is erased.

        Raises:
            CaptureViolation: inside a Segment; the version stays.
        """
        self._backend.forbid_in_segment("invalidating a shadow (a host write)")
        self._backend.upload(self._staged_buffer, np.zeros(self._staged.size, np.int32))
        self._staged[...] = 0
        self._version += 1

    def mark_staged(self, layer: int, blocks: HostArray, tokens: int) -> None:
        """Record that the first ``tokens`` rows of ``blocks`` hold the present version; called by ``backend.stage``."""
        size = self.geometry.block_size
        rows = np.minimum(tokens - np.arange(len(blocks)) * size, size)
        # A shorter second staging makes the rows behind it unreadable: they may belong to whoever had the block before.
        self._staged[layer, blocks] = rows
        self._backend.upload(self._staged_buffer, self._staged.reshape(-1))

    def current_blocks(self, layer: int, table: Array, visible: Array, table_len: int) -> tuple[Array, int]:
        """(``table`` without what is not staged, its length): a block is replaced by -1 where ``visible`` reaches rows of it that do
        not hold the present version.

        ``table`` int32 ``[B, width]``, ``visible`` int32 ``[B]``, on the device. Columns beyond the shadow's number of blocks are cut
        off: no sequence reaches them.
        """
        xp, g = self._backend.xp, self.geometry
        columns = min(table_len, g.num_blocks)
        blocks = table[:, :columns]
        needed = xp.reshape(visible, (-1, 1)) - self._starts_buffer.get()[:, :columns]
        held = self._staged_rows(layer, blocks)
        return xp.where((held > 0) & (held >= xp.clip(needed, 0, g.block_size)), blocks, -1), columns

    def _staged_rows(self, layer: int, blocks: Array) -> Array:
        """Rows of the present version in each of ``blocks`` (device int32, any shape); 0 for what is no block."""
        xp, nb = self._backend.xp, self.geometry.num_blocks
        rows = xp.take(self._staged_buffer.get(), xp.clip(blocks, 0, nb - 1) + layer * nb)
        return xp.where((blocks >= 0) & (blocks < nb), rows, 0)

    def write(self, layer: int, loc: WriteLoc, k: Array, v: Array | None = None) -> None:
        """Refused: a shadow is filled by ``backend.stage`` alone."""
        raise Unsupported(
            "shadow.write: a shadow is a copy of host KV; change it with backend.stage, or write to a pool"
        )

    def copy(self, src: WriteLoc, dst: WriteLoc) -> None:
        """Refused: a shadow is filled by ``backend.stage`` alone."""
        raise Unsupported("shadow.copy: a shadow is a copy of host KV; change it with backend.stage, or copy in a pool")

    def read(self, layer: int, loc: WriteLoc) -> tuple[Array, Array]:
        """Rows at ``loc`` as ``Pool.read`` gives them; rows of blocks not staged at the present version are never read.

        Raises:
            StaleShadow: the host knows the ids and one of their blocks is stale.
        """
        self.check_layer(layer, f"shadow.read(layer={layer})")
        device_loc, _ = self._check_loc(loc, f"shadow.read(layer={layer})", unique=False)
        slots = self._host_slots(loc)
        if slots is not None:
            self._refuse_stale(layer, slots)
        return self._backend.dispatch_read(self, layer, self._mask_stale(layer, device_loc()))

    def _host_slots(self, loc: WriteLoc) -> HostArray | None:
        if loc.ids is not None:
            return loc.ids if isinstance(loc.ids, np.ndarray) else None
        table = None if loc.table is None else loc.table.array
        if not (isinstance(table, np.ndarray) and isinstance(loc.positions, np.ndarray)):
            return None
        return lower_paged(table, loc.positions, loc.table_len or 0, self.geometry)

    def _refuse_stale(self, layer: int, slots: HostArray) -> None:
        size = self.geometry.block_size
        live = slots[slots >= self.first_block * size]
        stale = np.unique(live[live % size >= self._staged[layer, live // size]])
        if stale.size:
            raise StaleShadow(
                f"shadow.read(layer={layer}): slots {stale[:8].tolist()} hold no row of version {self._version}; stage them first"
            )

    def _mask_stale(self, layer: int, loc: WriteLoc) -> WriteLoc:
        """``loc`` (on the device) as slots in which stale rows are out of range: dropped and counted, pads stay pads."""
        xp, g = self._backend.xp, self.geometry
        slots = self._flat_slots(loc)
        block = xp.where(slots >= 0, slots // g.block_size, -1)
        current = slots - block * g.block_size < self._staged_rows(layer, block)
        return WriteLoc.slots(xp.where((slots < 0) | current, slots, g.num_slots), loc.physical)

    def _flat_slots(self, loc: WriteLoc) -> Array:
        """Slots ``[N]`` of a location on the device; a position without a block of the table is out of range."""
        if loc.table is None or loc.table_len is None:
            return loc.ids
        xp, g, width = self._backend.xp, self.geometry, loc.table_len
        if width == 0:
            return xp.where(xp.reshape(loc.positions, (-1,)) < 0, -1, g.num_slots)
        rows = xp.shape(loc.table.array)[0]
        positions = xp.reshape(loc.positions, (rows, -1))
        column = positions // g.block_size
        block = xp.take_along(loc.table.array, xp.clip(column, 0, width - 1))
        known = (column < width) & (block >= 0) & (block < g.num_blocks)
        slots = xp.where(known, block * g.block_size + positions % g.block_size, g.num_slots)
        return xp.reshape(xp.where(positions < 0, -1, slots), (-1,))


def check_stage(
    k_view: object,
    v_view: object,
    pool: Pool,
    layer: int,
    src_blocks: Sequence[int] | HostArray,
    dst_blocks: Sequence[int] | HostArray | BlockTable,
    tokens: int,
    dtype: str,
    accept_strided: bool,
) -> tuple[HostArray, HostArray | None, HostArray, HostArray]:
    """Check one ``stage`` call; return (k, v, src_blocks, dst_blocks) as numpy arrays.

    Raises:
        InvalidInput, InvalidLayout, UnmarkedWriteLoc: nothing was copied.
    """
    g, what = pool.geometry, f"stage(layer={layer})"
    marked = isinstance(dst_blocks, BlockTable) and dst_blocks.physical
    if pool.requires_physical_write_loc and not marked:
        raise UnmarkedWriteLoc(
            f"{what} dst_blocks: this pool translates ids; pass BlockTable(translated, physical=True)"
        )
    if isinstance(dst_blocks, BlockTable):
        dst_blocks = np.asarray(dst_blocks.array).reshape(-1)
    check_dtype(dtype, FLOAT_DTYPES, f"{what} dtype")
    if dtype != g.dtype:
        raise InvalidInput(
            f"{what}: dtype {dtype!r} named, the shadow holds {g.dtype}; staging copies bits, so both must agree"
        )
    if (v_view is None) != (pool.layout == "LATENT"):
        raise InvalidInput(
            f"{what}: layout {pool.layout} {'keeps V inside K, so pass None' if v_view is not None else 'needs v_view'}"
        )
    k = _check_view(k_view, g.key_dim, g, dtype, accept_strided, f"{what} k_view")
    v = None if v_view is None else _check_view(v_view, g.value_dim, g, dtype, accept_strided, f"{what} v_view")
    src = _check_blocks(src_blocks, 0, k.shape[0] if v is None else min(k.shape[0], v.shape[0]), f"{what} src_blocks")
    dst = _check_blocks(dst_blocks, pool.first_block, g.num_blocks, f"{what} dst_blocks")
    if len(np.unique(dst)) != len(dst):
        raise InvalidInput(f"{what} dst_blocks: {dst.tolist()} names a block twice; nothing was copied")
    needed = (
        -(-tokens // g.block_size) if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0 else -1
    )
    if not len(src) == len(dst) == needed:
        raise InvalidInput(
            f"{what}: {len(src)} source and {len(dst)} target blocks for tokens={tokens!r} in blocks of {g.block_size}; "
            f"expected {needed if needed >= 0 else 'a non-negative int of tokens and its number of'} blocks in both"
        )
    return k, v, src, dst


def _check_view(x: object, dim: int, g: KVGeometry, dtype: str, accept_strided: bool, what: str) -> HostArray:
    if not isinstance(x, np.ndarray):
        raise InvalidInput(f"{what}: got {type(x).__name__}, expected a numpy view [NB, BS, Hkv, D] of host KV")
    if x.dtype != BITS_DTYPE[dtype]:
        raise InvalidInput(
            f"{what}: dtype {dtype!r} named, got numpy {x.dtype}; expected {BITS_DTYPE[dtype]} (bfloat16 as uint16 bits)"
        )
    expected: tuple[Any, ...] = ("NB", g.block_size, g.num_kv_heads, dim)
    if x.ndim != 4 or x.shape[1:] != expected[1:]:
        raise InvalidLayout(f"{what}: got shape {x.shape}, expected [NB, {g.block_size}, {g.num_kv_heads}, {dim}]")
    if not accept_strided and not x.flags.c_contiguous:
        raise InvalidLayout(
            f"{what}: a non-contiguous view (strides {x.strides} bytes); pass accept_strided=True to stage it by its own strides"
        )
    return x


def _check_blocks(blocks: Sequence[int] | HostArray, low: int, high: int, what: str) -> HostArray:
    array = np.asarray(blocks)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidInput(f"{what}: got {array.dtype}{list(array.shape)}, expected a list of block ids")
    if array.size and not low <= int(array.min()) <= int(array.max()) < high:
        raise InvalidInput(
            f"{what}: got {int(array.min())} to {int(array.max())}, expected {low} to {high - 1}; nothing was copied"
        )
    return array.astype(np.int64)
