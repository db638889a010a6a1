"""Capabilities are data, held against what the backend does, both ways (clauses B4, B6)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, Driver, ForebayError, Pool, Unsupported
from forebay.specs.driver import DELEGABLE
from forebay.specs.suite.kv import LAYOUTS, Params, geometry, new_pool, scene

DTYPES = ("float32", "bfloat16", "float16")
SINKS = np.linspace(-3, 3, 4, dtype=np.float32)
FEATURES: dict[str, Params] = {"window": {"window": 3}, "softcap": {"softcap": 0.5}, "sinks": {"sinks": SINKS}}


@contextmanager
def claiming(backend: Backend, **claims: Any) -> Iterator[None]:
    """The backend with other claims: the checks in front of the driver let more, or less, through."""
    driver = backend._driver
    honest = driver.capabilities
    driver.capabilities = replace(honest, **claims)
    try:
        yield
    finally:
        driver.capabilities = honest


def works(backend: Backend, layout: str = "NHD", dtype: str = "float32", **params: Any) -> bool:
    """Whether decode over such a pool meets the oracle; False where it is refused or wrong."""
    try:
        with scene(backend, (5, 0, 9), layout=layout, dtype=dtype) as s:
            s.check(**params)
    except (ForebayError, AssertionError):
        return False
    return True


def layouts(backend: Backend) -> list[str]:
    return [layout for layout in LAYOUTS if layout in backend.capabilities.layouts]


@pytest.mark.clause("B4", "L2")
def test_every_claimed_layout_and_dtype_works(backend: Backend) -> None:
    for layout in layouts(backend):
        for dtype in backend.capabilities.kv_dtypes:
            assert works(backend, layout, dtype), (layout, dtype)


@pytest.mark.clause("B4", "D9")
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_works_exactly_where_it_is_claimed(backend: Backend, name: str) -> None:
    claimed = getattr(backend.capabilities, name)
    with claiming(backend, **{name: True}):
        assert works(backend, **FEATURES[name]) is claimed, f"{name} is {'' if claimed else 'not '}claimed"


@pytest.mark.clause("B4", "L2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_works_exactly_where_it_is_claimed(backend: Backend, layout: str) -> None:
    claimed = layout in backend.capabilities.layouts
    with claiming(backend, layouts=LAYOUTS):
        assert works(backend, layout) is claimed, f"{layout} is {'' if claimed else 'not '}claimed"


@pytest.mark.clause("B4")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kv_dtype_works_exactly_where_it_is_claimed(backend: Backend, dtype: str) -> None:
    claimed = dtype in backend.capabilities.kv_dtypes
    if claimed:
        assert works(backend, dtype=dtype)
    else:
        with pytest.raises(Unsupported, match=f"KV dtype '{dtype}'"):
            backend.create_pool(geometry(dtype=dtype))


@pytest.mark.refuses("B4", "D8")
@pytest.mark.parametrize("name", FEATURES)
def test_what_is_not_claimed_is_refused_by_name(backend: Backend, name: str) -> None:
    with scene(backend, (5, 9)) as s, claiming(backend, **{name: False}):
        s.decode()
        with pytest.raises(Unsupported, match=name):
            s.decode(**FEATURES[name])


@pytest.mark.refuses("B4", "D8", "L1")
def test_limits_are_refused_by_name(backend: Backend) -> None:
    limits: dict[str, Any] = {
        "head_dims": (4096,),
        "block_sizes": (4096,),
        "max_group": 1,
        "max_query_len": 1,
        "lse": False,
    }
    with scene(backend, (5, 9), query_len=2) as s:
        for name, limit in limits.items():
            with claiming(backend, **{name: limit}), pytest.raises(Unsupported, match=r"paged_decode .*supports"):
                s.decode()
    with claiming(backend, max_pool_elements=3), pytest.raises(Unsupported, match="at most 3 in one array"):
        backend.create_pool(geometry())


@pytest.mark.clause("B6")
def test_the_checks_are_final_and_a_port_is_small(backend: Backend) -> None:
    assert len(Driver.__abstractmethods__) <= 10
    assert type(backend) is Backend
    assert Backend.__final__ is True  # type: ignore[attr-defined]
    assert set(backend.counters.delegated) <= set(DELEGABLE)
    with new_pool(backend, geometry()) as pool:
        assert type(pool) is Pool


@pytest.mark.clause("B6", "C9")
def test_every_operation_is_counted_as_the_backends_or_as_delegated(backend: Backend) -> None:
    """One of each: it shows either among the backend's own kernels or among what numpy does for it."""
    c = backend.counters
    before = {name: c.launches[name] + c.delegated[name] for name in ("write_kv", "paged_decode")}
    with scene(backend, (5, 9)) as s:
        s.decode()
    for name, count in before.items():
        own = name in {k for k in DELEGABLE if getattr(type(backend._driver), k) is not getattr(Driver, k)}
        assert c.launches[name] + c.delegated[name] > count
        assert (c.delegated[name] == 0) is own
