"""The smallest case of each kernel, compared with numpy: ``python -m forebay.hardware.checking.cases BACKEND``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from forebay.runtime import Settings, open_backend
from forebay.specs import AttentionParams, KVGeometry, WriteLoc
from forebay.specs.backend import Backend

Floats = np.ndarray[Any, np.dtype[np.float32]]
TOLERANCE: Final = 2e-5
BLOCK: Final = 16


def write_and_read(backend: Backend) -> None:
    """Rows through the doors, one of them dropped."""
    pool = backend.create_pool(_geometry(1, 8))
    random = np.random.default_rng(0)
    k, v = (random.standard_normal((3, 1, 8)).astype(np.float32) for _ in range(2))
    loc = WriteLoc(backend.to_device(np.array([BLOCK + 3, -1, 2 * BLOCK], np.int32)))
    pool.write(0, loc, backend.to_device(k), backend.to_device(v))
    read_k, read_v = (backend.to_host(x) for x in pool.read(0, loc))
    held = np.array([1.0, 0.0, 1.0], np.float32)[:, None, None]
    _same("rows", read_k, k * held)
    _same("rows of values", read_v, v * held)


def decode(backend: Backend, group: int, dim: int, query_len: int, path: str, window: int | None) -> None:
    """Attention over shuffled blocks, an empty row among them, beside numpy."""
    random = np.random.default_rng(group + dim + query_len)
    visible = [37, 0, 16]
    pool = backend.create_pool(_geometry(2, dim))
    table = np.array([[5, 2, 7], [-1, -1, -1], [3, -1, -1]], np.int32)
    keys = [random.standard_normal((n, 2, dim)).astype(np.float32) for n in visible]
    values = [random.standard_normal((n, 2, dim)).astype(np.float32) for n in visible]
    for row, count in enumerate(visible):
        if count:
            slots = np.array([table[row, i // BLOCK] * BLOCK + i % BLOCK for i in range(count)], np.int32)
            loc = WriteLoc(backend.to_device(slots))
            pool.write(0, loc, backend.to_device(keys[row]), backend.to_device(values[row]))
    q = random.standard_normal((3, query_len, 2 * group, dim)).astype(np.float32)
    out = backend.paged_decode(
        backend.to_device(q),
        pool,
        0,
        backend.to_device(table),
        backend.to_device(np.array(visible, np.int32)),
        table_len=3,
        params=AttentionParams(window=window),
        path=path,
    )
    want = np.stack([_attention(q[i], keys[i], values[i], group, window) for i in range(3)])
    _same(f"decode G{group} D{dim} T{query_len} {path} window {window}", backend.to_host(out), want)


def stage(backend: Backend) -> None:
    """Host blocks to a pool."""
    random = np.random.default_rng(1)
    k, v = (random.standard_normal((2, BLOCK, 1, 8)).astype(np.float32) for _ in range(2))
    pool = backend.create_pool(_geometry(1, 8))
    backend.stage(k, v, pool, 0, src_blocks=[1, 0], dst_blocks=[4, 2], tokens=BLOCK + 3, dtype="float32")
    slots = np.array([*range(4 * BLOCK, 5 * BLOCK), *range(2 * BLOCK, 2 * BLOCK + 3)], np.int32)
    read = backend.to_host(pool.read(0, WriteLoc(backend.to_device(slots)))[0])
    _same("staged rows", read, np.concatenate([k[1], k[0][:3]]))


def merge(backend: Backend) -> None:
    """Two partial results, one of them empty."""
    out = np.ones((1, 1, 2, 8), np.float32)
    none = np.full((1, 1, 2), -np.inf, np.float32)
    parts = [backend.to_device(out), backend.to_device(0 * out)]
    lses = [backend.to_device(np.zeros((1, 1, 2), np.float32)), backend.to_device(none)]
    _same("merged", backend.to_host(backend.merge_partials(parts, lses)[0]), out)


CASES: Final[dict[str, Callable[[Backend], None]]] = {
    "doors": write_and_read,
    "decode, one head": lambda backend: decode(backend, 1, 64, 1, "direct", None),
    "decode, a group": lambda backend: decode(backend, 4, 64, 1, "direct", None),
    "decode, an odd head size": lambda backend: decode(backend, 3, 80, 1, "direct", 20),
    "decode, several queries": lambda backend: decode(backend, 2, 64, 2, "direct", None),
    "gather": lambda backend: decode(backend, 4, 64, 1, "gather", None),
    "stage": stage,
    "merge": merge,
}


def _geometry(kv_heads: int, dim: int) -> KVGeometry:
    return KVGeometry(
        num_blocks=8, block_size=BLOCK, num_kv_heads=kv_heads, head_dim=dim, num_layers=1, dtype="float32"
    )


def _attention(q: Floats, keys: Floats, values: Floats, group: int, window: int | None) -> Floats:
    """``[T, Hq, D]`` by numpy; a query without keys gives 0."""
    out = np.zeros_like(q)
    for t in range(q.shape[0]):
        end = max(len(keys) - (q.shape[0] - 1 - t), 0)
        start = 0 if window is None else max(end - window, 0)
        if end == start:
            continue
        for head in range(q.shape[1]):
            scores = keys[start:end, head // group] @ q[t, head] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ values[start:end, head // group] / weights.sum()
    return out


def _same(what: str, got: Floats, want: Floats) -> None:
    error = float(np.abs(got - want).max())
    if not error <= TOLERANCE:
        raise RuntimeError(f"{what}: differs from numpy by {error}; at most {TOLERANCE} is right")


def main(name: str) -> None:
    """Run every case on a backend; each that ends is printed."""
    with open_backend(name, settings=Settings()) as backend:
        for case, call in CASES.items():
            call(backend)
            backend.synchronize()
            print(f"ended: {case}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
