"""What interpreted kernels load: bytes by tensor, and proof that nothing else is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter


class Loads:
    """Bytes that masked loads fetched, by the name of the tensor whose storage they lie in; lanes that are masked off are none."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.bytes = dict.fromkeys((*tensors, "elsewhere"), 0)
        self.ranges = {
            name: (x.untyped_storage().data_ptr(), x.untyped_storage().data_ptr() + x.untyped_storage().nbytes())
            for name, x in tensors.items()
        }

    def add(self, pointers: Any, size: int) -> None:
        """Count one load of ``size`` bytes at each address."""
        rest = len(pointers)
        for name, (low, high) in self.ranges.items():
            there = int(((pointers >= low) & (pointers + size <= high)).sum())
            self.bytes[name] += size * there
            rest -= there
        self.bytes["elsewhere"] += size * rest


@contextmanager
def counted(**tensors: torch.Tensor) -> Iterator[Loads]:
    """Count what kernels load from the storages of ``tensors``, which are disjoint, within the block."""
    loads = Loads(tensors)
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        live = np.broadcast_to(mask.data, ptrs.data.shape)
        loads.add(np.asarray(ptrs.data)[live], ptrs.get_element_ty().primitive_bitwidth // 8)
        return load(self, ptrs, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", create_masked_load)
        yield loads
