"""Calls of the paged decode for TPUs: pools full of poison, and the cases that the tests and the mutants share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from forebay.kernels.pallas import paged_decode as decode_module
from forebay.kernels.pallas.pages import PageFormat

Array = npt.NDArray[Any]

NONE = 2**31 - 1
"""No window."""
FIRST_BLOCK = 1
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiling is what takes the time of these tests; where bits are compared, it is done as it is by default."""
POISON = (float("nan"), float("inf"), float("-inf"))
BAD = (-1, 0, -(2**31), 2**31 - 1, 10**6, -7)
"""Ids that are no block; 0 is the sink."""


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        visible: of each row.
        value_dim: None for FUSED, else LATENT with so many columns of K as V.
        spare: lanes that belong to nobody, beyond what the format needs.
        bad: ``(row, column)`` of the table entries that are no blocks.
        torn: ``(row, key)`` of the keys that hold NaN though a query sees them; ``torn_keys`` says whether K is, beside V.
    """

    visible: tuple[int, ...]
    heads: int = 2
    group: int = 1
    dim: int = 64
    value_dim: int | None = None
    spare: int = 0
    block_size: int = 16
    table_len: int = 8
    query_len: int = 1
    window: int = NONE
    softcap: float | None = None
    sinks: bool = False
    q_dtype: str = "float32"
    dtype: str = "float32"
    bad: tuple[tuple[int, int], ...] = ()
    torn: tuple[tuple[int, int], ...] = ()
    torn_keys: bool = True

    @property
    def format(self) -> PageFormat:
        """Where K and V lie."""
        if self.value_dim is not None:
            return PageFormat(self.dim + self.spare, self.dim, 0, self.value_dim)
        return PageFormat(max(2 * self.dim, 128) + self.spare, self.dim, self.dim, self.dim)

    @property
    def scale(self) -> float:
        """Of the logits."""
        return float(self.dim**-0.5)

    def with_visible(self, *visible: int) -> Case:
        """The same with other rows."""
        return replace(self, visible=visible)


@dataclass(frozen=True)
class Call:
    """A case with its arrays, which hold what their dtypes can; bfloat16 and float16 as float32."""

    case: Case
    q: Array
    pages: Array
    table: Array
    visible: Array
    sinks: Array | None


def rounded(x: Array, dtype: str) -> Array:
    """Nearest values of a dtype, as float32."""
    return np.array(jnp.asarray(x, jnp.float32).astype(dtype).astype(jnp.float32))


def poison(shape: tuple[int, ...]) -> Array:
    """NaN, inf and -inf in turn."""
    return np.resize(np.array(POISON, np.float32), shape)


def build(case: Case, seed: int = 0) -> Call:
    """Arrays of a case: whatever no query sees is poison, in the pool, in the lanes and in the table."""
    rng = np.random.default_rng(seed)
    form, batch = case.format, len(case.visible)
    blocks = FIRST_BLOCK + batch * case.table_len + 2
    pages = poison((blocks, case.heads, case.block_size, form.lanes))
    used = form.value_offset + form.value_dim if case.value_dim is None else case.dim
    ids = FIRST_BLOCK + rng.permutation(blocks - FIRST_BLOCK)[: batch * case.table_len]
    table = np.full((batch, case.table_len + 1), 1, np.int32)
    table[:, : case.table_len] = ids.reshape(batch, case.table_len)
    for b, visible in enumerate(case.visible):
        end = min(max(visible, 0), case.table_len * case.block_size)
        start = max(max(visible - case.query_len + 1, 0) - case.window, 0)
        for key in range(start, end):
            row = rng.standard_normal((case.heads, used)).astype(np.float32)
            if (b, key) in case.torn:
                row[:, 0 if case.torn_keys else form.value_offset :] = np.nan
            pages[table[b, key // case.block_size], :, key % case.block_size, :used] = rounded(row, case.dtype)
    for i, (b, column) in enumerate(case.bad):
        table[b, column] = (*BAD, blocks)[i % (len(BAD) + 1)]
    q = rng.standard_normal((batch, case.query_len, case.heads * case.group, case.dim)).astype(np.float32)
    sinks = rng.standard_normal(case.heads * case.group).astype(np.float32) if case.sinks else None
    return Call(case, rounded(q, case.q_dtype), pages, table, np.array(case.visible, np.int32), sinks)


@cache
def compiled(
    module: ModuleType, form: PageFormat, table_len: int, first_block: int, by: str, interpret: Any, quickly: bool
) -> Any:
    """The operation as a function of arrays, window and soft-cap; JAX compiles it once for each shape."""
    fixed = {"page": form, "table_len": table_len, "first_block": first_block, "by": by, "interpret": interpret}
    return jax.jit(partial(module.paged_decode, **fixed), compiler_options=QUICKLY if quickly else None)


def run(
    call: Call,
    by: str = "pallas",
    interpret: Any = True,
    *,
    module: ModuleType = decode_module,
    first_block: int = FIRST_BLOCK,
    quickly: bool = True,
    **changed: Any,
) -> tuple[Array, Array]:
    """Output and LSE of a call, float32; arrays named in ``changed`` stand in for its own."""
    case = call.case
    given: dict[str, Any] = {"q": call.q, "pages": call.pages, "table": call.table, "visible": call.visible} | changed
    function = compiled(module, case.format, case.table_len, first_block, by, interpret, quickly)
    out, lse = function(
        jnp.asarray(given["q"]).astype(case.q_dtype),
        jnp.asarray(given["pages"]).astype(case.dtype),
        given["table"],
        given["visible"],
        call.sinks,
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
    )
    if out.dtype != case.q_dtype or lse.dtype != jnp.float32:
        raise TypeError(f"output {out.dtype} and LSE {lse.dtype}, not {case.q_dtype} and float32")
    return np.array(out.astype(jnp.float32)), np.array(lse)
