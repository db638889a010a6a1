"""What a captured step may not do with arrays is refused by name while it is traced, and is an error outside of one (clause C2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forebay.specs import CaptureViolation, InvalidInput
from forebay.specs.dtypes import Array
from forebay.specs.suite.acts import ARRAY_ACTS, CLOSED, READ
from tests.backends_tpu.device import SEGMENT, Device

OF_A_DRIVER = (
    "*= on a pool",
    "closed-over ids to write",
    "closed-over ids to read",
    "closed-over source of a copy",
    "closed-over target of a copy",
    "closed-over k",
    "closed-over v",
    "closed-over table to write",
    "closed-over positions",
    "closed-over q",
    "closed-over table",
    "closed-over visible",
    "closed-over sinks",
    "closed-over partial result",
)
"""Acts that need a pool or a door."""
OF_ARRAYS = {name: act for name, act in ARRAY_ACTS.items() if name not in OF_A_DRIVER}
VALUES = {
    "x": np.arange(4, dtype=np.float32),
    "y": np.zeros(4, np.float32),
    "ids": np.array([1, 2], np.int32),
    "rows": np.ones((2, 2, 8), np.float32),
}
CLOSED_OVER = {
    "closed": np.ones(4, np.float32),
    "closed_ids": np.array([0, 1], np.int32),
    "closed_rows": np.ones((2, 2, 8), np.float32),
    "closed_matrix": np.ones((8, 8), np.float32),
    "closed_vector": np.ones(8, np.float32),
    "closed_angles": np.ones((2, 4), np.float32),
    "closed_get": np.ones(4, np.float32),
}


@dataclass(frozen=True, eq=False)
class Held:
    """A Buffer of the desk: its content is an array of the trace."""

    name: str
    arrays: dict[str, Array]

    def get(self) -> Array:
        return self.arrays[self.name]


def captured(device: Device, act: Callable[[Any, Any], Any]) -> None:
    """Do an act of the shared suite in a trace in which ``VALUES`` are declared."""
    held: dict[str, Array] = {}
    closed = {name: device.put(x) for name, x in CLOSED_OVER.items()}
    desk = SimpleNamespace(**{name: Held(name, held) for name in VALUES}, **closed)

    def step(*arrays: Array) -> Any:
        held.update(zip(VALUES, arrays, strict=True))
        made = act(device, desk)
        if not isinstance(made, tuple):
            return None
        updates, emits = made
        return [*updates.values(), *emits.values()]

    device.traced(step, *(device.put(x) for x in VALUES.values()))


@pytest.mark.clause("C2")
@pytest.mark.parametrize("name", OF_ARRAYS)
def test_an_act_of_the_shared_suite_is_refused_in_a_trace(device: Device, name: str) -> None:
    act, says = OF_ARRAYS[name]
    with pytest.raises(CaptureViolation, match=says) as caught:
        captured(device, act)
    assert SEGMENT in str(caught.value)
    assert device.scope.segment is None
    np.testing.assert_array_equal(device.host(device.put([1.0]) + 1), [2.0])


@pytest.mark.parametrize("name", OF_A_DRIVER)
def test_what_is_left_to_a_driver_is_an_act_of_the_suite(name: str) -> None:
    assert name in ARRAY_ACTS


MORE: dict[str, tuple[Callable[[Device, Array, Array], Any], str]] = {
    "complex": (lambda d, x, c: complex(x[0]), READ),
    "index": (lambda d, x, c: [1, 2][x[0]], READ),
    "numpy()": (lambda d, x, c: x.numpy(), READ),
    "dlpack": (lambda d, x, c: x.__dlpack__(), READ),
    "numpy reduction": (lambda d, x, c: np.sum(x), READ),
    "numpy.add.reduce": (lambda d, x, c: np.add.reduce(x), READ),
    "numpy with a host array": (lambda d, x, c: np.add(x, np.ones(4, np.float32)), "(?i)numpy array"),
    "a list": (lambda d, x, c: x + [1.0, 2.0, 3.0, 4.0], "host list"),  # noqa: RUF005  (the operator is what is tried)
    "compared with nothing": (lambda d, x, c: x == None, "host NoneType"),  # noqa: E711
    "compared with numpy": (lambda d, x, c: x < np.ones(4, np.float32), "(?i)numpy|host"),
    "an index array": (lambda d, x, c: x[d.xp.astype(x, "int32")], "device array .use xp.take"),
    "a numpy mask": (lambda d, x, c: x[np.array([True, False, True, False])], "host array"),
    "a list of places": (lambda d, x, c: x[[0, 1]], "host array"),
    "|=": (lambda d, x, c: (x > 1).__ior__(x > 2), "in place"),
    "a closed-over array alone": (lambda d, x, c: c, CLOSED),
    "a closed-over slice": (lambda d, x, c: c[:2], CLOSED),
    "closed over, turned": (lambda d, x, c: ~(c > 0), CLOSED),
    "closed over, on the right": (lambda d, x, c: 1 + c, CLOSED),
    "closed-over condition": (lambda d, x, c: d.xp.where(c, x, x), CLOSED),
    "closed-over choice": (lambda d, x, c: d.xp.where(x > 1, x, c), CLOSED),
    "closed over in a list": (lambda d, x, c: d.xp.concat([x, c]), CLOSED),
    "JAX over a closed-over array": (lambda d, x, c: jnp.asarray(c), CLOSED),
    "a JAX array made on the host": (lambda d, x, c: x + jnp.ones(4), "host ArrayImpl|host DynamicJaxprTracer"),
    "a concrete value in a wrapper": (lambda d, x, c: x + d.scope.wrap(c.value), CLOSED),
}


@pytest.mark.clause("C2")
@pytest.mark.parametrize("name", MORE)
def test_another_act_is_refused_in_a_trace(device: Device, name: str) -> None:
    act, says = MORE[name]
    closed = device.put(np.ones(4, np.float32))
    with pytest.raises(CaptureViolation, match=says) as caught:
        device.traced(lambda x: act(device, x, closed), device.put(VALUES["x"]))
    assert f"while capturing Segment {SEGMENT}" in str(caught.value)


OUTSIDE: dict[str, Callable[[Array], Any]] = {
    "bool": lambda x: bool(x[0]),
    "float": lambda x: float(x[0]),
    "numpy": lambda x: np.asarray(x),
    "item": lambda x: x[0].item(),
    "in": lambda x: 1.0 in x,
    "mask": lambda x: x[x > 1],
    "item set": lambda x: x.__setitem__(0, 5.0),
    "+=": lambda x: x.__iadd__(1),
    "numpy operand": lambda x: x + np.ones(4, np.float32),
    "numpy operand on the left": lambda x: np.ones(4, np.float32) + x,
    "numpy function": lambda x: np.exp(x),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_of_a_trace_an_error_says_where_to_turn(device: Device, name: str) -> None:
    x = device.put(VALUES["x"])
    with pytest.raises(InvalidInput, match=r"backend\.to_host.*backend\.to_device"):
        OUTSIDE[name](x)
    np.testing.assert_array_equal(device.host(x), VALUES["x"])


@pytest.mark.clause("C2")
def test_numbers_numpy_scalars_and_static_shapes_are_part_of_the_program(device: Device) -> None:
    def step(x: Array) -> list[Array]:
        total = x[0:1] * 0
        for row in x:
            total = total + np.float32(2) * row
        return [total, x + len(x) + np.int32(1), x[::2] if x.shape == (4,) else x, x > np.float32(1)]

    total, more, half, above = (device.host(x) for x in device.replayed(step, device.put(VALUES["x"])))
    assert (total.tolist(), more.tolist(), half.tolist()) == ([12], [5, 6, 7, 8], [0, 2])
    assert above.tolist() == [False, False, True, True]


@pytest.mark.clause("C2")
def test_an_array_of_a_trace_has_no_use_behind_it(device: Device) -> None:
    """Neither outside nor in the next trace: it is no value, and belongs to another program."""
    kept: list[Array] = []
    x = device.put(VALUES["x"])
    device.traced(lambda a: kept.append(a), x)
    with pytest.raises(InvalidInput, match="of a Segment that was captured"):
        kept[0] + 1
    with pytest.raises(CaptureViolation, match=CLOSED):
        device.traced(lambda a: a + kept[0], x)


def test_an_array_of_another_backend_is_refused(device: Device) -> None:
    other = Device()
    assert not device.xp.is_array(other.put([1.0]))
    assert device.xp.is_array(device.put([1.0]))
    assert not device.xp.is_array(np.ones(1))
    with pytest.raises(InvalidInput, match="of another backend"):
        device.put([1.0]) + other.put([1.0])


def test_memory_that_was_given_back_is_refused(device: Device) -> None:
    x = device.put([1.0, 2.0])
    x.value.delete()
    with pytest.raises(InvalidInput, match="given back; nothing was launched"):
        x + 1


def test_an_error_ends_the_trace(device: Device) -> None:
    with pytest.raises(ZeroDivisionError), device.scope.tracing("a"):
        with device.scope.tracing("b"):
            assert device.scope.segment == "b"
        assert device.scope.segment == "a"
        raise ZeroDivisionError
    assert device.scope.segment is None
    assert device.scope.trace is None


def test_what_may_be_said_of_an_array(device: Device) -> None:
    x = device.put(np.ones((2, 3), np.float32))
    assert repr(x) == str(x) == f"{x}" == "DeviceArray(float32[2, 3])"
    assert (x.shape, x.dtype, len(x)) == ((2, 3), "float32", 2)
    assert device.xp.dtype(device.put([1.0], "bfloat16")) == "bfloat16"
    assert isinstance(jnp.asarray(x), jax.Array)
    with pytest.raises(TypeError, match="no length"):
        len(x[0, 0])
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)
