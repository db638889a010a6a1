"""SamplingParams: what they take, what they refuse when they are made, and which variant of a step they ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from forebay.runtime import SamplingParams
from forebay.runtime.sampling import MAX_LOGIT_BIAS, check_vocabulary, fork_seed, seed_of
from forebay.runtime.variants import GREEDY, Variant, variant_for
from forebay.specs.errors import InvalidInput

NAN, INF = float("nan"), float("inf")
Cases = dict[str, tuple[list[Any], list[Any], str]]
NUMBERS: Cases = {
    "temperature": ([0, 0.0, 1e-5, 1, 1e5], [-1e-9, 1e-6, 1.1e5], "0 or a number from 1e-05 to 100000"),
    "top_p": ([1e-6, 0.5, 1], [0, -0.1, 1.0001, 1e-40], "a number from 1.2e-38"),
    "min_p": ([0, 0.05, 1], [-0.1, 1.0001], "a number in [0, 1]"),
    "repetition_penalty": ([0.01, 1, 1.3, 100], [0, -1, 0.009, 101], "a number in [0.01, 100]"),
}
WHOLE: Cases = {
    "max_tokens": ([1, 10**6], [0, -1], "an int >= 1"),
    "top_k": ([0, 1, 2**31 - 1], [-1, 2**31], "an int from 0 to 2147483647"),
    "seed": ([None, 0, -(2**31), 2**31 - 1], [2**31, -(2**31) - 1], "None or an int of 32 bits"),
    "logprobs": ([None, 0, 20], [-1, 21], "None or an int from 0 to 20"),
    "n": ([1, 64, 128], [0, -2, 129, 10**9], "an int from 1 to 128"),
}


def made(field: str, value: Any) -> Any:
    """What SamplingParams keep of one field."""
    fields: dict[str, Any] = {field: value}
    return getattr(SamplingParams(**fields), field)


def refused(field: str, value: Any, expected: str) -> None:
    says = f"SamplingParams.{field}: got {value!r}, expected {expected}"
    with pytest.raises(InvalidInput, match=f"^{re.escape(says)}") as caught:
        made(field, value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_is_finite_in_its_range_and_of_a_numbers_type(field: str) -> None:
    good, bad, expected = NUMBERS[field]
    for value in good:
        for given in (value, np.float64(value)):
            kept = made(field, given)
            assert (kept, type(kept)) == (value, float)
    for wrong in (*bad, NAN, INF, -INF, True, "1", None, [1], np.float32(NAN)):
        refused(field, wrong, expected)


@pytest.mark.parametrize("field", WHOLE)
def test_a_whole_number_is_in_its_range_and_of_an_ints_type(field: str) -> None:
    good, bad, expected = WHOLE[field]
    for value in good:
        for given in (value,) if value is None else (value, np.int64(value)):
            kept = made(field, given)
            assert (kept, type(kept)) == (value, type(value))
    for wrong in (*bad, True, 1.0, np.float32(1), "1", [1]):
        refused(field, wrong, expected)
    if None not in good:
        refused(field, None, expected)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None),
        ({}, ()),
        ({7: 1, 3: -2.5}, ((3, -2.5), (7, 1.0))),
        ([(7, 1), (3, -2.5)], ((3, -2.5), (7, 1.0))),
        ({np.int32(5): np.float32(0.5)}, ((5, 0.5),)),
        (dict.fromkeys(range(MAX_LOGIT_BIAS), 0.0), tuple((t, 0.0) for t in range(MAX_LOGIT_BIAS))),
    ],
)
def test_a_bias_is_kept_as_sorted_pairs(given: Any, kept: Any) -> None:
    params = SamplingParams(logit_bias=given)
    assert params.logit_bias == kept
    assert params.bias == (kept or ())
    assert params == SamplingParams(logit_bias=kept)
    assert hash(params) == hash(SamplingParams(logit_bias=kept))
    assert all(type(token) is int and type(value) is float for token, value in params.bias)


BIAS = "None or a mapping of at most 64 token ids >= 0 to finite numbers"


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (5, "5"),
        ("text", "'text'"),
        ([1, 2], "[1, 2]"),
        ({-1: 0.0}, "-1"),
        ({2**31: 0.0}, str(2**31)),
        ({True: 1.0}, "True"),
        ({1.0: 1.0}, "1.0"),
        ({"1": 1.0}, "'1'"),
        ({1: NAN}, "nan"),
        ({1: -INF}, "-inf"),
        ({1: 1e31}, "1e+31"),
        ({1: True}, "True"),
        ({1: None}, "None"),
        (dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0), "65 tokens"),
    ],
)
def test_a_bad_bias_is_refused(given: Any, got: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{re.escape(f'SamplingParams.logit_bias: got {got}, expected {BIAS}')}"):
        SamplingParams(logit_bias=given)


def test_stops_and_switches() -> None:
    params = SamplingParams(stop_token_ids=iter([3, np.int64(4)]), stop=["a", "bc"])  # type: ignore[arg-type]
    assert (params.stop_token_ids, params.stop) == ((3, 4), ("a", "bc"))
    assert SamplingParams(stop="one").stop == ("one",)  # type: ignore[arg-type]
    for field, bad, expected in (
        ("stop_token_ids", (3, -1), "token ids >= 0"),
        ("stop_token_ids", (True,), "token ids >= 0"),
        ("stop_token_ids", "12", "token ids"),
        ("stop_token_ids", 5, "token ids"),
        ("stop", ("",), "texts that are not empty"),
        ("stop", "", "texts that are not empty"),
        ("stop", b"x", "texts that are not empty"),
        ("stop", (1,), "texts that are not empty"),
        ("stop", 5, "texts that are not empty"),
        ("ignore_eos", 1, "True or False"),
    ):
        with pytest.raises(InvalidInput, match=rf"^SamplingParams.{field}: got .*, expected {expected}"):
            made(field, bad)


def test_parameters_are_hashable_and_equal_by_what_they_mean() -> None:
    one = SamplingParams(temperature=1, logit_bias={4: 2}, stop=["x"])  # type: ignore[arg-type]
    other = SamplingParams(temperature=1.0, logit_bias=((4, 2.0),), stop=("x",))
    assert {one: 1}[other] == 1
    assert not isinstance(one.logit_bias, Mapping)


def test_tokens_a_model_does_not_have_are_refused() -> None:
    check_vocabulary(SamplingParams(logit_bias={99: 1.0}, logprobs=20), 100, "prompt 1")
    check_vocabulary(SamplingParams(temperature=1.0, logit_bias={18: 1.0}), 19, "prompt 1")
    with pytest.raises(InvalidInput, match=r"^prompt 2: biased token 100 is not in the vocabulary \(0 to 99\)"):
        check_vocabulary(SamplingParams(logit_bias={3: 1.0, 100: 1.0}), 100, "prompt 2")
    says = (
        r"^prompt: log-probabilities need a vocabulary of at least 20 tokens, this one has 19; leave logprobs at None"
    )
    with pytest.raises(InvalidInput, match=says):
        check_vocabulary(SamplingParams(logprobs=0), 19, "prompt")


def test_a_seed_of_nobodys_choice_follows_from_the_engines_and_differs_by_request() -> None:
    assert {seed_of(SamplingParams(seed=-5), base, index) for base in range(3) for index in range(3)} == {-5}
    drawn = {seed_of(SamplingParams(), base, index) for base in range(50) for index in range(200)}
    assert len(drawn) == 10_000
    assert all(-(2**31) <= seed < 2**31 for seed in drawn)
    assert seed_of(SamplingParams(), 7, 3) == seed_of(SamplingParams(), 7, 3)


def test_results_of_one_prompt_have_seeds_of_their_own() -> None:
    for seed in (0, 1, -(2**31), 2**31 - 1):
        seeds = [fork_seed(seed, i) for i in range(10_000)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 10_000
        assert all(SamplingParams(seed=s).seed == s for s in seeds[:100])
    assert {fork_seed(5, i) for i in range(1000)}.isdisjoint(fork_seed(6, i) for i in range(1000))


S = SamplingParams
SAMPLED = Variant(sampled=True)


@pytest.mark.parametrize(
    ("params", "variant", "name"),
    [
        ([], GREEDY, "greedy"),
        ([S(), S(seed=3, top_k=5, top_p=0.5, min_p=0.1)], GREEDY, "greedy"),
        ([S(), S(temperature=0.5)], SAMPLED, "sampled"),
        ([S(repetition_penalty=1.1)], SAMPLED, "sampled"),
        ([S(repetition_penalty=1 + 1e-12)], GREEDY, "greedy"),
        ([S(logit_bias={3: 1.0})], SAMPLED, "sampled"),
        ([S(logit_bias={})], GREEDY, "greedy"),
        ([S(logprobs=0)], Variant(True, 1), "sampled+logprobs1"),
        ([S(logprobs=1), S(temperature=1)], Variant(True, 1), "sampled+logprobs1"),
        ([S(logprobs=2), S()], Variant(True, 5), "sampled+logprobs5"),
        ([S(logprobs=5), S(logprobs=6)], Variant(True, 20), "sampled+logprobs20"),
    ],
)
def test_the_variant_is_the_least_that_serves_all(params: list[S], variant: Variant, name: str) -> None:
    assert variant_for(params) == variant
    assert str(variant) == name
    assert all(variant.serves(p) for p in params)
    if variant != GREEDY:
        assert not all(GREEDY.serves(p) for p in params)


def test_a_variant_serves_what_a_lesser_one_does() -> None:
    order = [GREEDY, SAMPLED, Variant(True, 1), Variant(True, 5), Variant(True, 20)]
    asks = [S(), S(temperature=1), S(logprobs=1), S(logprobs=5), S(logprobs=20)]
    for i, variant in enumerate(order):
        assert [variant.serves(a) for a in asks] == [j <= i for j in range(5)]
