"""KV bytes per second of paged decode against a read ceiling measured in the same run, bfloat16, beside torch's attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Final

from forebay.hardware.checking.bandwidth import FIRST_DIM, KV_HEADS, Call, Decode, Size, Ways, measure_all
from forebay.hardware.checking.part import Result, Task
from forebay.hardware.h200.peers import peers

EVICT_BYTES: Final = 1 << 30
"""Read before each call: more than any cache holds. While it is read the host asks for the call, if it is that fast: not checked."""
ROUNDS: Final = 7
SIZES: Final = (Size(8, 1_024), Size(16, 4_096), Size(64, 8_192), Size(128, 32_768))
"""8k to 4M tokens."""
PEERS_AT: Final = (FIRST_DIM, 4)
"""Head size and group at which peers are measured: theirs have to be compiled too."""


def run(task: Task) -> Result:
    """One row a size, head size and group; what the time does not allow is counted, and none of it decides anything."""
    return measure_all(task, Ways(SIZES, ours, timed, lambda _bytes: read_ceiling(), _peers))


def ours(decode: Decode) -> AbstractContextManager[Call]:
    """A call as it is."""
    return nullcontext(lambda: decode.attend(decode.q))


def _peers(size: Size, group: int, dim: int) -> tuple[Mapping[str, Callable[[], Call]], Mapping[str, str]]:
    if (dim, group) != PEERS_AT:
        return {}, {}
    ready, absent = peers(size.batch, size.context, KV_HEADS, group, dim)

    def made(call: Call) -> Callable[[], Call]:
        return lambda: call

    return {name: made(call) for name, call in ready.items()}, absent


def timed(call: Call) -> list[float]:
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


@cache
def read_ceiling() -> float:
    """GB/s of plain reads of memory far larger than the caches: the best of torch's reductions."""
    import torch

    memory = torch.ones(4 << 30 >> 2, dtype=torch.float32, device="cuda")
    ways: list[Callable[[], object]] = [memory.sum, memory.amax, memory.view(torch.int32).amax]
    return max(memory.nbytes / min(timed(way)) / 1e9 for way in ways)
