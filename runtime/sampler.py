"""The choice of the next token from logits: one function for the captured step and for passes that the host drives.

The order is that of transformers' generation: bias, repetition penalty, then either the argmax or temperature, top-k, top-p, min-p
and a draw. Sets are kept by thresholds, so neither ties nor the order of a sum can tell two devices apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.specs.backend import Backend
from forebay.specs.draws import row_keys
from forebay.specs.dtypes import Array, HostArray

from .sampling_rows import Draw, SamplingRows, SamplingState
from .variants import Variant, variant_for

LOWEST = float("-inf")


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities of the distribution before any processing.

    Attributes:
        chosen: of the token that was chosen.
        top: (token, log-probability) of the most likely tokens, in falling order.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Chosen:
    """A token, with log-probabilities where they were asked for."""

    token: int
    logprobs: TokenLogprobs | None = None


def processed(b: Backend, logits: Array, rows: SamplingRows, state: SamplingState) -> Array:
    """Logits float32 ``[B, V]`` after bias and repetition penalty (Keskar et al. 2019); where a row has neither, the same bits."""
    xp = b.xp
    biased = xp.add_along(logits, rows.bias_ids, rows.bias_values(b))
    return xp.penalise(biased, rows.seen, state.bits.get(), rows.number(b, "repetition_penalty"))


def tempered(b: Backend, whole: Array, rows: SamplingRows) -> Array:
    """Logits float32 ``[B, V]`` counted from their maximum down, over the temperature where a row has one.

    Their maximum is 0, so that no temperature overflows, and a common summand is nothing to a softmax.
    """
    xp, temperature = b.xp, rows.number(b, "temperature")
    return (whole - xp.max(whole)) / xp.where(temperature > 0.0, temperature, 1.0)


def kept(b: Backend, scaled: Array, rows: SamplingRows) -> Array:
    """bool ``[B, V]``: what top-k, then top-p of that, then min-p of that leave of ``scaled``, from :func:`tempered`."""
    xp = b.xp
    among = scaled >= xp.kth_largest(scaled, rows.top_k)
    weight = xp.where(among, xp.exp(scaled), 0.0)
    top_p = rows.number(b, "top_p")
    mass = xp.where(top_p < 1.0, top_p * xp.sum(weight), -LOWEST)
    return among & (weight >= xp.mass_cutoff(weight, mass)) & (weight >= rows.number(b, "min_p"))


def choose(b: Backend, logits: Array, rows: SamplingRows, state: SamplingState) -> Array:
    """The next token of each row, int32 ``[B]``, of ``logits [B, V]``: the argmax where its temperature is 0, else a draw.

    A row's token does not depend on the other rows.
    """
    xp = b.xp
    whole = processed(b, xp.astype(logits, "float32"), rows, state)
    scaled = tempered(b, whole, rows)
    noise = xp.gumbel(xp.reshape(row_keys(rows.seed, rows.position), (-1, 1)), state.token_blocks.get())
    drawn = xp.argmax(xp.where(kept(b, scaled, rows), scaled + noise, LOWEST))
    hot = xp.reshape(rows.number(b, "temperature") > 0.0, (-1,))
    return xp.where(hot, drawn, xp.argmax(whole))


def log_probabilities(b: Backend, logits: Array, token: Array, top: int) -> tuple[Array, Array]:
    """Of ``logits [B, V]`` as they are: int32 ids ``[B, top]`` of the most likely tokens in falling order (the first of equals first),
    and float32 ``[B, 1 + top]`` log-probabilities, of ``token`` int32 ``[B]`` and then of those."""
    xp = b.xp
    raw = xp.astype(logits, "float32")
    peak = xp.max(raw)
    normaliser = xp.log(xp.sum(xp.exp(raw - peak))) + peak
    values, ids = xp.top_k(raw, top)
    chosen = xp.take_along(raw, xp.reshape(token, (-1, 1)))
    return ids, xp.concat([chosen, values]) - normaliser


def token_logprobs(ids: HostArray, values: HostArray, top: int) -> TokenLogprobs:
    """One row of :func:`log_probabilities`, cut to ``top`` alternatives."""
    pairs = zip(ids[:top].tolist(), values[1 : 1 + top].tolist(), strict=True)
    return TokenLogprobs(float(values[0]), tuple(pairs))


class HostSampler:
    """Chooses tokens outside of any Segment, by the same operations as a captured step: the same bits on one backend."""

    def __init__(self, backend: Backend, state: SamplingState) -> None:
        self._backend = backend
        self._state = state

    def choose(self, logits: Array, draws: Sequence[Draw]) -> list[Chosen]:
        """The next token of each row of ``logits [B, V]``, a device array; one download, and no upload where all is plain greedy."""
        b, variant = self._backend, variant_for([d.params for d in draws])
        if not variant.sampled:
            return [Chosen(int(t)) for t in b.to_host(b.xp.argmax(logits))]
        token = choose(b, logits, self._state.upload(draws), self._state)
        tokens = b.to_host(token).tolist()
        return [Chosen(t, info) for t, info in zip(tokens, self._logprobs(logits, token, variant, draws), strict=True)]

    def _logprobs(
        self, logits: Array, token: Array, variant: Variant, draws: Sequence[Draw]
    ) -> list[TokenLogprobs | None]:
        if not variant.logprobs:
            return [None] * len(draws)
        ids, values = (
            self._backend.to_host(x) for x in log_probabilities(self._backend, logits, token, variant.logprobs)
        )
        wanted = [d.params.logprobs for d in draws]
        return [None if n is None else token_logprobs(ids[i], values[i], n) for i, n in enumerate(wanted)]
