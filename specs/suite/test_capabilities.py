"""Every declared limit, asked both ways (clause B4): what is claimed works, what is not claimed does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, KVGeometry, Segment
from forebay.specs.suite.fixtures import Another
from forebay.specs.suite.kv import LAYOUTS, put_values, same_bits, scene


def decodes(backend: Backend, *, heads: int = 4, query_len: int = 1, params: Any = None, **sizes: Any) -> None:
    """A small decode in a pool of these sizes meets the oracle."""
    with scene(backend, (5, 3 + query_len), heads=heads, query_len=query_len, **sizes) as s:
        s.check(**(params or {}))


def holds(backend: Backend, elements: int) -> None:
    """One array of this many elements can be filled, to its last."""
    buffer = backend.reserve("large", (elements,), "bool")
    backend.zero(buffer)
    assert not backend.fetch(buffer).any()
    backend.release(buffer)


def takes_memory(backend: Backend, _: object) -> None:
    array = np.zeros((4, 2, 4, 2, 8), np.float32)
    pool = backend.wrap_pool(array, layout="KV2", geometry=KVGeometry(4, 4, 2, 8))
    put_values(backend, pool, [0], [7])
    backend.synchronize()
    assert (array[0, 1, 0] == 7).all()
    backend.release(pool)


def captures(backend: Backend, _: object) -> None:
    """A captured step adds one, again and again."""
    buffer = backend.buffer("n", np.arange(4, dtype=np.float32))
    segment = Segment(lambda _: {"n": buffer.get() + 1}, buffers=(buffer,), updates=(buffer,))
    backend.run(segment)
    trace = backend.capture(segment)
    backend.replay(trace)
    same_bits(backend.fetch(buffer), np.arange(2, 6, dtype=np.float32))


PROBES: dict[str, tuple[Callable[[Backend, Any], None], tuple[Any, ...]]] = {
    "layouts": (lambda b, layout: decodes(b, layout=layout), LAYOUTS),
}
