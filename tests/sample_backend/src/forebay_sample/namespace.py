"""``backend.xp``: the fixed list of array operations a model is written in (:class:`forebay.specs.ArrayNamespace`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.specs import draws
from forebay.specs.dtypes import BITS_DTYPE, HostArray
from forebay.specs.errors import InvalidInput

from .arrays import Device, SampleArray


def _silu(x: HostArray) -> HostArray:
    made: HostArray = x / (np.float32(1) + np.exp(-x))
    return made


def _falling(x: HostArray) -> HostArray:
    """Columns of each row from the largest element to the smallest: NaN first, the first of equals first."""
    return np.lexsort((np.where(np.isnan(x), 0, -x), ~np.isnan(x)), axis=-1)


class SampleNamespace:
    """Every operation by numpy; a device has its compiler or its library here."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def is_array(self, x: object) -> bool:
        return isinstance(x, SampleArray) and x.device is self._device

    def shape(self, x: SampleArray) -> tuple[int, ...]:
        return x.shape

    def dtype(self, x: SampleArray) -> str:
        return x.dtype

    # -- shape: views where the memory allows it -------------------------------------------------------------------------
    def reshape(self, x: SampleArray, shape: Sequence[int]) -> SampleArray:
        self._device.check(x, "xp.reshape")
        try:
            bits = x.bits.reshape(tuple(shape))
        except ValueError as error:
            raise InvalidInput(f"xp.reshape: {error}") from error
        if bits.size == 0 or np.may_share_memory(bits, x.bits):
            return x.view(bits)
        return self._device.apply(lambda values: values.reshape(tuple(shape)), x.dtype, x)

    def permute(self, x: SampleArray, axes: Sequence[int]) -> SampleArray:
        return x.view(x.bits.transpose(tuple(axes)))

    def head(self, x: SampleArray, n: int) -> SampleArray:
        if not 0 <= n <= len(x):
            raise InvalidInput(f"xp.head: got n={n} of {len(x)} rows")
        return x[:n]

    def repeat(self, x: SampleArray, n: int) -> SampleArray:
        return x.view(np.broadcast_to(x.bits, (*x.shape[:-1], n)))

    def bitcast(self, x: SampleArray, dtype: str) -> SampleArray:
        return x.view(x.bits.view(BITS_DTYPE[dtype]), dtype)

    def concat(self, xs: Sequence[SampleArray]) -> SampleArray:
        return self._device.apply(lambda *parts: np.concatenate(parts, -1), xs[0].dtype, *xs)

    def stack(self, xs: Sequence[SampleArray]) -> SampleArray:
        return self._device.apply(lambda *parts: np.stack(parts, -1), xs[0].dtype, *xs)

    # -- indexing --------------------------------------------------------------------------------------------------------
    def take(self, x: SampleArray, indices: SampleArray) -> SampleArray:
        return self._device.apply(lambda values, at: values[at], x.dtype, x, indices)

    def take_along(self, x: SampleArray, indices: SampleArray) -> SampleArray:
        return self._device.apply(lambda values, at: np.take_along_axis(values, at, 1), x.dtype, x, indices)

    def add_along(self, x: SampleArray, indices: SampleArray, values: SampleArray) -> SampleArray:
        def compute(base: HostArray, at: HostArray, more: HostArray) -> HostArray:
            made = base.copy()
            inside = (at >= 0) & (at < base.shape[1])
            rows = np.broadcast_to(np.arange(len(base))[:, None], at.shape)
            np.add.at(made, (rows[inside], at[inside]), more[inside])
            return made

        return self._device.apply(compute, x.dtype, x, indices, values)

    def where(self, condition: SampleArray, a: Any, b: Any) -> SampleArray:
        arrays = [x.dtype for x in (a, b) if isinstance(x, SampleArray)]
        dtype = arrays[0] if arrays else "float32" if float in (type(a), type(b)) else "int32"
        return self._device.apply(np.where, dtype, condition, a, b)

    # -- elementwise -----------------------------------------------------------------------------------------------------
    def astype(self, x: SampleArray, dtype: str) -> SampleArray:
        if x.dtype == dtype:
            return self._device.check(x, "xp.astype")
        return self._device.apply(lambda values: values != 0 if dtype == "bool" else values, dtype, x)

    def exp(self, x: SampleArray) -> SampleArray:
        return self._device.apply(np.exp, x.dtype, x)

    def log(self, x: SampleArray) -> SampleArray:
        return self._device.apply(np.log, x.dtype, x)

    def tanh(self, x: SampleArray) -> SampleArray:
        return self._device.apply(np.tanh, x.dtype, x)

    def rsqrt(self, x: SampleArray) -> SampleArray:
        return self._device.apply(lambda values: np.float32(1) / np.sqrt(values), x.dtype, x)

    def silu(self, x: SampleArray) -> SampleArray:
        return self._device.apply(_silu, x.dtype, x)

    def maximum(self, a: SampleArray, b: SampleArray) -> SampleArray:
        return self._device.apply(np.maximum, a.dtype, a, b)

    def minimum(self, a: SampleArray, b: SampleArray) -> SampleArray:
        return self._device.apply(np.minimum, a.dtype, a, b)

    def clip(self, x: SampleArray, low: int, high: int) -> SampleArray:
        return self._device.apply(lambda values: np.clip(values, low, high), x.dtype, x)

    # -- reductions over the last axis: each row by itself ---------------------------------------------------------------
    def max(self, x: SampleArray) -> SampleArray:
        return self._device.apply(lambda values: values.max(-1, keepdims=True), x.dtype, x)

    def sum(self, x: SampleArray) -> SampleArray:
        return self._device.apply(lambda values: values.sum(-1, keepdims=True, dtype=values.dtype), x.dtype, x)

    def mean(self, x: SampleArray) -> SampleArray:
        return self._device.apply(lambda values: values.mean(-1, keepdims=True), x.dtype, x)

    def argmax(self, x: SampleArray) -> SampleArray:
        return self._device.apply(lambda values: values.argmax(-1), "int32", x)

    def kth_largest(self, x: SampleArray, k: SampleArray) -> SampleArray:
        def compute(values: HostArray, rank: HostArray) -> HostArray:
            n = values.shape[1]
            places = np.take_along_axis(_falling(values), np.clip(rank - 1, 0, n - 1), 1)
            return np.where((rank >= 1) & (rank <= n), np.take_along_axis(values, places, 1), np.float32(-np.inf))

        return self._device.apply(compute, x.dtype, x, k)

    def top_k(self, x: SampleArray, k: int) -> tuple[SampleArray, SampleArray]:
        places = self._device.apply(lambda values: _falling(values)[:, :k], "int32", x)
        return self.take_along(x, places), places

    def mass_cutoff(self, p: SampleArray, mass: SampleArray) -> SampleArray:
        def compute(values: HostArray, needed: HostArray) -> HostArray:
            falling = np.take_along_axis(values, _falling(values), 1)
            reached = np.cumsum(falling, -1, dtype=np.float64) >= needed
            found = np.take_along_axis(falling, reached.argmax(-1)[:, None], 1)
            return np.where(reached.any(-1, keepdims=True), found, np.float32(-np.inf))

        return self._device.apply(compute, p.dtype, p, mass)

    # -- heavy operations: one row of the left side at a time, so that its bits do not depend on its neighbours -------------
    def matmul(self, a: SampleArray, b: SampleArray) -> SampleArray:
        def compute(left: HostArray, right: HostArray) -> HostArray:
            rows = [np.matmul(left[..., i : i + 1, :], right) for i in range(left.shape[-2])]
            return np.concatenate(rows, -2) if rows else np.matmul(left, right)

        return self._device.apply(compute, a.dtype, a, b)

    def linear(self, x: SampleArray, weight: SampleArray, bias: SampleArray | None = None) -> SampleArray:
        def compute(values: HostArray, matrix: HostArray, *more: HostArray) -> HostArray:
            rows = [matrix @ row for row in values.reshape(-1, values.shape[-1])]
            made = np.array(rows, np.float32).reshape(*values.shape[:-1], len(matrix))
            return made + more[0] if more else made

        return self._device.apply(compute, x.dtype, x, weight, *(() if bias is None else (bias,)))

    def rms_norm(self, x: SampleArray, weight: SampleArray, eps: float) -> SampleArray:
        def scaled(values: HostArray) -> HostArray:
            made: HostArray = values / np.sqrt((values * values).mean(-1, keepdims=True) + np.float32(eps))
            return made

        return self._device.apply(np.multiply, x.dtype, self._device.apply(scaled, x.dtype, x), weight)

    def rope(self, x: SampleArray, cos: SampleArray, sin: SampleArray) -> SampleArray:
        def compute(values: HostArray, c: HostArray, s: HostArray) -> HostArray:
            low, high = np.split(values, 2, -1)
            c, s = c[:, None], s[:, None]
            return np.concatenate([low * c - high * s, high * c + low * s], -1)

        return self._device.apply(compute, x.dtype, x, cos, sin)

    def silu_mul(self, gate: SampleArray, up: SampleArray) -> SampleArray:
        return self._device.apply(lambda g, u: _silu(g) * u, gate.dtype, gate, up)

    def gumbel(self, keys: SampleArray, blocks: SampleArray) -> SampleArray:
        made: SampleArray = draws.gumbel(self, keys, blocks)
        return made

    def penalise(self, x: SampleArray, seen: SampleArray, bits: SampleArray, penalty: SampleArray) -> SampleArray:
        made: SampleArray = draws.penalise(self, x, seen, bits, penalty)
        return made
