"""Arrays and their namespace as a driver holds them, without the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forebay.backends.tpu.arrays import TraceScope
from forebay.backends.tpu.namespace import TpuNamespace
from forebay.specs.dtypes import Array, HostArray, host_bits, host_from_bits

SEGMENT = "step[]"


class Device:
    """One scope; ``put`` and ``host`` stand for ``to_device`` and ``to_host``."""

    def __init__(self) -> None:
        self.scope = TraceScope()
        self.xp = TpuNamespace(self.scope)

    def put(self, x: Any, dtype: str | None = None) -> Array:
        """A device array of host values."""
        bits, kind = host_bits(x, dtype)
        return self.scope.wrap(jnp.array(bits.view(jnp.bfloat16) if kind == "bfloat16" else bits))

    def host(self, x: Array) -> HostArray:
        """What a device array holds, bfloat16 as float32."""
        made = np.asarray(self.scope.unwrap("host", x))
        return host_from_bits(made.view(np.uint16), "bfloat16") if x.dtype == "bfloat16" else made

    def traced(self, fn: Callable[..., Any], *arrays: Array) -> jax.stages.Lowered:
        """``fn`` of arrays as a driver would capture it; it returns an array, a sequence of arrays or nothing."""

        def body(*values: jax.Array) -> Any:
            with self.scope.tracing(SEGMENT):
                made = fn(*(self.scope.wrap(x) for x in values))
                outs = made if isinstance(made, list | tuple) else () if made is None else (made,)
                return [self.scope.unwrap("an output", x) for x in outs]

        return jax.jit(body).lower(*(x.value for x in arrays))

    def replayed(self, fn: Callable[..., Any], *arrays: Array) -> list[Array]:
        """What ``fn`` gives when it is captured and then done."""
        made = self.traced(fn, *arrays).compile()(*(x.value for x in arrays))
        return [self.scope.wrap(x) for x in made]
