"""Operators, slices and dense operations against numpy, in every dtype, in a trace as outside of one (clauses D1, C3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forebay.specs import InvalidInput
from forebay.specs.dtypes import Array, HostArray
from tests.backends_tpu.device import Device

TOLERANCE = {"float32": 2e-6, "bfloat16": 1.2e-2, "float16": 2e-3}
RNG = np.random.default_rng(0)
HOST: dict[str, HostArray] = {
    "x": RNG.normal(0, 1, (3, 24)).astype(np.float32),
    "y": RNG.normal(0, 1, (3, 24)).astype(np.float32),
    "h": RNG.normal(0, 1, (3, 4, 6)).astype(np.float32),
    "cos": RNG.normal(0, 1, (3, 3)).astype(np.float32),
    "sin": RNG.normal(0, 1, (3, 3)).astype(np.float32),
    "w": RNG.normal(0, 1, (10, 24)).astype(np.float32),
    "b": RNG.normal(0, 1, 10).astype(np.float32),
    "n": RNG.normal(0, 1, 24).astype(np.float32),
    "i": RNG.integers(-1000, 1000, (3, 24)).astype(np.int32),
    "j": RNG.integers(0, 24, (3, 5)).astype(np.int32),
}
HOST["i"][0, :4] = 2**31 - 1, -(2**31), 0, -1
Op = Callable[[Any, dict[str, Any]], Any]


def silu(x: HostArray) -> HostArray:
    made: HostArray = x / (1 + np.exp(-x))
    return made


FLOAT_OPS: dict[str, tuple[Op, Op]] = {
    "add": (lambda xp, a: a["x"] + a["y"], lambda _, a: a["x"] + a["y"]),
    "number - array": (lambda xp, a: 1.7 - a["y"], lambda _, a: 1.7 - a["y"]),
    "array * number": (lambda xp, a: a["x"] * 0.1, lambda _, a: a["x"] * 0.1),
    "mul": (lambda xp, a: a["x"] * a["n"], lambda _, a: a["x"] * a["n"]),
    "div": (lambda xp, a: a["x"] / (a["y"] * a["y"] + 1), lambda _, a: a["x"] / (a["y"] ** 2 + 1)),
    "maximum": (lambda xp, a: xp.maximum(a["x"], a["y"]), lambda _, a: np.maximum(a["x"], a["y"])),
    "minimum": (lambda xp, a: xp.minimum(a["x"], a["y"]), lambda _, a: np.minimum(a["x"], a["y"])),
    "exp": (lambda xp, a: xp.exp(a["x"]), lambda _, a: np.exp(a["x"])),
    "log": (lambda xp, a: xp.log(a["x"] * a["x"] + 1), lambda _, a: np.log(a["x"] ** 2 + 1)),
    "tanh": (lambda xp, a: xp.tanh(a["x"]), lambda _, a: np.tanh(a["x"])),
    "rsqrt": (lambda xp, a: xp.rsqrt(a["x"] * a["x"] + 1), lambda _, a: 1 / np.sqrt(a["x"] ** 2 + 1)),
    "silu": (lambda xp, a: xp.silu(a["x"]), lambda _, a: silu(a["x"])),
    "silu_mul": (lambda xp, a: xp.silu_mul(a["x"], a["y"]), lambda _, a: silu(a["x"]) * a["y"]),
    "clip": (lambda xp, a: xp.clip(a["x"], -1, 1), lambda _, a: np.clip(a["x"], -1, 1)),
    "where": (
        lambda xp, a: xp.where(a["x"] < a["y"], a["x"], 0.5),
        lambda _, a: np.where(a["x"] < a["y"], a["x"], 0.5),
    ),
    "reshape": (lambda xp, a: xp.reshape(a["h"], (-1, 2, 12)), lambda _, a: a["h"].reshape(-1, 2, 12)),
    "permute": (lambda xp, a: xp.permute(a["h"], (2, 0, 1)), lambda _, a: a["h"].transpose(2, 0, 1)),
    "head": (lambda xp, a: xp.head(a["w"], 4), lambda _, a: a["w"][:4]),
    "concat": (
        lambda xp, a: xp.concat([a["x"], a["y"][:, :3]]),
        lambda _, a: np.concatenate([a["x"], a["y"][:, :3]], -1),
    ),
    "stack": (lambda xp, a: xp.stack([a["x"], a["y"]]), lambda _, a: np.stack([a["x"], a["y"]], -1)),
    "repeat": (lambda xp, a: xp.repeat(a["x"][:, :1], 3), lambda _, a: np.repeat(a["x"][:, :1], 3, 1)),
    "take": (lambda xp, a: xp.take(a["n"], a["j"]), lambda _, a: a["n"][a["j"]]),
    "take rows": (lambda xp, a: xp.take(a["w"], a["j"] // 3), lambda _, a: a["w"][a["j"] // 3]),
    "take_along": (lambda xp, a: xp.take_along(a["x"], a["j"]), lambda _, a: np.take_along_axis(a["x"], a["j"], 1)),
    "max": (lambda xp, a: xp.max(a["x"]), lambda _, a: a["x"].max(-1, keepdims=True)),
    "sum": (lambda xp, a: xp.sum(a["x"]), lambda _, a: a["x"].sum(-1, keepdims=True)),
    "sum of three axes": (lambda xp, a: xp.sum(a["h"]), lambda _, a: a["h"].sum(-1, keepdims=True)),
    "mean": (lambda xp, a: xp.mean(a["x"]), lambda _, a: a["x"].mean(-1, keepdims=True)),
    "matmul": (lambda xp, a: xp.matmul(a["x"], xp.permute(a["w"], (1, 0))), lambda _, a: a["x"] @ a["w"].T),
    "batched matmul": (
        lambda xp, a: xp.matmul(a["h"], xp.permute(a["h"], (0, 2, 1))),
        lambda _, a: a["h"] @ a["h"].swapaxes(1, 2),
    ),
    "linear": (lambda xp, a: xp.linear(a["x"], a["w"], a["b"]), lambda _, a: a["x"] @ a["w"].T + a["b"]),
    "linear of many axes": (
        lambda xp, a: xp.linear(xp.reshape(a["x"], (-1, 1, 24)), a["w"]),
        lambda _, a: (a["x"] @ a["w"].T)[:, None],
    ),
    "rms_norm": (
        lambda xp, a: xp.rms_norm(a["x"], a["n"], 1e-5),
        lambda _, a: a["x"] / np.sqrt((a["x"] ** 2).mean(-1, keepdims=True) + 1e-5) * a["n"],
    ),
    "rope": (
        lambda xp, a: xp.rope(a["h"], a["cos"], a["sin"]),
        lambda _, a: np.concatenate(
            [
                a["h"][..., :3] * a["cos"][:, None] - a["h"][..., 3:] * a["sin"][:, None],
                a["h"][..., 3:] * a["cos"][:, None] + a["h"][..., :3] * a["sin"][:, None],
            ],
            -1,
        ),
    ),
}
EXACT_OPS: dict[str, tuple[Op, Op]] = {
    "int * number": (lambda xp, a: a["i"] * 3_000_017 + 7, lambda _, a: a["i"] * np.int32(3_000_017) + np.int32(7)),
    "floor": (lambda xp, a: a["i"] // 7, lambda _, a: a["i"] // np.int32(7)),
    "floor by a negative": (lambda xp, a: a["i"] // -7, lambda _, a: a["i"] // np.int32(-7)),
    "number // ints": (lambda xp, a: 5000 // (a["j"] + 1), lambda _, a: np.int32(5000) // (a["j"] + np.int32(1))),
    "mod": (lambda xp, a: a["i"] % 7, lambda _, a: a["i"] % np.int32(7)),
    "mod by a negative": (lambda xp, a: a["i"] % -7, lambda _, a: a["i"] % np.int32(-7)),
    "left shift": (lambda xp, a: a["i"] << 5, lambda _, a: a["i"] << np.int32(5)),
    "right shift": (lambda xp, a: a["i"] >> 3, lambda _, a: a["i"] >> np.int32(3)),
    "bits": (lambda xp, a: ~(a["i"] & 255 | 4096) ^ a["i"], lambda _, a: ~(a["i"] & 255 | 4096) ^ a["i"]),
    "truth": (
        lambda xp, a: ~(a["i"] > 3) & (a["i"] != 0) | (a["i"] <= -900),
        lambda _, a: ~(a["i"] > 3) & (a["i"] != 0) | (a["i"] <= -900),
    ),
    "compare": (lambda xp, a: (a["x"] >= a["y"]) ^ (a["x"] == a["x"]), lambda _, a: (a["x"] >= a["y"]) ^ True),
    "int / int": (lambda xp, a: a["i"] / 8, lambda _, a: (a["i"] / 8).astype(np.float32)),
    "int * float": (lambda xp, a: a["j"] * 0.5, lambda _, a: (a["j"] * 0.5).astype(np.float32)),
    "numpy scalar": (lambda xp, a: np.int32(2) * a["i"] - np.int32(1), lambda _, a: np.int32(2) * a["i"] - np.int32(1)),
    "numpy scalar compared": (lambda xp, a: np.int32(3) < a["i"], lambda _, a: a["i"] > 3),
    "truncate": (lambda xp, a: xp.astype(a["x"] * 9, "int32"), lambda _, a: (a["x"] * np.float32(9)).astype(np.int32)),
    "to bool": (lambda xp, a: xp.astype(a["i"], "bool"), lambda _, a: a["i"] != 0),
    "from bool": (lambda xp, a: xp.astype(a["i"] > 0, "int32"), lambda _, a: (a["i"] > 0).astype(np.int32)),
    "to float16": (lambda xp, a: xp.astype(a["x"], "float16"), lambda _, a: a["x"].astype(np.float16)),
    "two numbers": (
        lambda xp, a: xp.where(a["i"] > 0, 1, -1),
        lambda _, a: np.where(a["i"] > 0, 1, -1).astype(np.int32),
    ),
    "number and float": (
        lambda xp, a: xp.where(a["i"] > 0, 1, 0.5),
        lambda _, a: np.where(a["i"] > 0, np.float32(1), np.float32(0.5)),
    ),
    "choice of ints": (lambda xp, a: xp.where(a["i"] > 0, a["i"], 0), lambda _, a: np.maximum(a["i"], 0)),
    "sum of ints": (lambda xp, a: xp.sum(a["i"] * 1000), lambda _, a: (a["i"] * 1000).sum(-1, np.int32, keepdims=True)),
    "max of ints": (lambda xp, a: xp.max(a["i"]), lambda _, a: a["i"].max(-1, keepdims=True)),
    "clip of ints": (lambda xp, a: xp.clip(a["i"], -5, 7), lambda _, a: np.clip(a["i"], -5, 7)),
    "argmax": (lambda xp, a: xp.argmax(a["i"] // 500), lambda _, a: np.argmax(a["i"] // 500, -1).astype(np.int32)),
    "argmax of truth": (lambda xp, a: xp.argmax(a["i"] > 0), lambda _, a: np.argmax(a["i"] > 0, -1).astype(np.int32)),
}
SLICES: dict[str, Any] = {
    "row": 1,
    "last": -1,
    "numpy int": np.int64(2),
    "rows": slice(1, 3),
    "column": (slice(None), 2),
    "dots": (..., -1, 2),
    "none": (slice(None), slice(1, 4, 2), None, ...),
    "backwards": (..., slice(None, None, -1)),
    "backwards by two": (slice(None), slice(3, None, -2)),
    "nothing": slice(2, 2),
    "behind the end": (slice(None), slice(2, 99)),
    "all": (),
}


def on(device: Device, dtype: str) -> tuple[dict[str, Array], dict[str, HostArray]]:
    """The inputs on the device in a dtype, and in numpy as they were rounded."""
    made = {name: device.put(x, None if x.dtype == np.int32 else dtype) for name, x in HOST.items()}
    return made, {n: x if x.dtype == np.int32 else device.host(made[n]).astype(np.float64) for n, x in HOST.items()}


@pytest.mark.clause("D1")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", FLOAT_OPS)
def test_floats_meet_numpy_in_float64(device: Device, name: str, dtype: str) -> None:
    op, truth = FLOAT_OPS[name]
    inputs, rounded = on(device, dtype)
    made, want = op(device.xp, inputs), np.asarray(truth(np, rounded))
    assert made.dtype == dtype
    assert made.shape == want.shape
    scale = max(1, np.abs(want).max())
    np.testing.assert_allclose(device.host(made), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)


@pytest.mark.clause("D1", "C3")
@pytest.mark.parametrize("name", EXACT_OPS)
def test_ints_and_choices_are_exact(device: Device, name: str) -> None:
    op, truth = EXACT_OPS[name]
    inputs = {n: device.put(x) for n, x in HOST.items()}
    with np.errstate(over="ignore"):
        want = np.asarray(truth(np, HOST))
    for made in (
        op(device.xp, inputs),
        *device.replayed(lambda *arrays: op(device.xp, dict(zip(HOST, arrays, strict=True))), *inputs.values()),
    ):
        got = device.host(made)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.clause("D1")
@pytest.mark.parametrize("name", SLICES)
def test_slices_are_those_of_numpy(device: Device, name: str) -> None:
    x = HOST["h"]
    np.testing.assert_array_equal(device.host(device.put(x)[SLICES[name]]), x[SLICES[name]])


@pytest.mark.parametrize("index", [3, -4, (0, 0, 0, 0), (..., ...), "a", True, 1.0, (slice(None), 4)])
def test_an_index_outside_is_an_error(device: Device, index: Any) -> None:
    """JAX would take the nearest element."""
    with pytest.raises(IndexError, match="index"):
        device.put(HOST["h"])[index]


@pytest.mark.clause("D1", "C3")
def test_bfloat16_rounds_after_each_operation_in_a_program_too(device: Device) -> None:
    """XLA would keep float32 between them."""
    xp = device.xp
    x, w = (
        device.put(np.linspace(-3, 3, 200).astype(np.float32)[None], "bfloat16"),
        device.put(np.ones(200), "bfloat16"),
    )

    def chain(a: Array, weight: Array) -> list[Array]:
        return [((a * 1.01 + 100.0) - 100.0) / 3.0, xp.silu(a * a) - a, xp.rms_norm(a + 1, weight, 1e-5) * a]

    for alone, replayed in zip(chain(x, w), device.replayed(chain, x, w), strict=True):
        np.testing.assert_array_equal(device.host(alone), device.host(replayed))


@pytest.mark.clause("D1")
def test_a_number_is_not_rounded_before_the_result_is(device: Device) -> None:
    x = np.array([3.0, 5.0, 7.0], np.float32)
    got = device.host(device.put(x, "bfloat16") * 1.001953125)  # in bfloat16 the number would be 1
    np.testing.assert_array_equal(got, device.host(device.put(x * np.float32(1.001953125), "bfloat16")))
    assert device.host(device.put([1000.0], "float16") * 65536 / 65536).tolist() == [np.inf]


@pytest.mark.clause("D1")
def test_what_is_not_selected_may_be_nan(device: Device) -> None:
    x = device.put([np.nan, 1.0])
    assert device.host(device.xp.where(x == x, x, 0.0)).tolist() == [0.0, 1.0]
    assert np.isnan(device.host(device.xp.maximum(x, device.put([0.0, 2.0])))[0])
    assert np.isnan(device.host(device.xp.clip(x, 0, 1))[0])


@pytest.mark.clause("D1")
def test_a_bitcast_keeps_every_bit(device: Device) -> None:
    bits = np.array([[0x7F800001, 0xFFC00000, 0x80000000, 1, 0x3F800000]], np.uint32).view(np.int32)
    floats = device.xp.bitcast(device.put(bits)[:, 1:], "float32")
    assert floats.dtype == "float32"
    assert device.host(floats).tobytes() == bits[:, 1:].tobytes()
    np.testing.assert_array_equal(device.host(device.xp.bitcast(floats, "int32")), bits[:, 1:])


REFUSED: dict[str, tuple[Callable[[Any, dict[str, Any]], Any], str]] = {
    "dtypes": (lambda xp, a: a["x"] + a["i"], "one dtype"),
    "shapes": (lambda xp, a: a["x"] + a["b"], "do not fit"),
    "float bits": (lambda xp, a: a["x"] & 1, "not defined for float32"),
    "sum of truth and truth": (lambda xp, a: (a["x"] > 0) + (a["y"] > 0), "not defined for bool"),
    "not of floats": (lambda xp, a: ~a["x"], "not defined for floats"),
    "a large number": (lambda xp, a: a["i"] + 2**31, "does not fit int32"),
    "reshape": (lambda xp, a: xp.reshape(a["x"], (5, -1)), "numbers of elements"),
    "permute": (lambda xp, a: xp.permute(a["x"], (0, 0)), "axes"),
    "head": (lambda xp, a: xp.head(a["x"], 4), r"n=4 of \[3, 24\]"),
    "concat": (lambda xp, a: xp.concat([a["x"], a["n"]]), "last axis alone"),
    "stack": (lambda xp, a: xp.stack([a["x"], a["n"]]), "one shape"),
    "repeat": (lambda xp, a: xp.repeat(a["x"], 2), "length 1"),
    "take": (lambda xp, a: xp.take(a["n"], a["x"]), "int32 is expected"),
    "take_along": (lambda xp, a: xp.take_along(a["n"], a["j"]), "expected"),
    "add_along": (lambda xp, a: xp.add_along(a["x"], a["j"], a["y"]), "expected"),
    "where": (lambda xp, a: xp.where(a["i"], a["x"], a["y"]), "expected bool"),
    "astype": (lambda xp, a: xp.astype(a["x"], "float64"), "float64"),
    "bitcast": (lambda xp, a: xp.bitcast(a["x"], "bfloat16"), "expected float32 and int32"),
    "exp": (lambda xp, a: xp.exp(a["i"]), "expected a float array"),
    "mean": (lambda xp, a: xp.mean(a["i"]), "expected a float array"),
    "max of nothing": (lambda xp, a: xp.max(a["x"][:, :0]), "at least 1"),
    "kth_largest": (lambda xp, a: xp.kth_largest(a["x"], a["j"]), r"\[B, 1\]"),
    "top_k": (lambda xp, a: xp.top_k(a["x"], 25), "k=25"),
    "mass_cutoff": (lambda xp, a: xp.mass_cutoff(a["x"], a["y"]), r"\[B, 1\]"),
    "matmul": (lambda xp, a: xp.matmul(a["x"], a["y"]), r"\[..., K, N\]"),
    "linear": (lambda xp, a: xp.linear(a["x"], a["w"], a["n"]), "a bias"),
    "rms_norm": (lambda xp, a: xp.rms_norm(a["x"], a["b"], 1e-5), "expected"),
    "rope": (lambda xp, a: xp.rope(a["h"], a["x"], a["y"]), "expected"),
    "penalise": (lambda xp, a: xp.penalise(a["x"], a["j"], a["j"], a["x"][:, :1]), "expected"),
    "gumbel": (lambda xp, a: xp.gumbel(a["x"], a["j"]), "int32 is expected"),
}


@pytest.mark.refuses("B6")
@pytest.mark.parametrize("name", REFUSED)
def test_other_arguments_are_refused(device: Device, name: str) -> None:
    act, says = REFUSED[name]
    with pytest.raises(InvalidInput, match=says):
        act(device.xp, {n: device.put(x) for n, x in HOST.items()})
