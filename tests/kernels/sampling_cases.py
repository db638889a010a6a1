"""Legal calls of the kernels of sampling."""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay.kernels.numba.draws import prepare_gumbel, prepare_penalise
from forebay.kernels.numba.thresholds import (
    prepare_add_along,
    prepare_kth_largest,
    prepare_mass_cutoff,
    prepare_sum,
    prepare_top_k,
)
from forebay.specs.suite.attention import Array

ROWS = 3


def arguments(n: int, seed: int = 0) -> dict[str, tuple[Any, tuple[Array, ...], tuple[Array, ...]]]:
    """For each kernel: its ``prepare_``, its inputs, and outputs of their shapes."""
    random = np.random.default_rng([n, seed])
    x = random.standard_normal((ROWS, n)).astype(np.float32)
    column = np.linspace(0.5, 5, ROWS, dtype=np.float32)[:, None]
    ranks = np.arange(1, ROWS + 1, dtype=np.int32)[:, None]
    columns = random.integers(-3, n + 3, (ROWS, 4)).astype(np.int32)
    words = random.integers(-(2**31), 2**31, (ROWS, -(-n // 32))).astype(np.int32)
    blocks = random.integers(-(2**31), 2**31, (1, n)).astype(np.int32)
    one, like = np.zeros((ROWS, 1), np.float32), np.zeros((ROWS, n), np.float32)
    k = min(n, 3)
    return {
        "sum": (prepare_sum, (x,), (one,)),
        "kth_largest": (prepare_kth_largest, (x, ranks), (one,)),
        "mass_cutoff": (prepare_mass_cutoff, (x * x, column), (one,)),
        "top_k": (prepare_top_k, (x,), (np.zeros((ROWS, k), np.float32), np.zeros((ROWS, k), np.int32))),
        "add_along": (prepare_add_along, (x, columns, random.standard_normal((ROWS, 4)).astype(np.float32)), (like,)),
        "add_ints": (prepare_add_along, (blocks.repeat(ROWS, 0), columns, columns), (like.astype(np.int32),)),
        "gumbel": (prepare_gumbel, (ranks, blocks), (like,)),
        "penalise": (prepare_penalise, (x, words, column), (like,)),
    }
