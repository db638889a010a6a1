"""Compare ways of capturing a decode step on the CPU: ``python -m forebay.backends.cpu.bench_capture``.

The same dense step (a Llama of SmolLM2-135M's sizes with random weights, attention left out, since every way calls the same
kernel for it) is timed as plain eager torch, as our op tape, as an FX graph, as a TorchScript trace and, with ``--compile``, as a
graph compiled by inductor. Rounds are interleaved, so that noise of the machine meets every way alike; ratios are to eager.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from forebay.backends.torch_shared.guard import HostReadGuard
from forebay.backends.torch_shared.namespace import TorchNamespace
from forebay.specs.array_namespace import ArrayNamespace

from .tape import Recorder

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
TORCH: Final = TorchNamespace()
Step = Callable[[], Tensor]


def make_weights() -> list[Tensor]:
    """Weights of the dense part, about 0.5 GB in float32, then the norm weight, cos and sin."""
    torch.manual_seed(0)
    shapes = [((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
    weights = [torch.randn(shape) * 0.02 for _ in range(LAYERS) for shape in shapes]
    return [
        *weights,
        torch.randn(VOCAB, HIDDEN) * 0.02,
        torch.ones(HIDDEN),
        torch.ones(1, DIM // 2),
        torch.zeros(1, DIM // 2),
    ]


def dense_step(x: Tensor, *weights: Tensor, xp: ArrayNamespace = TORCH) -> Tensor:
    """Hidden state ``[B, hidden]`` to the next tokens ``[B]``; rope acts on the query that stands for attention's output."""
    *products, head, norm, cos, sin = weights
    rows = x.shape[0]
    for i in range(LAYERS):
        qkv, out, gate_up, down = products[4 * i : 4 * i + 4]
        heads = xp.reshape(xp.linear(xp.rms_norm(x, norm, 1e-5), qkv), (rows, HEADS + 2 * KV_HEADS, DIM))
        turned = xp.rope(heads[:, : HEADS + KV_HEADS], cos, sin)
        x = x + xp.linear(xp.reshape(turned[:, :HEADS], (rows, HEADS * DIM)), out)
        both = xp.linear(xp.rms_norm(x, norm, 1e-5), gate_up)
        x = x + xp.linear(xp.silu_mul(both[:, :INNER], both[:, INNER:]), down)
    return cast("Tensor", xp.argmax(xp.linear(xp.rms_norm(x, norm, 1e-5), head)))


def ways(x: Tensor, weights: list[Tensor], *, compiled: bool) -> dict[str, tuple[Step, float]]:
    """Name → (one step, seconds of preparation)."""
    made: dict[str, tuple[Step, float]] = {"eager": (lambda: dense_step(x, *weights), 0.0)}

    def add(name: str, prepare: Callable[[], Step]) -> None:
        start = time.perf_counter()
        step = prepare()
        step()
        made[name] = (step, time.perf_counter() - start)

    def tape() -> Step:
        recorder = Recorder("bench", [x, *weights])
        with HostReadGuard(recorder), recorder:
            result = dense_step(x, *weights)

        def replay() -> Tensor:
            recorder.tape.replay()
            return result

        return replay

    def fx() -> Step:
        graph = make_fx(dense_step)(x, *weights)
        return lambda: graph(x, *weights)

    def script() -> Step:
        traced = torch.jit.trace(dense_step, (x, *weights), check_trace=False)
        return lambda: traced(x, *weights)

    def inductor() -> Step:
        step = torch.compile(dense_step, dynamic=False)
        return lambda: step(x, *weights)

    add("op tape", tape)
    add("fx graph", fx)
    add("torchscript", script)
    if compiled:
        add("inductor", inductor)
    return made


@torch.no_grad()
def measure(batch: int, rounds: int, *, compiled: bool) -> list[dict[str, Any]]:
    """One record a way: best and median milliseconds a step, ratio of the medians to eager, seconds to prepare, equal tokens."""
    x = torch.randn(batch, HIDDEN)
    table = ways(x, make_weights(), compiled=compiled)
    times: dict[str, list[float]] = {name: [] for name in table}
    want = table["eager"][0]().clone()
    equal = {name: bool(torch.equal(step(), want)) for name, (step, _) in table.items()}
    for _ in range(rounds):
        for name, (step, _) in table.items():
            start = time.perf_counter()
            step()
            times[name].append(1e3 * (time.perf_counter() - start))
    eager = statistics.median(times["eager"])
    return [
        {
            "batch": batch,
            "way": name,
            "best_ms": min(times[name]),
            "median_ms": statistics.median(times[name]),
            "ratio_to_eager": statistics.median(times[name]) / eager,
            "prepare_s": seconds,
            "same_tokens": equal[name],
        }
        for name, (_, seconds) in table.items()
    ]


def main() -> None:
    """Print the table; ``--json FILE`` also writes the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--compile", action="store_true", help="include torch.compile (inductor): needs a C++ compiler, minutes"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    records = [r for batch in (1, 8) for r in measure(batch, options.rounds, compiled=options.compile)]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.rounds} interleaved rounds")
    for r in records:
        print(
            "batch {batch}  {way:12s} best {best_ms:7.2f} ms  median {median_ms:7.2f} ms  {ratio_to_eager:5.2f} of eager".format(
                **r
            ),
            end="",
        )
        print("  prepare {prepare_s:6.2f} s  same tokens {same_tokens}".format(**r))
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
