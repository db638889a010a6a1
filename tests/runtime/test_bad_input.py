"""What an engine refuses: one clear error, before any device work, and the engine stays good."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime import Engine, Model, SamplingParams, load_model
from forebay.specs import Backend
from forebay.specs.errors import (
    ForebayError,
    InvalidInput,
    InvalidLayout,
    InvalidModel,
    InvalidSetting,
    Unsupported,
)
from tests.models import tiny
from tests.runtime.harness import TestDriver, backend_of, count_lines, make_engine, prompt


# -- bad input ---------------------------------------------------------------------------------------------------------
@contextmanager
def refused(backend: Backend, error: type[ForebayError], says: str) -> Iterator[None]:
    """Raises one clear error, before anything is done on the device."""
    before, pools = count_lines(backend), len(backend._pools)
    with pytest.raises(error, match=re.escape(says)) as caught:
        yield
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
    assert count_lines(backend) == before
    assert len(backend._pools) == pools


VOCABULARY = len(tiny.TOKENS)
NINE_STOPS = SamplingParams(ignore_eos=True, stop_token_ids=tuple(range(9)))
BAD: dict[str, tuple[Any, Any, str]] = {
    "empty text": ([""], None, "prompt 1: an empty prompt; give at least one token"),
    "no tokens": ([[5], []], None, "prompt 2: an empty prompt; give at least one token"),
    "token beyond the vocabulary": (
        [[5, VOCABULARY]],
        None,
        f"token id {VOCABULARY} is not in the vocabulary (0 to 266)",
    ),
    "negative token": ([[5, -1]], None, "token id -1 is not in the vocabulary (0 to 266)"),
    "bool token": ([[5, True]], None, "prompt 1: got the bool True among the token ids, expected ints"),
    "float token": ([[5, 6.0]], None, "prompt 1: got the float 6.0 among the token ids, expected ints"),
    "text token": ([["5"]], None, "prompt 1: got the str '5' among the token ids, expected ints"),
    "bytes": ([b"hello"], None, "prompt 1: got bytes, expected text or a list of token ids"),
    "a number": ([7], None, "prompt 1: got int, expected text or a list of token ids"),
    "nothing": ([None], None, "prompt 1: got NoneType, expected text or a list of token ids"),
    "no list of prompts": (7, None, "generate: got int, expected prompts"),
    "longer than max_len": (
        [prompt(30)],
        SamplingParams(max_tokens=11),
        "prompt 1: 30 prompt tokens and max_tokens=11 are 41 tokens; max_len is 40",
    ),
    "larger than the pool": (
        [prompt(3), prompt(15)],
        SamplingParams(max_tokens=7),
        "prompt 2: 15 prompt tokens and max_tokens=7 need 6 blocks of 4 tokens; the pool has 5 (20 tokens); raise num_blocks",
    ),
    "no SamplingParams": ([[5]], {"max_tokens": 3}, "prompt 1: got dict, expected SamplingParams"),
    "not all SamplingParams": ([[5], [6]], [SamplingParams(), 3], "prompt 2: got int, expected SamplingParams"),
    "too few SamplingParams": (
        [[5], [6]],
        [SamplingParams()],
        "generate: 2 prompts and 1 SamplingParams; give one, or one",
    ),
    "too many SamplingParams": (
        [[5]],
        [SamplingParams()] * 2,
        "generate: 1 prompts and 2 SamplingParams; give one, or one",
    ),
    "too many stop tokens": ([[5]], NINE_STOPS, "prompt 1: 9 stop tokens, at most 8"),
    "stop token beyond the vocabulary": (
        [[5]],
        SamplingParams(stop_token_ids=(3, 2**40)),
        f"prompt 1: stop token {2**40} is not in the vocabulary (0 to 266)",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_prompt_is_refused_before_any_device_work_and_the_engine_stays_good(
    engine: Engine, backend: Backend, kind: str
) -> None:
    prompts, params, says = BAD[kind]
    with refused(backend, InvalidInput, says):
        engine.generate(prompts, params)
    if isinstance(prompts, list) and not isinstance(params, list):
        with refused(backend, InvalidInput, re.sub(r"prompt \d", "prompt", says)):
            engine.add(prompts[-1], params)
    assert not engine.has_work
    report = engine.report()
    assert set(report["engine"].values()) == {0}
    assert report["memory"]["blocks_free"] == 5
    good = engine.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [len(r.token_ids) for r in good] == [3]


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"max_tokens": 0}, InvalidInput, "SamplingParams.max_tokens: got 0, expected an int >= 1"),
        ({"max_tokens": True}, InvalidInput, "SamplingParams.max_tokens: got True"),
        ({"max_tokens": 2.0}, InvalidInput, "SamplingParams.max_tokens: got 2.0"),
        (
            {"temperature": -0.5},
            InvalidInput,
            "SamplingParams.temperature: got -0.5, expected 0 or a number from 1e-05",
        ),
        ({"temperature": float("nan")}, InvalidInput, "SamplingParams.temperature: got nan"),
        ({"stop_token_ids": (3, -1)}, InvalidInput, "SamplingParams.stop_token_ids: got -1, expected token ids >= 0"),
        ({"stop_token_ids": (True,)}, InvalidInput, "SamplingParams.stop_token_ids: got True"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_bad_sampling_parameters_are_refused_when_made(fields: Any, error: type[ForebayError], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_len": 513}, InvalidInput, "max_len: got 513, the model "),
        ({"max_len": 0}, InvalidSetting, "max_len = 0 (call); expected an integer of at least 1"),
        ({"max_len": True}, InvalidSetting, "max_len = True (call)"),
        ({"max_len": "64"}, InvalidSetting, "max_len = '64' (call)"),
        ({"slots": 0}, InvalidSetting, "slots = 0 (call); expected an integer of at least 1"),
        ({"block_size": 0}, InvalidSetting, "block_size = 0 (call); expected an integer of at least 1"),
        ({"num_blocks": 1}, InvalidSetting, "num_blocks = 1 (call); expected an integer of at least 2"),
        ({"num_blocks": 2**31}, InvalidLayout, "slot ids are int32"),
        ({"arm": "fast"}, InvalidSetting, "arm = 'fast' (call); expected 'eager' or 'hostfree' or 'captured' or none"),
        ({"capture": "on"}, InvalidSetting, "capture = 'on' (call); expected 'off' or 'auto' or 'required'"),
        ({"attention": "paged"}, InvalidSetting, "attention = 'paged' (call); expected 'direct' or 'gather'"),
        (
            {"kv_dtype": "float16"},
            InvalidSetting,
            "kv_dtype = 'float16' (call); expected 'float32' or 'bfloat16' or none",
        ),
        ({"read_behind": -1}, InvalidSetting, "read_behind = -1 (call); expected an integer of at least 0"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_a_bad_engine_is_refused_before_any_device_work(
    tiny_model: Model, backend: Backend, options: Any, error: type[ForebayError], says: str
) -> None:
    with refused(backend, error, says):
        make_engine(tiny_model, backend, **options)


@pytest.mark.clause("D8")
def test_heads_that_do_not_divide_are_refused_where_the_model_is_read_and_where_it_is_used(
    tiny_model: Model, backend: Backend, tmp_path: Path
) -> None:
    folder = tiny.write_folder(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({**tiny.CONFIG, "num_attention_heads": 3}))
    with refused(backend, InvalidModel, "3 attention heads do not divide into 2 key/value heads"):
        load_model(folder)
    config, opened = copy.copy(tiny_model.config), copy.copy(tiny_model.folder)
    object.__setattr__(config, "num_heads", 3)
    object.__setattr__(opened, "config", config)
    with refused(backend, InvalidLayout, "3 query heads are not a multiple of 2 KV heads"):
        make_engine(dataclasses.replace(tiny_model, folder=opened), backend)


def test_a_pool_of_a_type_the_backend_has_not_is_refused(tiny_model: Model) -> None:
    driver = TestDriver(kv_dtypes=("float32",))
    with (
        backend_of(driver) as backend,
        refused(backend, Unsupported, "KV dtype 'bfloat16': backend 'cpu' supports float32"),
    ):
        make_engine(tiny_model, backend, kv_dtype="bfloat16")


def test_the_smallest_pool_takes_the_smallest_request_and_refuses_the_next(tiny_model: Model, backend: Backend) -> None:
    with make_engine(tiny_model, backend, slots=2, block_size=1, num_blocks=2, max_len=8) as engine:
        results = engine.generate([[5], [6], [7]], SamplingParams(max_tokens=1))
        assert [len(r.token_ids) for r in results] == [1, 1, 1]
        with refused(
            backend, InvalidInput, "1 prompt tokens and max_tokens=2 need 2 blocks of 1 tokens; the pool has 1 (1"
        ):
            engine.generate([[5]], SamplingParams(max_tokens=2))
