"""The choice of a token: the sets that are kept, the frequencies of draws, limits of the parameters, log-probabilities."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from forebay.runtime import SamplingParams, open_backend
from forebay.runtime.digests import digest
from forebay.runtime.sampler import Chosen, HostSampler, kept, processed, tempered
from forebay.runtime.sampling_rows import Draw, SamplingState, Seen, options_row
from forebay.specs import Backend
from forebay.specs.dtypes import HostArray
from forebay.specs.suite.murmur import murmur3

VOCABULARY = 300


@pytest.fixture(scope="module")
def state(backend: Backend) -> SamplingState:
    return SamplingState(backend, 1, VOCABULARY)


def random_logits(rows: int, seed: int = 0, scale: float = 4.0) -> HostArray:
    return (np.random.default_rng(seed).standard_normal((rows, VOCABULARY)) * scale).astype(np.float32)


def draws_of(params: SamplingParams, count: int, *, seed: int = 5, tokens: Sequence[int] = ()) -> list[Draw]:
    """One draw at each of the positions from 0 on."""
    seen = Seen.of(params, tokens)
    return [Draw(params, seed, position, seen) for position in range(count)]


def choose(backend: Backend, state: SamplingState, logits: HostArray, draws: Sequence[Draw]) -> list[int]:
    return [c.token for c in HostSampler(backend, state).choose(backend.to_device(logits), draws)]


# -- the sets that are kept --------------------------------------------------------------------------------------------
def warped(logits: HostArray, params: SamplingParams, tokens: Sequence[int]) -> HostArray:
    """What transformers makes of the logits, -inf where it drops them, in the order of its generation."""
    scores: Any = torch.from_numpy(logits.copy())
    ids: Any = torch.tensor([list(tokens)] * len(logits))
    if params.bias:
        scores = SequenceBiasLogitsProcessor([[[token], value] for token, value in params.bias])(ids, scores)
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    result: HostArray = scores.numpy()
    return result


GRID: list[dict[str, Any]] = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m, "repetition_penalty": r}
    for t, k, p, m, r in itertools.product(
        (0.3, 1.0, 1.7), (0, 1, 7, 400), (0.01, 0.5, 0.95, 1.0), (0.0, 0.2), (1.0, 1.4)
    )
]


@pytest.mark.parametrize("chunk", range(6))
def test_the_kept_sets_are_those_of_transformers(backend: Backend, state: SamplingState, chunk: int) -> None:
    logits, tokens = random_logits(4, seed=chunk), [3, 299, 31, 32, 3, 64, 0]
    for options in GRID[chunk::6]:
        params = SamplingParams(**options, logit_bias={5: 3.0, 3: -2.0, 200: 1.5})
        rows = state.upload(draws_of(params, 4, tokens=tokens))
        scaled = tempered(backend, processed(backend, backend.to_device(logits), rows, state), rows)
        got, want = backend.to_host(kept(backend, scaled, rows)), warped(logits, params, tokens)
        np.testing.assert_array_equal(got, np.isfinite(want), err_msg=str(options))
        level = want.max(-1, keepdims=True)
        np.testing.assert_allclose(backend.to_host(scaled)[got], (want - level)[got], atol=2e-5)


def test_the_penalised_logits_are_those_of_transformers_to_the_last_bit(backend: Backend, state: SamplingState) -> None:
    logits, tokens = random_logits(3), [0, 1, 31, 32, 33, 63, 298, 299, 299]
    for penalty in (0.5, 1.0, 1.3, 7.0):
        params = SamplingParams(repetition_penalty=penalty)
        rows = state.upload(draws_of(params, 3, tokens=tokens))
        got = backend.to_host(processed(backend, backend.to_device(logits), rows, state))
        np.testing.assert_array_equal(
            got, warped(logits, SamplingParams(temperature=1, repetition_penalty=penalty), tokens)
        )


# -- draws -------------------------------------------------------------------------------------------------------------
def chi_square(counts: HostArray, probabilities: HostArray) -> float:
    """Pearson's statistic in standard deviations above its mean, for cells with at least 5 expected."""
    expected = probabilities * counts.sum()
    used = expected >= 5
    assert counts[probabilities == 0].sum() == 0, "a token that cannot be drawn was drawn"
    statistic = float((((counts - expected) ** 2)[used] / expected[used]).sum())
    freedom = int(used.sum()) - 1
    return (statistic - freedom) / float(np.sqrt(2 * freedom))


@pytest.mark.clause("C4")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5, "top_k": 40},
        {"top_p": 0.8},
        {"min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "logit_bias": {7: 4.0}},
    ],
    ids=str,
)
def test_draws_come_with_their_probabilities(backend: Backend, state: SamplingState, options: dict[str, Any]) -> None:
    """20,000 draws along the positions of one seed, and as many along the seeds at one position."""
    params = SamplingParams(**{"temperature": 1.0, **options})
    logits, tokens, count = random_logits(1, seed=2, scale=1.5), [1, 2, 3], 2000
    probabilities = torch.softmax(torch.from_numpy(warped(logits, params, tokens)[0].astype(np.float64)), -1).numpy()
    batch, seen = np.repeat(logits, count, 0), Seen.of(params, tokens)
    for along_seeds in (False, True):
        counts = np.zeros(VOCABULARY, np.int64)
        for start in range(0, 10 * count, count):
            places = range(start, start + count)
            draws = [Draw(params, i, 77, seen) if along_seeds else Draw(params, 99, i, seen) for i in places]
            counts += np.bincount(choose(backend, state, batch, draws), minlength=VOCABULARY)
        assert abs(chi_square(counts, probabilities)) < 4


@pytest.mark.clause("C4")
def test_successive_draws_and_neighbouring_seeds_are_independent(backend: Backend, state: SamplingState) -> None:
    logits = np.full((4000, VOCABULARY), -np.inf, np.float32)
    logits[:, [10, 42, 43, 74, 140]] = 0.0
    params = SamplingParams(temperature=1.0)
    cells = {token: i for i, token in enumerate((10, 42, 43, 74, 140))}
    along = [[cells[t] for t in choose(backend, state, logits, draws_of(params, 4000, seed=s))] for s in (6, 7)]
    even = np.full(25, 1 / 25)
    for first, second in ((along[0][:-1], along[0][1:]), (along[0][:-2], along[0][2:]), tuple(along)):
        counts = np.bincount(np.array(first) * 5 + np.array(second), minlength=25)
        assert abs(chi_square(counts, even)) < 4


@pytest.mark.clause("C4")
def test_no_place_in_the_vocabulary_is_favoured(backend: Backend, state: SamplingState) -> None:
    logits = np.zeros((3000, VOCABULARY), np.float32)
    tokens = choose(backend, state, logits, draws_of(SamplingParams(temperature=1.0), 3000))
    counts = np.bincount(np.array(tokens), minlength=VOCABULARY)
    assert abs(chi_square(counts, np.full(VOCABULARY, 1 / VOCABULARY))) < 4


@pytest.mark.clause("C4")
def test_a_draw_is_the_largest_of_logit_and_variate_by_the_published_hash(
    backend: Backend, state: SamplingState
) -> None:
    """The whole of it again, in Python's integers and float64."""
    params = SamplingParams(temperature=0.9, top_k=60, top_p=0.97, repetition_penalty=1.1)
    logits, tokens = random_logits(40, seed=4, scale=2.0), [9, 8, 250]
    draws = [
        Draw(params, seed, position, Seen.of(params, tokens))
        for seed, position in zip(range(-20, 20), range(40), strict=True)
    ]
    want = []
    for row, draw in zip(warped(logits, params, tokens), draws, strict=True):
        keys = [murmur3(struct.pack("<ii", draw.position, token), draw.seed) for token in range(VOCABULARY)]
        u = (np.minimum(np.array(keys) >> 1, 2**31 - 128) + 0.5) / 2**31
        want.append(int(np.argmax(row - np.log(-np.log1p(-u)))))
    assert choose(backend, state, logits, draws) == want
    assert len(set(want)) > 20


# -- limits ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-5},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "logprobs": 0},
    ],
    ids=str,
)
def test_the_limit_of_each_parameter_is_the_most_likely_token(
    backend: Backend, state: SamplingState, options: dict[str, Any]
) -> None:
    logits = random_logits(200, seed=8)
    assert choose(backend, state, logits, draws_of(SamplingParams(**options), 200)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_bans_and_forces(backend: Backend, state: SamplingState, temperature: float) -> None:
    logits = random_logits(100, seed=8, scale=1.0)
    best = int(logits.sum(0).argmax())
    logits[:, best] += 3
    free = choose(backend, state, logits, draws_of(SamplingParams(temperature=temperature), 100))
    banned = choose(
        backend, state, logits, draws_of(SamplingParams(temperature=temperature, logit_bias={best: -100.0}), 100)
    )
    forced = choose(
        backend,
        state,
        logits,
        draws_of(SamplingParams(temperature=temperature, logit_bias={299: 100.0, best: -100}), 100),
    )
    assert best in free
    assert best not in banned
    assert forced == [299] * 100


def test_equal_logits_are_kept_together(backend: Backend, state: SamplingState) -> None:
    logits = np.zeros((400, VOCABULARY), np.float32)
    logits[:, [5, 100, 299]] = 3.0
    kinds: tuple[dict[str, Any], ...] = ({"top_k": 1}, {"top_k": 2}, {"top_p": 0.01}, {"min_p": 1.0})
    for options in kinds:
        tokens = choose(backend, state, logits, draws_of(SamplingParams(temperature=1.0, **options), 400))
        assert set(tokens) == {5, 100, 299}
    assert choose(backend, state, logits, draws_of(SamplingParams(), 400)) == [5] * 400


def test_logits_at_the_ends_of_float32_are_no_trouble(backend: Backend, state: SamplingState) -> None:
    logits = np.full((50, VOCABULARY), -np.inf, np.float32)
    logits[:, 7], logits[:, 8], logits[:, 9] = 3e38, -3e38, 2.9e38
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 1.0},
        {"temperature": 1e-5},
        {"temperature": 1e5, "top_p": 0.5},
    )
    for options in kinds:
        assert choose(backend, state, logits, draws_of(SamplingParams(**options), 50)) == [7] * 50


@pytest.mark.clause("D5")
def test_a_row_is_the_same_alone_and_among_any_others(backend: Backend, state: SamplingState) -> None:
    """Tokens and the bits of log-probabilities; neighbours greedy, hot, penalised, biased."""
    kinds = [
        SamplingParams(temperature=1.3, logprobs=20),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=9, logprobs=1),
        SamplingParams(repetition_penalty=1.5, logprobs=0),
        SamplingParams(temperature=2.0, top_p=0.7, min_p=0.01, logit_bias={5: 9.0}, logprobs=5),
    ]
    logits = random_logits(10, seed=3, scale=2.0)
    draws = [Draw(p, 40 + i, i * 7, Seen.of(p, range(i, 200, 3))) for i, p in enumerate(kinds * 2)]
    sampler = HostSampler(backend, state)

    def chosen(order: Sequence[int]) -> list[Chosen]:
        return sampler.choose(backend.to_device(logits[list(order)]), [draws[i] for i in order])

    alone = [chosen([i])[0] for i in range(10)]
    for order in (range(10), range(9, -1, -1), [3, 1, 4], [0, 2, 4, 6, 8]):
        for i, found in zip(order, chosen(order), strict=True):
            assert found.token == alone[i].token
            if draws[i].params.logprobs is not None:
                assert found == alone[i]
    assert alone[1].token == int(logits[1].argmax())
    lengths = [None if c.logprobs is None else len(c.logprobs.top) for c in alone[:5]]
    assert lengths == [20, None, 1, 0, 5]


@pytest.mark.clause("D5")
def test_threads_and_company_change_no_bit_over_a_large_vocabulary() -> None:
    """Rows so long that the array library shares them out over its threads."""
    vocabulary, random = 49_152, np.random.default_rng(1)
    logits = (random.standard_normal((4, vocabulary)) * 3).astype(np.float32)
    params = [
        SamplingParams(temperature=1.0, logprobs=5),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logprobs=5),
        SamplingParams(temperature=1.2, top_p=0.99, logprobs=5),
        SamplingParams(logprobs=5),
    ]
    draws = [Draw(p, i, 9, Seen.of(p, range(0, vocabulary, 7))) for i, p in enumerate(params)]
    torch_threads, found = torch.get_num_threads(), []
    for threads in (1, 2):
        with open_backend("cpu", threads=threads) as backend:
            sampler = HostSampler(backend, SamplingState(backend, 1, vocabulary))
            found.append(sampler.choose(backend.to_device(logits), draws))
            for i, draw in enumerate(draws):
                found.append(sampler.choose(backend.to_device(logits[i : i + 1]), [draw]))
    torch.set_num_threads(torch_threads)
    assert found[0] == found[5] == [c for (c,) in found[1:5]] == [c for (c,) in found[6:]]


# -- log-probabilities -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("asked", [0, 1, 3, 5, 20])
def test_logprobs_are_those_of_the_raw_distribution(backend: Backend, state: SamplingState, asked: int) -> None:
    params = SamplingParams(temperature=1.5, top_k=50, logit_bias={7: 2.0}, repetition_penalty=1.3, logprobs=asked)
    logits = random_logits(8, seed=6)
    logits[3] += 1000
    want = torch.log_softmax(torch.from_numpy(logits.astype(np.float64)), -1).numpy()
    found = HostSampler(backend, state).choose(backend.to_device(logits), draws_of(params, 8, tokens=[1, 2]))
    for row, chosen in zip(want, found, strict=True):
        assert chosen.logprobs is not None
        assert abs(chosen.logprobs.chosen - row[chosen.token]) < 1e-4
        assert [t for t, _ in chosen.logprobs.top] == np.argsort(-row)[:asked].tolist()
        np.testing.assert_allclose([v for _, v in chosen.logprobs.top], np.sort(row)[::-1][:asked], atol=1e-4)


# -- what the host keeps of them ---------------------------------------------------------------------------------------
def test_a_bitmap_and_its_digest_grow_token_by_token() -> None:
    params, random = SamplingParams(repetition_penalty=1.1), np.random.default_rng(0)
    seen, tokens, words = Seen(), set[int](), -(-VOCABULARY // 32)
    for token in [0, 31, 32, 299, 31, *random.integers(0, VOCABULARY, 300).tolist()]:
        seen = seen.with_token(token)
        tokens.add(token)
        bitmap = seen.words(words)
        bits = np.unpackbits(bitmap.astype("<i4").view(np.uint8), bitorder="little")
        assert set(np.flatnonzero(bits).tolist()) == tokens
        assert seen.digest == digest(bitmap)
    assert seen == Seen.of(params, tokens)
    assert Seen.of(SamplingParams(), tokens) == Seen.of(params, []) == Seen()


@pytest.mark.clause("C5", "C13")
def test_the_device_marks_what_accepted_penalised_rows_were_given_and_nothing_else(
    backend: Backend, state: SamplingState
) -> None:
    penalised, free = SamplingParams(repetition_penalty=1.1), SamplingParams(temperature=1.0)
    before = Seen.of(penalised, [0, 31, 40])
    kinds = [
        (penalised, True),
        (penalised, False),
        (free, True),
        (penalised, True),
        (penalised, True),
        (penalised, True),
    ]
    tokens = [63, 63, 63, 31, 299, 287]
    rows = state.upload([Draw(params, 0, 0, before) for params, _ in kinds])
    accepted = backend.to_device(np.array([a for _, a in kinds]))
    after = backend.to_host(state.with_tokens(rows, accepted, backend.to_device(np.array(tokens, np.int32))))
    for row, (params, was_accepted), token in zip(after, kinds, tokens, strict=True):
        counts = params.penalises and was_accepted
        want = before.with_token(token) if counts else before
        np.testing.assert_array_equal(row, want.words(state.words))


def test_a_row_of_options_differs_wherever_its_parameters_do() -> None:
    base = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, logit_bias={3: 1.0})
    changes: list[dict[str, Any]] = [
        {"temperature": float(np.nextafter(np.float32(0.7), np.float32(1)))},
        {"top_k": 6},
        {"top_p": float(np.nextafter(np.float32(0.9), np.float32(1)))},
        {"min_p": float(np.nextafter(np.float32(0.1), np.float32(1)))},
        {"repetition_penalty": float(np.nextafter(np.float32(1.1), np.float32(2)))},
        {"logit_bias": {4: 1.0}},
        {"logit_bias": {3: -1.0}},
        {"logit_bias": {3: 1.0, 4: 0.0}},
    ]
    fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias")
    rows = [options_row(SamplingParams(**{n: getattr(base, n) for n in fields} | c)) for c in ({}, *changes)]
    assert len({digest(row) for row in rows}) == len(rows)
