"""The core of the contract, which no backend may refuse, and whether a refusal is what the backend declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.specs import Capabilities, Unsupported

CORE: Final[Mapping[str, tuple[Any, ...]]] = {
    "kv_dtypes": ("float32", "bfloat16"),
    "head_dims": (64, 128),
    "max_group": (1, 3, 4, 8),
    "block_sizes": (16, 32),
    "max_query_len": (1,),
    "max_pool_elements": (2**24,),
    "window": (True,),
    "lse": (True,),
    "capture": (True,),
}
"""By field of ``Capabilities`` the values that every backend supports. Staging has no field: nobody can declare it away."""
REFUSABLE: Final = (
    "layouts",
    "kv_dtypes",
    "addressable",
    "head_dims",
    "max_group",
    "block_sizes",
    "max_query_len",
    "sinks",
    "softcap",
    "max_pool_elements",
)
"""Fields that limit what can be asked. The others are of the core (``window``, ``lse``, ``capture``), or say how a device works, which
is nothing that anybody asks of it: ``tf32``, ``recapture_at_boundary``, ``traces_run``, ``deferred``."""


def core_gaps(capabilities: Capabilities) -> list[str]:
    """What of the core the declared capabilities leave out, one line each."""
    return [
        f"the core cannot be refused, and {name}={getattr(capabilities, name)!r} refuses {value!r}"
        for name, values in CORE.items()
        for value in values
        if not capabilities.allows(name, value)
    ]


def why_not_refused(error: Unsupported, capabilities: Capabilities) -> str:
    """Why an ``Unsupported`` is no verified refusal, ``""`` if it is one."""
    name, value = error.capability, error.value
    if not name:
        return "Unsupported without a declared capability"
    if name not in capabilities.as_dict():
        return f"Unsupported for {name!r}, which is no field of Capabilities"
    if capabilities.allows(name, value):
        return f"Unsupported for {name}={value!r}, which the declared {name}={getattr(capabilities, name)!r} allows"
    core = CORE.get(name, ())
    if name.startswith("max_") and type(value) is not int:
        return f"Unsupported for {name}={value!r}, expected an int, as the limit is"
    if value in core or (core and isinstance(core[0], bool)) or (name.startswith("max_") and value <= max(core)):
        return f"Unsupported for {name}={value!r}, which is of the core: it cannot be refused"
    if name not in REFUSABLE:
        return f"Unsupported for {name}={value!r}, and {name} is no limit of what can be asked"
    return ""
