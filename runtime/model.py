"""A model on the host: its folder, its tokenizer and the dtype its weights will have on a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forebay.specs.backend import Backend
from forebay.specs.errors import InvalidInput

from .models.config import ModelConfig
from .models.llama import Llama, LoadProgress, bind_llama
from .models.model_folder import ModelFolder, open_model
from .models.progress import ProgressCallback
from .models.store import resolve_model
from .models.tokenizer import Tokenizer
from .settings import Settings


@dataclass(frozen=True)
class Model:
    """An opened and checked model; weights are read when an Engine puts them on a backend."""

    name: str
    folder: ModelFolder
    dtype: str

    @property
    def config(self) -> ModelConfig:
        """The model's shape and constants."""
        return self.folder.config

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids and back."""
        return self.folder.tokenizer

    def bind(self, backend: Backend, *, max_len: int, progress: LoadProgress | None = None) -> Llama:
        """Put the weights on ``backend``."""
        return bind_llama(
            backend, self.config, self.folder.weights, dtype=self.dtype, max_len=max_len, progress=progress
        )


def load_model(
    name_or_path: str | Path | None = None,
    *,
    dtype: str | None = None,
    cache_dir: Path | None = None,
    settings: Settings | None = None,
    progress: ProgressCallback | None = None,
    hub_endpoint: str | None = None,
) -> Model:
    """Open a model: a folder, a GGUF file, a known name such as ``smollm2-135m``, or a hub's ``org/name``.

    A GGUF file may be the first of several shards (``...-00001-of-00003.gguf``); it is read as it is, nothing is converted
    on disk. Names are fetched when they are absent; a folder of that name goes before them. ``hub_endpoint`` is the hub's
    address, None that of huggingface_hub. Other arguments that are None come from ``settings`` (resolved from file and
    environment when that is None too).

    Raises:
        InvalidModel: the folder or file is missing, damaged or inconsistent.
        ModelUnavailable: a name cannot be fetched here.
        Unsupported: a kind of model that is not implemented.
        InvalidInput: no model is named.
        InvalidSetting: an unknown dtype.
    """
    given = {"model": None if name_or_path is None else str(name_or_path), "dtype": dtype, "cache_dir": cache_dir}
    settings = (Settings.resolve() if settings is None else settings).override(
        **{key: value for key, value in given.items() if value is not None}
    )
    if settings.model is None:
        raise InvalidInput("load_model: no model named; give a folder or a known name (forebay model list)")
    path = resolve_model(settings.model, settings.cache_dir, progress=progress, hub_endpoint=hub_endpoint)
    return Model(settings.model, open_model(path), settings.dtype)
