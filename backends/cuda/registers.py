"""What a launch is given beside its kernel's own constants, by the kind of device: so that no value finds itself without a register.

Tiles decide the bits of a result; what is chosen here does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def launch_options(kernel: str, constants: Mapping[str, Any], compiler: str) -> dict[str, int]:
    """Launch options of the kernel named ``kernel`` that replace those among ``constants``.

    ``compiler`` is Triton's name of it: ``cuda`` or ``hip``.
    """
    return {}
