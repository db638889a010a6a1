"""Sliding windows: each layer has its own, and a backend without them is refused where they matter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.runtime import Engine, SamplingParams, Settings
from forebay.specs import Backend
from forebay.specs.errors import Unsupported
from tests.families.conftest import Outcomes
from tests.families.zoo import MAX_LEN, NEW_TOKENS, Case, prompts
from tests.runtime.harness import TestDriver, backend_of

WINDOWS = {
    "llama": (None, None),
    "mistral": (24, 24),
    "mistral full": (None, None),
    "qwen2": (None, None),
    "qwen2 window": (None, 33),
    "qwen3": (None, None),
    "qwen3 window": (16, None),
}


@pytest.fixture
def without_windows() -> Iterator[tuple[TestDriver, Backend]]:
    """A driver that says it has no sliding window, and the backend over it."""
    driver = TestDriver(window=False)
    with backend_of(driver) as opened:
        yield driver, opened


@pytest.mark.parametrize(("family", "windows"), list(WINDOWS.items()), ids=list(WINDOWS))
def test_each_layer_has_the_window_of_the_configuration(
    family: str, windows: tuple[int | None, ...], outcomes: Outcomes, backend: Backend
) -> None:
    model = outcomes.model(Case(family, "default"))
    assert model.config.windows == windows
    llama = model.bind(backend, max_len=MAX_LEN)
    assert tuple(layer.attention.window for layer in llama.layers) == windows
    for buffer in llama.buffers:
        backend.release(buffer)


def test_a_backend_without_windows_is_refused_before_any_device_work(
    outcomes: Outcomes, without_windows: tuple[TestDriver, Backend]
) -> None:
    driver, backend = without_windows
    model = outcomes.model(Case("qwen2 window", "default"))
    message = (
        r"1 of 2 layers have a sliding window of 33 tokens, which backend 'cpu' does not support; lower max_len from 264 "
        r"to 33 or choose another backend"
    )
    with pytest.raises(Unsupported, match=message):
        Engine(model, backend, settings=Settings(), max_len=MAX_LEN)
    assert not driver.acts


def test_it_serves_sequences_that_no_window_cuts(
    outcomes: Outcomes, without_windows: tuple[TestDriver, Backend]
) -> None:
    case = Case("qwen2 window", "default")
    new = 33 - len(prompts()[1])
    with Engine(outcomes.model(case), without_windows[1], settings=Settings(), max_len=33, block_size=4) as engine:
        (result,) = engine.generate([prompts()[1]], SamplingParams(max_tokens=new, ignore_eos=True))
    assert result.token_ids == outcomes.references(case)[1].tokens[:new]
    assert new < NEW_TOKENS


def test_a_window_of_the_longest_sequence_is_no_window(outcomes: Outcomes) -> None:
    config = outcomes.model(Case("mistral", "default")).config
    assert [config.window(0, max_len) for max_len in (23, 24, 25)] == [None, None, 24]
