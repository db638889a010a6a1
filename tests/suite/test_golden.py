"""The tokens that the suite's plainest run expects are those of another implementation, in float64, on the same weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from forebay.runtime.models.suite_model import write_suite_model
from forebay.specs.suite.test_plainest import PROMPT, TOKENS

MARGIN = 0.33
"""What test_plainest.py says of its tokens: no rounding of float32 moves a logit so far."""


def test_the_tokens_are_those_of_float64_by_the_margin_they_are_said_to_have(tmp_path: Path) -> None:
    """Each of them, after the prompt and those before it. (Only the angles of rope are float32 in transformers.)"""
    folder = write_suite_model(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert {weight.dtype for weight in model.parameters()} == {torch.float64}
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *TOKENS]])).logits[0, len(PROMPT) - 1 : -1]
    best = logits.topk(2)
    assert best.indices[:, 0].tolist() == TOKENS
    assert (best.values[:, 0] - best.values[:, 1]).min() >= MARGIN
