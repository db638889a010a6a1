"""The fixed list of array operations a model may use (``backend.xp``).

A model is written once against this list. There are no creation functions (constants are Buffers made before capture) and result
types are fixed: comparisons give bool, integer sums and argmax stay int32. Device arrays also support the Python operators
``+ - * / // % < <= > >= == != & | ^ ~ << >>`` between arrays of one dtype or with Python scalars, and basic slicing.

A namespace may have more, which is found by its names and has a default through these: ``translate`` (:mod:`.translation`) and the
operations of a decode step's rows (:mod:`.step_operations`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .dtypes import Array


class ArrayNamespace(Protocol):
    """Operations every backend supplies; each returns a new device array and reads nothing on the host."""

    def is_array(self, x: object) -> bool:
        """True if ``x`` is one of this backend's device arrays."""

    def shape(self, x: Array) -> tuple[int, ...]:
        """The static shape."""

    def dtype(self, x: Array) -> str:
        """The element type's name (``"float32"``, ``"int64"``, …), also for types the contract refuses."""

    # -- shape ---------------------------------------------------------------------------------------------------------
    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        """Row-major reshape; one dimension may be -1."""

    def permute(self, x: Array, axes: Sequence[int]) -> Array:
        """Transpose to the order ``axes``."""

    def head(self, x: Array, n: int) -> Array:
        """The first ``n`` rows of axis 0."""

    def concat(self, xs: Sequence[Array]) -> Array:
        """Concatenate along the last axis."""

    def stack(self, xs: Sequence[Array]) -> Array:
        """Stack along a new last axis."""

    def repeat(self, x: Array, n: int) -> Array:
        """Repeat a last axis of length 1 ``n`` times."""

    # -- indexing ------------------------------------------------------------------------------------------------------
    def take(self, x: Array, indices: Array) -> Array:
        """``x[indices]`` along axis 0, any shape of int32 indices; the caller bounds them first."""

    def take_along(self, x: Array, indices: Array) -> Array:
        """``x [B, N]``, int32 ``indices [B, M]`` to ``[B, M]``: row b takes its own columns."""

    def add_along(self, x: Array, indices: Array, values: Array) -> Array:
        """``x [B, N]`` with ``values [B, M]`` added to columns ``indices`` int32 ``[B, M]`` of their own rows.

        float32 or int32 (which wraps), ``x`` and ``values`` alike. An index outside ``[0, N)`` is padding: nothing is added.
        Where indices repeat, every value is added.
        """

    def where(self, condition: Array, a: Array | float, b: Array | float) -> Array:
        """Select, never blend: what is not selected may be NaN."""

    # -- elementwise ---------------------------------------------------------------------------------------------------
    def astype(self, x: Array, dtype: str) -> Array:
        """Convert to a named dtype; float to bfloat16 rounds to nearest even."""

    def bitcast(self, x: Array, dtype: str) -> Array:
        """The bit patterns of float32 as int32, or back; no value is converted."""

    def exp(self, x: Array) -> Array:
        """Natural exponential."""

    def log(self, x: Array) -> Array:
        """Natural logarithm."""

    def tanh(self, x: Array) -> Array:
        """Hyperbolic tangent."""

    def rsqrt(self, x: Array) -> Array:
        """Reciprocal square root."""

    def silu(self, x: Array) -> Array:
        """``x * sigmoid(x)``."""

    def maximum(self, a: Array, b: Array) -> Array:
        """Elementwise maximum."""

    def minimum(self, a: Array, b: Array) -> Array:
        """Elementwise minimum."""

    def clip(self, x: Array, low: int, high: int) -> Array:
        """Bound to ``[low, high]``."""

    # -- reductions over the last axis; all but argmax keep it with length 1 ----------------------------------------------
    def max(self, x: Array) -> Array:
        """Maximum over the last axis."""

    def sum(self, x: Array) -> Array:
        """Sum over the last axis, in x's dtype (int32 wraps); the bits of a row's sum depend on that row alone."""

    def mean(self, x: Array) -> Array:
        """Mean over the last axis."""

    def argmax(self, x: Array) -> Array:
        """int32 index of the first maximum over the last axis, which is dropped."""

    # -- thresholds over the last axis of float32 ``[B, N]``; a row's bits depend on that row alone ------------------------
    def kth_largest(self, x: Array, k: Array) -> Array:
        """The ``k``-th largest element of each row, ``[B, 1]``, for ``k`` int32 ``[B, 1]``; equal elements count one by one.

        A NaN is larger than any number. A ``k`` outside ``[1, N]`` gives -inf: nothing lies below it.
        """

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        """The ``k`` largest elements of each row ``[B, k]`` in falling order and their columns, int32; of equals the first comes first.

        A NaN is larger than any number; k is from 1 to N.
        """

    def mass_cutoff(self, p: Array, mass: Array) -> Array:
        """The largest ``t`` among the elements of a row for which those ``>= t`` sum to ``mass [B, 1]`` or more, ``[B, 1]``.

        ``p`` is not negative; the sums are at least as exact as in float32. A row whose sum stays below ``mass``, or that has a
        NaN, gives -inf.
        """

    # -- heavy operations a backend may fuse -------------------------------------------------------------------------------
    def matmul(self, a: Array, b: Array) -> Array:
        """Matrix product over the last two axes."""

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        """``x [..., K]``, ``weight [N, K]``, ``bias [N]`` to ``[..., N]``: ``x @ weight.T + bias``."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, accumulated in float32 (Zhang & Sennrich 2019)."""

    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        """Rotary embedding of ``x [N, H, D]`` by ``cos, sin [N, D/2]``, pairs ``(d, d + D/2)`` (Su et al. 2021, NeoX order)."""

    def gumbel(self, keys: Array, blocks: Array) -> Array:
        """Standard Gumbel variates float32 ``[B, V]`` from the hash of :mod:`.draws`: int32 ``keys [B, 1]``, ``blocks [1, V]``.

        The largest of ``logit + variate`` is a draw from the softmax (Gumbel 1954; Maddison et al. 2014). The integers are the same
        on every backend; each variate depends on its own key and block alone.
        """

    def penalise(self, x: Array, seen: Array, bits: Array, penalty: Array) -> Array:
        """Repetition penalty (Keskar et al. 2019): float32 ``x [B, V]``, of which the columns in a bitmap are divided by ``penalty
        [B, 1]`` where positive and multiplied where negative.

        ``seen`` is int32 ``[B, ceil(V / 32)]``, ``bits`` int32 ``[32]`` are the values of a word's bits, both as in :mod:`.draws`.
        """

    def silu_mul(self, gate: Array, up: Array) -> Array:
        """``silu(gate) * up``: the gate of a Llama feed-forward."""
