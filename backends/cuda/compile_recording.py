"""A backend without a device whose launches are written down: what the cases of the ahead-of-time gate are made with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from forebay.backends.torch_shared.namespace import TORCH_DTYPE
from forebay.specs.attention import AttentionParams
from forebay.specs.backend import Backend
from forebay.specs.descriptor import Selection
from forebay.specs.geometry import KVGeometry
from forebay.specs.pool import Pool
from forebay.specs.write_loc import BlockTable

from .driver import CudaDriver
from .platform import Event, Graph

BLOCK: Final = 16
"""Tokens of a block in the cases."""
LONG: Final = 256
"""Table columns of rows that may have several splits."""
SHORT: Final = 8
"""Table columns of rows of one split."""


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
