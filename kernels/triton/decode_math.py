"""What both stages of paged decode compute alike: how a row's keys are split; and the soft-cap of scores."""

from __future__ import annotations

from typing import Final

import triton.language as tl

from .jit import jit

MOST_TOKENS: Final = 2**30
"""Tokens of a row beyond these count as missing: 32-bit sums of positions and tile sizes stay exact."""
LEAST: Final = tl.constexpr(-3.4028234663852886e38)
"""The least float32: a running maximum that starts there is finite, so that no difference of infinities is taken."""


@jit
def row_splits(
    start: tl.tensor, kept: tl.tensor, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr
) -> tl.tensor:
    """Keys of a split of a row that sees keys ``start`` to ``kept``: a multiple of BLOCK_N, from their number alone."""
    SHARE: tl.constexpr = MAX_SPLITS * BLOCK_N
    return tl.maximum((kept - start - 1) // SHARE * BLOCK_N + BLOCK_N, MIN_SPLIT)


@jit
def capped(score: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """``softcap * tanh(score / softcap)``, float32.

    tanh by the rational form of Cephes' ``tanhf`` (Moshier 1992) up to 0.625, where a difference of exponentials would lose the digits
    of a small argument, and above by ``1 - 2 / (exp(2x) + 1)``, right for any x as exp of a large one is infinite.
    """
    x = score / softcap
    size = tl.abs(x)
    z = x * x
    near = (
        (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
        - 3.33332819422e-1
    ) * z
    far = 1.0 - 2.0 / (tl.exp(size + size) + 1.0)
    return softcap * tl.where(size < 0.625, x * near + x, tl.where(x < 0.0, -far, far))
