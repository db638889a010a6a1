"""Rotary position embedding (Su et al. 2021): the frequencies of every scaling kind that transformers' configurations name.

A kind turns the position p by the angles ``p * frequencies(lengths)`` and multiplies cos and sin by its ``attention_factor``.
Formulas and float32 rounding are those of transformers' ``modeling_rope_utils``, so that angles at large positions round alike.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Rope(ABC):
    """One kind of rotary embedding. ``theta`` is the base of the frequencies ``theta^(-2i/D)``."""

    theta: float

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by, which scales q·k by its square."""
        return 1.0

    def regime(self, length: int) -> int:
        """A number that does not fall as ``length`` grows; lengths that share it have the same frequencies.

        Always 0 where the frequencies do not depend on length. KV of one token at one position may stand for another's only
        if both were turned in the same regime.
        """
        return 0

    @abstractmethod
    def frequencies(self, head_dim: int, lengths: IntArray) -> FloatArray:
        """Angle a position, float32 ``[N, D/2]``, or ``[1, D/2]`` where there is one regime.

        ``lengths [N]`` are the numbers of tokens in the sequence when each row is turned.
        """

    def positions(self, max_position_embeddings: int) -> int:
        """Positions the embedding is made for, given the configuration's ``max_position_embeddings``."""
        return max_position_embeddings

    def cos_sin(self, head_dim: int, positions: IntArray, lengths: IntArray) -> tuple[FloatArray, FloatArray]:
        """cos and sin float32 ``[N, D/2]`` for rows at ``positions [N]``, turned when the sequence has ``lengths [N]`` tokens."""
        angles = positions.astype(np.float32)[:, None] * self.frequencies(head_dim, lengths)
        factor = np.float32(self.attention_factor)
        return np.cos(angles) * factor, np.sin(angles) * factor


def _unscaled(theta: float | FloatArray, head_dim: int) -> FloatArray:
    """``theta^(-2i/D)``, float32 ``[..., D/2]``."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float32(1.0) / np.asarray(theta, np.float32) ** exponent).astype(np.float32)


@dataclass(frozen=True, slots=True)
class DefaultRope(Rope):
    """The embedding without scaling."""

    def frequencies(self, head_dim: int, lengths: IntArray) -> FloatArray:
        """The same for every length."""
        return _unscaled(self.theta, head_dim)[None]


@dataclass(frozen=True, slots=True)
class LinearRope(Rope):
    """Position interpolation (Chen et al. 2023): every frequency divided by ``factor``."""

    factor: float

    def frequencies(self, head_dim: int, lengths: IntArray) -> FloatArray:
        """The same for every length."""
        return _unscaled(self.theta, head_dim)[None] / np.float32(self.factor)


@dataclass(frozen=True, slots=True)
class DynamicRope(Rope):
    """Dynamic NTK scaling: past ``original`` tokens the base grows with the length of the sequence. Needs D > 2."""

    factor: float
    original: int

    def regime(self, length: int) -> int:
        """One up to ``original``, then one a length."""
        return max(length, self.original)

    def frequencies(self, head_dim: int, lengths: IntArray) -> FloatArray:
        """A base for every length."""
        length = np.maximum(lengths, self.original).astype(np.float32)[:, None]
        stretch = np.float32(self.factor) * length / np.float32(self.original) - np.float32(self.factor - 1)
        return _unscaled(np.float32(self.theta) * stretch ** np.float32(head_dim / (head_dim - 2)), head_dim)

    def positions(self, max_position_embeddings: int) -> int:
        """``max_position_embeddings`` is the length before scaling."""
        return int(max_position_embeddings * self.factor)


@dataclass(frozen=True, slots=True)
class YarnRope(Rope):
    """YaRN (Peng et al. 2023): low frequencies divided by ``factor``, high ones kept, a ramp between.

    ``beta_fast`` and ``beta_slow`` are the rotations over ``original`` positions at which the ramp ends; ``truncate`` rounds its
    ends to whole dimensions.
    """

    factor: float
    original: int
    scale: float
    beta_fast: float
    beta_slow: float
    truncate: bool

    @property
    def attention_factor(self) -> float:
        """As configured, else :func:`yarn_scale`."""
        return self.scale

    def frequencies(self, head_dim: int, lengths: IntArray) -> FloatArray:
        """The same for every length."""
        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        kept = np.float32(self.theta) ** exponent
        low, high = self._ramp(head_dim)
        ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
        keep = 1 - np.clip(ramp, 0, 1)
        one = np.float32(1.0)
        mixed: FloatArray = one / (np.float32(self.factor) * kept) * (1 - keep) + one / kept * keep
        return mixed[None]

    def _ramp(self, head_dim: int) -> tuple[float, float]:
        """The dimensions between which the ramp goes from 0 to 1."""

        def dimension(rotations: float) -> float:
            return head_dim * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return low, high + 0.001 if low == high else high

    def positions(self, max_position_embeddings: int) -> int:
        """Files give ``max_position_embeddings`` before scaling or after; the larger is what the kind is made for."""
        return max(max_position_embeddings, int(self.original * self.factor))


def yarn_scale(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Attention factor of YaRN: ``0.1 ln(factor) + 1`` (Peng et al. 2023), or the ratio of the two DeepSeek weightings of it."""

    def weighted(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return weighted(mscale) / weighted(mscale_all_dim) if mscale and mscale_all_dim else weighted(1.0)


@dataclass(frozen=True, slots=True)
class LongRope(Rope):
    """LongRoPE (Ding et al. 2024): each frequency divided by its own factor, another one past ``original`` tokens."""

    original: int
    scale: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]

    @property
    def attention_factor(self) -> float:
        """As configured, else :func:`longrope_scale`."""
        return self.scale

    def regime(self, length: int) -> int:
        """0 up to ``original``, then 1."""
        return int(length > self.original)

    def frequencies(self, head_dim: int, lengths: IntArray) -> FloatArray:
        """One of two sets for every length."""
        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        short, long = (np.array(factors, np.float32) for factors in (self.short_factor, self.long_factor))
        factors = np.where((lengths > self.original)[:, None], long, short)
        frequencies: FloatArray = np.float32(1.0) / (factors * np.float32(self.theta) ** exponent)
        return frequencies


def longrope_scale(factor: float, original: int) -> float:
    """Attention factor of LongRoPE: ``sqrt(1 + ln(factor) / ln(original))`` (Ding et al. 2024)."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


@dataclass(frozen=True, slots=True)
class Llama3Rope(Rope):
    """Llama 3.1: wavelengths beyond ``original / low_freq_factor`` are stretched by ``factor``, a smooth passage to those kept."""

    factor: float
    original: int
    low_freq_factor: float
    high_freq_factor: float

    def frequencies(self, head_dim: int, lengths: IntArray) -> FloatArray:
        """The same for every length."""
        plain = _unscaled(self.theta, head_dim)
        wavelength = np.float32(2 * math.pi) / plain
        longest = np.float32(self.original / self.low_freq_factor)
        shortest = np.float32(self.original / self.high_freq_factor)
        factor = np.float32(self.factor)
        kept = (np.float32(self.original) / wavelength - np.float32(self.low_freq_factor)) / np.float32(
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - kept) * plain / factor + kept * plain
        return np.select([wavelength > longest, wavelength >= shortest], [plain / factor, between], plain)[None]


@dataclass(frozen=True, slots=True)
class ProportionalRope(Rope):
    """The first ``share`` of the pairs is turned, with frequencies spaced over the whole head; the others stay as they are."""

    factor: float
    share: float

    def frequencies(self, head_dim: int, lengths: IntArray) -> FloatArray:
        """The same for every length."""
        turned = np.arange(head_dim // 2) < int(self.share * head_dim // 2)
        return (_unscaled(self.theta, head_dim) * turned.astype(np.float32) / np.float32(self.factor))[None]
