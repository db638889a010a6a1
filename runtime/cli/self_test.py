"""A real operation on one backend, checked against numpy: ``python -m forebay.runtime.cli.self_test NAME[:MODE]``.

``forebay doctor`` runs it once a mode, each in a process of its own: vendor libraries do not always live well together, and
one that crashes must not take the report with it. The last line of stdout is the outcome as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from forebay.runtime.plugins import describe_error
from forebay.runtime.selection import open_backend
from forebay.runtime.settings import Settings
from forebay.specs.attention import AttentionParams
from forebay.specs.errors import ForebayError
from forebay.specs.geometry import KVGeometry
from forebay.specs.write_loc import BlockTable, WriteLoc

if TYPE_CHECKING:
    from forebay.specs.backend import Backend

FloatArray = npt.NDArray[np.float32]
TOLERANCE: Final = {"float32": 2e-5, "tf32": 2e-3, "float16": 5e-3, "bfloat16": 4e-2}
"""Largest absolute error by arithmetic; the inputs are standard normal and the sums short."""


class WrongResult(ForebayError):
    """The device computed something else than numpy did."""


@dataclass(frozen=True)
class Step:
    """One checked operation: seconds of the first call (it may compile) and of the second, and the largest error."""

    name: str
    first_s: float
    again_s: float
    error: float


def run_steps(backend: Backend) -> list[Step]:
    """A round trip, a matrix product and a paged decode, each run twice and checked.

    Raises:
        WrongResult: names the operation, the error and the tolerance.
    """
    return [_round_trip(backend), _matmul(backend), _paged_decode(backend)]


def _round_trip(backend: Backend) -> Step:
    x = np.random.default_rng(1).standard_normal((3, 5), dtype=np.float32)
    return _timed("round trip", lambda: backend.to_host(backend.to_device(x)), x, tolerance=0.0)


def _matmul(backend: Backend) -> Step:
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((8, 32), dtype=np.float32), rng.standard_normal((32, 16), dtype=np.float32)
    x, y = backend.to_device(a), backend.to_device(b)
    tolerance = TOLERANCE["tf32" if backend.capabilities.tf32 else "float32"]
    return _timed("matmul", lambda: backend.to_host(backend.xp.matmul(x, y)), a @ b, tolerance)


def _paged_decode(backend: Backend) -> Step:
    """Two sequences of unlike length whose blocks are out of order, one of them partly filled."""
    can = backend.capabilities
    dtype = "float32" if "float32" in can.kv_dtypes else can.kv_dtypes[0]
    block_size, head_dim = _prefer(16, can.block_sizes), _prefer(64, can.head_dims)
    geometry = KVGeometry(num_blocks=4, block_size=block_size, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    lengths, table = (2 * block_size - 3, 5), np.array([[3, 1], [2, 0]], np.int32)
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 4, head_dim), dtype=np.float32)
    k, v = (rng.standard_normal((sum(lengths), 2, head_dim), dtype=np.float32) for _ in range(2))
    pool = backend.create_pool(geometry)
    slots = [table[row, t // block_size] * block_size + t % block_size for row in (0, 1) for t in range(lengths[row])]
    where = WriteLoc.slots(np.array(slots, np.int32), physical=True)
    pool.write(0, where, backend.to_device(k, dtype=dtype), backend.to_device(v, dtype=dtype))
    query, visible = backend.to_device(q, dtype=dtype), np.array(lengths, np.int32)

    def decode() -> Any:
        blocks = BlockTable(table, physical=True)
        out = backend.paged_decode(query, pool, 0, blocks, visible, table_len=2, params=AttentionParams())
        return backend.to_host(out)

    first, second = np.split(np.arange(sum(lengths)), [lengths[0]])
    expected = np.stack([_attention(q[0], k[first], v[first]), _attention(q[1], k[second], v[second])])
    return _timed("paged decode", decode, expected, TOLERANCE["tf32" if dtype == "float32" and can.tf32 else dtype])


def _attention(q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
    """Softmax attention of one query ``[Hq, D]`` over ``[N, Hkv, D]`` in float64 (Vaswani et al. 2017)."""
    group = q.shape[0] // k.shape[1]
    keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("hd,nhd->hn", q, keys) / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    out: FloatArray = np.einsum("hn,nhd->hd", weights, values).astype(np.float32)
    return out


def _prefer(value: int, supported: tuple[int, ...] | None) -> int:
    return value if supported is None or value in supported else supported[0]


def _timed(name: str, run: Callable[[], Any], expected: FloatArray, tolerance: float) -> Step:
    seconds = []
    error = 0.0
    for _ in range(2):
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
        worst = np.max(np.abs(np.asarray(result, np.float32) - expected))
        if not worst <= tolerance:  # also true for NaN
            raise WrongResult(f"{name}: the largest error against numpy is {worst}; at most {tolerance} is right")
        error = max(error, float(worst))
    return Step(name, first_s=seconds[0], again_s=seconds[1], error=error)


def main(label: str) -> int:
    """Open the backend ``label`` with default settings, run the steps, print the outcome; 0 if all is right."""
    try:
        with open_backend(label, settings=Settings()) as backend:
            steps = run_steps(backend)
            outcome: dict[str, Any] = {"ok": True, "info": dict(backend.info), "steps": list(map(asdict, steps))}
    except Exception as error:  # noqa: BLE001  # whatever a vendor library raises belongs in the report
        outcome = {"ok": False, "error": str(error) if isinstance(error, ForebayError) else describe_error(error)}
    print(json.dumps(outcome, default=str))
    return 0 if outcome["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
