"""Where a configuration's rotary embedding is read from, and what is refused in it."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.runtime.models.rope import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    YarnRope,
    yarn_scale,
)
from forebay.specs.errors import InvalidModel, Unsupported
from tests.models import tiny

HALF = 8
"""Half the head size of the tiny model."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 7000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 7000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 7000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * HALF,
    "long_factor": [2] * HALF,
}
LINEAR = {"rope_type": "linear", "rope_theta": 7000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 7000.0, "factor": 2.0}


def without(parameters: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name != key}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"rope_theta": 7000.0}, DefaultRope(7000.0)),
        (LINEAR, LinearRope(7000.0, 2.0)),
        (DYNAMIC, DynamicRope(7000.0, 2.0, original=128)),
        (
            YARN,
            YarnRope(7000.0, 4.0, original=32, scale=yarn_scale(4.0), beta_fast=32.0, beta_slow=1.0, truncate=True),
        ),
        (
            YARN | {"beta_fast": 0, "beta_slow": None, "mscale": 0, "mscale_all_dim": 1.0},
            YarnRope(7000.0, 4.0, original=32, scale=yarn_scale(4.0), beta_fast=32.0, beta_slow=1.0, truncate=True),
        ),
        (
            YARN | {"factor": None, "attention_factor": 1, "truncate": False, "beta_fast": 8},
            YarnRope(7000.0, 4.0, original=32, scale=1.0, beta_fast=8.0, beta_slow=1.0, truncate=False),
        ),
        (
            LONGROPE | {"attention_factor": 1.25},
            LongRope(7000.0, 32, 1.25, short_factor=(1.0,) * HALF, long_factor=(2.0,) * HALF),
        ),
        (LLAMA3, Llama3Rope(7000.0, 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)),
        (
            {"rope_type": "proportional", "rope_theta": 7000.0, "partial_rotary_factor": 0.5},
            ProportionalRope(7000.0, 1.0, 0.5),
        ),
    ],
    ids=lambda x: x.get("rope_type", "default") if isinstance(x, dict) else "",
)
def test_parameters_are_read_under_both_names(parameters: dict[str, Any], expected: object) -> None:
    assert tiny.config(rope_parameters=parameters).rope == expected
    assert tiny.config(rope_parameters=None, rope_scaling=parameters).rope == expected
    old = {("type" if key == "rope_type" else key): value for key, value in without(parameters, "rope_theta").items()}
    assert tiny.config(rope_parameters=None, rope_scaling=old, rope_theta=7000.0).rope == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": None, "rope_theta": 7000},
        {"rope_parameters": {}, "rope_scaling": None, "rope_theta": 7000},
        {"rope_parameters": {"rope_theta": 7000.0}},
        {"rope_parameters": {"rope_theta": 7000.0, "rope_type": "default"}, "rope_theta": 7000.0},
        {"rope_parameters": None, "rope_scaling": {"type": "default"}, "rope_theta": 7000.0},
        {"rope_parameters": None, "rope_scaling": {"type": "default", "rope_type": "default"}, "rope_theta": 7000.0},
        {"rope_parameters": {"rope_theta": 7000.0}, "rope_scaling": {"rope_theta": 7000.0}},
    ],
)
def test_theta_is_found_wherever_it_is_written(changes: dict[str, Any]) -> None:
    assert tiny.config(**changes).rope == DefaultRope(7000.0)


@pytest.mark.parametrize("parameters", [YARN, LONGROPE, LLAMA3], ids=lambda x: x["rope_type"])
def test_the_length_before_scaling_may_stand_at_the_top_level(parameters: dict[str, Any]) -> None:
    original = parameters["original_max_position_embeddings"]
    moved = without(parameters, "original_max_position_embeddings")
    expected = tiny.config(rope_parameters=parameters).rope
    assert tiny.config(rope_parameters=moved, original_max_position_embeddings=original).rope == expected
    with pytest.raises(InvalidModel, match=rf"is 16 at the top level and {original} in rope_parameters; expected the"):
        tiny.config(rope_parameters=parameters, original_max_position_embeddings=16)


@pytest.mark.parametrize("kind", ["axial", "mrope", "su", "", "Linear", "ntk"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_an_unknown_kind_is_refused_by_name(kind: str, key: str) -> None:
    message = (
        f"config.json: rope_parameters: rope_type is '{kind}'; supported: default, dynamic, linear, llama3, longrope, "
        "proportional, yarn"
    )
    with pytest.raises(Unsupported, match=message):
        tiny.config(rope_parameters={key: kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"full_attention": {"rope_type": "default"}}, "rope_parameters: has an entry full_attention; supported: one"),
        ({"sliding_attention": {"rope_type": "linear"}}, "rope_parameters: has an entry sliding_attention"),
        (LINEAR | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5 with rope_type linear; supported: 1.0"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25 with rope_type default; supported: 1.0"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=f"config.json: {message}"):
        tiny.config(rope_parameters=parameters)


def test_a_share_at_the_top_level_counts() -> None:
    with pytest.raises(Unsupported, match=r"partial_rotary_factor is 0\.5 with rope_type default"):
        tiny.config(partial_rotary_factor=0.5)
    rope = {"rope_type": "proportional", "rope_theta": 5000.0}
    assert tiny.config(rope_parameters=rope, partial_rotary_factor=0.5).rope == ProportionalRope(5000.0, 1.0, 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": -1.0}, "rope_theta is -1.0; expected a number above 1"),
        (
            {"rope_theta": 1.0e4},
            "rope_theta is 10000.0 at the top level and 5000.0 in rope_parameters; expected the same",
        ),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; expected an object"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn'; expected an object"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling and rope_parameters differ; expected only one",
        ),
        (
            {"rope_parameters": {"type": "linear", "rope_type": "yarn"}},
            r"rope_type and type are \['linear', 'yarn'\]; expected only one",
        ),
        ({"rope_parameters": {"rope_type": 3}}, "rope_parameters: rope_type is 3; expected a string"),
        (
            {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 1.5}},
            "is 1.5; expected a number from 0 to 1",
        ),
        ({"rope_parameters": DYNAMIC, "head_dim": 2}, "rope_type is dynamic with head_dim 2; expected more than 2"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=f"config.json: .*{message}|config.json: {message}"):
        tiny.config(**changes)


REQUIRED = [
    (parameters, key)
    for parameters in (LINEAR, DYNAMIC, YARN, LONGROPE, LLAMA3)
    for key in parameters
    if key not in ("rope_type", "rope_theta") and (parameters, key) != (YARN, "factor")
]


@pytest.mark.parametrize(("parameters", "key"), REQUIRED, ids=lambda x: x if isinstance(x, str) else x["rope_type"])
@pytest.mark.parametrize(
    "value", [..., None, float("nan"), float("inf"), -1.0, 0, 10**400, "8", True, {"a": 1}], ids=lambda x: str(x)[:8]
)
def test_a_parameter_that_is_missing_or_none_is_refused(parameters: dict[str, Any], key: str, value: object) -> None:
    """Every parameter a kind needs, with every wrong value: missing, not finite, not positive, not a number."""
    changed = without(parameters, key) if value is ... else parameters | {key: value}
    expected = "missing" if value is ... else ".*"
    with pytest.raises(InvalidModel, match=f"config.json: rope_parameters: {key} is {expected}; expected "):
        tiny.config(rope_parameters=changed)


@pytest.mark.parametrize("key", ["attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "factor"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "8", True])
def test_an_optional_parameter_that_is_no_number_is_refused(key: str, value: object) -> None:
    with pytest.raises(InvalidModel, match=f"rope_parameters: {key} is .*; expected a number"):
        tiny.config(rope_parameters=YARN | {key: value})


@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0] * (HALF - 1), "has 7 numbers; expected 8"),
        ([1.0] * (2 * HALF), "has 16 numbers; expected 8"),
        ([], "has 0 numbers; expected 8"),
        ([1.0] * (HALF - 1) + [float("nan")], "expected a list of numbers above 0"),
        ([1.0] * (HALF - 1) + [float("inf")], "expected a list of numbers above 0"),
        ([1.0] * (HALF - 1) + [0.0], "expected a list of numbers above 0"),
        ([1.0] * (HALF - 1) + ["1"], "expected a list of numbers above 0"),
        ([1.0] * (HALF - 1) + [True], "expected a list of numbers above 0"),
        (1.0, "expected a list of numbers above 0"),
    ],
)
def test_a_list_of_another_length_or_with_other_things_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(InvalidModel, match=f"rope_parameters: {key} .*{message}"):
        tiny.config(rope_parameters=LONGROPE | {key: value})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (LINEAR | {"factor": 0.5}, "factor is 0.5; expected a number from 1 to"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "low_freq_factor is 1 and high_freq_factor 1; expected the second"),
        (LLAMA3 | {"low_freq_factor": 5.0}, "low_freq_factor is 5 and high_freq_factor 4; expected the second"),
        (YARN | {"beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast is 1 and beta_slow 2; expected beta_fast"),
        (YARN | {"truncate": 1}, "truncate is 1; expected true or false"),
        (YARN | {"attention_factor": 0}, "attention_factor is 0; expected a number above 0"),
        (
            YARN | {"original_max_position_embeddings": 32.0},
            "original_max_position_embeddings is 32.0; expected an integer",
        ),
        (
            LONGROPE | {"original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1; expected at least 2",
        ),
    ],
)
def test_parameters_out_of_range_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=f"config.json: rope_parameters: {message}"):
        tiny.config(rope_parameters=parameters)
