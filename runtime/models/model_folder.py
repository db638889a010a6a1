"""A model folder, opened and checked as a whole before anything large is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forebay.specs.errors import InvalidModel

from .config import ModelConfig
from .llama_tensors import expected_tensors, is_redundant
from .safetensors_folder import SafetensorsFolder
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The parts of one model folder; they are known to belong together."""

    path: Path
    config: ModelConfig
    weights: SafetensorsFolder
    tokenizer: Tokenizer


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
    expected = expected_tensors(config)
    weights.check(expected)
    # A tensor nobody asks for is a part of the model (a bias, an extra norm) that would silently not be computed.
    unused = [name for name in weights.unexpected(expected) if not is_redundant(config, name)]
    if unused:
        raise InvalidModel(
            f"{path}: {len(unused)} stored tensors have no place in a {config.model_type} model of this configuration, "
            f"the first is {unused[0]!r}; configuration and weights do not belong together"
        )
    return ModelFolder(path, config, weights, Tokenizer.from_folder(path, config))
