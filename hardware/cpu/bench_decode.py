"""Tokens a second of each arm beside transformers, in one run: ``python -m forebay.hardware.cpu.bench_decode``.

Every way decodes the same prompts greedily in float32 with the same number of threads. Rounds are interleaved; a round's time
includes prefill. Tokens are compared too: a way that is fast and wrong says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from forebay.runtime import Engine, Model, SamplingParams, Settings, load_model, open_backend
from forebay.specs import Backend

ARMS = ("eager", "hostfree", "captured")
TEXTS = (
    "The capital of France is",
    "Once upon a time, a small",
    "def fibonacci(n):",
    "Water boils at",
    "The three primary colours are",
    "In the beginning of the year",
    "My favourite food is",
    "The longest river in the world",
)
Run = Callable[[], list[list[int]]]


def arm_runs(
    model: Model, backend: Backend, prompts: list[list[int]], tokens: int
) -> tuple[dict[str, Run], list[Engine]]:
    """One engine an arm, all on one backend."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    settings = Settings()
    engines = {
        arm: Engine(model, backend, arm=arm, slots=len(prompts), max_len=256, prefix_reuse=False, settings=settings)
        for arm in ARMS
    }

    def run(engine: Engine) -> list[list[int]]:
        return [list(r.token_ids) for r in engine.generate(prompts, params)]

    return {f"forebay {arm}": partial(run, engine) for arm, engine in engines.items()}, list(engines.values())


def transformers_run(folder: Path, prompts: list[list[int]], tokens: int) -> Run:
    """``generate`` of transformers' own model, one batch, left-padded; the peer users compare with."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # go on after the end of text, as the arms do
    longest = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])

    @torch.inference_mode()
    def run() -> list[list[int]]:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        made: list[list[int]] = out[:, longest:].tolist()
        return made

    return run


def measure(model: Model, backend: Backend, batch: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """One record a way: best and median tokens a second, ratio of the medians to transformers, whether the tokens agree."""
    prompts = [model.tokenizer.encode(text) for text in TEXTS[:batch]]
    runs, engines = arm_runs(model, backend, prompts, tokens)
    runs = {"transformers": transformers_run(model.folder.path, prompts, tokens)} | runs
    results = {name: run() for name, run in runs.items()}
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            speeds[name].append(batch * tokens / (time.perf_counter() - start))
    for engine in engines:
        engine.close()
    peer = statistics.median(speeds["transformers"])
    return [
        {
            "batch": batch,
            "way": name,
            "best_tokens_per_s": max(speeds[name]),
            "median_tokens_per_s": statistics.median(speeds[name]),
            "ratio_to_transformers": statistics.median(speeds[name]) / peer,
            "equal_tokens": sum(
                a == b
                for mine, theirs in zip(results[name], results["transformers"], strict=True)
                for a, b in zip(mine, theirs, strict=True)
            ),
            "tokens": batch * tokens,
        }
        for name in runs
    ]


def main() -> None:
    """Print the table; ``--json FILE`` also writes the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = load_model(options.model, dtype="float32")
    with open_backend("cpu") as backend:
        records = [r for batch in (1, 8) for r in measure(model, backend, batch, options.tokens, options.rounds)]
        print(
            f"{options.model} float32, {backend.info}, {options.tokens} tokens a prompt, {options.rounds} interleaved rounds"
        )
    for r in records:
        print(
            "batch {batch}  {way:18s} best {best_tokens_per_s:7.1f}  median {median_tokens_per_s:7.1f} tokens/s  "
            "{ratio_to_transformers:5.2f} of transformers  equal tokens {equal_tokens}/{tokens}".format(**r)
        )
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
