"""Paged decode at large sizes: many queries a row, wide groups, wide windows, and any two features at once (clauses D6, D9, D11)."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from forebay.specs import AttentionParams, Backend
from forebay.specs.suite.kv import (
    BLOCK_SIZE,
    EACH_KV_DTYPE,
    HEAD_DIM,
    KV_DTYPES,
    LAYOUTS,
    Params,
    geometry,
    int32,
    new_pool,
    put_values,
    same_arrays,
    slot,
)
from forebay.specs.suite.scenes import Q_DTYPES, WAYS, Scene, scene

QUERY_LENS = (8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300)
WIDE_GROUPS = (16, 24, 25, 32, 33, 48, 64, 96, 128)


# -- many queries ----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("D11", "D6", "D3")
@pytest.mark.beyond_core
@pytest.mark.parametrize("query_len", QUERY_LENS)
def test_many_queries(backend: Backend, query_len: int) -> None:
    """Chunked prefill around every power of two: each query sees its own keys, and the first ones of a short row none."""
    lengths = (0, 1, query_len - 1, query_len, query_len + 1, query_len + 70)
    with scene(backend, lengths, heads=2, num_kv_heads=1, query_len=query_len, layer=1) as s:
        for q_dtype in Q_DTYPES[:2]:
            _, lse = s.check(q_dtype=q_dtype)
            for b, length in enumerate(lengths):
                assert np.isneginf(lse[b]).all(axis=-1).sum() == max(0, query_len - length)
        s.check(window=query_len // 2 + 1)


@pytest.mark.clause("D11", "D5", "D4", "C3")
@pytest.mark.beyond_core
@pytest.mark.parametrize("query_len", [17, 33, 128])
def test_each_of_many_queries_is_a_call_of_its_own(backend: Backend, query_len: int) -> None:
    """The bits that a query has alone, on both paths and in a step."""
    with scene(backend, (query_len + 30, 4, query_len), heads=6, query_len=query_len) as s:
        params: list[Params] = [{}, {"window": 20}]
        for each in params:
            direct, gather = s.both_paths(**each)
            same_arrays(direct, gather)
            for t in (0, 1, 15, 16, query_len // 2, query_len - 1):
                visible = np.maximum(s.visible - (query_len - 1 - t), 0)
                one = Scene(backend, s.pool, s.q[:, t : t + 1].copy(), s.table, visible, s.table_len)
                same_arrays(one.decode(**each), [x[:, t : t + 1] for x in direct])
        s.check_every_way(window=20)


@pytest.mark.clause("D11", "D6")
@pytest.mark.beyond_core
@pytest.mark.parametrize(
    ("query_len", "group"), [(2, 16), (3, 24), (4, 64), (5, 7), (9, 8), (16, 20), (17, 3), (33, 5), (64, 4)]
)
def test_many_queries_of_many_heads(backend: Backend, query_len: int, group: int) -> None:
    """Rows of a tile that are queries times heads of a group: none is another's."""
    with scene(backend, (query_len + 21, 5), heads=2 * group, num_kv_heads=2, query_len=query_len) as s:
        s.check()
        s.check(q_dtype="bfloat16", window=9)


# -- wide groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("D6", "L3")
@pytest.mark.beyond_core
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("group", WIDE_GROUPS)
def test_any_wide_group_of_query_heads(backend: Backend, group: int, dtype: str) -> None:
    for dim in (64, 128):
        with scene(backend, (5, 0, 37, 130), heads=2 * group, num_kv_heads=2, head_dim=dim, dtype=dtype) as s:
            s.check()


@pytest.mark.clause("D6", "L2")
@pytest.mark.beyond_core
@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(64, 48), (576, 512)])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_many_heads_share_one_latent_row(backend: Backend, heads: int, head_dim: int, value_head_dim: int) -> None:
    """Every query head of a model over its one compressed head."""
    sizes: Any = {"head_dim": head_dim, "value_head_dim": value_head_dim}
    with scene(backend, (70, 0, 5), layout="LATENT", heads=heads, num_kv_heads=1, **sizes) as s:
        s.check()
        s.check(q_dtype="bfloat16", path="gather", window=9)


# -- wide windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("D9")
@pytest.mark.parametrize("path", ["direct", "gather"])
def test_a_window_of_any_width_begins_where_it_says(backend: Backend, path: str) -> None:
    """Equal keys; V is W at the first of the last W tokens and 10^6 at the one before: the mean is 1, as long as the window is."""
    length = 33000
    blocks = -(-length // BLOCK_SIZE)
    with new_pool(backend, geometry(num_kv_heads=1, num_blocks=blocks + 1)) as pool:
        first = slot(pool, 0)
        put_values(backend, pool, range(first, first + length), [0.0] * length)
        table = int32(np.arange(pool.first_block, pool.first_block + blocks))
        q = backend.to_device(np.zeros((1, 1, HEAD_DIM), np.float32))
        for window in (100, 511, 512, 513, 1000, 1001, 1024, 1025, 2048, 4096, 5000, 8192, 16384, 32768, 32999):
            edge = [first + length - window - 1, first + length - window]
            put_values(backend, pool, edge, [1e6, window])
            out = backend.paged_decode(
                q, pool, 0, table, int32(length), table_len=blocks, path=path, params=AttentionParams(window=window)
            )
            np.testing.assert_allclose(backend.to_host(out), 1.0, rtol=1e-5)
            put_values(backend, pool, edge, [0, 0])


@pytest.mark.clause("D9", "D6")
@pytest.mark.parametrize("dtype", EACH_KV_DTYPE)
@pytest.mark.parametrize("query_len", [1, pytest.param(3, marks=[pytest.mark.clause("D11"), pytest.mark.beyond_core])])
def test_wide_windows_on_long_rows_beside_short_ones(backend: Backend, query_len: int, dtype: str) -> None:
    lengths = (4097, 0, 1025, 2049, 5)
    with scene(backend, lengths, heads=2, num_kv_heads=1, dtype=dtype, query_len=query_len, layer=1) as s:
        for window in (1001, 1024, 2048, 4000):
            s.check(window=window)
        direct, gather = s.both_paths(window=1500)
        same_arrays(direct, gather)


# -- several things at once ------------------------------------------------------------------------------------------------

FEATURES: dict[str, tuple[Any, ...]] = {
    "layouts": LAYOUTS,
    "kv_dtypes": KV_DTYPES,
    "q_dtype": Q_DTYPES,
    "max_group": (1, 3, 8, 20),
    "head_dims": (64, 128, 80),
    "block_sizes": (16, 32, 5),
    "max_query_len": (1, 3, 17),
    "window": (None, 5, 1500),
    "softcap": (None, 1.5),
    "sinks": (None, True),
    "scale": (None, -0.2),
    "path": ("direct", "gather"),
    "how": WAYS,
    "layer": (0, 2),
    "rows": ("short", "long", "beyond the table", "invalid blocks"),
}
"""What a call can have, by the field of ``Capabilities`` that limits it where there is one."""


def pairs(call: dict[str, Any]) -> set[Any]:
    """Each two features of a call, with their values."""
    return set(combinations(sorted(call.items(), key=lambda item: item[0]), 2))


def covering(features: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Few calls in which each value of a feature meets each value of each other one: always the best of some random ones."""
    rng = np.random.default_rng(0)
    left = {
        pair
        for a, b in combinations(sorted(features), 2)
        for x in features[a]
        for y in features[b]
        for pair in pairs({a: x, b: y})
    }
    calls = []
    while left:
        given = dict(min(left, key=repr))
        some = [
            {name: given.get(name, values[rng.integers(len(values))]) for name, values in features.items()}
            for _ in range(60)
        ]
        calls.append(max(some, key=lambda call: len(pairs(call) & left)))
        left -= pairs(calls[-1])
    return calls


@pytest.mark.clause("D6", "D9", "D1", "D2")
def test_any_two_features_go_together(backend: Backend) -> None:
    """Of all that the backend claims, each value of a feature beside each of every other one meets the oracle."""
    limits = backend.capabilities.as_dict()
    claimed = {
        name: tuple(x for x in values if name not in limits or backend.capabilities.allows(name, x))
        for name, values in FEATURES.items()
    }
    for call in covering(claimed):
        try:
            meets_the_oracle(backend, **call)
        except AssertionError as error:
            error.add_note(f"in the call {call}")
            raise


def meets_the_oracle(backend: Backend, **call: Any) -> None:
    """One call of ``FEATURES``."""
    # 160 fills whole blocks of every size, so that what is missing begins behind the table and not in a block's tail.
    lengths = {"long": (1600, 3), "beyond the table": (160, 0, 33)}.get(call["rows"], (70, 0, 33))
    kv_heads = 1 if call["layouts"] == "LATENT" else 2
    heads = kv_heads * call["max_group"]
    sizes: Any = {"num_kv_heads": kv_heads, "head_dim": call["head_dims"], "block_size": call["block_sizes"]}
    with scene(
        backend,
        lengths,
        layout=call["layouts"],
        heads=heads,
        query_len=call["max_query_len"],
        layer=call["layer"],
        dtype=call["kv_dtypes"],
        **sizes,
    ) as s:
        if call["rows"] == "beyond the table":
            s.visible[0] += 1200
        elif call["rows"] == "invalid blocks":
            s.table[0, 1], s.table[2, 0] = -1, 10**6
        params: Params = {name: call[name] for name in ("window", "softcap", "scale")}  # type: ignore[assignment]
        params["sinks"] = None if call["sinks"] is None else np.linspace(-2, 2, heads, dtype=np.float32)
        s.check(path=call["path"], q_dtype=call["q_dtype"], how=call["how"], **params)
