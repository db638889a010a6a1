"""How the driver and its namespace call kernels: on a platform, and under the guard of the Segment that is being captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from forebay.backends.torch_shared.guard import CaptureGuard
from forebay.backends.torch_shared.namespace import TORCH_DTYPE
from forebay.kernels.triton import gather, merge, rows, slots, staging
from forebay.kernels.triton import paged_decode as attention
from forebay.kernels.triton.decode_config import DecodeTiles, decode_tiles, interpreted_tiles
from forebay.kernels.triton.spans import DEVICE_SPANS, INTERPRETER_SPANS
from forebay.kernels.triton.tiles import DEVICE_TILES, INTERPRETER_TILES
from forebay.specs.attention import DecodeCall
from forebay.specs.errors import InvalidInput
from forebay.specs.geometry import kv_views
from forebay.specs.pool import Pool
from forebay.specs.write_loc import WriteLoc

from .platform import Platform

LARGE_GATHERS: Final = MappingProxyType({"tokens_a_tile": 64, "elements_a_tile": 1024, "programs": 1})
"""In the interpreter, where a program is dear."""


class Kernels:
    """Calls of Triton kernels. They take memory that torch's modes do not see them take, so every tensor passes here first.

    Args:
        platform: runs them.
        interpreted: whether they run in Triton's interpreter.

    Attributes:
        guard: of the Segment that is being captured; None outside of capture.
        rehearsing: True while a Segment is evaluated on tensors without data; nothing is launched then.
        tiles, spans: tiles of doors and tables, and of row operations.
        launches: kernels asked for, by name; those that a capture records are among them, those of a replay are not.
    """

    def __init__(self, platform: Platform, *, interpreted: bool) -> None:
        self._platform = platform
        self._interpreted = interpreted
        self.tiles = INTERPRETER_TILES if interpreted else DEVICE_TILES
        self.spans = INTERPRETER_SPANS if interpreted else DEVICE_SPANS
        self.guard: CaptureGuard | None = None
        self.rehearsing = False
        self.launches: Counter[str] = Counter()

    def owns(self, x: Tensor) -> bool:
        """True for tensors that kernels can take."""
        return self._platform.owns(x)

    # -- memory and launches ---------------------------------------------------------------------------------------------
    def unseen(self) -> AbstractContextManager[None]:
        """Code that is no part of a Segment."""
        return nullcontext() if self.guard is None else self.guard.pause()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a kernel's output; while a Segment is captured it belongs to the trace."""
        with self.unseen():
            blank = self.rehearsing
            made = (
                torch.empty(tuple(shape), dtype=dtype, device="meta") if blank else self._platform.empty(shape, dtype)
            )
        return made if self.guard is None else self.guard.adopt(made)

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Ask for a kernel."""
        self.launches[kernel.fn.__name__] += 1
        if not self.rehearsing:
            with self.unseen():
                self._platform.launch(kernel, grid, *args, **constants)

    def held(self, act: str, *arrays: Tensor | None) -> None:
        """Refuse a closed-over array while a Segment is captured: what a kernel takes as it is, no torch operation would see."""
        if self.guard is not None:
            self.guard.check_held(act, *arrays)

    # -- doors -----------------------------------------------------------------------------------------------------------
    def write(
        self, pool: Pool, storage: tuple[Tensor, ...], dropped: Tensor, loc: WriteLoc, k: Tensor, v: Tensor | None
    ) -> None:
        """Rows into a layer's ``storage``."""
        self.held("pool.write", k, v)
        k_view, v_view = kv_views(pool.layout, storage, pool.geometry)
        rows.write_rows(
            k_view,
            None if v is None else v_view,
            self._slots(pool, loc),
            k,
            v,
            dropped,
            first_slot=pool.first_block * pool.geometry.block_size,
            num_slots=pool.num_slots,
            tiles=self.tiles,
            launch=self.launch,
        )

    def read(self, pool: Pool, storage: tuple[Tensor, ...], dropped: Tensor, loc: WriteLoc) -> tuple[Tensor, Tensor]:
        """Rows out of a layer's ``storage``, in its dtype."""
        g, ids = pool.geometry, self._slots(pool, loc)
        k, v = (
            self.empty((ids.shape[0], g.num_kv_heads, dim), TORCH_DTYPE[g.dtype]) for dim in (g.key_dim, g.value_dim)
        )
        rows.read_rows(
            *kv_views(pool.layout, storage, g),
            ids,
            k,
            v,
            dropped,
            first_slot=pool.first_block * g.block_size,
            num_slots=pool.num_slots,
            tiles=self.tiles,
            launch=self.launch,
        )
        return k, v

    def copy(
        self, pool: Pool, layers: Sequence[tuple[Tensor, ...]], dropped: Tensor, src: WriteLoc, dst: WriteLoc
    ) -> None:
        """Rows of every layer to other rows; what is dropped is counted in the first one."""
        source, target = self._slots(pool, src), self._slots(pool, dst)
        for layer, storage in enumerate(layers):
            k_view, v_view = kv_views(pool.layout, storage, pool.geometry)
            rows.copy_rows(
                k_view,
                None if pool.layout == "LATENT" else v_view,
                source,
                target,
                dropped if layer == 0 else None,
                first_slot=pool.first_block * pool.geometry.block_size,
                num_slots=pool.num_slots,
                tiles=self.tiles,
                empty=self.empty,
                launch=self.launch,
            )

    def stage(
        self, pool: Pool, storage: tuple[Tensor, ...], packed: Sequence[Tensor], blocks: Tensor, tokens: int
    ) -> None:
        """Blocks ``packed [n, BS, Hkv, D]`` of K (and V) to pool blocks, by ``blocks`` int32 ``[2, n]`` (from, to)."""
        k, v = kv_views(pool.layout, storage, pool.geometry)
        both = len(packed) == 2  # LATENT keeps V inside K
        staging.stage_rows(
            packed[0],
            packed[1] if both else None,
            k,
            v if both else None,
            blocks[0],
            blocks[1],
            tokens=tokens,
            tiles=self.tiles,
            launch=self.launch,
        )

    def _slots(self, pool: Pool, loc: WriteLoc) -> Tensor:
        """Flat int32 slots of a location; a table is lowered on the device."""
        if loc.ids is not None:
            self.held("a door's slot ids", loc.ids)
            ids: Tensor = loc.ids
            return ids
        if loc.table is None or loc.positions is None or loc.table_len is None:
            raise InvalidInput("WriteLoc: neither ids nor a table with positions")
        self.held("a door's table and positions", loc.table.array, loc.positions)
        found = self.empty((loc.positions.numel(),), torch.int32)
        slots.slots_from_table(
            loc.table.array,
            loc.positions,
            found,
            table_len=loc.table_len,
            block_size=pool.geometry.block_size,
            first_block=pool.first_block,
            num_blocks=pool.geometry.num_blocks,
            tiles=self.tiles,
            launch=self.launch,
        )
        return found

    # -- attention -------------------------------------------------------------------------------------------------------
    def paged_decode(
        self, call: DecodeCall, storage: tuple[Tensor, ...], invalid: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over a layer's ``storage``; both paths end in the same kernel with the same tiles (clause D4)."""
        self.held("paged_decode", call.q, call.table, call.visible, call.sinks)
        pool, g, (batch, query_len, heads, _) = call.pool, call.pool.geometry, call.q.shape
        k, v = kv_views(pool.layout, storage, g)
        out = self.empty((batch, query_len, heads, g.value_dim), call.q.dtype)
        lse = self.empty((batch, query_len, heads), torch.float32)
        latent, visible = pool.layout == "LATENT", call.visible.contiguous()
        table, first_block, num_blocks = call.table, pool.first_block, g.num_blocks
        if call.path == "gather":
            k, v, table = self._gathered(call, k, v, visible, latent=latent)
            first_block, num_blocks = 0, k.shape[0]
        attention.paged_decode(
            call.q,
            k,
            v,
            table,
            visible,
            out,
            lse,
            invalid,
            table_len=call.table_len,
            first_block=first_block,
            num_blocks=num_blocks,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=None if call.sinks is None else call.sinks.contiguous(),
            tiles=self._decode_tiles(call, heads // g.num_kv_heads, query_len),
            count_table=call.table,
            count_first_block=pool.first_block,
            count_num_blocks=g.num_blocks,
            values_in_keys=latent,
            empty=self.empty,
            launch=self.launch,
        )
        return out, lse if call.return_lse else None

    def _gathered(
        self, call: DecodeCall, k: Tensor, v: Tensor, visible: Tensor, *, latent: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """K and V of the rows that are seen in blocks of their own, one sequence behind the other, and the table of these."""
        call.gathered()
        batch, blocks = call.q.shape[0], call.q.shape[0] * call.table_len
        k_out = self.empty((blocks, *k.shape[1:]), k.dtype)
        v_out = k_out[..., : v.shape[3]] if latent else self.empty((blocks, *v.shape[1:]), v.dtype)
        identity = self.empty((batch, call.table_len), torch.int32)
        gather.gather(
            k,
            None if latent else v,
            call.table,
            visible,
            k_out,
            None if latent else v_out,
            identity,
            table_len=call.table_len,
            first_block=call.pool.first_block,
            num_blocks=call.pool.geometry.num_blocks,
            query_len=call.q.shape[1],
            window=call.window,
            **(LARGE_GATHERS if self._interpreted else {}),
            launch=self.launch,
        )
        return k_out, v_out, identity

    def _decode_tiles(self, call: DecodeCall, group: int, query_len: int) -> DecodeTiles:
        g = call.pool.geometry
        choose = interpreted_tiles if self._interpreted else decode_tiles
        return choose(call.q.dtype, TORCH_DTYPE[g.dtype], group, query_len, g.key_dim, g.value_dim)

    def merge_partials(self, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Parts of one attention, by their LSE."""
        self.held("merge_partials", *outs, *lses)
        out = self.empty(outs[0].shape, outs[0].dtype)
        lse = self.empty(lses[0].shape, torch.float32)
        merge.merge_partials(
            [x.contiguous() for x in outs],
            [x.contiguous() for x in lses],
            out,
            lse,
            empty=self.empty,
            **({"rows_a_program": 256} if self._interpreted else {}),
            launch=self.launch,
        )
        return out, lse
