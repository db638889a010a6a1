"""``xp`` of the simulated device against numpy in float64, in every dtype, batch by batch, recorded as computed (clauses C3, D5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forebay.specs import Backend, Buffer, Segment
from forebay.specs.suite import attention
from forebay.specs.suite.attention import Array
from forebay.specs.suite.kv import same_bits

ROWS, MANY = 3, 14
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.2e-2, "float16": 2e-3}
Op = Callable[[Any, dict[str, Any]], Any]


def shapes(rows: int) -> dict[str, tuple[int, ...]]:
    return {
        "x": (rows, 24),
        "y": (rows, 24),
        "h": (rows, 4, 6),
        "cos": (rows, 3),
        "sin": (rows, 3),
        "w": (10, 24),
        "b": (10,),
        "n": (24,),
    }


PER_ROW = ("x", "y", "h", "cos", "sin", "i", "j")


def inputs(rows: int, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    made: dict[str, Array] = {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in shapes(rows).items()}
    made["i"] = rng.integers(-1000, 1000, (rows, 24)).astype(np.int32)
    made["j"] = rng.integers(0, 24, (rows, 5)).astype(np.int32)
    return made


def softplus_free(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


FLOAT_OPS: dict[str, tuple[Op, Op]] = {
    "add": (lambda xp, a: a["x"] + a["y"], lambda np_, a: a["x"] + a["y"]),
    "sub": (lambda xp, a: 1.5 - a["y"], lambda np_, a: 1.5 - a["y"]),
    "mul": (lambda xp, a: a["x"] * a["n"], lambda np_, a: a["x"] * a["n"]),
    "div": (lambda xp, a: a["x"] / (a["y"] * a["y"] + 1), lambda np_, a: a["x"] / (a["y"] ** 2 + 1)),
    "exp": (lambda xp, a: xp.exp(a["x"]), lambda np_, a: np.exp(a["x"])),
    "log": (lambda xp, a: xp.log(a["x"] * a["x"] + 1), lambda np_, a: np.log(a["x"] ** 2 + 1)),
    "tanh": (lambda xp, a: xp.tanh(a["x"]), lambda np_, a: np.tanh(a["x"])),
    "rsqrt": (lambda xp, a: xp.rsqrt(a["x"] * a["x"] + 1), lambda np_, a: 1 / np.sqrt(a["x"] ** 2 + 1)),
    "silu": (lambda xp, a: xp.silu(a["x"]), lambda np_, a: a["x"] * softplus_free(a["x"])),
    "silu_mul": (lambda xp, a: xp.silu_mul(a["x"], a["y"]), lambda np_, a: a["x"] * softplus_free(a["x"]) * a["y"]),
    "maximum": (lambda xp, a: xp.maximum(a["x"], a["y"]), lambda np_, a: np.maximum(a["x"], a["y"])),
    "minimum": (lambda xp, a: xp.minimum(a["x"], a["y"]), lambda np_, a: np.minimum(a["x"], a["y"])),
    "clip": (lambda xp, a: xp.clip(a["x"], -1, 1), lambda np_, a: np.clip(a["x"], -1, 1)),
    "where": (
        lambda xp, a: xp.where(a["x"] < a["y"], a["x"], 0.5),
        lambda np_, a: np.where(a["x"] < a["y"], a["x"], 0.5),
    ),
    "reshape": (lambda xp, a: xp.reshape(a["h"], (-1, 2, 12)), lambda np_, a: a["h"].reshape(-1, 2, 12)),
    "reshape of a transpose": (
        lambda xp, a: xp.reshape(xp.permute(a["h"], (0, 2, 1)), (-1, 24)),
        lambda np_, a: a["h"].swapaxes(1, 2).reshape(-1, 24),
    ),
    "slices": (lambda xp, a: a["h"][:, 1:4:2, None, ..., ::-1], lambda np_, a: a["h"][:, 1:4:2, None, ..., ::-1]),
    "an element": (lambda xp, a: a["h"][..., -1, 2], lambda np_, a: a["h"][..., -1, 2]),
    "concat": (lambda xp, a: xp.concat([a["x"], a["y"]]), lambda np_, a: np.concatenate([a["x"], a["y"]], -1)),
    "stack": (lambda xp, a: xp.stack([a["x"], a["y"]]), lambda np_, a: np.stack([a["x"], a["y"]], -1)),
    "repeat": (lambda xp, a: xp.repeat(a["x"][:, :1], 3) * 2, lambda np_, a: np.repeat(a["x"][:, :1], 3, 1) * 2),
    "take_along": (lambda xp, a: xp.take_along(a["x"], a["j"]), lambda np_, a: np.take_along_axis(a["x"], a["j"], 1)),
    "max": (lambda xp, a: xp.max(a["x"]), lambda np_, a: a["x"].max(-1, keepdims=True)),
    "sum": (lambda xp, a: xp.sum(a["x"]), lambda np_, a: a["x"].sum(-1, keepdims=True)),
    "sum of a transpose": (
        lambda xp, a: xp.sum(xp.permute(a["h"], (0, 2, 1))),
        lambda np_, a: a["h"].swapaxes(1, 2).sum(-1, keepdims=True),
    ),
    "mean": (lambda xp, a: xp.mean(a["x"]), lambda np_, a: a["x"].mean(-1, keepdims=True)),
    "matmul": (lambda xp, a: xp.matmul(a["x"], xp.permute(a["w"], (1, 0))), lambda np_, a: a["x"] @ a["w"].T),
    "batched matmul": (
        lambda xp, a: xp.matmul(a["h"], xp.permute(a["h"], (0, 2, 1))),
        lambda np_, a: a["h"] @ a["h"].swapaxes(1, 2),
    ),
    "linear": (lambda xp, a: xp.linear(a["x"], a["w"], a["b"]), lambda np_, a: a["x"] @ a["w"].T + a["b"]),
    "linear of many axes": (
        lambda xp, a: xp.linear(xp.reshape(a["x"], (-1, 1, 24)), a["w"]),
        lambda np_, a: (a["x"] @ a["w"].T)[:, None],
    ),
    "rms_norm": (
        lambda xp, a: xp.rms_norm(a["x"], a["n"], 1e-5),
        lambda np_, a: a["x"] / np.sqrt((a["x"] ** 2).mean(-1, keepdims=True) + 1e-5) * a["n"],
    ),
    "rope": (
        lambda xp, a: xp.rope(a["h"], a["cos"], a["sin"]),
        lambda np_, a: np.concatenate(
            [
                a["h"][..., :3] * a["cos"][:, None] - a["h"][..., 3:] * a["sin"][:, None],
                a["h"][..., 3:] * a["cos"][:, None] + a["h"][..., :3] * a["sin"][:, None],
            ],
            -1,
        ),
    ),
}
EXACT_OPS: dict[str, tuple[Op, Op]] = {
    "int add": (lambda xp, a: a["i"] * 3_000_017 + 7, lambda np_, a: a["i"] * np.int32(3_000_017) + np.int32(7)),
    "floor": (lambda xp, a: a["i"] // 7, lambda np_, a: a["i"] // np.int32(7)),
    "mod": (lambda xp, a: a["i"] % 7, lambda np_, a: a["i"] % np.int32(7)),
    "shifts": (lambda xp, a: (a["i"] << 5) ^ (a["i"] >> 3), lambda np_, a: (a["i"] << 5) ^ (a["i"] >> 3)),
    "logic": (
        lambda xp, a: ~(a["i"] > 3) & (a["i"] != 0) | (a["i"] <= -900),
        lambda np_, a: ~(a["i"] > 3) & (a["i"] != 0) | (a["i"] <= -900),
    ),
    "compare": (lambda xp, a: (a["x"] >= a["y"]) ^ (a["x"] == a["x"]), lambda np_, a: (a["x"] >= a["y"]) ^ True),
    "int / int": (lambda xp, a: a["i"] / 8, lambda np_, a: (a["i"] / 8).astype(np.float32)),
    "int * float": (lambda xp, a: a["i"] * 0.5, lambda np_, a: (a["i"] * 0.5).astype(np.float32)),
    "numpy scalar": (lambda xp, a: np.int32(2) * a["i"] - np.int32(1), lambda np_, a: 2 * a["i"] - np.int32(1)),
    "truncate": (
        lambda xp, a: xp.astype(a["x"] * 9, "int32"),
        lambda np_, a: (a["x"] * np.float32(9)).astype(np.int32),
    ),
    "to bool": (lambda xp, a: xp.astype(a["i"], "bool"), lambda np_, a: a["i"] != 0),
    "from bool": (lambda xp, a: xp.astype(a["i"] > 0, "int32"), lambda np_, a: (a["i"] > 0).astype(np.int32)),
    "choice of numbers": (
        lambda xp, a: xp.where(a["i"] > 0, 1, -1),
        lambda np_, a: np.where(a["i"] > 0, 1, -1).astype(np.int32),
    ),
    "argmax": (lambda xp, a: xp.argmax(a["i"] // 500), lambda np_, a: np.argmax(a["i"] // 500, -1).astype(np.int32)),
    "take": (lambda xp, a: xp.take(a["n"], a["j"]), lambda np_, a: a["n"][a["j"]]),
    "head": (lambda xp, a: xp.head(a["w"], 4), lambda np_, a: a["w"][:4]),
}


def expected(op: Op, host: dict[str, Array]) -> Array:
    return np.asarray(op(np, host))


@pytest.mark.clause("D1")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", FLOAT_OPS)
def test_floats_meet_numpy_in_float64(backend: Backend, name: str, dtype: str) -> None:
    host, (op, truth) = inputs(ROWS), FLOAT_OPS[name]
    device = {n: backend.to_device(x, None if x.dtype == np.int32 else dtype) for n, x in host.items()}
    rounded = {n: x if x.dtype == np.int32 else backend.to_host(device[n]).astype(np.float64) for n, x in host.items()}
    result = op(backend.xp, device)
    want, got = expected(truth, rounded), backend.to_host(result)
    assert backend.xp.dtype(result) == dtype
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * max(1, np.abs(want).max()))


@pytest.mark.clause("D1")
@pytest.mark.parametrize("name", EXACT_OPS)
def test_ints_and_choices_are_exact(backend: Backend, name: str) -> None:
    host, (op, truth) = inputs(ROWS), EXACT_OPS[name]
    got = backend.to_host(op(backend.xp, {n: backend.to_device(x) for n, x in host.items()}))
    want = expected(truth, host)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.clause("C3", "C2")
@pytest.mark.parametrize("name", FLOAT_OPS | EXACT_OPS)
def test_an_operation_replays_as_it_runs(backend: Backend, name: str) -> None:
    """On other values than those of its capture, and with the bits of an operation outside a Segment."""
    op = (FLOAT_OPS | EXACT_OPS)[name][0]
    made = {n: backend.buffer(n, x) for n, x in inputs(ROWS).items()}
    segment = Segment(
        name, lambda b: ({}, {"out": op(b.xp, {n: x.get() for n, x in made.items()})}), reads=tuple(made.values())
    )
    backend.run(segment)
    trace = backend.capture(segment)
    for n, x in inputs(ROWS, seed=1).items():
        backend.upload(made[n], x)
    replayed = backend.replay(trace).get()["out"]
    same_bits(replayed, backend.run(segment).get()["out"])
    same_bits(replayed, backend.to_host(op(backend.xp, {n: x.get() for n, x in made.items()})))
    backend.release(trace)
    for buffer in made.values():
        backend.release(buffer)


@pytest.mark.clause("D5")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", FLOAT_OPS)
def test_a_row_has_the_same_bits_in_any_batch(backend: Backend, name: str, dtype: str) -> None:
    host, op = inputs(MANY), FLOAT_OPS[name][0]
    whole = {n: backend.to_device(x, None if x.dtype == np.int32 else dtype) for n, x in host.items()}
    want = backend.to_host(op(backend.xp, whole))
    for begin, end in ((0, 1), (5, 7), (9, 14)):
        part = {n: x[begin:end] if n in PER_ROW else x for n, x in whole.items()}
        same_bits(backend.to_host(op(backend.xp, part)), want[begin:end])


@pytest.mark.clause("D1")
def test_bfloat16_is_rounded_to_nearest_even(backend: Backend) -> None:
    """Against the rounding of the tests' own, over ties, the largest numbers, infinities and NaN."""
    raw = np.concatenate(
        [
            np.arange(0x3F80_0000, 0x3F84_0000, 0x1000).astype(np.uint32),
            np.array([0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0000, 1], np.uint32),
        ]
    )
    x = backend.to_device(raw.view(np.float32))
    got = backend.to_host(backend.xp.astype(x, "bfloat16"))
    wide = raw.astype(np.uint64)
    up = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint32) << np.uint32(16)
    same_bits(got, up.view(np.float32))
    assert np.isnan(
        backend.to_host(backend.xp.astype(backend.to_device(np.array([np.nan], np.float32)), "bfloat16"))
    ).all()
    assert attention.values(np.array([0x3F80], np.uint16))[0] == 1


@pytest.mark.clause("D1")
def test_no_rows_and_no_axes(backend: Backend) -> None:
    """Empty arrays and single numbers go through everything that has a meaning for them."""
    xp = backend.xp
    host = {n: x[:0] if n in PER_ROW else x for n, x in inputs(ROWS).items()}
    device = {n: backend.to_device(x) for n, x in host.items()}
    for op, truth in (*FLOAT_OPS.values(), *EXACT_OPS.values()):
        assert backend.to_host(op(xp, device)).shape == expected(truth, host).shape
    number: Buffer = backend.buffer("number", np.float32(3))
    assert float(backend.to_host(number.get() * 2 + number.get())) == 9
    assert backend.to_host(xp.reshape(number.get(), (1, 1))).tolist() == [[3]]
    backend.release(number)
