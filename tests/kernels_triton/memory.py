"""Poisoned memory in every layout, bits of tensors, and memory beyond 2^31 elements of which only touched pages exist."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bits = npt.NDArray[Any]

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
POISON = {torch.float32: 0x7FC12345, torch.bfloat16: 0x7FD5, torch.float16: 0x7FD5}
FLOATS = tuple(INTEGERS)
LAYOUTS = ("NHD", "HND", "KV2", "PACKED", "LATENT", "STRIDED")


def bits(x: Tensor) -> Bits:
    """The bits of a tensor of floats as integers, a view of the same memory."""
    made: Bits = x.view(INTEGERS[x.dtype]).numpy()
    return made


def from_bits(values: npt.ArrayLike, dtype: torch.dtype) -> Tensor:
    """A tensor of floats with these bits."""
    return torch.from_numpy(np.asarray(values)).to(INTEGERS[dtype]).view(dtype)


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of NaNs with one payload."""
    return torch.full(tuple(shape), POISON[dtype], dtype=INTEGERS[dtype]).view(dtype)


def any_bits(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bits: numbers of every size, infinities and NaNs with payloads among them."""
    info = np.iinfo(np.int32 if dtype == torch.float32 else np.int16)
    made = np.random.default_rng(seed).integers(info.min, info.max, tuple(shape), info.dtype, endpoint=True)
    special = np.array(
        [-0x800000, 0x7F800001, -1, 1] if dtype == torch.float32 else [-1, 0x7F81, 0x7C01, 1], info.dtype
    )
    made.reshape(-1)[: len(special)] = special[: made.size]
    return from_bits(made, dtype)


@dataclass(frozen=True)
class Store:
    """Paged storage full of poison.

    Attributes:
        parts: the tensors that own the memory.
        k: ``[NB, BS, Hkv, D]``.
        v: the same, or None in LATENT.
    """

    parts: tuple[Tensor, ...]
    k: Tensor
    v: Tensor | None

    def snapshot(self) -> list[Bits]:
        """A copy of all bits."""
        return [bits(part).copy() for part in self.parts]


def store(layout: str, blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype) -> Store:
    """Storage in a layout; STRIDED has no dense axis, its heads outermost and bytes between all elements."""
    if layout == "LATENT":
        one = poisoned((blocks, block_size, 1, dim), dtype)
        return Store((one,), one, None)
    if layout == "KV2":
        one = poisoned((blocks, 2, block_size, heads, dim), dtype)
        return Store((one,), *one.unbind(1))
    if layout == "PACKED":
        one = poisoned((blocks, block_size, heads, 2 * dim), dtype)
        return Store((one,), one[..., :dim], one[..., dim:])
    if layout == "HND":
        two = [poisoned((blocks, heads, block_size, dim), dtype) for _ in range(2)]
        return Store(tuple(two), two[0].transpose(1, 2), two[1].transpose(1, 2))
    if layout == "STRIDED":
        one = poisoned((heads, block_size + 1, 2, blocks, 2 * dim + 3), dtype)
        k, v = (one[:, :block_size, i, :, 1 : 2 * dim : 2].permute(2, 1, 0, 3) for i in range(2))
        return Store((one,), k, v)
    two = [poisoned((blocks, block_size, heads, dim), dtype) for _ in range(2)]
    return Store(tuple(two), two[0], two[1])


def lazy(elements: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of zeros of which a page exists once it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)
