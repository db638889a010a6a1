"""The CPU backend's dense operations: kernels where they fit, torch elsewhere, the same bits run and replayed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from forebay.backends.cpu.memory import BufferMemory
from forebay.backends.torch_shared.namespace import TorchNamespace
from forebay.kernels.numba.linear import MAX_ROWS
from forebay.specs import Backend, Buffer, CaptureViolation, Segment, draws
from forebay.specs.array_namespace import ArrayNamespace

DTYPES = ("float32", "bfloat16")
HIDDEN, HEADS, DIM, VOCAB = 48, 3, 16, 101
Operation = Callable[[ArrayNamespace, dict[str, Any]], Any]


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


OPERATIONS: dict[str, Operation] = {
    "linear": lambda xp, a: xp.linear(a["x"], a["weight"]),
    "linear with bias": lambda xp, a: xp.linear(a["x"], a["weight"], a["bias"]),
    "rms_norm": lambda xp, a: xp.rms_norm(a["x"], a["norm"], 1e-5),
    "rope": lambda xp, a: xp.rope(a["heads"][:, :2], a["cos"], a["sin"]),
    "silu_mul": lambda xp, a: xp.silu_mul(a["x"][:, :24], a["x"][:, 24:]),
    "argmax": lambda xp, a: xp.argmax(a["x"]),
}

FLOAT32_OPERATIONS: dict[str, Operation] = {
    "sum": lambda xp, a: xp.sum(a["x"]),
    "kth_largest": lambda xp, a: xp.kth_largest(a["x"], a["ranks"]),
    "top_k": lambda xp, a: xp.concat(xp.top_k(a["x"], 5)[:1]),
    "top_k places": lambda xp, a: xp.top_k(a["x"], 5)[1],
    "mass_cutoff": lambda xp, a: xp.mass_cutoff(a["x"] * a["x"], a["masses"]),
    "add_along": lambda xp, a: xp.add_along(a["x"], a["columns"], a["cos"]),
    "gumbel": lambda xp, a: xp.gumbel(a["ranks"], a["blocks"]),
    "penalise": lambda xp, a: xp.penalise(a["x"], a["columns"][:, :2], a["bits"], a["masses"]),
}
"""The kernels of sampling take float32 alone."""
CASES = [(name, dtype) for name in OPERATIONS for dtype in DTYPES] + [(name, "float32") for name in FLOAT32_OPERATIONS]
ALL_OPERATIONS = OPERATIONS | FLOAT32_OPERATIONS
PER_ROW = ("x", "heads", "cos", "sin", "ranks", "masses", "columns")


def buffers(backend: Backend, rows: int, dtype: str) -> dict[str, Buffer]:
    """What the operations read, ``rows`` rows of it."""
    host = {
        "x": numbers(rows, HIDDEN, seed=1),
        "weight": numbers(VOCAB, HIDDEN, seed=2),
        "bias": numbers(VOCAB, seed=3),
        "norm": numbers(HIDDEN, seed=4),
        "heads": numbers(rows, HEADS, DIM, seed=5),
        "cos": numbers(rows, DIM // 2, seed=6),
        "sin": numbers(rows, DIM // 2, seed=7),
    }
    whole = {
        "ranks": np.arange(3, 3 + rows, dtype=np.int32)[:, None],
        "columns": np.random.default_rng(8).integers(-2, HIDDEN + 2, (rows, DIM // 2)).astype(np.int32),
        "blocks": draws.token_blocks(VOCAB)[None],
        "bits": draws.bit_values(),
    }
    made = {name: backend.buffer(name, value, dtype) for name, value in host.items()}
    made["masses"] = backend.buffer("masses", np.linspace(0.5, 40, rows, dtype=np.float32)[:, None])
    return made | {name: backend.buffer(name, value) for name, value in whole.items()}


def segment(operation: Operation, made: dict[str, Buffer]) -> Segment:
    """Emits the operation's result as ``y``."""
    return Segment(
        "operation",
        lambda b: ({}, {"y": operation(b.xp, {name: buffer.get() for name, buffer in made.items()})}),
        reads=tuple(made.values()),
    )


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("torch computed it")


@pytest.mark.clause("C3", "C12", "D4")
@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("rows", [1, 3, MAX_ROWS])
def test_a_kernel_computes_it_and_replay_equals_run(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, rows: int, dtype: str, name: str
) -> None:
    made = buffers(backend, rows, dtype)
    step = segment(ALL_OPERATIONS[name], made)
    want = backend.to_host(ALL_OPERATIONS[name](TorchNamespace(), {n: torch_of(backend, b) for n, b in made.items()}))
    monkeypatch.setattr(TorchNamespace, name.split()[0], refuse)
    backend.run(step)
    trace = backend.capture(step)
    for seed in (1, 11, 12):
        backend.upload(made["x"], numbers(rows, HIDDEN, seed=seed))
        ran, replayed = backend.run(step).get()["y"], backend.replay(trace).get()["y"]
        np.testing.assert_array_equal(replayed, ran)
        if seed == 1:
            # Against torch: a few last digits of the storage, of numbers that 48 products cancelled down from.
            digits = 0.02 if dtype == "bfloat16" else 1e-5
            np.testing.assert_allclose(ran, want, rtol=digits, atol=4 * digits)
    backend.release(trace)
    for buffer in made.values():
        backend.release(buffer)


def torch_of(backend: Backend, buffer: Buffer) -> Any:
    """A torch tensor with the Buffer's values."""
    return backend.to_device(backend.fetch(buffer), buffer.dtype)


@pytest.mark.clause("C2")
@pytest.mark.parametrize("name", ALL_OPERATIONS)
def test_a_closed_over_array_is_refused(backend: Backend, name: str) -> None:
    """Each array in turn comes from outside the declared Buffers; nothing may slip past, for kernels read by address."""
    made = buffers(backend, 2, "float32")
    used = {
        "linear": ("x", "weight"),
        "linear with bias": ("x", "weight", "bias"),
        "rms_norm": ("x", "norm"),
        "rope": ("heads", "cos", "sin"),
        "silu_mul": ("x",),
        "argmax": ("x",),
        "sum": ("x",),
        "kth_largest": ("x", "ranks"),
        "top_k": ("x",),
        "top_k places": ("x",),
        "mass_cutoff": ("masses",),
        "add_along": ("x", "columns", "cos"),
        "gumbel": ("ranks", "blocks"),
        "penalise": ("x", "columns", "bits", "masses"),
    }[name]
    for closed in used:
        outside = torch_of(backend, made[closed])

        def mixed(xp: ArrayNamespace, a: dict[str, Any], closed: str = closed, outside: Any = outside) -> Any:
            return ALL_OPERATIONS[name](xp, a | {closed: outside})

        step = segment(mixed, made)
        backend.run(step)
        with pytest.raises(CaptureViolation, match=rf"{name.split()[0]}|slice|select") as caught:
            backend.capture(step)
        assert "no declared Buffer holds" in str(caught.value)
    for buffer in made.values():
        backend.release(buffer)


@pytest.mark.clause("D5", "D4")
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_row_has_the_same_bits_in_any_batch(backend: Backend, dtype: str, name: str) -> None:
    made = buffers(backend, MAX_ROWS, dtype)
    arrays = {n: torch_of(backend, b) for n, b in made.items()}
    whole = backend.to_host(ALL_OPERATIONS[name](backend.xp, arrays))
    for begin, end in ((0, 1), (5, 7), (9, 14)):
        part = {n: a[begin:end] if n in PER_ROW else a for n, a in arrays.items()}
        np.testing.assert_array_equal(backend.to_host(ALL_OPERATIONS[name](backend.xp, part)), whole[begin:end])


@pytest.mark.clause("D1")
def test_bfloat16_products_are_float32_sums_rounded_once(backend: Backend) -> None:
    x, weight = numbers(4, 64, seed=1), numbers(30, 64, seed=2)
    device = [backend.to_device(a, "bfloat16") for a in (x, weight)]
    got = backend.to_host(backend.xp.linear(*device))
    exact = backend.to_host(device[0]).astype(np.float64) @ backend.to_host(device[1]).astype(np.float64).T
    # A rounding of float32 sums may fall on the other side of a tie, so one unit in the last place of eight bits.
    assert (np.abs(got - exact) <= np.abs(exact) * 2.0**-8 + 1e-5).all()


RANKS = torch.tensor([[2], [8], [9]], dtype=torch.int32)


@pytest.mark.clause("D1")
@pytest.mark.parametrize(
    "call",
    [
        lambda xp, x, w: xp.linear(x.repeat(6, 1), w),
        lambda xp, x, w: xp.linear(x, w.t().contiguous().t()),
        lambda xp, x, w: xp.linear(x.to(torch.float16), w.to(torch.float16)),
        lambda xp, x, w: xp.rms_norm(x.t().contiguous().t(), w[0], 1e-5),
        lambda xp, x, w: xp.rms_norm(x.to(torch.float16), w[0].to(torch.float16), 1e-5),
        lambda xp, x, w: xp.silu_mul(x, w[:1]),
        lambda xp, x, w: xp.rope(x[:, None], w[:1, :4], w[:1, 4:]),
        lambda xp, x, w: xp.argmax(x.to(torch.int32)),
        lambda xp, x, w: xp.argmax(x.to(torch.float16)),
        lambda xp, x, w: xp.sum(x.to(torch.bfloat16)),
        lambda xp, x, w: xp.sum(x.t().contiguous().t()),
        lambda xp, x, w: xp.kth_largest(x.t().contiguous().t(), RANKS),
        lambda xp, x, w: xp.mass_cutoff(x.t().contiguous().t() ** 2, x[:, :1]),
        lambda xp, x, w: xp.top_k(x.t().contiguous().t(), 3)[1],
        lambda xp, x, w: xp.add_along(x.t().contiguous().t(), RANKS, x[:, :1]),
        lambda xp, x, w: xp.gumbel(RANKS, torch.arange(12, dtype=torch.int32)[None, ::2]),
        lambda xp, x, w: xp.penalise(x.t().contiguous().t(), RANKS, torch.from_numpy(draws.bit_values()), x[:, :1]),
    ],
    ids=[
        "many rows",
        "columns",
        "float16",
        "strided",
        "float16 norm",
        "broadcast gate",
        "broadcast angles",
        "int",
        "half",
        "bfloat16 sum",
        "strided sum",
        "strided ranks",
        "strided masses",
        "strided top",
        "strided additions",
        "strided blocks",
        "strided penalty",
    ],
)
def test_what_kernels_do_not_take_goes_to_torch(backend: Backend, call: Callable[..., Any]) -> None:
    """More rows, other dtypes, broadcasting and columns: torch's own numbers."""
    x, weight = torch.from_numpy(numbers(3, 8)), torch.from_numpy(numbers(5, 8, seed=1))
    want = call(TorchNamespace(), x, weight)
    got = call(backend.xp, x, weight)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


@pytest.mark.clause("D1")
def test_leading_axes_and_single_rows(backend: Backend) -> None:
    xp, x, weight = backend.xp, torch.from_numpy(numbers(2, 3, 8)), torch.from_numpy(numbers(5, 8, seed=1))
    flat = xp.linear(x.reshape(6, 8), weight)
    assert torch.equal(xp.linear(x, weight), flat.reshape(2, 3, 5))
    assert torch.equal(xp.linear(x[1, 2], weight), flat[5])
    assert torch.equal(xp.rms_norm(x[1, 2], weight[0], 1e-5), xp.rms_norm(x, weight[0], 1e-5)[1, 2])
    assert torch.equal(xp.argmax(x), x.argmax(-1).to(torch.int32))
    assert torch.equal(xp.argmax(x[0, 0]), x[0, 0].argmax().to(torch.int32))


@pytest.mark.clause("S5")
def test_buffers_of_medium_size_share_blocks_and_never_memory() -> None:
    memory = BufferMemory()
    made = [memory.empty((1 << 18,), dtype) for dtype in ("float32", "bfloat16", "int32") * 20]
    for number, tensor in enumerate(made):
        tensor.fill_(number)
    for number, tensor in enumerate(made):
        assert bool((tensor == number).all())
        assert tensor.data_ptr() % 64 == 0
    starts = sorted(tensor.data_ptr() for tensor in made)
    assert sum(b - a <= 1 << 20 for a, b in pairwise(starts)) > len(made) // 2
    assert memory.empty((0, 3), "float32").shape == (0, 3)
    assert memory.empty((), "int32").shape == ()
    assert memory.empty((3 << 20,), "float32").numel() == 3 << 20
