"""The plainest run there is: one request, one block, contiguous NHD. Most faults of real life leave it right."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, KVGeometry, WriteLoc
from forebay.specs.suite.kv import int32


@pytest.mark.clause("D6")
def test_one_request_in_one_block(backend: Backend) -> None:
    """Two rows written through the door, one after the other, equal keys: the mean of their values."""
    pool = backend.create_pool(KVGeometry(3, 16, 1, 64))
    rows = np.ones((2, 1, 64), np.float32)
    values = np.array([1, 3], np.float32)[:, None, None] * rows
    for i, slot in enumerate((16, 17)):
        k, v = (backend.to_device(x[i : i + 1]) for x in (rows, values))
        pool.write(0, WriteLoc.slots(int32(slot), physical=True), k, v)
    q = backend.to_device(np.ones((1, 1, 64), np.float32))
    out = backend.paged_decode(q, pool, 0, backend.to_device(int32([1])), backend.to_device(int32(2)), table_len=1)
    np.testing.assert_allclose(backend.to_host(out), 2.0, rtol=1e-6)
    k, _ = pool.read(0, WriteLoc.slots(int32(16, 17), physical=True))
    np.testing.assert_array_equal(backend.to_host(k), rows)
    backend.release(pool)


PROMPT, TOKENS = [226, 43, 221, 148, 110], [147, 117, 158, 91, 52, 92, 92, 92]
"""A prompt of the suite's model, and what float64 arithmetic on its weights gives: each token best by 0.33 or more."""


@pytest.mark.clause("C11")
@pytest.mark.parametrize("options", [{"arm": "eager"}, {"capture": "auto"}], ids=["eager", "captured"])
def test_one_request_through_an_engine(
    backend: Backend, make_engine: Callable[..., Any], runtime: ModuleType, options: dict[str, Any]
) -> None:
    """Its first request: right tokens, every receipt as it should be, and an engine that closes."""
    engine = make_engine(backend, slots=1, block_size=32, max_len=32, **options)
    params = runtime.SamplingParams(max_tokens=len(TOKENS), ignore_eos=True)
    assert list(engine.generate([PROMPT], params)[0].token_ids) == TOKENS
    assert engine.report()["engine"]["reseeds"] == 0
    engine.close()
