"""How kernels are run: on a TPU, interpreted, or as a loop of XLA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Way:
    """How kernels are run.

    Attributes:
        by: ``"pallas"`` or ``"xla"``: what the attention is made of.
        interpret: as ``pallas_call`` takes it; False on a TPU.
        options: of XLA's compiler.
    """

    by: str
    interpret: Any
    options: dict[str, Any] | None = None


ON_DEVICE: Final = Way("pallas", interpret=False)
"""On a TPU."""
