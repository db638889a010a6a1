"""Kernels of sampling: they read and write their rows and nothing else, follow their arrays, and refuse what does not fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forebay.kernels.numba.thresholds import prepare_top_k
from forebay.specs.suite.attention import Array
from tests.kernels.sampling_cases import arguments


def inside(array: Array) -> Array:
    """The array as a part of a larger one that is NaN, or far out of range, everywhere else; rows stay contiguous."""
    filler = np.nan if array.dtype == np.float32 else -(2**30)
    whole = np.full(tuple(n + 3 for n in array.shape), filler, array.dtype)
    part = whole[tuple(slice(2, -1) for _ in array.shape)]
    part[:] = array
    return part


KERNELS = tuple(arguments(8))
ROOT = Path(__file__).parents[2]
every_kernel = pytest.mark.parametrize("name", KERNELS)
every_size = pytest.mark.parametrize("n", [1, 7, 16, 31, 64, 267])


@pytest.mark.clause("L1", "L3")
@every_kernel
@every_size
def test_rows_anywhere_in_memory_give_the_same_and_nothing_else_is_written(name: str, n: int) -> None:
    prepare, inputs, outputs = arguments(n)[name]
    prepare(*inputs, *outputs)()
    targets = [inside(np.zeros_like(x)) for x in outputs]
    before = [x.base.copy() for x in targets]  # type: ignore[union-attr]  # a view has a base
    prepare(*(inside(x) for x in inputs), *targets)()
    for target, whole, want in zip(targets, before, outputs, strict=True):
        assert target.tobytes() == want.tobytes()
        whole[tuple(slice(2, -1) for _ in want.shape)] = want
        assert target.base is not None
        assert target.base.tobytes() == whole.tobytes()


@pytest.mark.clause("L1", "L3")
def test_no_byte_beyond_the_rows_is_touched() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.guarded_sampling"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.clause("W9", "C12")
@every_kernel
def test_a_prepared_operation_follows_its_arrays_and_preparing_writes_nothing(name: str) -> None:
    prepare, inputs, outputs = arguments(33)[name]
    call = prepare(*inputs, *outputs)
    assert not any(x.any() for x in outputs)
    for seed in (1, 2):
        _, others, wanted = arguments(33, seed)[name]
        for mine, other in zip(inputs, others, strict=True):
            mine[:] = other
        call()
        prepare(*others, *wanted)()
        assert [x.tobytes() for x in outputs] == [x.tobytes() for x in wanted]


@pytest.mark.clause("D1")
@every_kernel
def test_arrays_that_do_not_fit_are_refused(name: str) -> None:
    """Each array in turn has another type, another shape, or elements that do not lie side by side."""
    prepare, inputs, outputs = arguments(8)[name]
    arrays = (*inputs, *outputs)
    for i, array in enumerate(arrays):
        wrong = [array.astype(np.float64), array[0], np.concatenate([array, array])]
        if array.shape[1] > 1:
            wrong.append(np.repeat(array, 2, 1)[:, ::2])
        for bad in wrong:
            with pytest.raises(ValueError, match=r"^\w+: got "):
                prepare(*arrays[:i], bad, *arrays[i + 1 :])


@pytest.mark.clause("D1")
def test_more_of_the_largest_than_there_are_is_refused() -> None:
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"^top_k: got k=4 of rows of 3 elements, expected 1 to 3"):
        prepare_top_k(x, np.zeros((2, 4), np.float32), np.zeros((2, 4), np.int32))
