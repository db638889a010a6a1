"""Tiny random models of every family and rope kind, made by transformers, which also says which tokens are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from forebay.runtime.models.gguf_tokenizer import tokenizer_from_gguf
from tests.models import tiny

NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 15, 16, 17, 200)
MAX_LEN = max(PROMPT_LENGTHS) + NEW_TOKENS
ORIGINAL = 48
"""Length before scaling of the kinds that name one: short prompts lie below it, cross it while they decode, 200 lies above."""

_VOCAB = 288
_BASE: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": _VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
)

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": ("llama", {}),
        "llama tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 24}),
        "llama bias": (
            "llama",
            {"attention_bias": True, "mlp_bias": True, "hidden_size": 96, "num_attention_heads": 6},
        ),
        "mistral": ("mistral", {"sliding_window": 24, "head_dim": 32}),
        "mistral full": ("mistral", {"sliding_window": None, "head_dim": 32}),
        "qwen2": ("qwen2", {"num_key_value_heads": 4}),
        "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1}),
        "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
        "qwen3 window": (
            "qwen3",
            {
                "head_dim": 20,
                "attention_bias": True,
                "num_key_value_heads": 1,
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
    }
)
"""Variant → model_type and what differs from the base."""

ROPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {},
        "linear": {"factor": 3.0},
        "dynamic": {"factor": 6.0},
        "yarn": {"factor": 6.0, "original_max_position_embeddings": ORIGINAL},
        "yarn mscale": {
            "factor": 6.0,
            "original_max_position_embeddings": ORIGINAL,
            "mscale": 1.3,
            "mscale_all_dim": 0.6,
            "beta_fast": 16,
            "beta_slow": 2,
            "truncate": False,
        },
        "longrope": {"original_max_position_embeddings": ORIGINAL, "short_factor": 1.0, "long_factor": 2.5},
        "llama3": {
            "factor": 8.0,
            "original_max_position_embeddings": ORIGINAL,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "proportional": {"factor": 2.0, "partial_rotary_factor": 0.6},
    }
)
"""Rope variant → its parameters; the first word is the kind. LongRoPE's numbers start lists that grow by pair."""


@dataclass(frozen=True)
class Case:
    """A family and a rope variant: one model."""

    family: str
    rope: str

    def __str__(self) -> str:
        return f"{self.family}, {self.rope}"


@dataclass(frozen=True)
class Reference:
    """What transformers decodes greedily from one prompt: tokens, and each step's top-2 gap relative to its largest logit."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


def every_case() -> list[Case]:
    """The whole cross product."""
    return [Case(family, rope) for family in FAMILIES for rope in ROPES]


def covering_cases() -> list[Case]:
    """Every family without scaling, and every rope variant: each family in turn, Llama with the two that depend on length."""
    scaled = list(ROPES)[1:]
    turns = [Case(list(FAMILIES)[index % len(FAMILIES)], rope) for index, rope in enumerate(scaled, start=3)]
    length_dependent = [Case("llama", "dynamic"), Case("llama", "longrope")]
    return list(dict.fromkeys([*(Case(family, "default") for family in FAMILIES), *turns, *length_dependent]))


def prompts() -> list[list[int]]:
    """One prompt of each length, the same in every process."""
    return [
        [int(t) for t in np.random.default_rng(length).integers(len(tiny.SPECIAL), _VOCAB, length)]
        for length in PROMPT_LENGTHS
    ]


def build(case: Case, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model of ``case`` into ``folder`` by ``save_pretrained``, its weights stored as ``dtype``."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers_config(case))
    with torch.no_grad():
        # transformers starts norms at one and biases at zero: a forgotten one would not show.
        for name, values in model.named_parameters():
            if name.endswith("norm.weight"):
                values.normal_(1.0, 0.3)
            if name.endswith(".bias"):
                values.normal_(0.0, 0.5)
    model.to(dtype).save_pretrained(folder)
    tokenizer_from_gguf(tiny.tokenizer_metadata()).save(str(folder / "tokenizer.json"))
    return folder


def transformers_config(case: Case) -> Any:
    """transformers' configuration of ``case``."""
    from transformers import AutoConfig

    model_type, changes = FAMILIES[case.family]
    options = {**_BASE, **changes}
    kind = case.rope.split()[0]
    pairs = options.get("head_dim", options["hidden_size"] // options["num_attention_heads"]) // 2
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **ROPES[case.rope]}
    if kind == "longrope":
        rope |= {key: [rope[key] + 0.25 * pair for pair in range(pairs)] for key in ("short_factor", "long_factor")}
    if kind == "dynamic":
        options["max_position_embeddings"] = ORIGINAL
    return AutoConfig.for_model(model_type, **options, rope_parameters=rope)


def references(folder: Path, wanted: Sequence[Sequence[int]]) -> list[Reference]:
    """What transformers, in float32 with its plain attention, decodes from each prompt with the model in ``folder``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [_reference(model, ids) for ids in wanted]


def _reference(model: Any, ids: Sequence[int]) -> Reference:
    # A rotary embedding that depends on length keeps the longest one it has seen; every prompt starts afresh.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    tokens = torch.tensor([ids])
    made = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack(made.logits)[:, 0]
    best, second = logits.topk(2, dim=-1).values.T
    gaps = (best - second) / logits.abs().amax(-1)
    return Reference(tuple(made.sequences[0, len(ids) :].tolist()), tuple(gaps.tolist()))
