"""The driver's ``xp``: torch, with Triton kernels for what a decode step does between its products.

torch's reductions on a device choose their order by the number of rows; the kernels' rows have the same bits in a batch of any size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.backends.torch_shared.namespace import TorchNamespace
from forebay.kernels.triton import reductions, step, step_rows, translate

from .kernels import Kernels

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class CudaNamespace(TorchNamespace):
    """Operations on tensors of one platform; shapes and dtypes alone decide between a kernel and torch."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def is_array(self, x: object) -> bool:
        """True for tensors of the platform."""
        return isinstance(x, Tensor) and self._kernels.owns(x)

    def argmax(self, x: Tensor) -> Tensor:
        """int32 index of the first maximum."""
        if x.dtype not in _FLOATS or x.dim() == 0 or x.numel() == 0:
            return super().argmax(x)
        rows = self._rows("xp.argmax", x)
        out = self._kernels.empty(rows.shape[:1], torch.int32)
        step.argmax_rows(rows, out, empty=self._kernels.empty, tiles=self._kernels.spans, launch=self._kernels.launch)
        return out.reshape(x.shape[:-1])

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the last axis, kept, in x's dtype."""
        if x.dtype not in (torch.float32, torch.int32) or x.dim() == 0:
            return super().sum(x)
        rows = self._rows("xp.sum", x)
        out = self._kernels.empty((rows.shape[0], 1), x.dtype)
        reductions.row_sum(rows, out, tiles=self._kernels.spans, launch=self._kernels.launch)
        return out.reshape(*x.shape[:-1], 1)

    def mass_cutoff(self, p: Tensor, mass: Tensor) -> Tensor:
        """Sorted by torch, whose values are exact; added up by a kernel."""
        if p.dtype != torch.float32 or p.dim() != 2 or p.shape[1] == 0 or mass.shape != (p.shape[0], 1):
            return super().mass_cutoff(p, mass)
        self._kernels.held("xp.mass_cutoff", p, mass)
        out = self._kernels.empty((p.shape[0], 1), torch.float32)
        falling = torch.sort(p, -1, descending=True)[0].contiguous()
        reductions.mass_cutoff(falling, mass, out, tiles=self._kernels.spans, launch=self._kernels.launch)
        return out

    def gumbel(self, keys: Tensor, blocks: Tensor) -> Tensor:
        """Standard Gumbel variates."""
        ints = keys.dtype == blocks.dtype == torch.int32 and keys.dim() == blocks.dim() == 2
        if not ints or keys.shape[1] != 1 or blocks.shape[0] != 1:
            return super().gumbel(keys, blocks)
        self._kernels.held("xp.gumbel", keys, blocks)
        out = self._kernels.empty((keys.shape[0], blocks.shape[1]), torch.float32)
        reductions.gumbel(keys, blocks.contiguous(), out, tiles=self._kernels.spans, launch=self._kernels.launch)
        return out

    def penalise(self, x: Tensor, seen: Tensor, bits: Tensor, penalty: Tensor) -> Tensor:
        """Repetition penalty."""
        if x.dtype != torch.float32 or x.dim() != 2 or seen.dtype != torch.int32 or penalty.shape != (x.shape[0], 1):
            return super().penalise(x, seen, bits, penalty)
        self._kernels.held("xp.penalise", x, seen, bits, penalty)
        out = self._kernels.empty(x.shape, torch.float32)
        reductions.penalise(
            x.contiguous(), seen.contiguous(), penalty, out, tiles=self._kernels.spans, launch=self._kernels.launch
        )
        return out

    def translate(self, ids: Tensor, page_map: Tensor, page_size: int) -> Tensor:
        """Physical ids of virtual ones (:mod:`forebay.specs.translation`)."""
        self._kernels.held("translate", ids, page_map)
        out = self._kernels.empty(ids.shape, torch.int32)
        flat = ids if ids.dim() in (1, 2) else ids.reshape(-1)
        translate.translate(
            flat,
            page_map,
            out.reshape(flat.shape),
            page_size=page_size,
            tiles=self._kernels.tiles,
            launch=self._kernels.launch,
        )
        return out

    # -- rows of a decode step (specs.step_operations) -------------------------------------------------------------------
    def accepted_rows(
        self,
        position: Tensor,
        visible: Tensor,
        epoch: Tensor,
        limit: Tensor,
        stamp: Tensor,
        table: Tensor,
        *,
        block_size: int,
        first_block: int,
        num_blocks: int,
    ) -> Tensor:
        """Which rows may act, by one launch."""
        self._kernels.held("xp.accepted_rows", position, visible, epoch, limit, stamp, table)
        out = self._kernels.empty(position.shape, torch.bool)
        step_rows.accepted_rows(
            position,
            visible,
            epoch,
            limit,
            stamp,
            table,
            out,
            block_size=block_size,
            first_block=first_block,
            num_blocks=num_blocks,
            tiles=self._kernels.tiles,
            launch=self._kernels.launch,
        )
        return out

    def advance_rows(
        self,
        token: Tensor,
        position: Tensor,
        visible: Tensor,
        limit: Tensor,
        stop: Tensor,
        accepted: Tensor,
        next_token: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Token, position and visible behind the step, by one launch."""
        rows = (token, position, visible, limit, accepted, next_token)
        self._kernels.held("xp.advance_rows", *rows, stop)
        made = tuple(self._kernels.empty(token.shape, torch.int32) for _ in range(3))
        step_rows.advance_rows(*rows, stop, made, tiles=self._kernels.tiles, launch=self._kernels.launch)
        return made[0], made[1], made[2]

    def digest_rows(self, values: Tensor, weights: Tensor) -> Tensor:
        """Digests of rows, by one launch."""
        self._kernels.held("xp.digest_rows", values, weights)
        out = self._kernels.empty(values.shape[:1], torch.int32)
        step_rows.digest_rows(values, weights[0], out, tiles=self._kernels.spans, launch=self._kernels.launch)
        return out

    def _rows(self, act: str, x: Tensor) -> Tensor:
        """``x`` as ``[rows, N]``."""
        self._kernels.held(act, x)
        return x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])
