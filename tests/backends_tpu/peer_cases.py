"""JAX's own kernels of paged attention at the shapes of ours, as cases of the ahead-of-time gate: what they refuse, and what they hold.

.. code-block:: console

   python -m forebay.backends.tpu.compile_gate --cases tests.backends_tpu.peer_cases --table tests/records/tpu_peers.json
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from forebay.backends.tpu.compile_cases import COLUMNS, ROWS, Case, Stored, arrays_for
from forebay.specs.dtypes import ITEMSIZE


def paged(stored: Stored, group: int) -> Case:
    """One query a row; pools of K and of V, heads first."""

    def compile_for(chip: Any) -> Any:
        array = arrays_for(chip)
        pages = array((stored.heads, stored.blocks, stored.block_size, stored.width), stored.dtype)
        fn = partial(paged_attention, pages_per_compute_block=128 // stored.block_size)
        given = (
            array((ROWS, stored.heads * group, stored.width), stored.dtype),
            pages,
            pages,
            array((ROWS,), "int32"),
            array((ROWS, COLUMNS), "int32"),
        )
        return jax.jit(fn, keep_unused=True).lower(*given).compile()

    layer = stored.heads * stored.blocks * stored.block_size * stored.width
    return _case("paged_attention", stored, f"G {group}, T 1", layer, compile_for)


def ragged(stored: Stored, group: int, query_len: int) -> Case:
    """Any number of queries a row; one pool of K and V beside each other, tokens first."""
    shape = (stored.blocks, stored.block_size, 2 * stored.heads, stored.width)

    def compile_for(chip: Any) -> Any:
        array = arrays_for(chip)
        given = (
            array((ROWS * query_len, stored.heads * group, stored.width), stored.dtype),
            array(shape, stored.dtype),
            array((ROWS,), "int32"),
            array((ROWS, COLUMNS), "int32"),
            array((ROWS + 1,), "int32"),
            array((1,), "int32"),
        )
        fn = partial(ragged_paged_attention, num_kv_pages_per_block=8, num_queries_per_block=min(8, ROWS * query_len))
        return jax.jit(fn, keep_unused=True).lower(*given).compile()

    return _case("ragged_paged_attention", stored, f"G {group}, T {query_len}", prod(shape), compile_for)


def _case(name: str, stored: Stored, words: str, layer: int, compile_for: Any) -> Case:
    def as_on_chip(chip: Any) -> Any:
        # They ask the present device what it can do, and that is this host, unless a mesh says otherwise.
        kind = AbstractDevice(chip.device_kind, chip.num_cores, chip.platform)
        with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=kind)):
            return compile_for(chip)

    return Case(
        name,
        f"D{stored.width}, {stored.heads} KV heads, {stored.dtype}, blocks of {stored.block_size}, {words}",
        as_on_chip,
        layer=layer,
        layer_bytes=layer * ITEMSIZE[stored.dtype],
        kernels=1,
        judged=False,
    )


def cases() -> list[Case]:
    """Shapes that ours has as well."""
    made = []
    for dtype in ("float32", "bfloat16"):
        for width, heads, group in (
            (64, 3, 3),
            (64, 8, 4),
            (80, 8, 4),
            (96, 8, 4),
            (128, 8, 4),
            (128, 8, 1),
            (256, 8, 4),
        ):
            stored = Stored(dtype, width, heads)
            made += [paged(stored, group), ragged(stored, group, 1)]
        made.append(ragged(Stored(dtype, 128), 4, 4))
        for size in (4, 8, 64):
            made += [paged(Stored(dtype, 128, block_size=size), 4), ragged(Stored(dtype, 128, block_size=size), 4, 1)]
    return made
