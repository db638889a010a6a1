"""Geometry and layout of paged KV memory (clauses L1, L2, L7).

A layout is a *tag* that travels with the memory; nothing guesses one from a shape. :func:`kv_views` is the only place where
storage becomes K and V views, and every view has the logical shape ``[NB, BS, Hkv, D]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol, get_args

from .dtypes import FLOAT_DTYPES, ITEMSIZE, Array
from .errors import InvalidLayout

Layout = Literal["NHD", "HND", "KV2", "PACKED", "FUSED", "TOKEN_MAJOR", "LATENT"]
LAYOUTS: Final[tuple[str, ...]] = get_args(Layout)
INT32_MAX: Final = 2**31 - 1
FUSED_LANES: Final = 128
"""The fewest lanes of FUSED's last axis: a TPU tiles it by 128, and memory whose last axis is narrower is copied for each kernel."""


@dataclass(frozen=True)
class KVGeometry:
    """Sizes of one pool.

    Attributes:
        num_blocks: NB, blocks a layer, the sink included.
        block_size: BS, tokens a block.
        num_kv_heads: Hkv.
        head_dim: D, elements of a key row (and of a value row unless ``value_head_dim`` says otherwise).
        num_layers: layers that share block ids.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        value_head_dim: elements of a value row; differs from ``head_dim`` only in the LATENT layout, where V is K's first columns.

    Raises:
        InvalidLayout: a size is not a positive int, or slot ids would not fit int32 (the limit is named).
    """

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = 1
    dtype: str = "float32"
    value_head_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "num_kv_heads", "head_dim", "num_layers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidLayout(f"KVGeometry.{name}: got {value!r}, expected a positive int")
        if self.dtype not in FLOAT_DTYPES:
            raise InvalidLayout(f"KVGeometry.dtype: got {self.dtype!r}, expected one of {', '.join(FLOAT_DTYPES)}")
        if self.value_head_dim is not None and (
            isinstance(self.value_head_dim, bool) or not isinstance(self.value_head_dim, int)
        ):
            raise InvalidLayout(f"KVGeometry.value_head_dim: got {self.value_head_dim!r}, expected None or an int")
        if self.value_head_dim is not None and not 1 <= self.value_head_dim <= self.head_dim:
            raise InvalidLayout(
                f"KVGeometry.value_head_dim: got {self.value_head_dim}, expected 1 to head_dim={self.head_dim}"
            )
        if self.num_slots > INT32_MAX:
            raise InvalidLayout(
                f"KVGeometry: {self.num_blocks} blocks of {self.block_size} tokens are {self.num_slots} slots; slot ids are int32 "
                f"on the device, so at most {INT32_MAX // self.block_size} blocks of this size"
            )

    @property
    def num_slots(self) -> int:
        """NB * BS, the bound of slot ids (the sink's included)."""
        return self.num_blocks * self.block_size

    @property
    def key_dim(self) -> int:
        """Elements of a key row."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Elements of a value row."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer where both are stored, without the lanes of FUSED that are neither."""
        return self.num_slots * self.num_kv_heads * (self.key_dim + self.value_dim) * ITEMSIZE[self.dtype]

    def check_query_heads(self, num_query_heads: int, where: str) -> int:
        """Return G = Hq / Hkv; raise InvalidLayout where it does not divide (clause D8)."""
        if num_query_heads < 1 or num_query_heads % self.num_kv_heads:
            raise InvalidLayout(
                f"{where}: {num_query_heads} query heads are not a multiple of {self.num_kv_heads} KV heads; "
                "grouped-query attention needs Hq % Hkv == 0"
            )
        return num_query_heads // self.num_kv_heads


def fused_lanes(head_dim: int) -> int:
    """L, the last axis of FUSED: K and V side by side, and lanes of nobody up to :data:`FUSED_LANES` where these are fewer."""
    return max(2 * head_dim, FUSED_LANES)


def storage_shapes(layout: str, geometry: KVGeometry) -> tuple[tuple[int, ...], ...]:
    """Shapes of the arrays that hold one layer: ``(k, v)`` for NHD and HND, one array for KV2, PACKED, FUSED and LATENT.

    FUSED is ``[NB, Hkv, BS, L]``, L by :func:`fused_lanes`: K in lanes 0 to D - 1 and V in lanes D to 2D - 1, heads before tokens.
    Lanes from 2D on belong to nobody.

    Raises:
        InvalidLayout: the layout is unknown, or the geometry does not fit it.
    """
    g = geometry
    if layout not in LAYOUTS:
        raise InvalidLayout(f"layout: got {layout!r}, expected one of {', '.join(LAYOUTS)}")
    if layout == "LATENT":
        if g.num_kv_heads != 1 or g.value_head_dim is None:
            raise InvalidLayout(
                f"layout LATENT keeps one head [NB, BS, 1, Dc+Dr] whose first Dc columns are V: got num_kv_heads={g.num_kv_heads}, "
                f"value_head_dim={g.value_head_dim}; expected num_kv_heads=1 and value_head_dim=Dc"
            )
        return ((g.num_blocks, g.block_size, 1, g.key_dim),)
    if g.key_dim != g.value_dim:
        raise InvalidLayout(
            f"layout {layout}: value_head_dim={g.value_dim} differs from head_dim={g.key_dim}; only LATENT may"
        )
    if layout == "NHD":
        return ((g.num_blocks, g.block_size, g.num_kv_heads, g.head_dim),) * 2
    if layout == "HND":
        return ((g.num_blocks, g.num_kv_heads, g.block_size, g.head_dim),) * 2
    if layout == "KV2":
        return ((g.num_blocks, 2, g.block_size, g.num_kv_heads, g.head_dim),)
    if layout == "PACKED":
        return ((g.num_blocks, g.block_size, g.num_kv_heads, 2 * g.head_dim),)
    if layout == "FUSED":
        return ((g.num_blocks, g.num_kv_heads, g.block_size, fused_lanes(g.head_dim)),)
    raise InvalidLayout("layout TOKEN_MAJOR belongs to the unified pool (clause L8), which this version does not have")


def kv_views(layout: str, storage: tuple[Array, ...], geometry: KVGeometry) -> tuple[Array, Array]:
    """K ``[NB, BS, Hkv, D]`` and V ``[NB, BS, Hkv, Dv]`` as views of one layer's storage; nothing is copied.

    ``storage`` are arrays with numpy's slicing and ``swapaxes`` (numpy and torch have both).
    """
    if layout == "NHD":
        return storage[0], storage[1]
    if layout == "HND":
        return storage[0].swapaxes(1, 2), storage[1].swapaxes(1, 2)
    if layout == "KV2":
        return storage[0][:, 0], storage[0][:, 1]
    if layout == "PACKED":
        return storage[0][..., : geometry.head_dim], storage[0][..., geometry.head_dim :]
    if layout == "FUSED":
        rows, dim = storage[0].swapaxes(1, 2), geometry.head_dim
        return rows[..., :dim], rows[..., dim : 2 * dim]
    if layout == "LATENT":
        return storage[0], storage[0][..., : geometry.value_dim]
    raise InvalidLayout(f"layout {layout}: no views")


def check_no_overlap(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, what: str) -> None:
    """Refuse strides (bytes) that give two elements one address, or that split an element (clause L1).

    Sorted by stride, each dimension must step past everything the smaller ones cover.
    """
    covered = itemsize
    for stride, size in sorted((abs(st), n) for st, n in zip(strides, shape, strict=True) if n > 1):
        if stride % itemsize or stride < covered:
            raise InvalidLayout(
                f"{what}: strides {strides} bytes over shape {shape} of {itemsize}-byte elements overlap or split elements"
            )
        covered = stride * (size - 1) + covered


class Strided(Protocol):
    """Memory by address, shape and strides in bytes."""

    @property
    def address(self) -> int:
        """Address of the first element."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours of each dimension."""


def share_memory(a: Strided, b: Strided, itemsize: int) -> bool:
    """True if two strided memories have a byte in common.

    Exact where both have the same shape and strides, as K and V views of one store do: they meet where the distance of their
    bases is a sum of ``n_i * stride_i`` with ``|n_i| < shape_i``. Otherwise the extents decide.
    """
    low_a, high_a = _extent(a, itemsize)
    low_b, high_b = _extent(b, itemsize)
    if high_a <= low_b or high_b <= low_a:
        return False
    if a.shape != b.shape or a.strides != b.strides:
        return True
    steps = sorted(((abs(s), n) for s, n in zip(a.strides, a.shape, strict=True) if n > 1), reverse=True)

    def meets(distance: int, i: int) -> bool:
        if i == len(steps):
            return abs(distance) < itemsize
        stride, size = steps[i]
        return any(
            abs(q) < size and meets(distance - q * stride, i + 1) for q in (distance // stride, distance // stride + 1)
        )

    return meets(b.address - a.address, 0)


def _extent(x: Strided, itemsize: int) -> tuple[int, int]:
    """Addresses ``[low, high)`` that the memory lies within; nothing where it has no elements."""
    if 0 in x.shape:
        return x.address, x.address
    reach = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    return x.address + sum(r for r in reach if r < 0), x.address + sum(r for r in reach if r > 0) + itemsize
