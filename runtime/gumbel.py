"""The random numbers of sampling: a hash of (seed, position, token) in int32 arithmetic that wraps, the same on every backend.

The hash is MurmurHash3_x86_32 (A. Appleby, public domain, smhasher) of the two 32-bit blocks (position, token) with the request's
seed. So a row's draw depends on its seed and its position and on nothing else: not on its batch, its bucket or what was drawn before.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from forebay.specs.array_namespace import ArrayNamespace
from forebay.specs.dtypes import Array, HostArray

from .digests import wrapped

_C1, _C2, _N, _F1, _F2 = (wrapped(c) for c in (0xCC9E2D51, 0x1B873593, 0xE6546B64, 0x85EBCA6B, 0xC2B2AE35))
_BYTES: Final = 8
_LARGEST: Final = 2**31 - 128
"""The largest 31-bit integer that float32 holds."""


def shifted_right(x: Array, n: int) -> Array:
    """``x`` int32 shifted by ``n`` from 1 to 31 with zeros coming in; ``>>`` alone brings the sign in."""
    return (x >> n) & (2 ** (32 - n) - 1)


def rotated(x: Array, n: int) -> Array:
    """``x`` int32 rotated to the left."""
    return (x << n) | shifted_right(x, 32 - n)


def mixed_block(block: Array) -> Array:
    """A block as it enters the hash."""
    return rotated(block * _C1, 15) * _C2


def _absorbed(state: Array, mixed: Array) -> Array:
    return rotated(state ^ mixed, 13) * 5 + _N


def _finished(state: Array) -> Array:
    """The finaliser of MurmurHash3 (fmix32)."""
    h = state ^ _BYTES
    h = (h ^ shifted_right(h, 16)) * _F1
    h = (h ^ shifted_right(h, 13)) * _F2
    return h ^ shifted_right(h, 16)


def index_blocks(vocab_size: int) -> HostArray:
    """The blocks of tokens 0 to vocab_size - 1 as they enter the hash, int32 ``[vocab_size]``: a constant of the device."""
    blocks: HostArray = mixed_block(np.arange(vocab_size, dtype=np.int32))
    return blocks


def draw_bits(xp: ArrayNamespace, seed: Array, position: Array, blocks: Array) -> Array:
    """The hash, int32 ``[B, V]``, of ``seed`` and ``position`` int32 ``[B]`` and ``blocks [1, V]`` from :func:`index_blocks`."""
    state = _absorbed(seed, mixed_block(position))
    return _finished(_absorbed(xp.reshape(state, (-1, 1)), blocks))


def log_exponential(xp: ArrayNamespace, bits: Array) -> Array:
    """Logarithms of exponential variates, float32; what is subtracted from logits to make them compete by their probabilities.

    With u uniform in (0, 1), ``-log(-log(1 - u))`` is Gumbel and the largest of ``logit + Gumbel`` is a draw from the softmax
    (Gumbel 1954; Maddison et al. 2014). u has 31 bits, and as many significant ones near 0 as float32 holds: there the winners are
    made, so ``-log(1 - u)`` comes from its series where ``1 - u`` would round them away.
    """
    u = (xp.astype(xp.clip(shifted_right(bits, 1), 0, _LARGEST), "float32") + 0.5) * 2.0**-31
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    return xp.log(xp.where(u < 2.0**-8, series, 0.0 - xp.log(1.0 - u)))
