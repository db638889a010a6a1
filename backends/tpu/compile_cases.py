"""The used configurations of the driver's operations, as its own compiled functions of arrays without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import jax
import jax.numpy as jnp

from forebay.kernels.pallas.pages import LANES, MOST_SCALARS, PageFormat
from forebay.specs.dtypes import ITEMSIZE
from forebay.specs.geometry import fused_lanes

from . import calls

LAYER_BYTES: Final = 192 << 20
"""Of a layer of a pool, at least: more than the vector memory of any chip, where a copy of a smaller one would not be seen."""
ROWS: Final = 8
"""Sequences of a decode."""
COLUMNS: Final = 64
"""Columns of a table that are blocks; one more holds the stamp."""
Arrays = Callable[..., jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        kernel: the operation's name.
        configuration: in words.
        compile: gives its ``jax.stages.Compiled`` for a device.
        layer: elements of a layer of a pool that it is given; layer_bytes: its bytes; 0 where there is none.
        passes: bytes of what it is meant to hold in between: gathered pages, and results with lanes of nobody.
        beside: bytes of rows on their way through it; None: of the arguments that are no layer.
        kernels: Pallas kernels that it is to consist of.
        judged: whether it must compile and copy nothing; False for code that is not ours.
    """

    kernel: str
    configuration: str
    compile: Callable[[Any], Any]
    layer: int = 0
    layer_bytes: int = 0
    passes: int = 0
    beside: int | None = None
    kernels: int = 0
    judged: bool = True


@dataclass(frozen=True)
class Stored:
    """A pool's layer: its layout, dtype and sizes; ``width`` is D, ``values`` Dv in LATENT."""

    dtype: str
    width: int
    heads: int = 8
    block_size: int = 16
    values: int | None = None

    @property
    def latent(self) -> bool:
        """Whether it is LATENT; else FUSED."""
        return self.values is not None

    @property
    def lanes(self) -> int:
        """Of its last axis."""
        return self.width if self.latent else fused_lanes(self.width)

    @property
    def blocks(self) -> int:
        """As many as take LAYER_BYTES."""
        return -(-LAYER_BYTES // (self.heads * self.block_size * self.lanes * ITEMSIZE[self.dtype]))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the storage."""
        by_layout = (self.block_size, 1) if self.latent else (self.heads, self.block_size)
        return self.blocks, *by_layout, self.lanes

    @property
    def nbytes(self) -> int:
        """Of a layer."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def store(self) -> calls.Store:
        """As the driver describes it."""
        values = self.width if self.values is None else self.values
        form = PageFormat(self.lanes, self.width, 0 if self.latent else self.width, values)
        return calls.Store(form, self.latent, 1)

    @property
    def words(self) -> str:
        """For a configuration."""
        sizes = f"LATENT {self.width}/{self.values}" if self.latent else f"FUSED D{self.width}, {self.heads} KV heads"
        return f"{sizes}, {self.dtype}, blocks of {self.block_size}"


def arrays_for(device: Any) -> Arrays:
    """Makes arrays without data on a device, from a shape and a dtype."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


class Cases:
    """Collects cases."""

    def __init__(self) -> None:
        self.found: list[Case] = []

    def add(
        self,
        function: Callable[..., Any],
        words: str,
        given: Callable[[Arrays], tuple[Any, ...]],
        sizes: Mapping[str, Any],
        stored: Stored | None = None,
        **more: Any,
    ) -> None:
        """One function of :mod:`.calls`, jitted as the driver does it, on what ``given`` makes."""

        def compile_for(device: Any) -> Any:
            return calls.lowered(function, tuple(sizes.items()), *given(arrays_for(device))).compile()

        pool: Any = {} if stored is None else {"layer": prod(stored.shape), "layer_bytes": stored.nbytes}
        self.found.append(Case(function.__name__, words, compile_for, **pool, **more))

    def decode(
        self,
        stored: Stored,
        group: int,
        *,
        query_len: int = 1,
        q: str | None = None,
        rows: int = ROWS,
        columns: int = COLUMNS,
        path: str = "direct",
        sinks: bool = False,
        capped: bool = False,
    ) -> None:
        """Attention; a window is an operand, so every case may have one."""
        heads, kind = stored.heads * group, q or stored.dtype

        def given(array: Arrays) -> tuple[Any, ...]:
            return (
                array(stored.shape, stored.dtype),
                array((1,), "int32"),
                array((rows, query_len, heads, stored.width), kind),
                array((rows, columns + 1), "int32"),
                array((rows,), "int32"),
                array((heads,), "float32") if sinks else None,
                array((), "float32"),
                array((), "int32"),
                array((), "float32") if capped else None,
            )

        extras = [
            f"q {q}" if q else "",
            "sinks" if sinks else "",
            "soft-cap" if capped else "",
            path if path != "direct" else "",
        ]
        words = f"{stored.words}, G {group}, T {query_len}, table {rows} x {columns}"
        words = ", ".join([words, *(extra for extra in extras if extra)])
        page = prod(stored.shape[1:]) * ITEMSIZE[stored.dtype]
        sizes = {"store": stored.store, "table_len": columns, "path": path, "by": "pallas", "interpret": False}
        passes = rows * columns * page if path == "gather" else 0
        passes += rows * query_len * heads * LANES * 4  # the kernel's LSE, in every lane
        self.add(calls.attend, words, given, sizes, stored, passes=passes, kernels=1)


KINDS: Final = ("float32", "bfloat16")
FUSED: Final = (32, 64, 80, 96, 128, 256)
LATENT: Final = ((576, 512), (320, 256), (48, 32))
SMOLLM2: Final = Stored("float32", 64, 3)


def decodes(cases: Cases) -> None:
    """Attention: dtypes, head sizes, groups, queries, block sizes, tables, and what a score may go through."""
    cases.decode(SMOLLM2, 3, rows=1)
    cases.decode(SMOLLM2, 3)
    cases.decode(SMOLLM2, 3, rows=1, query_len=64)
    for dtype in KINDS:
        other = KINDS[1 - KINDS.index(dtype)]
        for width in FUSED:
            cases.decode(Stored(dtype, width), 4)
        for width in (64, 80, 256):
            cases.decode(Stored(dtype, width), 4, query_len=4)
        for width in (80, 128):
            cases.decode(Stored(dtype, width), 4, path="gather")
        cases.decode(Stored(dtype, 128), 1)
        for group in (3, 8, 16) if dtype == "bfloat16" else (16,):
            cases.decode(Stored(dtype, 128), group)
        for heads in (1, 32):
            cases.decode(Stored(dtype, 128, heads), 1)
        cases.decode(Stored(dtype, 256, 32), 1)
        for query_len, group in ((64, 1), (64, 8), (256, 8)):
            cases.decode(Stored(dtype, 128), group, query_len=query_len, rows=1)
        for size in (2, 4, 8, 32, 64, 128):
            cases.decode(Stored(dtype, 128, block_size=size), 4)
        for width, values in LATENT:
            stored = Stored(dtype, width, 1, values=values)
            cases.decode(stored, 16, query_len=4 if width == 320 else 1)
        for group in (1, 128):
            cases.decode(Stored(dtype, 576, 1, values=512), group)
        cases.decode(Stored(dtype, 576, 1, values=512), 16, path="gather")
        cases.decode(Stored(dtype, 576, 1, 4, 512), 16)
        cases.decode(Stored(dtype, 128, 32, 4), 1, query_len=4)
        cases.decode(Stored(dtype, 128), 4, query_len=4, sinks=True, capped=True)
        cases.decode(Stored(dtype, 128), 1, sinks=True, capped=True)
        cases.decode(Stored(dtype, 64), 8, sinks=True)  # gpt-oss
        cases.decode(Stored(dtype, 64), 4, q=other)
        cases.decode(Stored(dtype, 128), 4, q=other, query_len=4)
        cases.decode(Stored(dtype, 576, 1, values=512), 16, q=other)
        cases.decode(Stored(dtype, 128), 4, q="float16")
    for rows in (1, 256, MOST_SCALARS // 4):  # the largest tables that scalar memory holds, in any shape
        cases.decode(Stored("bfloat16", 128, 1), 1, rows=rows, columns=MOST_SCALARS // rows - 1)


def doors(cases: Cases) -> None:
    """Writing, reading, copying and staging rows."""
    kinds = [Stored(dtype, width) for dtype in KINDS for width in (80, 128)]
    kinds += [Stored(dtype, 576, 1, values=512) for dtype in KINDS]
    kinds += [Stored("bfloat16", 128, 8, 2), Stored("bfloat16", 64, 3, 8), Stored("bfloat16", 320, 1, values=256)]
    kinds += [SMOLLM2, Stored("float32", 32), Stored("bfloat16", 256, 1)]
    for stored in dict.fromkeys(kinds):
        _door(cases, stored)


def _door(cases: Cases, stored: Stored) -> None:
    values = stored.width if stored.values is None else stored.values
    slots, paged = calls.Where(None), calls.Where(COLUMNS)

    def pool(array: Arrays) -> tuple[Any, Any]:
        return array(stored.shape, stored.dtype), array((1,), "int32")

    def by_slots(array: Arrays, n: int) -> tuple[Any, ...]:
        return (array((n,), "int32"),)

    def by_table(array: Arrays, n: int) -> tuple[Any, ...]:
        return array((n, COLUMNS + 1), "int32"), array((n,), "int32")

    def rows(array: Arrays, n: int, kind: str) -> tuple[Any, Any]:
        k, v = (array((n, stored.heads, width), kind) for width in (stored.width, values))
        return k, None if stored.latent else v

    store = {"store": stored.store}
    for n, kind in ((ROWS, stored.dtype), (256, "float32"))[: 2 if stored.width == 128 else 1]:
        cases.add(
            calls.write,
            f"{stored.words}, {n} rows {kind} by slots",
            lambda array, n=n, kind=kind: (*pool(array), by_slots(array, n), *rows(array, n, kind)),  # type: ignore[misc]
            {**store, "where": slots},
            stored,
        )
    cases.add(
        calls.write,
        f"{stored.words}, {ROWS} rows by a table",
        lambda array: (*pool(array), by_table(array, ROWS), *rows(array, ROWS, stored.dtype)),
        {**store, "where": paged},
        stored,
    )
    cases.add(
        calls.read,
        f"{stored.words}, {ROWS} rows by a table",
        lambda array: (*pool(array), by_table(array, ROWS)),
        {**store, "where": paged},
        stored,
    )
    cases.add(
        calls.copy,
        f"{stored.words}, {ROWS} rows of 2 layers",
        lambda array: (
            (pool(array)[0],) * 2,
            array((1,), "int32"),
            by_slots(array, ROWS),
            by_slots(array, ROWS),
        ),
        {**store, "from_where": slots, "to_where": slots},
        stored,
    )
    cases.add(
        calls.stage,
        f"{stored.words}, 4 blocks",
        lambda array: (
            pool(array)[0],
            array((4, stored.heads, stored.block_size, stored.lanes), stored.dtype),
            array((4,), "int32"),
            array((4,), "int32"),
        ),
        store,
        stored,
    )


def others(cases: Cases) -> None:
    """Merging parts, and rows of a Buffer."""
    for dtype in KINDS:
        for width, parts in ((64, 2), (80, 2), (512, 9)):
            cases.add(
                calls.merge,
                f"{dtype}, D{width}, {parts} parts",
                lambda array, dtype=dtype, width=width, parts=parts: (  # type: ignore[misc]
                    (array((ROWS, 1, 32, width), dtype),) * parts,
                    (array((ROWS, 1, 32), "float32"),) * parts,
                ),
                {},
            )
    for shape, dtype in (((ROWS, COLUMNS + 1), "int32"), ((ROWS,), "int32"), ((8192, 4096), "float32")):
        cases.add(
            calls.set_rows,
            f"{dtype} {list(shape)}, one row",
            lambda array, shape=shape, dtype=dtype: (  # type: ignore[misc]
                array(shape, dtype),
                array((1, *shape[1:]), dtype),
                array((), "int32"),
            ),
            {},
        )


def cases() -> list[Case]:
    """Every case, in order."""
    made = Cases()
    for family in (decodes, doors, others):
        family(made)
    return made.found
