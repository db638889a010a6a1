"""KV bytes per second of paged decode against a read ceiling measured in the same run, bfloat16, beside torch's attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from forebay.hardware.h200.part import Result, Task
from forebay.hardware.h200.peers import peers
from forebay.runtime import Settings, open_backend
from forebay.specs import KVGeometry
from forebay.specs.backend import Backend

KV_HEADS: Final = 8
BLOCK: Final = 16
EVICT_BYTES: Final = 1 << 30
"""Read before each call: more than any cache holds. While it is read the host asks for the call, if it is that fast: not checked."""
ROUNDS: Final = 7
SPARE_S: Final = 6.0


@dataclass(frozen=True)
class Size:
    """``batch`` rows of ``context`` tokens."""

    batch: int
    context: int


SIZES: Final = (Size(8, 1_024), Size(16, 4_096), Size(64, 8_192), Size(128, 32_768))
"""8k to 4M tokens."""
DIMS: Final = (64, 128, 256)
GROUPS: Final = (1, 4, 8)
PEERS_AT: Final = (128, 4)
"""Head size and group at which peers are measured: theirs have to be compiled too."""


def run(task: Task) -> Result:
    """One row a size, head size and group; what the time does not allow is counted, and none of it decides anything."""
    sizes, dims, groups = ((Size(2, 24),), (64,), (1, 4)) if task.dry else (SIZES, DIMS, GROUPS)
    planned = [(d, g, size) for size in sizes for d in (sorted(dims, key=lambda d: d != PEERS_AT[0])) for g in groups]
    rows: list[dict[str, Any]] = []
    with open_backend(task.backend, settings=Settings()) as backend:
        ceiling = None if task.dry else read_ceiling()
        data: dict[str, Any] = {"ceiling_gb_s": ceiling, "planned": len(planned), "rows": rows, "kv_heads": KV_HEADS}
        for dim, group, size in planned:
            if task.left_s < SPARE_S:
                break
            try:
                rows += measure(backend, task, dim, group, size, ceiling)
            except (RuntimeError, MemoryError) as error:
                rows.append({"way": "forebay direct", "error": f"{type(error).__name__}: {error}"[:300]})
            task.save("measured", data)
    left = len(planned) - len({(row.get("dim"), row.get("group"), row.get("tokens")) for row in rows})
    problems = [f"not run: time, {left} of {len(planned)} sizes"] if left > 0 else []
    return ("dry" if task.dry else "measured"), data, problems


def measure(
    backend: Backend, task: Task, dim: int, group: int, size: Size, ceiling: float | None
) -> list[dict[str, Any]]:
    """Ours and, at one head size and group, the peers at the same sizes on contiguous memory; blocks are in random order for ours."""
    import torch

    width = -(-size.context // BLOCK)
    blocks = size.batch * width
    geometry = KVGeometry(blocks + 1, BLOCK, KV_HEADS, dim, 1, "bfloat16")
    pool = backend.create_pool(geometry)
    torch.manual_seed(0)
    try:
        table = backend.to_device((torch.randperm(blocks, dtype=torch.int32) + 1).reshape(size.batch, width).numpy())
        visible = backend.to_device(torch.full((size.batch,), size.context, dtype=torch.int32).numpy())
        heads = KV_HEADS * group
        q = backend.to_device(torch.randn(size.batch, heads, dim).numpy(), dtype="bfloat16")

        def ours() -> object:
            return backend.paged_decode(q, pool, 0, table, visible, table_len=width)

        calls: dict[str, Callable[[], object]] = {"forebay direct": ours}
        about: dict[str, Any] = {"dim": dim, "group": group, "batch": size.batch, "tokens": size.batch * size.context}
        rows: list[dict[str, Any]] = []
        if not task.dry and (dim, group) == PEERS_AT:
            ready, absent = peers(size.batch, size.context, KV_HEADS, group, dim)
            calls |= ready
            rows += [about | {"way": name, "error": why} for name, why in absent.items()]
        moved = 2 * size.batch * size.context * KV_HEADS * dim * 2
        for name, call in calls.items():
            if task.dry:
                call()
                rows.append(about | {"way": name, "kv_bytes": moved})
                continue
            try:
                seconds = timed(call)
            except (RuntimeError, MemoryError) as error:
                rows.append(about | {"way": name, "error": f"{type(error).__name__}: {error}"[:300]})
                continue
            rate = moved / statistics.median(seconds) / 1e9
            ratio = None if ceiling is None else rate / ceiling
            row = {"kv_bytes": moved, "median_s": statistics.median(seconds), "best_s": min(seconds), "gb_s": rate}
            rows.append(about | {"way": name} | row | {"to_ceiling": ratio})
        return rows
    finally:
        backend.release(pool)


def timed(call: Callable[[], object]) -> list[float]:
    """Seconds of the device in each round, by its own events, with nothing of the KV in its caches."""
    import torch

    evict = torch.ones(EVICT_BYTES // 4, dtype=torch.float32, device="cuda")
    call()
    call()
    found = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        evict.sum()
        evict.sum()
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return found


def read_ceiling() -> float:
    """GB/s of plain reads of memory far larger than the caches: the best of torch's reductions."""
    import torch

    memory = torch.ones(4 << 30 >> 2, dtype=torch.float32, device="cuda")
    ways: list[Callable[[], object]] = [memory.sum, memory.amax, memory.view(torch.int32).amax]
    return max(memory.nbytes / min(timed(way)) / 1e9 for way in ways)
