"""What paged decode loads, counted in the interpreter: ``python -m tests.kernels_triton.traffic`` writes the table of it.

Tiles are those of devices. The ratio is bytes of keys and values over those that the queries see, ``2 * visible * Hkv * D * itemsize``
(LATENT keeps the values in its keys: ``visible * (Dc + Dr) * itemsize``); partial results and tables stand beside it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, where this file is the program

import torch

from forebay.kernels.triton.decode_config import decode_tiles, most_rows
from forebay.kernels.triton.interpreter import mend
from forebay.kernels.triton.launching import cdiv
from tests.kernels_triton.cases import Case, make
from tests.kernels_triton.loads import counted

TABLE: Final = Path(__file__).parents[1] / "records" / "triton_traffic.md"
VISIBLE: Final = 1100
KV_HEADS: Final = 2
MOST: Final = 1.02


@dataclass(frozen=True)
class Configuration:
    """One kind of decode."""

    layout: str
    dtype: torch.dtype
    group: int
    dim: int
    query_len: int = 1
    block_size: int = 16
    window: int | None = None

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        size = f"{self.dim}/{self.value_dim}" if self.layout == "LATENT" else f"{self.dim}"
        window = f", window {self.window}" if self.window else ""
        return f"{self.layout} {name}, G {self.group}, D {size}, T {self.query_len}, block {self.block_size}{window}"

    @property
    def value_dim(self) -> int:
        """Of a latent row, what is no rotary part."""
        return self.dim - 64 if self.layout == "LATENT" else self.dim


@dataclass(frozen=True)
class Traffic:
    """Bytes loaded: of keys and values, of those the least that can be, of partial results, of tables and lengths."""

    kv: int
    least: int
    partials: int
    tables: int

    @property
    def ratio(self) -> float:
        """Keys and values over the least."""
        return self.kv / self.least


CONFIGURATIONS: Final = (
    *(
        Configuration("NHD", dtype, group, 64)
        for dtype in (torch.float32, torch.bfloat16)
        for group in (1, 3, 4, 8, 16)
    ),
    *(Configuration("HND", torch.bfloat16, group, dim) for dim in (128, 256) for group in (1, 4, 8)),
    *(Configuration("KV2", torch.float16, 4, dim, block_size=32) for dim in (80, 96, 128)),
    Configuration("PACKED", torch.bfloat16, 8, 128),
    *(Configuration("LATENT", torch.bfloat16, group, 576) for group in (16, 32, 64, 128)),
    Configuration("LATENT", torch.float32, 32, 576),
    *(Configuration("NHD", torch.bfloat16, group, 128) for group in (32, 64)),
    Configuration("NHD", torch.bfloat16, 32, 256),
    *(Configuration("NHD", torch.float32, 32, dim) for dim in (64, 128, 256)),
    *(Configuration("NHD", torch.bfloat16, group, 64, query_len=t) for group, t in ((8, 8), (16, 4))),
    *(Configuration("NHD", torch.bfloat16, group, 128, query_len=t) for group, t in ((4, 4), (4, 8), (8, 8), (16, 4))),
    *(Configuration("NHD", torch.bfloat16, group, 256, query_len=t) for group, t in ((4, 4), (4, 8), (8, 8))),
    *(Configuration("NHD", torch.float32, 4, dim, query_len=t) for dim in (64, 128) for t in (4, 8)),
    Configuration("NHD", torch.bfloat16, 4, 128, window=1030),
)

ABOVE: Final = tuple(
    made
    for made in CONFIGURATIONS
    if made.group * made.query_len
    > most_rows(max(made.dim, made.value_dim), low=made.dtype != torch.float32, queries=made.query_len)
)
"""Those of more rows a KV head than registers hold without spills on all devices: keys and values are loaded once a query block."""


def query_blocks(made: Configuration) -> int:
    """How often keys and values are loaded."""
    return cdiv(made.group * made.query_len, case_of(made).tiles.block_m)


def case_of(made: Configuration) -> Case:
    """One row of :data:`VISIBLE` keys, in the tiles of a device."""
    case = make(
        (VISIBLE,),
        group=made.group,
        kv_heads=KV_HEADS,
        dim=made.dim,
        value_dim=made.value_dim,
        block_size=made.block_size,
        query_len=made.query_len,
        q_dtype=made.dtype,
        dtype=made.dtype,
        layout=made.layout,
        window=made.window,
    )
    tiles = decode_tiles(made.dtype, made.dtype, made.group, made.query_len, made.dim, made.value_dim)
    return case.with_tiles(**vars(tiles))


def traffic(made: Configuration) -> Traffic:
    """Count one call."""
    case = case_of(made)
    tensors = {"k": case.k, "table": case.table, "q": case.q, "visible": case.visible}
    if made.layout in ("NHD", "HND"):
        tensors["v"] = case.v
    with counted(**tensors) as loads:
        case.run()
    seen = VISIBLE if made.window is None else min(VISIBLE, made.window + made.query_len - 1)
    row = made.dim if made.layout == "LATENT" else 2 * KV_HEADS * made.dim
    return Traffic(
        loads.bytes["k"] + loads.bytes.get("v", 0),
        seen * row * made.dtype.itemsize,
        loads.bytes["elsewhere"],
        loads.bytes["table"] + loads.bytes["visible"],
    )


def page() -> str:
    """The table."""
    lines = [
        "# Bytes that paged decode loads",
        "",
        f"One row of {VISIBLE} visible keys, {KV_HEADS} KV heads (LATENT: 1), tiles of devices, counted in Triton's interpreter:",
        "`python -m tests.kernels_triton.traffic`. Not run on hardware.",
        "",
        "Where a KV head has more query rows than a program holds without spilling registers on every device, the ratio is the number",
        "of query blocks, which stands behind it.",
        "",
        "| configuration | KV bytes | over the visible ones | partial results | tables |",
        "|---|---|---|---|---|",
    ]
    for made in CONFIGURATIONS:
        found = traffic(made)
        blocks = f" ({query_blocks(made)} query blocks)" if made in ABOVE else ""
        lines.append(f"| {made} | {found.kv} | {found.ratio:.3f}{blocks} | {found.partials} | {found.tables} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    mend()
    TABLE.write_text(page(), encoding="utf-8")
    print(TABLE.read_text(encoding="utf-8"))
