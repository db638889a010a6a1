"""A model on disk, opened and checked as a whole before anything large is read: a folder, or a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forebay.specs.errors import InvalidModel

from .config import ModelConfig
from .llama_tensors import expected_tensors, is_redundant
from .safetensors_folder import SafetensorsFolder
from .tokenizer import Tokenizer
from .weights import Weights


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The parts of one model; they are known to belong together. ``path``: its folder or file."""

    path: Path
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer


def open_model(path: Path) -> ModelFolder:
    """Open the model at ``path``: a folder, or a GGUF file (the first, where it is in several shards).

    Raises as :func:`open_model_folder` and :func:`open_gguf_model`.
    """
    return open_gguf_model(path) if path.is_file() else open_model_folder(path)


def open_model_folder(path: Path) -> ModelFolder:
    """Open the folder at ``path``: configuration, weights (headers only) and tokenizer.

    Raises:
        InvalidModel: a file is missing or damaged, tensors are missing, misshapen or left over, or the parts do not
            belong together.
        Unsupported: the model is of a kind that is not implemented.
    """
    if not path.is_dir():
        raise InvalidModel(f"{path}: no such folder; expected a model folder with config.json and model.safetensors")
    config = ModelConfig.from_folder(path)
    weights = SafetensorsFolder(path)
    check_weights(path, config, weights)
    return ModelFolder(path, config, weights, Tokenizer.from_folder(path, config))


def open_gguf_model(path: Path) -> ModelFolder:
    """Open the GGUF file at ``path``; its tensors are dequantised when they are asked for, and nothing is written.

    Raises:
        InvalidModel: the file is damaged, or tensors are missing, misshapen or left over.
        Unsupported: the model is of a kind, or stored in a type, that is not implemented.
    """
    # Imported here because the gguf package takes long to import and folders do not need it.
    from .gguf_import import open_gguf

    model = open_gguf(path)
    config = model.model_config()
    check_weights(path, config, model.weights)
    return ModelFolder(path, config, model.weights, model.tokenizer(config))


def check_weights(path: Path, config: ModelConfig, weights: Weights) -> None:
    """Check that ``weights`` are those of a model of ``config``, no more and no less; raises :class:`InvalidModel`."""
    expected = expected_tensors(config)
    weights.check(expected)
    # A tensor nobody asks for is a part of the model (a bias, an extra norm) that would silently not be computed.
    unused = [name for name in weights.unexpected(expected) if not is_redundant(config, name)]
    if unused:
        raise InvalidModel(
            f"{path}: {len(unused)} stored tensors have no place in a {config.model_type} model of this configuration, "
            f"the first is {unused[0]!r}; configuration and weights do not belong together"
        )
