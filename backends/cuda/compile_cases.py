"""The launches of the used configurations: the backend's own operations on tensors without data, on a platform that writes down.

Every case calls what a user calls (pools, attention, staging, ``xp``), so that wrappers and driver decide by themselves what is
launched with which tiles, strides and constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import numpy as np

from forebay.specs.dtypes import BITS_DTYPE
from forebay.specs.step_operations import StepOperations
from forebay.specs.translation import translate
from forebay.specs.write_loc import BlockTable, WriteLoc

from .compile_recording import BLOCK, LONG, SHORT, Cases, Launch

FLOATS: Final = ("float32", "bfloat16", "float16")
PREFILL: Final = 64
"""Queries of a prefill: several query blocks a row."""


def decodes(cases: Cases) -> None:
    """Attention: dtypes, head sizes, groups, queries, layouts, paths, and what a score may go through."""
    cases.decode("float32", 64, 3, kv_heads=3, batch=1)  # SmolLM2-135M, one sequence and a batch, and its prefill
    cases.decode("float32", 64, 3, kv_heads=3, batch=1, columns=SHORT)
    cases.decode("float32", 64, 3, kv_heads=3, batch=1, query_len=PREFILL)
    for dtype in FLOATS:
        half = dtype == "float16"  # compiles as bfloat16 does, so that a few head sizes tell
        for dim in (64, 128, 256) if half else (64, 80, 96, 128, 192, 256):
            for group in (1, 4):
                for query_len in (1, 2):
                    cases.decode(dtype, dim, group, query_len=query_len)
        for group in (3, 8, 16):
            cases.decode(dtype, 128, group)
        cases.decode(dtype, 128, 8, query_len=4)
        cases.decode(dtype, 64, 4, query_len=PREFILL)
        for group in (1, 4):
            cases.decode(dtype, 128, group, columns=SHORT)
            cases.decode(dtype, 128, group, query_len=2, columns=SHORT)
        for layout in ("HND", "KV2", "PACKED"):
            cases.decode(dtype, 128, 4, layout=layout)
        cases.decode(dtype, 128, 1, layout="PACKED")
        for group in (1, 16, 128):
            cases.decode(dtype, 576, group, layout="LATENT")
        cases.decode(dtype, 576, 16, query_len=2, layout="LATENT")
        cases.decode(dtype, 576, 16, layout="LATENT", path="gather")
        cases.decode(dtype, 128, 4, path="gather", window=4096)
        cases.decode(dtype, 128, 4, blocks=1 << 17, also="2 GiB and more")
        for layout in ("NHD", "HND", "KV2", "PACKED"):
            cases.decode(dtype, 64, 4, layout=layout, path="gather")
        for group in (1, 4):
            cases.decode(dtype, 128, group, window=4096, softcap=30.0, sinks=True)
        if half:
            continue
        for group in (1, 4):
            cases.decode(dtype, 128, group, window=4096)
            cases.decode(dtype, 128, group, softcap=30.0)
            cases.decode(dtype, 128, group, sinks=True)
            cases.decode(dtype, 128, group, query_len=2, window=4096, softcap=30.0, sinks=True)
        cases.decode(dtype, 64, 8, window=128, sinks=True)  # gpt-oss
        cases.decode(dtype, 256, 2, window=4096, softcap=50.0)  # Gemma 2
    for q, dtype in (("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")):
        for dim in (64, 128, 256):
            cases.decode(dtype, dim, 4, q=q)
        cases.decode(dtype, 128, 1, q=q)
        cases.decode(dtype, 128, 4, q=q, query_len=2)
        cases.decode(dtype, 576, 16, q=q, layout="LATENT")
    cases.decode("bfloat16", 128, 4, batch=16)
    cases.decode("bfloat16", 128, 4, column_step=2, also="every other column")


def doors(cases: Cases) -> None:
    """Writing, reading, copying and staging rows, by slots and by a table."""
    kinds = [(dtype, dim, heads, layout) for dtype in FLOATS for dim, heads, layout in (
        (64, 3, "NHD"), (128, 8, "NHD"), (128, 8, "HND"), (128, 8, "KV2"), (128, 8, "PACKED"), (576, 1, "LATENT"),
    )]  # fmt: skip
    for dtype, dim, heads, layout in kinds:
        pool = cases.pool(dtype, dim, heads, layout)
        one, other = (WriteLoc.slots(cases.ints(5), physical=True) for _ in range(2))
        words = f"{layout}, {dtype}, D{dim}, {heads} heads"
        for kind in FLOATS if (layout, dim) == ("NHD", 128) else dict.fromkeys((dtype, "float32")):
            with cases.named(words + (f", rows {kind}" if kind != dtype else "")):
                k, v = (cases.floats(kind, 5, heads, d) for d in (dim, pool.geometry.value_dim))
                pool.write(0, one, k, None if layout == "LATENT" else v)
        with cases.named(words):
            pool.read(0, one)
        with cases.named(f"{words}, copied"):
            pool.copy(one, other)
        with cases.named(words):
            host = np.zeros((4, BLOCK, heads, dim), BITS_DTYPE[dtype])
            cases.backend.stage(
                host,
                None if layout == "LATENT" else host,
                pool,
                0,
                src_blocks=[0, 1],
                dst_blocks=[1, 2],
                tokens=20,
                dtype=dtype,
            )
    pool = cases.pool("bfloat16", 128, 8)
    for batch, positions in ((1, (1,)), (3, (3,)), (16, (16,)), (3, (3, 4)), (1, (1, PREFILL))):
        with cases.named(f"{batch} sequences, positions {list(positions)}"):
            table = BlockTable(cases.ints(batch, LONG), physical=True)
            pool.read(0, WriteLoc.paged(table, cases.ints(*positions), table_len=LONG))
    # A part of the fused rows of a projection, as a model writes them, and a single row.
    for rows in (1, 5):
        with cases.named(f"NHD, bfloat16, D128, 8 heads, {rows} rows out of a projection"):
            fused = cases.floats("bfloat16", rows, 48, 128)
            pool.write(0, WriteLoc.slots(cases.ints(rows), physical=True), fused[:, 32:40], fused[:, 40:])


def merges(cases: Cases) -> None:
    """Merging up to eight parts, and more."""
    for dtype in FLOATS:
        for dim in (64, 80, 128, 256, 512):
            for parts in (2, 9) if dim == 128 else (2,):
                with cases.named(f"{dtype}, D{dim}, {parts} parts"):
                    cases.backend.merge_partials(
                        [cases.floats(dtype, 3, 8, dim) for _ in range(parts)],
                        [cases.floats("float32", 3, 8) for _ in range(parts)],
                    )


def row_operations(cases: Cases) -> None:
    """What ``xp`` does over rows of logits of SmolLM2 and of Llama 3, of a hidden size, and of a few columns."""
    xp = cases.backend.xp
    for width in (49152, 128256, 576, 100):
        for rows in (1, 3):
            words = f"[{rows}, {width}]"
            x, column = cases.floats("float32", rows, width), cases.floats("float32", rows, 1)
            with cases.named(words):
                xp.mass_cutoff(x, column)
                xp.gumbel(cases.ints(rows, 1), cases.ints(1, width))
                xp.penalise(x, cases.ints(rows, -(-width // 32)), cases.ints(width), column)
            for dtype in ("float32", "int32"):
                with cases.named(f"{dtype}, {words}"):
                    xp.sum(cases.floats(dtype, rows, width))
            for dtype in FLOATS:
                with cases.named(f"{dtype}, {words}"):
                    xp.argmax(cases.floats(dtype, rows, width))


def dense_operations(cases: Cases) -> None:
    """What ``xp`` does for a step of a decoder beside attention; a kernel that it takes for any of it is compiled as it takes it."""
    xp = cases.backend.xp
    for dtype in FLOATS:
        for rows, hidden, inner, heads, dim in ((3, 576, 1536, 9, 64), (3, 4096, 14336, 32, 128)):
            with cases.named(f"{dtype}, {rows} rows of {hidden}"):
                x = cases.floats(dtype, rows, hidden)
                xp.rms_norm(x, cases.floats(dtype, hidden), 1e-5)
                xp.linear(x, cases.floats(dtype, inner, hidden))
                xp.silu_mul(cases.floats(dtype, rows, inner), cases.floats(dtype, rows, inner))
                angles = cases.floats("float32", rows, dim // 2)
                xp.rope(cases.floats(dtype, rows, heads, dim), angles, angles)


def translations(cases: Cases) -> None:
    """Virtual to physical blocks and slots, of one row and of tables, through a map with any step."""
    for shape in ((16,), (3, LONG)):
        for page_size, kind in ((1, "blocks"), (BLOCK, "slots")):
            for step in (1, 2):
                with cases.named(f"{kind} {list(shape)}, map step {step}"):
                    translate(
                        cases.backend.xp, cases.ints(*shape), cases.ints(1024 * step)[::step], page_size=page_size
                    )


def step_rows(cases: Cases) -> None:
    """What a step asks of its rows: columns of a table of which the last one is the stamp, and any number of stop tokens."""
    xp = cast("StepOperations", cases.backend.xp)
    for rows in (1, 3, 16):
        for stops in (1, 8):
            with cases.named(f"{rows} rows, {stops} stop tokens"):
                position, visible, epoch, limit, token, chosen = (cases.ints(rows) for _ in range(6))
                full, stop = cases.ints(rows, LONG + 1), cases.ints(rows, stops)
                table = full[:, :LONG]
                accepted = xp.accepted_rows(
                    position,
                    visible,
                    epoch,
                    limit,
                    full[:, LONG],
                    table,
                    block_size=BLOCK,
                    first_block=1,
                    num_blocks=512,
                )
                xp.advance_rows(token, position, visible, limit, stop, accepted, chosen)
                xp.digest_rows(table, cases.ints(1, LONG))
                xp.digest_rows(stop, cases.ints(1, stops))


FAMILIES: Final[tuple[Callable[[Cases], None], ...]] = (
    decodes,
    doors,
    merges,
    row_operations,
    dense_operations,
    translations,
    step_rows,
)


def recorded() -> list[Launch]:
    """Every launch of every case, in their order."""
    cases = Cases()
    for family in FAMILIES:
        family(cases)
    return cases.recorder.launches
