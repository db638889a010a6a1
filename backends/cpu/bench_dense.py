"""Measure the dense part of a decode step, torch's operations beside our kernels: ``python -m forebay.backends.cpu.bench_dense``.

The step is that of :mod:`.bench_capture` (SmolLM2-135M's sizes, attention left out) on an op tape. One way computes all of it with
torch, one all of it with kernels; each of the others gives one operation back to torch, which shows whether its kernel pays. Rates
are bytes of weights a second, beside plain reading of memory on as many threads. Rounds are interleaved, so that noise of the
machine meets every way alike. Weights lie where the backend puts Buffers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forebay.backends.torch_shared.guard import HostReadGuard
from forebay.backends.torch_shared.namespace import TORCH_DTYPE, TorchNamespace
from forebay.kernels.numba.workers import usable_cpus

from .bench_capture import DIM, HIDDEN, TORCH, dense_step, make_weights
from .kernel_calls import KernelCalls
from .kernel_namespace import KernelNamespace
from .memory import BufferMemory
from .tape import Recorder

OPERATIONS: Final = ("linear", "rms_norm", "rope", "silu_mul", "argmax")
_CEILING_BYTES: Final = 512 << 20


@cast("Callable[..., Any]", numba.njit(nogil=True, fastmath=True))
def _read(values: npt.NDArray[np.float32]) -> float:
    total = np.float32(0)
    for i in range(values.size):
        total += values[i]
    return float(total)


def read_ceiling(threads: int) -> Callable[[], object]:
    """Reads :data:`_CEILING_BYTES` of memory on ``threads`` threads."""
    parts = np.array_split(np.ones(_CEILING_BYTES // 4, np.float32), threads)
    _read(parts[0][:16])
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(_read, parts))


def tape_without(
    torch_operations: tuple[str, ...], x: Tensor, weights: list[Tensor], threads: int
) -> Callable[[], Tensor]:
    """Record the step with kernels for all operations but some; the result replays it and returns the tokens."""
    calls = KernelCalls()
    xp = KernelNamespace(calls, threads)
    for name in torch_operations:
        setattr(xp, name, partial(getattr(TorchNamespace, name), TORCH))
    recorder = Recorder("bench", [x, *weights])
    calls.recorder = recorder
    with HostReadGuard(recorder), recorder:
        tokens = dense_step(x, *weights, xp=xp)

    def replay(_alive: KernelCalls = calls) -> Tensor:
        recorder.tape.replay()
        return tokens

    return replay


def place(tensors: list[Tensor], dtype: str) -> list[Tensor]:
    """Copies where the backend would put them."""
    memory = BufferMemory()
    return [memory.empty(tuple(x.shape), dtype).copy_(x) for x in tensors]


@torch.no_grad()
def measure(batch: int, dtype: str, rounds: int, threads: int) -> list[dict[str, Any]]:
    """One record a way: milliseconds a step, GB/s of weights, both also as a share of the read ceiling of the same rounds."""
    *products, norm, cos, sin = make_weights()
    angles = [x.expand(batch, DIM // 2) for x in (cos, sin)]
    weights = place([*products, norm, *angles], dtype)
    x = torch.randn(batch, HIDDEN).to(TORCH_DTYPE[dtype])
    ways: dict[str, tuple[str, ...]] = {"torch": OPERATIONS, "kernels": ()}
    ways |= {f"kernels, torch {name}": (name,) for name in OPERATIONS}
    steps = {way: tape_without(names, x, weights, threads) for way, names in ways.items()}
    size = sum(w.nbytes for w in weights)
    calls: dict[str, tuple[int, Callable[[], object]]] = {"read ceiling": (_CEILING_BYTES, read_ceiling(threads))}
    calls |= {way: (size, step) for way, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _, call in calls.values():
        call()
    for _ in range(rounds):
        for name, (_, call) in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    rates = {name: [size / s / 1e9 for s in seconds[name]] for name, (size, _) in calls.items()}
    best, middle = max(rates["read ceiling"]), statistics.median(rates["read ceiling"])
    return [
        {
            "batch": batch,
            "dtype": dtype,
            "way": name,
            "best_ms": 1e3 * min(seconds[name]),
            "median_ms": 1e3 * statistics.median(seconds[name]),
            "best_gb_s": max(rates[name]),
            "median_gb_s": statistics.median(rates[name]),
            "best_to_ceiling": max(rates[name]) / best,
            "median_to_ceiling": statistics.median(rates[name]) / middle,
        }
        for name in calls
    ]


def main() -> None:
    """Print the table; ``--json FILE`` also writes the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    numba.set_num_threads(1)  # starts numba's threading layer, which resets torch's thread count
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} interleaved rounds")
    records = []
    for dtype in options.dtypes:
        for batch in options.batches:
            print(f"{dtype}, batch {batch}, load {os.getloadavg()[0]:.1f}")
            for r in measure(batch, dtype, options.rounds, options.threads):
                records.append(r)
                print(
                    "  {way:24s} best {best_ms:7.2f} ms  median {median_ms:7.2f} ms  {best_gb_s:5.1f} and {median_gb_s:5.1f} GB/s  "
                    "{best_to_ceiling:5.2f} and {median_to_ceiling:5.2f} of the ceiling".format(**r)
                )
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
