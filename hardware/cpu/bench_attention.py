"""Measure paged decode attention on this machine: KV bytes per second against the read ceiling, beside PyTorch's
attention.

``python -m forebay.hardware.cpu.bench_attention [--json FILE]``

Everything is measured in one run, in interleaved rounds, so that a noisy neighbour meets all of it alike; the table
shows the best and the median of the rounds. All KV comes from numpy, as the ceiling's memory does: numpy asks for
huge pages, without which page walks halve every rate. The ceiling is a sum over memory far larger than the caches.
Ratios are to the ceiling on ``--threads`` threads, best to best and median to median.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import numpy.typing as npt

from forebay.runtime import open_backend
from forebay.specs import KVGeometry

if TYPE_CHECKING:
    import torch

REQUIRED: Final = {"float32": 0.6, "bfloat16": 0.42}
"""Share of the ceiling that the direct path must reach at the default geometry."""
_CEILING_BYTES: Final = 512 << 20


@dataclass(frozen=True)
class Geometry:
    """What is attended: ``batch`` sequences of ``context`` tokens in blocks of ``block_size``."""

    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of K and V that one call has to read."""
        return 2 * self.batch * self.context * self.kv_heads * self.head_dim * (4 if dtype == "float32" else 2)


@dataclass
class Measurement:
    """One thing measured: bytes that a call reads, and its seconds in each round."""

    name: str
    dtype: str
    size: int
    call: Callable[[], object] = field(repr=False)
    seconds: list[float] = field(default_factory=list)

    def take(self, evict: Callable[[], object]) -> None:
        """Time one call, after one that is not timed and after ``evict`` has read memory larger than the caches.

        The first gives the threads of whatever ran before time to come to rest (OpenMP's spin for a while), the second leaves
        none of the KV in the caches; and no core falls asleep in between. Every way is treated alike.
        """
        self.call()
        evict()
        start = time.perf_counter()
        self.call()
        self.seconds.append(time.perf_counter() - start)

    @property
    def best(self) -> float:
        """Highest rate of all rounds, GB/s."""
        return self.size / min(self.seconds) / 1e9

    @property
    def median(self) -> float:
        """Median rate, GB/s."""
        return self.size / statistics.median(self.seconds) / 1e9


@cache
def _reader() -> Callable[[npt.NDArray[np.float32]], float]:
    """A plain sum over memory, compiled."""
    import numba

    def read(values: npt.NDArray[np.float32]) -> float:
        total = np.float32(0)
        for i in range(values.size):
            total += values[i]
        return float(total)

    return cast("Callable[..., float]", numba.njit(nogil=True, fastmath=True)(read))


def ceilings(threads: int) -> list[Measurement]:
    """Plain reading of memory on one thread and on ``threads``."""
    memory = np.ones(_CEILING_BYTES // 4, np.float32)
    read = _reader()
    read(memory[:16])
    pool = ThreadPoolExecutor(threads)
    parts = np.array_split(memory, threads)

    def read_all() -> None:
        list(pool.map(read, parts))

    return [
        Measurement("read ceiling, 1 thread", "", memory.nbytes, lambda: read(memory)),
        Measurement(f"read ceiling, {threads} threads", "", memory.nbytes, read_all),
    ]


def _tensor(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """An uninitialised tensor in numpy's memory."""
    import torch

    if dtype == "float32":
        return torch.from_numpy(np.empty(shape, np.float32))
    return torch.from_numpy(np.empty(shape, np.int16)).view(torch.bfloat16)


def attention(geometry: Geometry, dtype: str, backend: Any) -> list[Measurement]:
    """Ours on both paths, PyTorch on contiguous KV, and PyTorch after a gather by the block table, all on equal
    numbers."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    g = geometry
    torch.manual_seed(0)
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    width = -(-g.context // g.block_size)
    blocks = g.batch * width
    k, v = (_tensor((blocks, g.block_size, g.kv_heads, g.head_dim), dtype) for _ in range(2))
    for plane in (k, v):
        for block in plane:  # a block at a time: no second copy of the storage in float32
            block.copy_(torch.randn(block.shape))
    q = torch.randn(g.batch, g.heads, g.head_dim)
    table = torch.randperm(blocks, dtype=torch.int32).reshape(g.batch, width)
    visible = torch.full((g.batch,), g.context, dtype=torch.int32)
    shape = KVGeometry(
        num_blocks=blocks,
        block_size=g.block_size,
        num_kv_heads=g.kv_heads,
        head_dim=g.head_dim,
        num_layers=1,
        dtype=dtype,
    )
    pool = backend.wrap_pool((k, v), layout="NHD", geometry=shape)
    queries = q.to(kind).reshape(g.batch, g.kv_heads, g.heads // g.kv_heads, g.head_dim)

    def gathered() -> list[torch.Tensor]:
        flat = table.flatten()
        rows = (plane.index_select(0, flat).reshape(g.batch, -1, g.kv_heads, g.head_dim) for plane in (k, v))
        return [plane[:, : g.context].transpose(1, 2) for plane in rows]

    contiguous = [_tensor((g.batch, g.kv_heads, g.context, g.head_dim), dtype).copy_(rows) for rows in gathered()]

    def ours(path: str) -> torch.Tensor:
        return cast("torch.Tensor", backend.paged_decode(q, pool, 0, table, visible, table_len=width, path=path))

    # One KV head's group of query heads is a group of queries to it: faster on CPU than enable_gqa.
    def sdpa(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(queries, keys, values)

    want = sdpa(*contiguous).reshape(q.shape).float()
    for path in ("direct", "gather"):
        error = float((ours(path) - want).abs().max())
        if error > 0.02:
            raise RuntimeError(
                f"{dtype} {path}: differs from PyTorch by {error}; a rate of wrong results means nothing"
            )
    size = g.kv_bytes(dtype)
    return [
        Measurement("forebay direct", dtype, size, lambda: ours("direct")),
        Measurement("forebay gather", dtype, size, lambda: ours("gather")),
        Measurement("torch SDPA, contiguous KV", dtype, size, lambda: sdpa(*contiguous)),
        Measurement("gather + torch SDPA", dtype, size, lambda: sdpa(*gathered())),
    ]


def report(measurements: list[Measurement], geometry: Geometry, rounds: int, threads: int) -> dict[str, Any]:
    """Everything a reader needs to judge the run, as plain data."""
    ceiling = measurements[1]
    return {
        "geometry": asdict(geometry),
        "rounds": rounds,
        "threads": threads,
        "machine": {"cpu": _cpu_name(), "cpus": os.cpu_count(), "load_average": os.getloadavg()},
        "versions": {name: version(name) for name in ("forebay", "numba", "numpy", "torch")},
        "results": [
            {
                "name": m.name,
                "dtype": m.dtype,
                "bytes": m.size,
                "best_gb_s": m.best,
                "median_gb_s": m.median,
                "best_to_ceiling": m.best / ceiling.best,
                "median_to_ceiling": m.median / ceiling.median,
                "seconds": m.seconds,
            }
            for m in measurements
        ],
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def show(data: dict[str, Any]) -> None:
    """Print the results as a table."""
    g, machine = data["geometry"], data["machine"]
    print(f"{machine['cpu']}, {machine['cpus']} CPUs, load {machine['load_average'][0]:.1f}, {data['rounds']} rounds")
    print(
        f"{g['batch']} x {g['context']} tokens, {g['heads']} query / {g['kv_heads']} KV heads, D {g['head_dim']}, "
        f"blocks of {g['block_size']}, {data['threads']} threads"
    )
    print(f"{'':27} {'dtype':9} {'best GB/s':>10} {'ratio':>6} {'median':>8} {'ratio':>6}")
    for r in data["results"]:
        print(
            f"{r['name']:27} {r['dtype']:9} {r['best_gb_s']:10.1f} {r['best_to_ceiling']:6.2f} "
            f"{r['median_gb_s']:8.1f} {r['median_to_ceiling']:6.2f}"
        )


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_attention", description=(__doc__ or "").splitlines()[0])
    for name, default in (
        ("batch", 8),
        ("context", 4096),
        ("heads", 32),
        ("kv-heads", 8),
        ("head-dim", 128),
        ("block-size", 16),
        ("rounds", 10),
        ("threads", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--require", action="store_true", help=f"exit with 1 if the direct path is below {REQUIRED}")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the record; returns the exit code."""
    a = _arguments(argv)
    geometry = Geometry(a.batch, a.context, a.heads, a.kv_heads, a.head_dim, a.block_size)
    with open_backend("cpu", threads=a.threads) as backend:
        measurements = ceilings(a.threads)
        for dtype in REQUIRED:
            measurements += attention(geometry, dtype, backend)
        for _ in range(a.rounds):
            for measurement in measurements:
                measurement.take(measurements[1].call)
    data = report(measurements, geometry, a.rounds, a.threads)
    show(data)
    if a.json:
        a.json.write_text(json.dumps(data, indent=1), encoding="utf-8")
    slow = [
        f"{r['dtype']}: {r['best_to_ceiling']:.2f} of the ceiling, required {REQUIRED[r['dtype']]}"
        for r in data["results"]
        if r["name"] == "forebay direct" and r["best_to_ceiling"] < REQUIRED[r["dtype"]]
    ]
    if a.require and slow:
        print("; ".join(slow), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
