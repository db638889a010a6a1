"""The memory of Buffers, and how kernels see tensors."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from forebay.backends.torch_shared.namespace import TORCH_DTYPE
from forebay.specs.dtypes import BITS_DTYPE, HostArray

_BLOCK_BYTES: Final = 32 << 20
_SHARED: Final = range(64 << 10, _BLOCK_BYTES // 4)
"""Sizes in bytes that share a block: smaller ones do not matter, larger ones get huge pages by themselves."""


class BufferMemory:
    """Memory the operating system commits when it is first touched.

    It comes from numpy, which asks for huge pages: without them page walks cost half of the memory's bandwidth. The system
    grants them to large allocations only, so Buffers of the size of a small model's weights lie side by side in large blocks. A
    block goes back when the last of its Buffers does.
    """

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A tensor of undefined content."""
        signed = np.dtype(np.int16) if dtype == "bfloat16" else BITS_DTYPE[dtype]
        size = int(np.prod(shape, dtype=np.int64)) * signed.itemsize
        array = self._take(size).view(signed).reshape(shape) if size in _SHARED else np.empty(shape, signed)
        return torch.from_numpy(array).view(TORCH_DTYPE[dtype])

    def _take(self, size: int) -> HostArray:
        start = -self._block.ctypes.data % 64
        if start + size > len(self._block):
            self._block = np.empty(_BLOCK_BYTES, np.uint8)
            start = -self._block.ctypes.data % 64
        taken, self._block = self._block[start : start + size], self._block[start + size :]
        return taken


def bits_of(x: Tensor) -> HostArray:
    """A numpy view of a tensor's bytes (bfloat16 as uint16); shares memory."""
    if x.dtype == torch.bfloat16:
        bits: HostArray = x.view(torch.int16).numpy().view(np.uint16)
        return bits
    whole: HostArray = x.numpy()
    return whole
