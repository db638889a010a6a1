"""The driver's ``xp``: torch, with Triton kernels for what a decode step does between its products."""

from __future__ import annotations

from torch import Tensor

from forebay.backends.torch_shared.namespace import TorchNamespace

from .kernels import Kernels


class CudaNamespace(TorchNamespace):
    """Operations on tensors of one platform."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def is_array(self, x: object) -> bool:
        """True for tensors of the platform."""
        return isinstance(x, Tensor) and self._kernels.owns(x)
