"""``backend.xp`` over torch: the operations of :class:`forebay.specs.ArrayNamespace`, result types fixed."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from forebay.specs import draws
from forebay.specs.errors import InvalidInput

TORCH_DTYPE: Final = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "int32": torch.int32,
        "bool": torch.bool,
    }
)


def dtype_name(x: Tensor) -> str:
    """The dtype's name without torch's prefix."""
    return str(x.dtype).removeprefix("torch.")


class TorchNamespace:
    """Array operations on torch tensors. Nothing here reads a tensor's values on the host."""

    def is_array(self, x: object) -> bool:
        """True for torch tensors."""
        return isinstance(x, Tensor)

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """The static shape."""
        return tuple(x.shape)

    def dtype(self, x: Tensor) -> str:
        """The dtype's name without torch's prefix."""
        return dtype_name(x)

    # -- shape ---------------------------------------------------------------------------------------------------------
    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Row-major reshape."""
        return torch.reshape(x, tuple(shape))

    def permute(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Transpose."""
        return torch.permute(x, tuple(axes))

    def head(self, x: Tensor, n: int) -> Tensor:
        """First n rows."""
        if not 0 <= n <= x.shape[0]:
            raise InvalidInput(f"xp.head: got n={n} of {x.shape[0]} rows")
        return x[:n]

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        """Along the last axis."""
        return torch.cat(list(xs), -1)

    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        """Along a new last axis."""
        return torch.stack(list(xs), -1)

    def repeat(self, x: Tensor, n: int) -> Tensor:
        """Last axis of length 1, n times."""
        return x.expand(*x.shape[:-1], n)

    # -- indexing ------------------------------------------------------------------------------------------------------
    def take(self, x: Tensor, indices: Tensor) -> Tensor:
        """Rows of axis 0."""
        return torch.index_select(x, 0, indices.reshape(-1)).reshape(*indices.shape, *x.shape[1:])

    def take_along(self, x: Tensor, indices: Tensor) -> Tensor:
        """Row b takes its own columns."""
        return torch.gather(x, 1, indices.to(torch.int64))

    def add_along(self, x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        """Row b adds to its own columns; what is outside them goes to a column that is cut off again."""
        n = x.shape[1]
        inside = torch.where((indices >= 0) & (indices < n), indices, n).to(torch.int64)
        wider = torch.nn.functional.pad(x, (0, 1))
        return torch.scatter_add(wider, 1, inside, values)[:, :n]

    def where(self, condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
        """Select; two Python ints give int32."""
        out = torch.where(condition, a, b)
        return out.to(torch.int32) if out.dtype == torch.int64 else out

    # -- elementwise ---------------------------------------------------------------------------------------------------
    def astype(self, x: Tensor, dtype: str) -> Tensor:
        """Convert to a named dtype."""
        return x.to(TORCH_DTYPE[dtype])

    def bitcast(self, x: Tensor, dtype: str) -> Tensor:
        """The same bytes seen as another dtype of their size."""
        return x.view(TORCH_DTYPE[dtype])

    def exp(self, x: Tensor) -> Tensor:
        """e^x."""
        return torch.exp(x)

    def log(self, x: Tensor) -> Tensor:
        """ln x."""
        return torch.log(x)

    def tanh(self, x: Tensor) -> Tensor:
        """Hyperbolic tangent."""
        return torch.tanh(x)

    def rsqrt(self, x: Tensor) -> Tensor:
        """1/sqrt(x)."""
        return torch.rsqrt(x)

    def silu(self, x: Tensor) -> Tensor:
        """x * sigmoid(x)."""
        return torch.nn.functional.silu(x)

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        """Elementwise maximum."""
        return torch.maximum(a, b)

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        """Elementwise minimum."""
        return torch.minimum(a, b)

    def clip(self, x: Tensor, low: int, high: int) -> Tensor:
        """Bound to [low, high]."""
        return torch.clamp(x, low, high)

    # -- reductions ----------------------------------------------------------------------------------------------------
    def max(self, x: Tensor) -> Tensor:
        """Maximum over the last axis, kept."""
        return torch.amax(x, -1, keepdim=True)

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the last axis, kept, in x's dtype."""
        return torch.sum(x, -1, keepdim=True, dtype=x.dtype)

    def mean(self, x: Tensor) -> Tensor:
        """Mean over the last axis, kept."""
        return torch.mean(x, -1, keepdim=True)

    def argmax(self, x: Tensor) -> Tensor:
        """int32 index of the first maximum."""
        return torch.argmax(x, -1).to(torch.int32)

    # -- thresholds ----------------------------------------------------------------------------------------------------
    def kth_largest(self, x: Tensor, k: Tensor) -> Tensor:
        """From each row in descending order, NaN first."""
        n = x.shape[1]
        falling = torch.sort(x, -1, descending=True)[0]
        found = torch.gather(falling, 1, torch.clamp(k - 1, 0, n - 1).to(torch.int64))
        return torch.where((k >= 1) & (k <= n), found, -torch.inf)

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """By a stable sort: torch's own top-k leaves the order of equals open."""
        values, places = torch.sort(x, dim=-1, descending=True, stable=True)
        return values[:, :k].contiguous(), places[:, :k].to(torch.int32)

    def mass_cutoff(self, p: Tensor, mass: Tensor) -> Tensor:
        """The first element of each row in descending order at which the sum is reached."""
        falling = torch.sort(p, -1, descending=True)[0]
        short = torch.cumsum(falling, -1, dtype=torch.float64) < mass
        at = torch.sum(short, -1, keepdim=True)
        found = torch.gather(falling, 1, torch.clamp(at, max=p.shape[1] - 1))
        reached = torch.sum(p, -1, keepdim=True, dtype=torch.float64) >= mass
        return torch.where(reached, found, -torch.inf)

    # -- heavy operations ------------------------------------------------------------------------------------------------
    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Matrix product."""
        return torch.matmul(a, b)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias."""
        return torch.nn.functional.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm, accumulated in float32."""
        wide = x.to(torch.float32)
        scaled = wide * torch.rsqrt(torch.mean(wide * wide, -1, keepdim=True) + eps)
        return scaled.to(x.dtype) * weight

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of [N, H, D] by [N, D/2] in NeoX order."""
        low, high = torch.chunk(x, 2, -1)
        c, s = cos[:, None, :], sin[:, None, :]
        return torch.cat((low * c - high * s, high * c + low * s), -1)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        return torch.nn.functional.silu(gate) * up

    def gumbel(self, keys: Tensor, blocks: Tensor) -> Tensor:
        """Standard Gumbel variates, operation by operation."""
        made: Tensor = draws.gumbel(self, keys, blocks)
        return made

    def penalise(self, x: Tensor, seen: Tensor, bits: Tensor, penalty: Tensor) -> Tensor:
        """Repetition penalty, operation by operation."""
        made: Tensor = draws.penalise(self, x, seen, bits, penalty)
        return made
