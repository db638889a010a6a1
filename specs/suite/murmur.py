"""MurmurHash3_x86_32 of bytes, in Python's exact integers, from its published description."""

from __future__ import annotations

MASK = 0xFFFFFFFF


def _rotated(x: int, n: int) -> int:
    return ((x << n) | (x >> (32 - n))) & MASK


def _mixed(block: int) -> int:
    return _rotated(block * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK


def murmur3(data: bytes, seed: int) -> int:
    """The hash of ``data``, 0 to 2**32 - 1; of ``seed`` the lower 32 bits count."""
    h, whole = seed & MASK, len(data) // 4 * 4
    for start in range(0, whole, 4):
        h = _rotated(h ^ _mixed(int.from_bytes(data[start : start + 4], "little")), 13)
        h = (h * 5 + 0xE6546B64) & MASK
    if data[whole:]:
        h ^= _mixed(int.from_bytes(data[whole:], "little"))
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift)) * factor & MASK
    return h ^ (h >> 16)
