"""KV bytes per second of paged decode against a plain reduction of XLA over as many bytes, beside the peers that JAX ships."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Final

from forebay.hardware.checking.bandwidth import Call, Decode, Size, Ways, measure_all
from forebay.hardware.checking.part import Result, Task
from forebay.hardware.tpu.peers import peers
from forebay.specs.backend import Backend
from forebay.specs.dtypes import Array
from forebay.specs.segment import Buffer, Segment, Ticket

SIZES: Final = (Size(8, 1_024), Size(16, 4_096), Size(32, 8_192), Size(64, 16_384))
"""8k to 1M tokens: what the smallest chip has memory for."""
CHAIN: Final = 8
"""Attentions in one program, each of what the one before it gave: asking for it then costs little beside the smallest."""
ROUNDS: Final = 5
ROUND_S: Final = 0.04
"""Seconds a round lasts about: waiting for the device once falls out."""
MOST: Final = 400
"""Programs a round, at most."""


def run(task: Task) -> Result:
    """One row a size, head size and group; what the time does not allow is counted, and none of it decides anything."""
    return measure_all(task, Ways(SIZES, ours, timed, read_ceiling, peers_of))


@contextmanager
def ours(decode: Decode) -> Iterator[Call]:
    """The replay of a captured step of CHAIN attentions; it gives the step's Ticket."""
    backend = decode.backend
    with ExitStack() as made:

        def cell(name: str, x: Array) -> Buffer:
            buffer = backend.buffer(f"bandwidth.{name}", backend.to_host(x), backend.xp.dtype(x))
            made.callback(backend.release, buffer)
            return buffer

        q, table, visible = (cell(name, getattr(decode, name)) for name in ("q", "table", "visible"))

        def step(_: Backend) -> tuple[dict[Buffer, Array], dict[str, Array]]:
            inside, x = replace(decode, table=table.get(), visible=visible.get()), q.get()
            for _turn in range(CHAIN):
                x = inside.attend(x)
            return {q: x}, {"done": x[:1, :1, :1]}

        key = (decode.width, decode.pool.generation)
        segment = Segment("bandwidth", step, key=key, reads=(table, visible), updates=(q,), pools=(decode.pool,))
        backend.run(segment)
        trace = backend.capture(segment)
        made.callback(backend.release, trace)
        yield lambda: backend.replay(trace)


def peers_of(size: Size, group: int, dim: int) -> tuple[Any, dict[str, str]]:
    """The peers, as chains of as many attentions as ours."""
    return peers(size.batch, size.context, group, dim, CHAIN)


def timed(call: Call) -> list[float]:
    """Seconds of one attention in each round: programs are asked for one behind the other, and the last is waited for."""
    _wait(call())
    start = time.perf_counter()
    _wait(call())
    count = max(1, min(MOST, int(ROUND_S / (time.perf_counter() - start))))
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _turn in range(count - 1):
            call()
        _wait(call())
        found.append((time.perf_counter() - start) / (count * CHAIN))
    return found


def _wait(result: Any) -> None:
    """Until a step has ended, or a JAX array is there."""
    if isinstance(result, Ticket):
        result.get()
    else:
        result.block_until_ready()


@cache
def read_ceiling(nbytes: int) -> float:
    """GB/s of a reduction by XLA over so many bytes: each depends on the one before it, so that none is left out."""
    import jax
    import jax.numpy as jnp

    memory = jnp.zeros((nbytes // 4096, 1024), jnp.int32)

    @jax.jit
    def chain(x: Any) -> Any:
        return jax.lax.fori_loop(0, CHAIN, lambda _, found: jnp.max(x + found), jnp.int32(0))

    return nbytes / min(timed(lambda: chain(memory))) / 1e9
