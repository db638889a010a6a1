"""Greedy tokens of a model on ``tpu:xla``: ``python -m forebay.hardware.tpu.reference FOLDER ASKED ANSWER``, both JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from forebay.hardware.checking.tokens import MAX_LEN
from forebay.runtime import Engine, SamplingParams, Settings, load_model, open_backend


def main(folder: Path, asked: Path, answer: Path) -> None:
    """Answer ``{"prompts", "made"}`` with a list of ``{"tokens", "gaps"}``; gaps are those of the two best log-probabilities."""
    wanted = json.loads(asked.read_text(encoding="utf-8"))
    settings = Settings()
    model = load_model(folder, dtype="float32", settings=settings)
    params = SamplingParams(max_tokens=wanted["made"], ignore_eos=True, logprobs=2)
    options: dict[str, Any] = {"slots": len(wanted["prompts"]), "max_len": MAX_LEN, "prefix_reuse": False}
    with (
        open_backend("tpu:xla", settings=settings) as backend,
        Engine(model, backend, arm="hostfree", settings=settings, **options) as engine,
    ):
        results = engine.generate(wanted["prompts"], params)
    rows = []
    for result in results:
        best = [step.top for step in result.logprobs or ()]
        rows.append({"tokens": list(result.token_ids), "gaps": [first[1] - second[1] for first, second in best]})
    answer.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
