"""The launches of the used configurations: the backend's own operations on tensors without data, on a platform that writes down.

Every case calls what a user calls (pools, attention, staging, ``xp``), so that wrappers and driver decide by themselves what is
launched with which tiles, strides and constants. Only what the backend does not launch yet is called by its wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from forebay.backends.torch_shared.namespace import TORCH_DTYPE
from forebay.kernels.triton import translate
from forebay.specs.attention import AttentionParams
from forebay.specs.backend import Backend
from forebay.specs.descriptor import Selection
from forebay.specs.geometry import KVGeometry
from forebay.specs.pool import Pool
from forebay.specs.write_loc import BlockTable, WriteLoc

from .driver import CudaDriver
from .platform import Event, Graph

FLOATS: Final = ("float32", "bfloat16", "float16")
BLOCK: Final = 16
"""Tokens of a block in the cases."""
LONG: Final = 256
"""Table columns of rows that may have several splits."""
SHORT: Final = 8
"""Table columns of rows of one split."""
PREFILL: Final = 64
"""Queries of a prefill: several query blocks a row."""


@dataclass(frozen=True)
class Launch:
    """One launch that a case made: the kernel, its grid and arguments, and in words what configuration it belongs to."""

    case: str
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.fn.__name__)


class Written:
    """A place in no order: nothing is done, so everything has been."""

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Wait for nothing."""


class Recorder:
    """A platform whose tensors have no data and whose launches are written down and not done."""

    def __init__(self) -> None:
        self.case = ""
        self.launches: list[Launch] = []

    def owns(self, x: Tensor) -> bool:
        """Tensors without data."""
        return bool(x.is_meta)

    def memory_of(self, x: Tensor) -> int:
        """That of its storage object, as there are no addresses."""
        return int(x.untyped_storage()._cdata)  # noqa: SLF001  (its only identity where there is no memory)

    def address_of(self, x: Tensor) -> int:
        """Bytes from the start of its storage."""
        return x.data_ptr()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Sizes and strides."""
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def pinned(self, size: int) -> Tensor:
        """Plain memory."""
        return torch.empty(size, dtype=torch.uint8)

    def adopt(self, x: object, dtype: torch.dtype) -> Tensor | None:
        """No foreign memory."""
        return None

    def forget(self, x: Tensor) -> None:
        """Nothing was kept."""

    def settle(self) -> None:
        """Nothing was asked for."""

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Write it down."""
        if 0 not in grid:
            self.launches.append(Launch(self.case, kernel, grid, args, constants))

    def event(self) -> Event:
        """One that is done."""
        return Written()

    def synchronize(self) -> None:
        """Nothing was asked for."""

    def capture(self) -> AbstractContextManager[Graph]:
        """Refuse.

        Raises:
            RuntimeError: always; launches are the same inside a graph as outside.
        """
        raise RuntimeError("the platform that records launches captures no graph")

    def lost(self, error: BaseException) -> bool:
        """Never."""
        return False

    def describe(self) -> Mapping[str, Any]:
        """What it is."""
        return {"device": "none: launches are recorded to be compiled"}

    def close(self) -> None:
        """Nothing was opened."""


class Cases:
    """A backend over a :class:`Recorder`, and what the cases ask of it."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        driver = CudaDriver(self.recorder, interpreted=False)
        self.backend = Backend(driver, Selection(name="cuda", mode="", kind="accelerator"))

    @contextmanager
    def named(self, words: str) -> Iterator[None]:
        """Launches inside belong to the configuration ``words``."""
        self.recorder.case = words
        yield
        self.recorder.case = ""

    def floats(self, dtype: str, *shape: int) -> Tensor:
        """A tensor of the platform."""
        return torch.empty(shape, dtype=TORCH_DTYPE[dtype], device="meta")

    def ints(self, *shape: int) -> Tensor:
        """int32 of the platform."""
        return self.floats("int32", *shape)

    def pool(self, dtype: str, dim: int, kv_heads: int, layout: str = "NHD", *, blocks: int = 1024) -> Pool:
        """A pool without data; LATENT keeps 512 of 576 columns as values."""
        latent = layout == "LATENT"
        geometry = KVGeometry(
            num_blocks=blocks,
            block_size=BLOCK,
            num_kv_heads=kv_heads,
            head_dim=dim,
            dtype=dtype,
            value_head_dim=dim * 8 // 9 if latent else None,
        )
        return self.backend.create_pool(geometry, layout)

    def decode(
        self,
        dtype: str,
        dim: int,
        group: int,
        *,
        query_len: int = 1,
        kv_heads: int = 8,
        layout: str = "NHD",
        q: str | None = None,
        path: str = "direct",
        columns: int = LONG,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        batch: int = 3,
        blocks: int = 1024,
        column_step: int = 1,
        also: str = "",
    ) -> None:
        """One attention, named by what it is given."""
        kv_heads = 1 if layout == "LATENT" else kv_heads
        words = [layout, dtype, f"D{dim}", f"{group * kv_heads}/{kv_heads} heads", f"T{query_len}"]
        words += [f"q {q}"] if q not in (None, dtype) else []
        words += ["one split"] if columns == SHORT else []
        words += [path] if path != "direct" else []
        words += [what for what, on in (("window", window), ("softcap", softcap), ("sinks", sinks)) if on]
        words += [also] if also else []
        with self.named(", ".join(words)):
            self.backend.paged_decode(
                self.floats(q or dtype, batch, query_len, group * kv_heads, dim),
                self.pool(dtype, dim, kv_heads, layout, blocks=blocks),
                0,
                BlockTable(self.ints(batch, columns * column_step)[:, ::column_step], physical=True),
                self.ints(batch),
                table_len=columns,
                params=AttentionParams(
                    window=window, softcap=softcap, sinks=self.floats("float32", group * kv_heads) if sinks else None
                ),
                path=path,
                return_lse=True,
            )


def decodes(cases: Cases) -> None:
    """Attention: dtypes, head sizes, groups, queries, layouts, paths, and what a score may go through."""
    cases.decode("float32", 64, 3, kv_heads=3, batch=1)  # SmolLM2-135M, one sequence and a batch, and its prefill
    cases.decode("float32", 64, 3, kv_heads=3, batch=1, columns=SHORT)
    cases.decode("float32", 64, 3, kv_heads=3, batch=1, query_len=PREFILL)
    for dtype in FLOATS:
        for dim in (64, 80, 96, 128, 192, 256):
            for group in (1, 4):
                for query_len in (1, 2):
                    cases.decode(dtype, dim, group, query_len=query_len)
        for dim in (64, 128):
            for group in (3, 8, 16):
                cases.decode(dtype, dim, group)
            cases.decode(dtype, dim, 8, query_len=4)
            cases.decode(dtype, dim, 4, query_len=PREFILL)
            for group in (1, 4):
                for query_len in (1, 2):
                    cases.decode(dtype, dim, group, query_len=query_len, columns=SHORT)
        for group in (1, 4):
            for layout in ("HND", "KV2", "PACKED"):
                cases.decode(dtype, 128, group, layout=layout)
            cases.decode(dtype, 128, group, window=4096)
            cases.decode(dtype, 128, group, softcap=30.0)
            cases.decode(dtype, 128, group, sinks=True)
            cases.decode(dtype, 128, group, window=4096, softcap=30.0, sinks=True)
            cases.decode(dtype, 128, group, query_len=2, window=4096, softcap=30.0, sinks=True)
        cases.decode(dtype, 64, 8, window=128, sinks=True)  # gpt-oss
        cases.decode(dtype, 256, 2, window=4096, softcap=50.0)  # Gemma 2
        for group in (1, 16, 128):
            for query_len in (1, 2):
                cases.decode(dtype, 576, group, query_len=query_len, layout="LATENT")
        for layout in ("NHD", "HND", "KV2", "PACKED"):
            cases.decode(dtype, 64, 4, layout=layout, path="gather")
        cases.decode(dtype, 576, 16, layout="LATENT", path="gather")
        cases.decode(dtype, 128, 4, path="gather", window=4096)
        cases.decode(dtype, 128, 4, blocks=1 << 17, also="2 GiB and more")
    for q, dtype in (("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")):
        for dim in (64, 128, 256):
            for group in (1, 4):
                cases.decode(dtype, dim, group, q=q)
        cases.decode(dtype, 128, 4, q=q, query_len=2)
        cases.decode(dtype, 576, 16, q=q, layout="LATENT")
    cases.decode("bfloat16", 128, 4, batch=16)
    cases.decode("bfloat16", 128, 4, column_step=2, also="every other column")


def doors(cases: Cases) -> None:
    """Writing, reading, copying and staging rows, by slots and by a table."""
    kinds = [(dtype, dim, heads, layout) for dtype in FLOATS for dim, heads, layout in (
        (64, 3, "NHD"), (128, 8, "NHD"), (80, 8, "NHD"), (128, 8, "HND"), (128, 8, "KV2"), (128, 8, "PACKED"), (576, 1, "LATENT"),
    )]  # fmt: skip
    for dtype, dim, heads, layout in kinds:
        pool = cases.pool(dtype, dim, heads, layout)
        one, other = (WriteLoc.slots(cases.ints(5), physical=True) for _ in range(2))
        words = f"{layout}, {dtype}, D{dim}, {heads} heads"
        for rows in FLOATS if layout in ("NHD", "LATENT") else (dtype,):
            with cases.named(words + (f", rows {rows}" if rows != dtype else "")):
                k, v = (cases.floats(rows, 5, heads, d) for d in (dim, pool.geometry.value_dim))
                pool.write(0, one, k, None if layout == "LATENT" else v)
        with cases.named(words):
            pool.read(0, one)
        with cases.named(f"{words}, copied"):
            pool.copy(one, other)
        with cases.named(words):
            host = [
                np.zeros((4, BLOCK, heads, d), np.float32 if dtype == "float32" else np.uint16 if dtype == "bfloat16" else np.float16)
                for d in (dim, dim)
            ]  # fmt: skip
            cases.backend.stage(
                host[0],
                None if layout == "LATENT" else host[1],
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
        for dim in (64, 80, 96, 128, 192, 256, 512):
            for parts in (2, 9) if dim in (64, 128) else (2,):
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
    for ids in (torch.int32, torch.int64):
        for shape in ((16,), (3, LONG)):
            for block_size in (None, BLOCK):
                for step in (1, 2):
                    kind = "blocks" if block_size is None else "slots"
                    with cases.named(f"{str(ids).removeprefix('torch.')} {kind} {list(shape)}, map step {step}"):
                        translate.translate(
                            torch.empty(shape, dtype=ids, device="meta"),
                            cases.ints(1024 * step)[::step],
                            cases.ints(*shape),
                            cases.ints(1),
                            num_blocks=512,
                            block_size=block_size,
                            launch=cases.recorder.launch,
                        )


FAMILIES: Final[tuple[Callable[[Cases], None], ...]] = (
    decodes,
    doors,
    merges,
    row_operations,
    dense_operations,
    translations,
)


def recorded() -> list[Launch]:
    """Every launch of every case, in their order."""
    cases = Cases()
    for family in FAMILIES:
        family(cases)
    return cases.recorder.launches
