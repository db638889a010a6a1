"""Greedy tokens by transformers' own ``generate`` in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forebay.hardware.checking.tokens import Reference


def transformers_references(
    folder: Path, wanted: Sequence[Sequence[int]], made: int, device: str
) -> tuple[str, list[Reference]]:
    """With its plain attention, one prompt at a time, on torch's ``device``; call it once a backend is open, for it imports torch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.eval().to(device)
    found = []
    for ids in wanted:
        given = torch.tensor([list(ids)], device=device)
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
    return "transformers", found
