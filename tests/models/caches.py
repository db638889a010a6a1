"""What a model cache holds, as the tests of the store ask it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forebay.runtime.models import list_models
from forebay.runtime.models.registry import KnownModel

Known = Mapping[str, KnownModel]


def state(cache: Path, known: Known) -> str:
    return list_models(cache, known=known)[0].state


def contents(cache: Path) -> list[str]:
    """Every file and folder of the cache except the lock's."""
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if "locks" not in path.parts)


FINISHED = [
    "downloads",
    "tiny",
    *(
        f"tiny/{name}"
        for name in (
            "LICENSE",
            "MANIFEST.json",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        )
    ),
]
