"""Greedy tokens of the seeded model in three arms, beside transformers' own ``generate`` in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forebay.hardware.h200.part import Result, Task
from forebay.hardware.h200.shaped_model import prompts, write_model
from forebay.runtime import Engine, SamplingParams, Settings, load_model, open_backend

ARMS: Final = ("eager", "hostfree", "captured")
TIE: Final = 1e-4
"""The least gap of a step's two best logits, relative to its largest, below which rounding may choose; nothing behind is compared."""
LEAST_COMPARED: Final = 0.5
"""Share of the tokens that must be compared for the part to have shown anything."""


@dataclass(frozen=True)
class Reference:
    """What transformers decodes from one prompt, and each step's gap between its two best logits, relative to the largest."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]

    @property
    def clear(self) -> int:
        """Tokens before the first near tie."""
        return next((step for step, gap in enumerate(self.gaps) if gap < TIE), len(self.gaps))


def run(task: Task) -> Result:
    """Fails by a token that differs where the reference is clear, or by arms that differ from one another anywhere."""
    count, made = (2, 4) if task.dry else (8, 32)
    wanted = prompts(count, dry=task.dry)
    settings = Settings()
    found: dict[str, list[list[int]]] = {}
    with open_backend(task.backend, settings=settings) as backend:
        folder = write_model(task.work / "model-tokens", dry=task.dry)
        want = references(folder, wanted, made, "cpu" if task.dry else "cuda")
        model = load_model(folder, dtype="float32", settings=settings)
        for arm in ARMS:
            options: dict[str, Any] = {"slots": count, "max_len": 256, "prefix_reuse": False, "settings": settings}
            with Engine(model, backend, arm=arm, **options) as engine:
                results = engine.generate(wanted, SamplingParams(max_tokens=made, ignore_eos=True))
                found[arm] = [list(result.token_ids) for result in results]
    problems = differences(found, want)
    compared = sum(reference.clear for reference in want)
    data = {
        "prompts": [len(ids) for ids in wanted],
        "tokens_a_prompt": made,
        "compared": compared,
        "of": count * made,
        "distinct_tokens": len({token for reference in want for token in reference.tokens}),
        "smallest_gap": min(gap for reference in want for gap in reference.gaps),
    }
    if compared < LEAST_COMPARED * count * made:
        problems.append(f"only {compared} of {count * made} tokens lie before a near tie; nothing much was shown")
    return ("failed" if problems else "passed"), data, problems


def differences(found: dict[str, list[list[int]]], want: Sequence[Reference]) -> list[str]:
    """In words, where tokens differ."""
    problems = []
    for arm, rows in found.items():
        if rows != found[ARMS[0]]:
            problems.append(f"{arm}: other tokens than {ARMS[0]}")
        for index, (row, reference) in enumerate(zip(rows, want, strict=True)):
            clear, ours = reference.clear, tuple(row)
            if len(ours) != len(reference.tokens) or ours[:clear] != reference.tokens[:clear]:
                problems.append(f"{arm}, prompt {index}: {list(ours)}, transformers has {list(reference.tokens)}")
    return problems


def references(folder: Path, wanted: Sequence[Sequence[int]], made: int, device: str) -> list[Reference]:
    """transformers' greedy tokens in float32 with its plain attention, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.eval().to(device)
    found = []
    for ids in wanted:
        given = torch.tensor([ids], device=device)
        result = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=made,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.stack(result.logits)[:, 0].float().cpu()
        best = logits.topk(2, dim=-1).values
        gaps = (best[:, 0] - best[:, 1]) / logits.abs().amax(-1)
        found.append(Reference(tuple(result.sequences[0, len(ids) :].tolist()), tuple(gaps.tolist())))
    return found
