"""KV bytes per second of paged decode against a read ceiling measured in the same run, bfloat16, beside others' attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from forebay.hardware.checking.part import Result, Task
from forebay.runtime import Settings, open_backend
from forebay.specs import KVGeometry
from forebay.specs.backend import Backend
from forebay.specs.dtypes import Array
from forebay.specs.pool import Pool

KV_HEADS: Final = 8
BLOCK: Final = 16
SPARE_S: Final = 6.0
DIMS: Final = (64, 128, 256)
FIRST_DIM: Final = 128
"""Measured before the others at each size."""
GROUPS: Final = (1, 4, 8)
ERRORS: Final = (RuntimeError, MemoryError, ValueError, NotImplementedError)
"""By which a device or a backend refuses, or has no room."""


@dataclass(frozen=True)
class Size:
    """``batch`` rows of ``context`` tokens."""

    batch: int
    context: int


@dataclass(frozen=True)
class Decode:
    """One paged decode to measure: rows have their blocks in random order."""

    backend: Backend
    pool: Pool
    q: Array
    table: Array
    visible: Array
    width: int

    def attend(self, q: Array) -> Array:
        """Attention of ``q [B, Hq, D]`` over everything."""
        out: Array = self.backend.paged_decode(q, self.pool, 0, self.table, self.visible, table_len=self.width)
        return out


Call = Callable[[], object]
"""What is timed."""


@dataclass(frozen=True)
class Ways:
    """How a kind of device measures.

    Attributes:
        sizes: from small to large.
        ours: makes of a Decode what is timed, and frees what that holds.
        seconds: times a call, a number a round; seconds of one attention.
        ceiling: GB/s of plain reads of so many bytes.
        peers: of size, group and head size the others by name, each to be made when it is its turn, and why some are absent.
    """

    sizes: Sequence[Size]
    ours: Callable[[Decode], AbstractContextManager[Call]]
    seconds: Callable[[Call], list[float]]
    ceiling: Callable[[int], float]
    peers: Callable[[Size, int, int], tuple[Mapping[str, Callable[[], Call]], Mapping[str, str]]]


def measure_all(task: Task, ways: Ways) -> Result:
    """One row a size, head size and group; what the time does not allow is counted, and none of it decides anything."""
    sizes, dims, groups = ((Size(2, 24),), (64,), (1, 4)) if task.dry else (ways.sizes, DIMS, GROUPS)
    planned = [(d, g, size) for size in sizes for d in (sorted(dims, key=lambda d: d != FIRST_DIM)) for g in groups]
    rows: list[dict[str, Any]] = []
    data: dict[str, Any] = {"ceiling_gb_s": None, "planned": len(planned), "rows": rows, "kv_heads": KV_HEADS}
    with open_backend(task.backend, settings=Settings()) as backend:
        for dim, group, size in planned:
            if task.left_s < SPARE_S:
                break
            about = {"dim": dim, "group": group, "batch": size.batch, "tokens": size.batch * size.context}
            moved = 2 * size.batch * size.context * KV_HEADS * dim * 2
            rows += [about | row for row in measured(backend, task, ways, dim, group, size, moved)]
            if not task.dry:
                data["ceiling_gb_s"] = max((row["ceiling_gb_s"] for row in rows if "ceiling_gb_s" in row), default=None)
            task.save("measured", data)
    left = len(planned) - len({(row["dim"], row["group"], row["tokens"]) for row in rows})
    problems = [f"not run: time, {left} of {len(planned)} sizes"] if left > 0 else []
    return ("dry" if task.dry else "measured"), data, problems


def measured(
    backend: Backend, task: Task, ways: Ways, dim: int, group: int, size: Size, moved: int
) -> list[dict[str, Any]]:
    """A row for ours, which moves ``moved`` bytes of KV, and outside of a dry run for each peer; a refusal is a row as well."""
    found: list[tuple[str, list[float] | str]] = []
    try:
        found.append(("forebay direct", _ours(backend, task, ways, dim, group, size)))
        ceiling = None if task.dry else ways.ceiling(moved)
    except ERRORS as error:
        return [{"way": "forebay direct", "error": _told(error)}]
    if not task.dry:
        ready, absent = ways.peers(size, group, dim)
        found += absent.items()
        for name, make in ready.items():
            try:
                found.append((name, ways.seconds(make())))
            except Exception as error:  # noqa: BLE001  # how a peer refuses a shape is its own affair
                found.append((name, _told(error)))
    rows: list[dict[str, Any]] = []
    for name, seconds in found:
        row: dict[str, Any] = {"way": name, "kv_bytes": moved}
        if isinstance(seconds, str):
            row["error"] = seconds
        elif ceiling is not None:
            rate = moved / statistics.median(seconds) / 1e9
            row |= {"median_s": statistics.median(seconds), "best_s": min(seconds), "gb_s": rate}
            row |= {"ceiling_gb_s": ceiling, "to_ceiling": rate / ceiling}
        rows.append(row)
    return rows


def _ours(backend: Backend, task: Task, ways: Ways, dim: int, group: int, size: Size) -> list[float]:
    """Seconds a round; none in a dry run, which calls it once."""
    width = -(-size.context // BLOCK)
    blocks = size.batch * width
    pool = backend.create_pool(KVGeometry(blocks + 1, BLOCK, KV_HEADS, dim, 1, "bfloat16"))
    random = np.random.default_rng(0)
    try:
        table = backend.to_device((random.permutation(blocks) + 1).astype(np.int32).reshape(size.batch, width))
        visible = backend.to_device(np.full((size.batch,), size.context, np.int32))
        q = random.standard_normal((size.batch, KV_HEADS * group, dim), dtype=np.float32)
        with ways.ours(Decode(backend, pool, backend.to_device(q, dtype="bfloat16"), table, visible, width)) as call:
            if not task.dry:
                return ways.seconds(call)
            call()
            backend.synchronize()
            return []
    finally:
        backend.release(pool)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
