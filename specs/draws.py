"""Operations of sampling in terms of others: what ``xp.gumbel`` and ``xp.penalise`` mean, for backends that do not fuse them.

Random numbers are a hash of (seed, position, token) in int32 arithmetic that wraps, the same on every backend: MurmurHash3_x86_32
(A. Appleby, public domain, smhasher) of the two 32-bit blocks (position, token), with the request's seed. So a row's draw depends on
its seed and its position and on nothing else: not on its batch, its bucket or what was drawn before.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .array_namespace import ArrayNamespace
from .dtypes import Array, HostArray

WORD: Final = 32
"""Tokens in an int32 of a bitmap; token t is bit t % 32 of word t // 32."""

_C1, _C2, _N, _F1, _F2 = (
    int(x) for x in np.array([0xCC9E2D51, 0x1B873593, 0xE6546B64, 0x85EBCA6B, 0xC2B2AE35], np.uint32).view(np.int32)
)
_BYTES: Final = 8
_LARGEST: Final = 2**31 - 128
"""The largest 31-bit integer that float32 holds."""


def shifted_right(x: Array, n: int) -> Array:
    """``x`` int32 shifted by ``n`` from 1 to 31 with zeros coming in; ``>>`` alone brings the sign in."""
    return (x >> n) & (2 ** (32 - n) - 1)


def rotated(x: Array, n: int) -> Array:
    """``x`` int32 rotated to the left by ``n`` from 1 to 31."""
    return (x << n) | shifted_right(x, 32 - n)


def mixed_block(block: Array) -> Array:
    """A block as it enters the hash."""
    return rotated(block * _C1, 15) * _C2


def token_blocks(vocab_size: int) -> HostArray:
    """The blocks of tokens 0 to vocab_size - 1 as they enter the hash, int32 ``[vocab_size]``: a constant of the device."""
    blocks: HostArray = mixed_block(np.arange(vocab_size, dtype=np.int32))
    return blocks


def bit_values() -> HostArray:
    """The value of each bit of a word, int32 ``[32]``; the last one is negative."""
    return (np.uint32(1) << np.arange(WORD, dtype=np.uint32)).view(np.int32)


def absorbed(state: Array, mixed: Array) -> Array:
    """The hash's state after one more block."""
    return rotated(state ^ mixed, 13) * 5 + _N


def row_keys(seed: Array, position: Array) -> Array:
    """The hash's state after the first block: int32 of ``seed`` and ``position`` of any one shape."""
    return absorbed(seed, mixed_block(position))


def draw_bits(keys: Array, blocks: Array) -> Array:
    """The hash, int32 ``[B, V]``, of ``keys [B, 1]`` from :func:`row_keys` and ``blocks [1, V]`` from :func:`token_blocks`."""
    h = absorbed(keys, blocks) ^ _BYTES
    h = (h ^ shifted_right(h, 16)) * _F1
    h = (h ^ shifted_right(h, 13)) * _F2
    return h ^ shifted_right(h, 16)


def gumbel(xp: ArrayNamespace, keys: Array, blocks: Array) -> Array:
    """``xp.gumbel`` in terms of elementwise operations.

    ``-log(-log(1 - u))`` with u uniform in (0, 1). u has 31 bits, and as many significant ones near 0 as float32 holds: the largest
    variates come from there, so ``-log(1 - u)`` is taken from its series where ``1 - u`` would round them away.
    """
    u = (xp.astype(xp.clip(shifted_right(draw_bits(keys, blocks), 1), 0, _LARGEST), "float32") + 0.5) * 2.0**-31
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    return 0.0 - xp.log(xp.where(u < 2.0**-8, series, 0.0 - xp.log(1.0 - u)))


def penalise(xp: ArrayNamespace, x: Array, seen: Array, bits: Array, penalty: Array) -> Array:
    """``xp.penalise`` in terms of elementwise operations."""
    (batch, vocab), words = xp.shape(x), xp.shape(seen)[1]
    held = xp.reshape(seen, (batch, words, 1)) & xp.reshape(bits, (1, 1, WORD))
    columns = xp.reshape(held != 0, (batch, words * WORD))[:, :vocab]
    return xp.where(columns, xp.where(x < 0.0, x * penalty, x / penalty), x)
