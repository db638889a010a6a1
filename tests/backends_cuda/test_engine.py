"""The engine on the interpreter: golden tokens by the backend's own kernels and nobody else's attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay.runtime import Engine, SamplingParams, load_model, open_backend
from forebay.runtime.models import fetch
from forebay.runtime.settings import user_cache_dir

KERNELS = {"decode_kernel", "write_rows_kernel"}
LIBRARY = ("scaled_dot_product_attention", "softmax")
"""What attention would be made of, if it were not a kernel of ours."""


@pytest.fixture
def no_library_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's attention and what one would build it of raise."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a library computed attention")

    for name in LIBRARY:
        for place in (torch.nn.functional, torch, torch.Tensor, torch.ops.aten):
            if hasattr(place, name):
                monkeypatch.setattr(place, name, refuse)


@pytest.mark.model
@pytest.mark.clause("C3", "C11")
def test_eight_golden_tokens_are_exact(golden: list[dict[str, Any]], no_library_attention: None) -> None:
    item = min(golden, key=lambda item: len(item["prompt_ids"]))
    model = load_model(fetch("smollm2-135m", cache_dir=user_cache_dir()), dtype="float32")
    eight = SamplingParams(max_tokens=8, ignore_eos=True)
    with open_backend("cuda:interpret") as backend:
        with Engine(model, backend, capture="required", slots=1, max_len=64) as engine:
            (result,) = engine.generate([item["prompt"]], eight)
        launched = backend.info["launches"]
        assert backend.counters.delegated.total() == 0
        assert backend.counters.replay > 0
    assert list(result.token_ids) == item["output_ids"][:8]
    assert launched.keys() >= KERNELS
