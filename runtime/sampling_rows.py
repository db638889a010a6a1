"""Options of sampling as rows of the device: how :class:`SamplingParams` are packed, read back, and summed up for receipts.

A row of options is int32: numbers are bit patterns of float32, so that a digest over the row sees every change of it. Which tokens
a sequence has had so far is a bitmap, 32 tokens an int32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from forebay.specs.backend import Backend
from forebay.specs.draws import WORD, bit_values, token_blocks
from forebay.specs.dtypes import Array, HostArray
from forebay.specs.segment import Buffer

from .digests import digest, digest_weight, digest_weights, wrapped
from .sampling import MAX_LOGIT_BIAS, SamplingParams

NUMBERS: Final = ("temperature", "top_p", "min_p", "repetition_penalty")
"""The first columns of a row of options; then top-k, the biased tokens and their biases."""
TOP_K: Final = len(NUMBERS)
BIAS_IDS: Final = slice(TOP_K + 1, TOP_K + 1 + MAX_LOGIT_BIAS)
BIAS_VALUES: Final = slice(BIAS_IDS.stop, BIAS_IDS.stop + MAX_LOGIT_BIAS)
WIDTH: Final = BIAS_VALUES.stop
NO_TOKEN: Final = -1
GREEDY_PARAMS: Final = SamplingParams()


def options_row(params: SamplingParams) -> HostArray:
    """``params`` as int32 ``[WIDTH]``."""
    row = np.zeros(WIDTH, np.int32)
    numbers = row.view(np.float32)
    numbers[:TOP_K] = [getattr(params, name) for name in NUMBERS]
    row[TOP_K] = params.top_k
    ids, values = row[BIAS_IDS], numbers[BIAS_VALUES]
    ids[:] = NO_TOKEN
    for i, (token, value) in enumerate(params.bias):
        ids[i], values[i] = token, value
    return row


@dataclass(frozen=True)
class Seen:
    """Tokens a sequence has had, with the digest of their bitmap. Immutable; one more token costs a copy of the bits.

    Attributes:
        bits: bit t is set where token t was seen.
        digest: of the bitmap's words; kept up by each token, for it is linear.
    """

    bits: int = 0
    digest: int = 0

    @classmethod
    def of(cls, params: SamplingParams, tokens: Iterable[int]) -> Seen:
        """Of prompt and output so far, where ``params`` look at them; else of nothing, so that nobody has to keep count."""
        ids = np.fromiter(tokens, np.int64) if params.penalises else np.zeros(0, np.int64)
        if not len(ids):
            return cls()
        words = np.zeros(int(ids.max()) // WORD + 1, np.uint32)
        np.bitwise_or.at(words, ids // WORD, np.uint32(1) << (ids % WORD).astype(np.uint32))
        return cls(int.from_bytes(words.astype("<u4").tobytes(), "little"), digest(words.view(np.int32)))

    def with_token(self, token: int) -> Seen:
        """With one more token."""
        bit = 1 << token
        if self.bits & bit:
            return self
        word, place = divmod(token, WORD)
        return Seen(self.bits | bit, wrapped(self.digest + (1 << place) * digest_weight(word)))

    def words(self, count: int) -> HostArray:
        """The bitmap, int32 ``[count]``."""
        return np.frombuffer(self.bits.to_bytes(count * 4, "little"), np.dtype("<i4")).astype(np.int32)


NOTHING_SEEN: Final = Seen()


@dataclass(frozen=True)
class SamplingRows:
    """Rows of B sequences as device arrays.

    Attributes:
        seed, position: int32 ``[B]``: they, and nothing else, decide a row's draw.
        options: int32 ``[B, WIDTH]``.
        seen: int32 ``[B, words]``.
    """

    seed: Array
    position: Array
    options: Array
    seen: Array

    def number(self, backend: Backend, name: str) -> Array:
        """One of :data:`NUMBERS`, float32 ``[B, 1]``."""
        column = NUMBERS.index(name)
        return backend.xp.bitcast(self.options[:, column : column + 1], "float32")

    @property
    def top_k(self) -> Array:
        """int32 ``[B, 1]``."""
        return self.options[:, TOP_K : TOP_K + 1]

    @property
    def bias_ids(self) -> Array:
        """int32 ``[B, MAX_LOGIT_BIAS]``, -1 beyond the last."""
        return self.options[:, BIAS_IDS]

    def bias_values(self, backend: Backend) -> Array:
        """float32 ``[B, MAX_LOGIT_BIAS]``."""
        return backend.xp.bitcast(self.options[:, BIAS_VALUES], "float32")


class SamplingState:
    """Buffers of sampling: per-slot options and bitmaps, and constants over the vocabulary; made before the first capture (C7)."""

    def __init__(self, backend: Backend, slots: int, vocab_size: int) -> None:
        self._backend = backend
        self.vocab_size = vocab_size
        self.words = -(-vocab_size // WORD)
        self._idle = options_row(GREEDY_PARAMS)
        self.options = backend.buffer("slot.options", np.tile(self._idle, (slots, 1)))
        self.seen = backend.buffer("slot.seen", np.zeros((slots, self.words), np.int32))
        self.token_blocks = backend.buffer("sampling.tokens", token_blocks(vocab_size)[None])
        self.bits = backend.buffer("sampling.bits", bit_values())
        self.options_weights = backend.buffer("digest.options", digest_weights(WIDTH)[None])
        self.seen_weights = backend.buffer("digest.seen", digest_weights(self.words)[None])

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """Buffers a sampled step reads and never changes."""
        return (self.options, self.token_blocks, self.bits, self.options_weights, self.seen_weights)

    @property
    def updates(self) -> tuple[Buffer, ...]:
        """Buffers a sampled step advances."""
        return (self.seen,)

    def seed(self, slot: int, params: SamplingParams, seen: Seen) -> None:
        """Seed a slot's options and bitmap, each by itself (clause C6)."""
        self._backend.upload(self.options, options_row(params)[None], slot)
        self._backend.upload(self.seen, seen.words(self.words)[None], slot)

    def idle(self, slot: int) -> None:
        """Make a slot's options those of plain greedy decoding, and its bitmap empty."""
        self._backend.upload(self.options, self._idle[None], slot)
        self._backend.upload(self.seen, np.zeros((1, self.words), np.int32), slot)

    def load(self, bucket: int, seed: Array, position: Array) -> SamplingRows:
        """The bucket's rows, read inside a Segment."""
        xp = self._backend.xp
        return SamplingRows(seed, position, xp.head(self.options.get(), bucket), xp.head(self.seen.get(), bucket))

    def upload(self, draws: Sequence[Draw]) -> SamplingRows:
        """Rows that are no slot's, for passes in which the host supplies every id."""
        b = self._backend
        return SamplingRows(
            b.to_device(np.array([d.seed for d in draws], np.int32)),
            b.to_device(np.array([d.position for d in draws], np.int32)),
            b.to_device(np.stack([options_row(d.params) for d in draws])),
            b.to_device(np.stack([d.seen.words(self.words) for d in draws])),
        )

    def receipt(self, rows: SamplingRows) -> Array:
        """Digests of what the rows hold, int32 ``[B, len(SAMPLING_FIELDS)]``."""
        xp = self._backend.xp
        options = xp.sum(rows.options * self.options_weights.get())
        return xp.concat([options, xp.sum(rows.seen * self.seen_weights.get())])

    def with_tokens(self, rows: SamplingRows, accepted: Array, token: Array) -> Array:
        """The bitmaps after a step: an accepted row that is penalised has seen ``token`` int32 ``[B]`` too."""
        xp = self._backend.xp
        word, bit = xp.reshape(token // WORD, (-1, 1)), xp.reshape(xp.take(self.bits.get(), token % WORD), (-1, 1))
        held = xp.take_along(rows.seen, word) & bit
        penalised = rows.number(self._backend, "repetition_penalty") != 1.0
        added = xp.where(penalised & xp.reshape(accepted, (-1, 1)) & (held == 0), bit, 0)
        return xp.add_along(rows.seen, word, added)


SAMPLING_FIELDS: Final = ("options", "seen")
"""Columns of the receipt of sampling, int32: digests of what the row consumed."""


@dataclass(frozen=True)
class Draw:
    """What one choice outside of a Segment depends on, beside the logits.

    Attributes:
        position: the position that the model consumed; the token chosen comes at the next one.
        seen: tokens up to that position.
    """

    params: SamplingParams
    seed: int
    position: int
    seen: Seen = NOTHING_SEEN


def expected_sampling(params: SamplingParams, seen: Seen) -> dict[str, int]:
    """What an honest sampled step reports to have consumed, by :data:`SAMPLING_FIELDS`."""
    return {"options": _options_digest(params), "seen": seen.digest}


@lru_cache(maxsize=4096)
def _options_digest(params: SamplingParams) -> int:
    return digest(options_row(params))
