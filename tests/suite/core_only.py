"""A backend that does what the contract asks of everybody and not one thing more: sim with every other ability taken away."""

from __future__ import annotations

from typing import Final, NoReturn

from forebay.backends.sim.arrays import SimArray
from forebay.backends.sim.driver import SimDriver
from forebay.specs import Capabilities
from forebay.specs.attention import DecodeCall

CORE: Final = Capabilities(
    layouts=("HND",),
    kv_dtypes=("float32", "bfloat16"),
    head_dims=(64, 128),
    block_sizes=(16, 32),
    max_group=8,
    max_query_len=1,
    sinks=False,
    softcap=False,
    deferred=True,
)


class CoreDriver(SimDriver):
    """Declares the core, and breaks where a call that reaches it asks for more."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = CORE

    def paged_decode(self, call: DecodeCall) -> tuple[SimArray, SimArray | None]:
        """One launch, of a kernel that knows no other sizes and features."""
        g, (_, query_len, heads, _) = call.pool.geometry, call.q.shape
        asked = {
            "layouts": call.pool.layout,
            "kv_dtypes": g.dtype,
            "head_dims": g.head_dim,
            "block_sizes": g.block_size,
            "max_group": heads // g.num_kv_heads,
            "max_query_len": query_len,
            "sinks": call.sinks is not None,
            "softcap": call.softcap is not None,
        }
        beyond = {name: value for name, value in asked.items() if not CORE.allows(name, value)}
        if beyond:
            raise RuntimeError(f"no kernel for {beyond}")
        return super().paged_decode(call)

    def wrap(self, x: object, dtype: str) -> NoReturn:
        """This device reads its own memory alone."""
        raise RuntimeError("no foreign memory")
