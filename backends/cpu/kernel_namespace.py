"""The driver's ``xp``: torch, with kernels of ours for the heavy operations of a decode step.

A decode step is bound by memory and by the overhead of each call. Where shapes and dtypes allow it (nothing else decides), a
product of few rows reads its weights at the speed of memory, and a norm, a rotation or a gate is one call. Other cases go to torch.
:mod:`.bench_dense` measures both.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from forebay.backends.torch_shared.namespace import TorchNamespace
from forebay.kernels.numba import draws, elementwise, thresholds
from forebay.kernels.numba.linear import MAX_ROWS, prepare_linear

from .kernel_calls import KernelCalls
from .memory import bits_of

_DTYPES: Final = (torch.float32, torch.bfloat16)


class KernelNamespace(TorchNamespace):
    """Operations whose rows have the same bits in a batch of any size, where a kernel computes them.

    Args:
        calls: runs or records the kernels.
        threads: at most this many threads a product; None for the CPUs this process may use.
    """

    def __init__(self, calls: KernelCalls, threads: int | None = None) -> None:
        self._calls = calls
        self._threads = threads

    def argmax(self, x: Tensor) -> Tensor:
        """int32 index of the first maximum."""
        if not _alike(x) or x.dim() == 0 or x.shape[-1] == 0:
            return super().argmax(x)
        self._calls.check_held("xp.argmax", x)
        rows = x.reshape(-1, x.shape[-1])
        out = self._calls.empty(rows.shape[:1], torch.int32)
        self._calls.issue(lambda: elementwise.prepare_argmax(bits_of(rows), bits_of(out)), pure=True)
        return out.reshape(x.shape[:-1])

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the last axis, kept, in x's dtype; torch would split a lone float32 row over its threads."""
        if x.dtype != torch.float32 or not _rows_lie(x) or x.dim() == 0:
            return super().sum(x)
        self._calls.check_held("xp.sum", x)
        rows = x.reshape(-1, x.shape[-1])
        out = self._calls.empty((rows.shape[0], 1), torch.float32)
        self._calls.issue(lambda: thresholds.prepare_sum(bits_of(rows), bits_of(out)), pure=True)
        return out.reshape(*x.shape[:-1], 1)

    def kth_largest(self, x: Tensor, k: Tensor) -> Tensor:
        """By digits, without a sort."""
        if not _fit_rows(x, k):
            return super().kth_largest(x, k)
        self._calls.check_held("xp.kth_largest", x, k)
        out = self._calls.empty((x.shape[0], 1), torch.float32)
        self._calls.issue(lambda: thresholds.prepare_kth_largest(bits_of(x), bits_of(k), bits_of(out)), pure=True)
        return out

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """By insertion: few elements are larger than those found so far."""
        if x.dtype != torch.float32 or x.dim() != 2 or not _rows_lie(x):
            return super().top_k(x, k)
        self._calls.check_held("xp.top_k", x)
        values = self._calls.empty((x.shape[0], k), torch.float32)
        places = self._calls.empty((x.shape[0], k), torch.int32)
        self._calls.issue(lambda: thresholds.prepare_top_k(bits_of(x), bits_of(values), bits_of(places)), pure=True)
        return values, places

    def mass_cutoff(self, p: Tensor, mass: Tensor) -> Tensor:
        """By digits, without a sort."""
        if not _fit_rows(p, mass):
            return super().mass_cutoff(p, mass)
        self._calls.check_held("xp.mass_cutoff", p, mass)
        out = self._calls.empty((p.shape[0], 1), torch.float32)
        self._calls.issue(lambda: thresholds.prepare_mass_cutoff(bits_of(p), bits_of(mass), bits_of(out)), pure=True)
        return out

    def add_along(self, x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        """Row b adds to its own columns."""
        if x.dtype not in (torch.float32, torch.int32) or not _rows_lie(x, indices, values):
            return super().add_along(x, indices, values)
        self._calls.check_held("xp.add_along", x, indices, values)
        out = self._calls.empty(x.shape, x.dtype)
        self._calls.issue(
            lambda: thresholds.prepare_add_along(bits_of(x), bits_of(indices), bits_of(values), bits_of(out)), pure=True
        )
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias."""
        if not _fit_linear(x, weight, bias):
            return super().linear(x, weight, bias)
        self._calls.check_held("xp.linear", x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        added = None if bias is None else bias.to(torch.float32).contiguous()
        out = self._calls.empty((rows.shape[0], weight.shape[0]), torch.float32)
        self._calls.issue(
            lambda: prepare_linear(
                bits_of(rows),
                bits_of(weight),
                bits_of(out),
                None if added is None else bits_of(added),
                threads=self._threads,
            ),
            pure=True,
        )
        return out.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm, accumulated in float32."""
        if not _alike(x, weight) or x.dim() == 0 or weight.shape != x.shape[-1:]:
            return super().rms_norm(x, weight, eps)
        self._calls.check_held("xp.rms_norm", x, weight)
        rows = x.reshape(-1, x.shape[-1])
        out = self._calls.empty(rows.shape, x.dtype)
        self._calls.issue(
            lambda: elementwise.prepare_rms_norm(bits_of(rows), bits_of(weight), bits_of(out), eps), pure=True
        )
        return out.reshape(x.shape)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of [N, H, D] by [N, D/2] in NeoX order."""
        angles = (x.shape[0], x.shape[-1] // 2) if x.dim() == 3 and x.shape[-1] % 2 == 0 else None
        if not _alike(x, cos, sin) or cos.shape != angles or sin.shape != angles:
            return super().rope(x, cos, sin)
        self._calls.check_held("xp.rope", x, cos, sin)
        out = self._calls.empty(x.shape, x.dtype)
        self._calls.issue(
            lambda: elementwise.prepare_rope(bits_of(x), bits_of(cos), bits_of(sin), bits_of(out)), pure=True
        )
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        if not _alike(gate, up) or gate.dim() == 0 or gate.shape != up.shape:
            return super().silu_mul(gate, up)
        self._calls.check_held("xp.silu_mul", gate, up)
        gates, ups = (x.reshape(-1, x.shape[-1]) for x in (gate, up))
        out = self._calls.empty(gates.shape, gate.dtype)
        self._calls.issue(lambda: elementwise.prepare_silu_mul(bits_of(gates), bits_of(ups), bits_of(out)), pure=True)
        return out.reshape(gate.shape)

    def gumbel(self, keys: Tensor, blocks: Tensor) -> Tensor:
        """Standard Gumbel variates."""
        ints = keys.dtype == blocks.dtype == torch.int32 and keys.dim() == blocks.dim() == 2
        if not ints or keys.shape[1] != 1 or blocks.shape[0] != 1 or not _rows_lie(blocks):
            return super().gumbel(keys, blocks)
        self._calls.check_held("xp.gumbel", keys, blocks)
        out = self._calls.empty((keys.shape[0], blocks.shape[1]), torch.float32)
        self._calls.issue(lambda: draws.prepare_gumbel(bits_of(keys), bits_of(blocks), bits_of(out)), pure=True)
        return out

    def penalise(self, x: Tensor, seen: Tensor, bits: Tensor, penalty: Tensor) -> Tensor:
        """Repetition penalty."""
        if not _fit_rows(x, penalty) or not _rows_lie(seen) or seen.dtype != torch.int32:
            return super().penalise(x, seen, bits, penalty)
        self._calls.check_held("xp.penalise", x, seen, bits, penalty)
        out = self._calls.empty(x.shape, torch.float32)
        self._calls.issue(
            lambda: draws.prepare_penalise(bits_of(x), bits_of(seen), bits_of(penalty), bits_of(out)), pure=True
        )
        return out


def _alike(*arrays: Tensor) -> bool:
    """One dtype that the kernels know, and neighbouring elements in the last axis."""
    return arrays[0].dtype in _DTYPES and all(x.dtype == arrays[0].dtype for x in arrays) and _rows_lie(*arrays)


def _rows_lie(*arrays: Tensor) -> bool:
    """Neighbouring elements in the last axis."""
    return all(x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] <= 1 for x in arrays)


def _fit_rows(x: Tensor, column: Tensor) -> bool:
    return x.dtype == torch.float32 and x.dim() == 2 and _rows_lie(x) and column.shape == (x.shape[0], 1)


def _fit_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or x.shape[-1] == 0:
        return False
    few = 1 <= x.numel() // x.shape[-1] <= MAX_ROWS
    return few and _alike(x, weight) and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1]))
