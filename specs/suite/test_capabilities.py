"""Capabilities are data, held against what the backend does, both ways (clauses B4, B6)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, Capabilities, CaptureDeclined, Driver, Pool, Segment, Unsupported
from forebay.specs.driver import DELEGABLE
from forebay.specs.geometry import storage_shapes
from forebay.specs.suite.fixtures import Another
from forebay.specs.suite.kv import LAYOUTS, Params, geometry, put_values, refused, same_bits
from forebay.specs.suite.scenes import scene
from forebay.specs.testing import claiming, own_operations

DTYPES = ("float32", "bfloat16", "float16")
SINKS = np.linspace(-3, 3, 4, dtype=np.float32)
FEATURES: dict[str, Params] = {"window": {"window": 3}, "softcap": {"softcap": 0.5}, "sinks": {"sinks": SINKS}}


def works(backend: Backend, layout: str | None = None, dtype: str = "float32", **params: Any) -> bool:
    """Whether decode over such a pool meets the oracle; False where it is refused or wrong."""
    try:
        with scene(backend, (5, 0, 9), layout=layout, dtype=dtype) as s:
            s.check(**params)
    # With the check in front of it lifted, a driver may say in any way that it cannot.
    except Exception:  # noqa: BLE001
        return False
    return True


def works_exactly_if(claimed: bool, backend: Backend, what: str, **params: Any) -> None:
    """Such a decode works where it is claimed and nowhere else; the plain one always, or its failing would say nothing of a claim."""
    assert works(backend)
    assert works(backend, **params) is claimed, f"{what} is {'' if claimed else 'not '}claimed"


def decodes(backend: Backend, *, heads: int = 4, query_len: int = 1, **sizes: Any) -> None:
    """A small decode in a pool of these sizes meets the oracle."""
    with scene(backend, (5, 3 + query_len), heads=heads, query_len=query_len, **sizes) as s:
        s.check()


def holds(backend: Backend, elements: int) -> None:
    """One array of this many elements is filled to its last, and cleared."""
    buffer = backend.reserve("large", (elements,), "bool")
    backend.upload(buffer, np.ones(elements, bool))
    assert backend.fetch(buffer).all()
    backend.zero(buffer)
    assert not backend.fetch(buffer).any()
    backend.release(buffer)


def takes_memory(backend: Backend, _: object) -> None:
    """Rows written through the door of a wrapped pool are in the memory it was given."""
    g = geometry()
    array = np.zeros(storage_shapes("KV2", g)[0], np.float32)
    pool = backend.wrap_pool(array, layout="KV2", geometry=g)
    put_values(backend, pool, [0], [7])
    backend.synchronize()
    assert (array[0, 1, 0] == 7).all()
    backend.release(pool)


def captures(backend: Backend, _: object) -> None:
    """A captured step adds one each time it is replayed."""
    buffer = backend.buffer("n", np.arange(4, dtype=np.float32))
    segment = Segment("count", lambda _: ({buffer: buffer.get() + 1}, {}), updates=(buffer,))
    backend.run(segment).get()
    trace = backend.capture(segment)
    backend.replay(trace).get()
    same_bits(backend.fetch(buffer), np.arange(2, 6, dtype=np.float32))
    backend.release(trace)
    backend.release(buffer)


@dataclass(frozen=True)
class Probe:
    """The smallest call that needs ``values`` of a field of ``Capabilities``, and what lifts the facade's check of it.

    ``values`` are tried as they are; of a field that is a largest value, one more than the declared too.
    """

    call: Callable[[Backend, Any], None]
    values: tuple[Any, ...]
    lifted: Any = None


PROBES = {
    "kv_dtypes": Probe(lambda b, dtype: decodes(b, dtype=dtype), DTYPES, DTYPES),
    "head_dims": Probe(lambda b, dim: decodes(b, head_dim=dim), (8, 32, 64, 80, 96, 128, 256)),
    "block_sizes": Probe(lambda b, size: decodes(b, block_size=size), (1, 4, 8, 16, 32, 64, 128)),
    "max_group": Probe(lambda b, group: decodes(b, heads=group, num_kv_heads=1), (1, 3, 4, 8, 16, 20, 32, 64, 128)),
    "max_query_len": Probe(lambda b, length: decodes(b, query_len=length), (1, 2, 5, 16, 17, 33, 128)),
    "max_pool_elements": Probe(holds, (2**12,)),
    "lse": Probe(lambda b, _: decodes(b), (True,), lifted=True),
    "addressable": Probe(takes_memory, (True,), lifted=True),
    "capture": Probe(captures, (True,), lifted=True),
}


HELD_ELSEWHERE = {
    "layouts": "the tests of layouts below",
    "tf32": "the record: a run without an error beyond that of float32 fails",
    "traces_run": "the test of delegated operations below",
    "recapture_at_boundary": "nothing: what it costs is speed, and a device that needs it and does not say so replays what is stale",
    "deferred": "nothing: it only says that a Ticket may be read behind the device, which is so of every device that is fast",
}
"""By field that is neither probed nor a feature, what holds the claim against the backend."""


def layouts(backend: Backend) -> list[str]:
    return [layout for layout in LAYOUTS if layout in backend.capabilities.layouts]


@pytest.mark.clause("B4")
def test_every_capability_is_held_against_the_backend() -> None:
    """A field that is added is one that somebody has to hold against what the device does."""
    held = [*PROBES, *FEATURES, *HELD_ELSEWHERE]
    assert sorted(held) == sorted(field.name for field in fields(Capabilities))


@pytest.mark.clause("B4", "C11")
def test_a_run_takes_delegated_operations_unless_it_is_traced(backend: Backend) -> None:
    with scene(backend, (5, 9)) as s:
        before = backend.counters.delegated["paged_decode"]
        want, _ = s.check()
        delegated = backend.counters.delegated["paged_decode"] > before
        held = [backend.buffer(name, getattr(s, name)) for name in ("q", "table", "visible")]

        def decode(b: Backend) -> Any:
            q, table, visible = (buffer.get() for buffer in held)
            return {}, {"out": b.paged_decode(q, s.pool, 0, table, visible, table_len=s.table_len)}

        segment = Segment("decode", decode, reads=tuple(held), pools=(s.pool,))
        if delegated and backend.capabilities.traces_run:
            with pytest.raises(CaptureDeclined, match="paged_decode is delegated to numpy"):
                backend.run(segment)
        else:
            same_bits(backend.run(segment).get()["out"], want)
        for buffer in held:
            backend.release(buffer)


@pytest.mark.clause("B4", "L2")
def test_every_claimed_layout_and_dtype_works(backend: Backend) -> None:
    for layout in layouts(backend):
        for dtype in backend.capabilities.kv_dtypes:
            assert works(backend, layout, dtype), f"layout {layout} with {dtype} KV is claimed"


@pytest.mark.clause("B4", "D9")
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_works_exactly_where_it_is_claimed(backend: Backend, name: str) -> None:
    claimed = getattr(backend.capabilities, name)
    with claiming(backend, **{name: True}):
        works_exactly_if(claimed, backend, name, **FEATURES[name])


@pytest.mark.clause("B4", "L2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_works_exactly_where_it_is_claimed(backend: Backend, layout: str) -> None:
    own = backend.capabilities.layouts
    claimed = layout in own
    # The backend's own layout stays the first, for the plain decode is in that one.
    with claiming(backend, layouts=tuple(dict.fromkeys((*own, *LAYOUTS)))):
        works_exactly_if(claimed, backend, layout, layout=layout)


@pytest.mark.clause("B4")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kv_dtype_works_exactly_where_it_is_claimed(backend: Backend, dtype: str) -> None:
    claimed = dtype in backend.capabilities.kv_dtypes
    with claiming(backend, kv_dtypes=DTYPES):
        works_exactly_if(claimed, backend, dtype, dtype=dtype)


@pytest.mark.refuses("B4", "L2")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kv_dtype_that_is_not_claimed_is_refused_with_those_that_are(backend: Backend, dtype: str) -> None:
    others = tuple(other for other in DTYPES if other != dtype)
    says = f"KV dtype '{dtype}': .* supports {', '.join(others)}$"
    with claiming(backend, kv_dtypes=others), refused(backend, Unsupported, says):
        backend.create_pool(geometry(dtype=dtype))


@pytest.mark.clause("B4")
@pytest.mark.parametrize("name", PROBES)
def test_a_limit_is_declared_exactly_where_there_is_one(another: Another, name: str) -> None:
    """What the declared limit allows works; what it does not is tried with the check lifted, and must not give right results."""
    probe = PROBES[name]
    with another() as backend:
        declared = backend.capabilities
        decodes(backend)  # or what fails beyond a limit would say nothing of the limit
    limit = getattr(declared, name)
    values = (*probe.values, *([limit + 1] if name.startswith("max_") and limit is not None else []))
    for value in values:
        if declared.allows(name, value):
            with another() as backend:
                probe.call(backend, value)
            continue
        right = False
        # A device that is asked for more than it can may raise anything and be left in any state: it is one of its own.
        with contextlib.suppress(Exception), another() as backend, claiming(backend, **{name: probe.lifted}):
            probe.call(backend, value)
            right = True
        assert not right, f"{name}={value!r} gives right results, and the declared {name}={limit!r} refuses it"


@pytest.mark.clause("B4")
@pytest.mark.refuses("B4", "D8")
@pytest.mark.parametrize("name", FEATURES)
def test_what_is_not_claimed_is_refused_by_name(backend: Backend, name: str) -> None:
    """Alone: calls that do not ask for it work."""
    with scene(backend, (5, 9)) as s, claiming(backend, **{name: False}):
        assert s.decode()[0].any()
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
    with scene(backend, (5, 9)) as s:
        for name, limit in limits.items():
            query_len = 2 if name == "max_query_len" else 1
            s.q = np.repeat(s.q[:, :1], query_len, axis=1)
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
    with scene(backend, (5, 9)) as s:
        assert type(s.pool) is Pool
        s.check()


@pytest.mark.clause("B6", "C9")
def test_every_operation_is_counted_as_the_backends_or_as_delegated(backend: Backend) -> None:
    """One of each: it shows either among the backend's own kernels or among what numpy does for it."""
    c = backend.counters
    before = {name: c.launches[name] + c.delegated[name] for name in ("write_kv", "paged_decode")}
    with scene(backend, (5, 9)) as s:
        s.check()
    for name, count in before.items():
        own = name in own_operations(backend)
        assert c.launches[name] + c.delegated[name] > count
        assert (c.delegated[name] == 0) is own
