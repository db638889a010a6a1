"""Triton's interpreter as mended: bfloat16 by exact reference, launches in place (what the other tests rest on)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from forebay.kernels.triton import interpreter
from forebay.kernels.triton.jit import jit


@jit
def cast_kernel(x: Any, y: Any, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@jit
def dot_kernel(a: Any, b: Any, c: Any, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr) -> None:
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(left, right, input_precision="ieee"))


@jit
def sum_kernel(x: Any, y: Any, M: tl.constexpr, N: tl.constexpr) -> None:
    m, n = tl.arange(0, M), tl.arange(0, N)
    tl.store(y + m, tl.sum(tl.load(x + m[:, None] * N + n[None, :]), 1))


@jit
def add_kernel(x: Any, y: Any, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i) + tl.load(y + i))


@jit
def grid_kernel(x: Any, step: Any) -> None:
    place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(x + place * step, place)


def test_float32_rounds_to_the_nearest_bfloat16() -> None:
    """Every upper half with the lower halves around a tie, against torch; NaNs stay NaN, also those with low bits alone."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = torch.from_numpy((upper | np.uint32(lower)).view(np.float32))
        got = torch.empty(2**16, dtype=torch.bfloat16)
        cast_kernel[(1,)](x, got, N=2**16)
        nan = x.isnan()
        assert torch.equal(got.isnan(), nan)
        assert torch.equal(got[~nan].view(torch.int16), x[~nan].to(torch.bfloat16).view(torch.int16))
        assert (got[nan].view(torch.int16) == 0x7FC0).all()


def test_bfloat16_widens_exactly() -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    got = torch.empty(2**16)
    cast_kernel[(1,)](bits, got, N=2**16)
    assert torch.equal(got.view(torch.int32), bits.float().view(torch.int32) | 0) or torch.equal(
        got.nan_to_num(7), bits.float().nan_to_num(7)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inner", [32, 1024])
def test_products_run_in_float32_and_rows_are_independent(inner: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(64, inner, generator=generator).to(dtype)
    b = torch.randn(inner, 32, generator=generator).to(dtype)
    whole, part = torch.empty(64, 32), torch.empty(16, 32)
    dot_kernel[(1,)](a, b, whole, M=64, K=inner, N=32)
    want = a.double() @ b.double()
    assert (whole - want).abs().max() <= 1e-6 * inner**0.5 * 8
    for first in (0, 5, 48):
        dot_kernel[(1,)](a[first : first + 16].contiguous(), b, part, M=16, K=inner, N=32)
        assert torch.equal(part, whole[first : first + 16])


def test_bfloat16_is_summed_in_float32() -> None:
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    got = torch.empty(4, dtype=torch.bfloat16)
    sum_kernel[(1,)](x, got, M=4, N=512)
    want = x.double().sum(1)
    assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-6).all()


def test_other_arithmetic_on_bfloat16_is_refused() -> None:
    x = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="add of bfloat16: convert to float32 first"):
        add_kernel[(1,)](x, x, N=4)


def test_a_launch_runs_every_program_and_touches_nothing_else() -> None:
    """Numbers of 64 bits, default grids of one to three sizes; storages are not copied, so memory that is read-only stays usable."""
    x = torch.full((24,), -1, dtype=torch.int32)
    grid_kernel[(2, 3, 4)](x, 1)
    assert x.tolist() == list(range(24))
    y = torch.full((4,), -1, dtype=torch.int32)
    grid_kernel[(4,)](y[0], 1)
    assert y.tolist() == [0, 1, 2, 3]
    lazy = torch.from_numpy(np.empty(2**31 + 8, np.int8)).view(torch.int32)
    grid_kernel[(2,)](lazy, 2**29)
    assert (int(lazy[0]), int(lazy[2**29])) == (0, 1)


def test_mending_twice_changes_nothing() -> None:
    before = (triton.runtime.interpreter.InterpreterBuilder.create_dot, triton.runtime.interpreter._patch_lang)
    interpreter.mend()
    assert before == (triton.runtime.interpreter.InterpreterBuilder.create_dot, triton.runtime.interpreter._patch_lang)


def test_an_interpreter_that_is_built_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter as real

    monkeypatch.setattr(real, interpreter._MENDED, False)
    monkeypatch.delattr(real.ReduceOps, "sum")
    with pytest.raises(RuntimeError, match=r"lacks ReduceOps.sum; it was mended for triton 3.4 to 3.7"):
        interpreter.mend()


def test_a_process_that_compiles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before triton is imported"):
        interpreter.mend()
