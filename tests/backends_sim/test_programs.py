"""Warm and cold programs, and what a Segment may not do though the host's checks do not see it (clauses C1, C2, C13)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, CaptureDeclined, CaptureViolation, ColdCapture, DeviceLost, InvalidInput, Segment
from forebay.specs.suite.acts import ARRAY_ACTS
from forebay.specs.suite.desk import Desk, open_desk
from forebay.specs.suite.kv import bytes_of, changes
from tests.backends_sim.opened import counter, launched, open_sim


@pytest.mark.clause("C1", "C12")
def test_another_program_than_the_one_that_ran_is_cold() -> None:
    """A Segment that evaluates otherwise at capture has never been compiled so; running it once makes it warm."""
    with open_sim() as b:
        x = b.buffer("x", np.zeros(4, np.float32))
        wide = [False]

        def fn(_: Backend) -> Any:
            y = x.get() + 1
            return {x: y if wide else y[:2]}, {}

        segment = Segment("s", fn, updates=(x,))
        wide.clear()
        b.run(segment)
        wide.append(True)
        with pytest.raises(ColdCapture, match=r"launch \d+ is \('commit', .*, not \('commit'"):
            b.capture(segment)
        b.run(segment)
        b.release(b.capture(segment))

        def longer(_: Backend) -> Any:
            return {x: x.get() + 1}, ({"x": x.get()} if wide else {})

        other = Segment("longer", longer, updates=(x,))
        wide.clear()
        b.run(other)
        wide.append(True)
        with pytest.raises(ColdCapture, match="run it once before capture"):
            b.capture(other)
        assert (b.counters.capture, b.counters.declined) == (1, 0)


@pytest.mark.clause("C2")
def test_a_host_value_that_changes_is_not_frozen() -> None:
    """A random draw is baked into the program as a number: the trace would repeat it for ever."""
    with open_sim() as b:
        x = b.buffer("x", np.zeros(4, np.float32))
        random = np.random.default_rng(0)
        draws = Segment("draws", lambda _: ({x: x.get() + np.float32(random.random())}, {}), updates=(x,))
        b.run(draws)
        with pytest.raises(
            CaptureViolation, match=r"launch 0 \(add\) of Segment draws\[\] bakes a host value that is not the same"
        ):
            b.capture(draws)
        fixed = Segment("fixed", lambda _: ({x: x.get() + np.float32(0.5)}, {}), updates=(x,))
        b.run(fixed)
        b.release(b.capture(fixed))


@pytest.mark.clause("C2", "C1")
@pytest.mark.parametrize("name", ARRAY_ACTS)
def test_acts_on_arrays_are_refused_in_run_as_well(name: str) -> None:
    """Nothing of a step is done before all of it is known, so a refused run changes nothing, doors included."""
    act, says = ARRAY_ACTS[name]
    with open_sim() as b, open_desk(b) as d:

        def fn(be: Backend) -> Any:
            d.write(be)
            done = act(be, d)
            return done if isinstance(done, tuple) else ({}, {})

        segment = Segment("forbidden", fn, reads=d.reads, updates=(d.y,), pools=(d.pool,))
        before, launches = bytes_of(b, *d.everything), launched(b)
        with pytest.raises(CaptureViolation, match=says):
            b.run(segment)
        assert changes(before, bytes_of(b, *d.everything)) == {}
        assert launched(b) == launches
        with pytest.raises(CaptureViolation, match=says):
            b.capture(segment)


def mixed(x: Any, d: Desk) -> Any:
    return x + d.ids.get()


OUTSIDE: dict[str, tuple[Any, str]] = {
    "bool": (lambda b, d: bool(d.x.get()[0]), "a host read of a device value by __bool__"),
    "item": (lambda b, d: d.x.get()[0].item(), "a host read of a device value by item"),
    "numpy": (lambda b, d: np.asarray(d.x.get()), "a host read of a device value by __array__"),
    "numpy function": (lambda b, d: np.exp(d.x.get()), "a host read of a device value by numpy.exp"),
    "numpy operand": (lambda b, d: d.x.get() + np.ones(4, np.float32), "host ndarray among device arrays"),
    "numpy operand on the left": (lambda b, d: np.ones(4, np.float32) + d.x.get(), "a host array. among device arrays"),
    "a list": (lambda b, d: d.x.get() + list(range(4)), "host list among device arrays"),
    "setting an item": (lambda b, d: d.x.get().__setitem__(0, 1.0), "changes an array in place"),
    "in place": (lambda b, d: d.x.get().__iadd__(1.0), "add= changes an array in place"),
    "a mask": (lambda b, d: d.x.get()[d.x.get() > 1], "a boolean mask"),
    "an index array": (lambda b, d: d.x.get()[d.ids.get()], "use xp.take"),
    "a list of indices": (lambda b, d: d.x.get()[[0, 1]], "a host array; use xp.take"),
    "two dtypes": (lambda b, d: mixed(d.x.get(), d), r"add: got float32\[4\], int32\[2\], expected one dtype"),
    "a product of two dtypes": (lambda b, d: b.xp.matmul(d.rows.get(), d.table.get()), "matmul: .*expected one dtype"),
    "shapes that do not fit": (lambda b, d: d.x.get() + d.rows.get()[0, 0, :3], "operator add"),
    "bits of floats": (lambda b, d: d.x.get() & 1, "it is not defined for float32"),
    "a number beyond int32": (lambda b, d: d.ids.get() + 2**31, "the number 2147483648 does not fit int32"),
    "indices of floats": (lambda b, d: b.xp.take(d.x.get(), d.x.get()), "got indices of float32, expected int32"),
    "a reshape of other size": (lambda b, d: b.xp.reshape(d.x.get(), (3, -1)), "the numbers of elements differ"),
    "a head too long": (lambda b, d: b.xp.head(d.x.get(), 5), r"got n=5 of \[4\]"),
    "a repeat of many": (lambda b, d: b.xp.repeat(d.x.get(), 2), "expected a last axis of length 1"),
    "axes that are none": (lambda b, d: b.xp.permute(d.x.get(), (1,)), "got axes"),
    "a condition of floats": (lambda b, d: b.xp.where(d.x.get(), 1, 0), "got a condition of float32, expected bool"),
    "a bitcast of size": (lambda b, d: b.xp.bitcast(d.x.get(), "bfloat16"), "expected float32 and int32"),
    "the exponential of ints": (lambda b, d: b.xp.exp(d.ids.get()), "got int32, expected a float array"),
    "a product that does not fit": (
        lambda b, d: b.xp.linear(d.x.get(), d.closed_matrix),
        r"expected \[..., K\], \[N, K\]",
    ),
}


@pytest.mark.clause("C2")
@pytest.mark.parametrize("name", OUTSIDE)
def test_arrays_refuse_the_same_outside_a_segment(backend: Backend, name: str) -> None:
    """Strict always, so that a model that works here asks for nothing an accelerator lacks."""
    act, says = OUTSIDE[name]
    with open_desk(backend) as d:
        before = launched(backend)
        with pytest.raises(InvalidInput, match=says):
            act(backend, d)
        assert launched(backend) == before, "nothing was waited for"


def test_an_index_outside_an_array_is_an_index_error(backend: Backend) -> None:
    x = backend.to_device(np.zeros((2, 3), np.float32))
    for index in (2, -3, (0, 3), (0, 0, 0), (Ellipsis, Ellipsis), True, 1.0):
        with pytest.raises(IndexError):
            x[index]


def test_arrays_of_two_devices_do_not_mix(backend: Backend) -> None:
    with open_sim() as other:
        mine, theirs = backend.to_device(np.ones(2, np.float32)), other.to_device(np.ones(2, np.float32))
        with pytest.raises(InvalidInput, match="of another device"):
            mine + theirs
        with pytest.raises(InvalidInput, match="expected a device array"):
            backend.to_host(theirs)


@pytest.mark.clause("C2", "S5")
def test_a_wild_index_loses_the_device() -> None:
    """The caller bounds indices; a device that is handed a wild one does not answer with somebody else's memory."""
    with open_sim() as b:
        x, ids = b.to_device(np.ones(4, np.float32)), b.to_device(np.array([0, 4], np.int32))
        y = b.xp.take(x, ids)
        with pytest.raises(DeviceLost, match=r"kernel take reached outside its arrays: indices 0 to 4 of 4"):
            b.to_host(y)
        with pytest.raises(DeviceLost, match="kernel take reached outside"):
            b.to_device(np.ones(1, np.float32))


@pytest.mark.clause("C9", "C12")
def test_an_injected_lack_of_room_declines_one_capture() -> None:
    with open_sim(inject=[{"kind": "memory", "at_capture": 1}]) as b:
        x, segment = counter(b)
        b.run(segment)
        with pytest.raises(CaptureDeclined, match=r"the arena of Segment count\[\] needs 128 bytes; .*injected"):
            b.capture(segment)
        assert (b.counters.declined, b.counters.capture) == (1, 0)
        trace = b.capture(segment)
        assert b.replay(trace).get()["x"].tolist() == [1, 1]
        assert b.fetch(x).tolist() == [2, 2]
