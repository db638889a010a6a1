"""``backend.xp`` of the simulated device: each operation is one launch, or another name for the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from forebay.specs import draws
from forebay.specs.dtypes import ITEMSIZE, check_dtype
from forebay.specs.errors import InvalidInput

from . import dense
from .arrays import Place, SimArray
from .issue import Issuer
from .queue import Launch, sizes


class SimNamespace:
    """Array operations; nothing here can read a value."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer

    def is_array(self, x: object) -> bool:
        """True for arrays of this very device."""
        return isinstance(x, SimArray) and x.issuer is self._issuer

    def shape(self, x: SimArray) -> tuple[int, ...]:
        """The static shape."""
        return x.shape

    def dtype(self, x: SimArray) -> str:
        """The dtype's name."""
        return x.dtype

    # -- shape ---------------------------------------------------------------------------------------------------------
    def reshape(self, x: SimArray, shape: Sequence[int]) -> SimArray:
        """Row-major; a copy where the elements do not lie so."""
        whole, known = prod(x.shape), prod(n for n in shape if n != -1)
        sizes_ = tuple(int(n) if n != -1 else whole // max(known, 1) for n in shape)
        if prod(sizes_) != whole or sum(n == -1 for n in shape) > 1:
            raise InvalidInput(f"xp.reshape: got {list(x.shape)} to {list(shape)}; the numbers of elements differ")
        source = self._issuer.contiguous(x)
        return source.at(Place.dense(source.place.offset, sizes_, ITEMSIZE[x.dtype]))

    def permute(self, x: SimArray, axes: Sequence[int]) -> SimArray:
        """Other strides."""
        if sorted(axes) != list(range(len(x.shape))):
            raise InvalidInput(f"xp.permute: got axes {list(axes)} of an array of {len(x.shape)}")
        place = x.place
        return x.at(Place(place.offset, tuple(place.shape[a] for a in axes), tuple(place.strides[a] for a in axes)))

    def head(self, x: SimArray, n: int) -> SimArray:
        """First rows."""
        if not x.shape or not 0 <= n <= x.shape[0]:
            raise InvalidInput(f"xp.head: got n={n} of {list(x.shape)}")
        return x[:n]

    def concat(self, xs: Sequence[SimArray]) -> SimArray:
        """Along the last axis."""
        self._alike("concat", *xs)
        shape = (*xs[0].shape[:-1], sum(x.shape[-1] for x in xs))
        return self._issuer.launch("concat", dense.concat, shape, xs[0].dtype, tuple(xs))

    def stack(self, xs: Sequence[SimArray]) -> SimArray:
        """Along a new last axis."""
        self._alike("stack", *xs)
        return self._issuer.launch("stack", dense.stack, (*xs[0].shape, len(xs)), xs[0].dtype, tuple(xs))

    def repeat(self, x: SimArray, n: int) -> SimArray:
        """A last axis of length 1 with a stride of 0."""
        place = x.place
        if not x.shape or x.shape[-1] != 1:
            raise InvalidInput(f"xp.repeat: got {list(x.shape)}, expected a last axis of length 1")
        return x.at(Place(place.offset, (*place.shape[:-1], n), (*place.strides[:-1], 0)))

    # -- indexing ------------------------------------------------------------------------------------------------------
    def take(self, x: SimArray, indices: SimArray) -> SimArray:
        """Rows of axis 0; an index outside loses the device, as a wild address does."""
        self._int32("take", indices)
        shape = (*indices.shape, *x.shape[1:])
        return self._issuer.launch("take", dense.take, shape, x.dtype, (x, indices))

    def take_along(self, x: SimArray, indices: SimArray) -> SimArray:
        """Each row its own columns."""
        self._int32("take_along", indices)
        return self._issuer.launch("take_along", dense.take_along, indices.shape, x.dtype, (x, indices))

    def add_along(self, x: SimArray, indices: SimArray, values: SimArray) -> SimArray:
        """Each row its own columns."""
        self._int32("add_along", indices)
        self._alike("add_along", x, values)
        return self._issuer.launch("add_along", dense.add_along, x.shape, x.dtype, (x, indices, values))

    def where(self, condition: SimArray, a: Any, b: Any) -> SimArray:
        """Two numbers give int32, or float32 where one is a float."""
        self._issuer.check(condition, "xp.where")
        if condition.dtype != "bool":
            raise InvalidInput(f"xp.where: got a condition of {condition.dtype}, expected bool")
        for x in (a, b):
            self._issuer.check_operand(x, "xp.where")
        dtype = self._issuer.common_dtype("xp.where", a, b)
        arrays = [x for x in (condition, a, b) if isinstance(x, SimArray)]
        numbers = [None if isinstance(x, SimArray) else self._issuer.constant(x, dtype, "xp.where") for x in (a, b)]
        shape = np.broadcast_shapes(*(x.shape for x in arrays))
        ins = (condition, *(x if isinstance(x, SimArray) else None for x in (a, b)))
        return self._issuer.launch("where", dense.where, shape, dtype, ins, tuple(numbers))

    # -- elementwise ---------------------------------------------------------------------------------------------------
    def astype(self, x: SimArray, dtype: str) -> SimArray:
        """Convert; the same dtype is the same array."""
        check_dtype(dtype, what="xp.astype dtype")
        self._issuer.check(x, "xp.astype")
        return x if dtype == x.dtype else self._issuer.launch("convert", dense.convert, x.shape, dtype, (x,))

    def bitcast(self, x: SimArray, dtype: str) -> SimArray:
        """The same memory under another dtype of its size."""
        self._issuer.check(x, "xp.bitcast")
        if {x.dtype, dtype} - {"float32", "int32"}:
            raise InvalidInput(f"xp.bitcast: got {x.dtype} to {dtype}, expected float32 and int32")
        return x.at(x.place, dtype)

    def exp(self, x: SimArray) -> SimArray:
        """e^x."""
        return self._issuer.unary("exp", x)

    def log(self, x: SimArray) -> SimArray:
        """ln x."""
        return self._issuer.unary("log", x)

    def tanh(self, x: SimArray) -> SimArray:
        """Hyperbolic tangent."""
        return self._issuer.unary("tanh", x)

    def rsqrt(self, x: SimArray) -> SimArray:
        """1/sqrt(x)."""
        return self._issuer.unary("rsqrt", x)

    def silu(self, x: SimArray) -> SimArray:
        """x * sigmoid(x)."""
        return self._issuer.unary("silu", x)

    def maximum(self, a: SimArray, b: SimArray) -> SimArray:
        """The larger of each pair."""
        return self._issuer.binary("maximum", a, b)

    def minimum(self, a: SimArray, b: SimArray) -> SimArray:
        """The smaller of each pair."""
        return self._issuer.binary("minimum", a, b)

    def clip(self, x: SimArray, low: int, high: int) -> SimArray:
        """Bounds."""
        self._issuer.check(x, "xp.clip")
        bounds = tuple(self._issuer.constant(n, x.dtype, "xp.clip") for n in (low, high))
        return self._issuer.launch("clip", dense.clip, x.shape, x.dtype, (x,), bounds)

    # -- reductions ----------------------------------------------------------------------------------------------------
    def max(self, x: SimArray) -> SimArray:
        """Maximum of the last axis, kept."""
        return self._issuer.launch("max", dense.largest, (*x.shape[:-1], 1), x.dtype, (x,))

    def sum(self, x: SimArray) -> SimArray:
        """Sum of the last axis, kept."""
        return self._issuer.launch("sum", dense.total, (*x.shape[:-1], 1), x.dtype, (x,), (False,))

    def mean(self, x: SimArray) -> SimArray:
        """Mean of the last axis, kept."""
        return self._issuer.launch("mean", dense.total, (*x.shape[:-1], 1), x.dtype, (x,), (True,))

    def argmax(self, x: SimArray) -> SimArray:
        """int32 index of the first maximum."""
        return self._issuer.launch("argmax", dense.argmax, x.shape[:-1], "int32", (x,))

    # -- thresholds ----------------------------------------------------------------------------------------------------
    def kth_largest(self, x: SimArray, k: SimArray) -> SimArray:
        """One element of each sorted row."""
        return self._issuer.launch("kth_largest", dense.kth_largest, (x.shape[0], 1), x.dtype, (x, k))

    def top_k(self, x: SimArray, k: int) -> tuple[SimArray, SimArray]:
        """The first columns of each sorted row."""
        self._issuer.check(x, "xp.top_k")
        outs = tuple(self._issuer.new((x.shape[0], k), d, "the output of top_k") for d in (x.dtype, "int32"))
        self._issuer.put(Launch("top_k", dense.top_k, outs, (x,)))
        return outs[0], outs[1]

    def mass_cutoff(self, p: SimArray, mass: SimArray) -> SimArray:
        """Where the sum of each sorted row reaches its mass."""
        return self._issuer.launch("mass_cutoff", dense.mass_cutoff, (p.shape[0], 1), p.dtype, (p, mass))

    # -- heavy operations ------------------------------------------------------------------------------------------------
    def matmul(self, a: SimArray, b: SimArray) -> SimArray:
        """Matrix product over the last two axes."""
        self._alike("matmul", a, b)
        if min(len(a.shape), len(b.shape)) < 2 or a.shape[-1] != b.shape[-2]:
            raise InvalidInput(f"xp.matmul: got {sizes((a, b))}, expected [..., M, K] and [..., K, N]")
        shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        return self._issuer.launch("matmul", dense.matmul, shape, a.dtype, (a, b))

    def linear(self, x: SimArray, weight: SimArray, bias: SimArray | None = None) -> SimArray:
        """x @ weight.T + bias."""
        given = (x, weight) if bias is None else (x, weight, bias)
        self._alike("linear", *given)
        if len(weight.shape) != 2 or not x.shape or x.shape[-1] != weight.shape[1]:
            raise InvalidInput(f"xp.linear: got {sizes(given)}, expected [..., K], [N, K] and a bias [N]")
        shape = (*x.shape[:-1], weight.shape[0])
        return self._issuer.launch("linear", dense.linear, shape, x.dtype, (x, weight, bias))

    def rms_norm(self, x: SimArray, weight: SimArray, eps: float) -> SimArray:
        """Root-mean-square norm."""
        self._alike("rms_norm", x, weight)
        return self._issuer.launch("rms_norm", dense.rms_norm, x.shape, x.dtype, (x, weight), (eps,))

    def rope(self, x: SimArray, cos: SimArray, sin: SimArray) -> SimArray:
        """Rotary embedding."""
        self._alike("rope", x, cos, sin)
        return self._issuer.launch("rope", dense.rope, x.shape, x.dtype, (x, cos, sin))

    def silu_mul(self, gate: SimArray, up: SimArray) -> SimArray:
        """silu(gate) * up."""
        self._alike("silu_mul", gate, up)
        return self._issuer.launch("silu_mul", dense.silu_mul, gate.shape, gate.dtype, (gate, up))

    def gumbel(self, keys: SimArray, blocks: SimArray) -> SimArray:
        """Standard Gumbel variates, operation by operation."""
        made: SimArray = draws.gumbel(self, keys, blocks)
        return made

    def penalise(self, x: SimArray, seen: SimArray, bits: SimArray, penalty: SimArray) -> SimArray:
        """Repetition penalty, operation by operation."""
        made: SimArray = draws.penalise(self, x, seen, bits, penalty)
        return made

    # -- checks ----------------------------------------------------------------------------------------------------------
    def _alike(self, act: str, *arrays: SimArray) -> None:
        for x in arrays:
            self._issuer.check(x, f"xp.{act}")
        if len({x.dtype for x in arrays}) != 1:
            raise InvalidInput(f"xp.{act}: got {sizes(arrays)}, expected one dtype; convert with xp.astype")

    def _int32(self, act: str, indices: SimArray) -> None:
        self._issuer.check(indices, f"xp.{act}")
        if indices.dtype != "int32":
            raise InvalidInput(f"xp.{act}: got indices of {indices.dtype}, expected int32")
