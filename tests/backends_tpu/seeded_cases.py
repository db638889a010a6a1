"""Programs that the gate must not pass: a copied pool, a donation that is not taken, and one that is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from forebay.backends.tpu import calls
from forebay.backends.tpu.compile_cases import Case, Stored, arrays_for

STORED = Stored("bfloat16", 80)


def copying(chip: Any) -> Any:
    """The kernel over pages that XLA lays out as it likes."""
    array = arrays_for(chip)
    given = (
        array(STORED.shape, "bfloat16"),
        array((1,), "int32"),
        array((8, 1, 32, 80), "bfloat16"),
        array((8, 65), "int32"),
        array((8,), "int32"),
        array((), "float32"),
        array((), "int32"),
    )

    def attend(*x: jax.Array) -> Any:
        sizes: Any = {"table_len": 64, "path": "direct", "by": "pallas", "interpret": False}
        operands: Any = (*x[:5], None, *x[5:], None)
        return calls.attend(*operands, store=STORED.store, **sizes)

    return jax.jit(attend, donate_argnums=1, keep_unused=True).lower(*given).compile()


def kept(chip: Any) -> Any:
    """No result is as large as what is donated."""
    return jax.jit(jnp.sum, donate_argnums=0).lower(arrays_for(chip)((1024,), "float32")).compile()


def refused(chip: Any) -> Any:
    raise ValueError(f"no such thing\non {chip}")


def cases() -> list[Case]:
    layer: Any = {"layer": STORED.nbytes // 2, "layer_bytes": STORED.nbytes}
    made = [Case("copying", "seeded", copying, kernels=2, **layer)]
    return [*made, Case("kept", "seeded", kept), Case("refused", "seeded", refused)]
