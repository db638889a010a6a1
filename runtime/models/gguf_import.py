"""A GGUF file as the parts of a model, and as a plain model folder for what wants one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from forebay.specs.errors import InvalidModel

from .chat_template import TOKENIZER_CONFIG_FILE, ChatTemplates
from .config import CONFIG_FILE, GENERATION_CONFIG_FILE, ModelConfig
from .files import write_json
from .gguf_config import RopeFactors, Stored, config_of, special_ids
from .gguf_file import GGUFTensor, read_gguf
from .gguf_tokenizer import tokenizer_from_gguf
from .gguf_weights import GGUFWeights, RotatedPairs, dequantised
from .json_fields import Fields
from .model_folder import check_weights
from .progress import ProgressCallback
from .safetensors_folder import WEIGHTS_FILE
from .tokenizer import TOKENIZER_FILE, Tokenizer

_FLOAT32_BYTES: Final = 4
_MAX_ROPE_FACTORS: Final = 2**16
_ROPE_TENSORS: Final = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """The parts of the model of one GGUF file. ``config``: what its ``config.json`` would say."""

    metadata: Fields
    config: Mapping[str, Any]
    weights: GGUFWeights

    def model_config(self) -> ModelConfig:
        """The configuration, checked; raises as :meth:`ModelConfig.from_folder`."""
        return ModelConfig.from_fields(
            Fields(self.metadata.source, self.config), Fields(self.metadata.source, special_ids(self.metadata))
        )

    def tokenizer(self, config: ModelConfig) -> Tokenizer:
        """The tokenizer with its chat templates; raises as :func:`tokenizer_from_gguf`."""
        chat = ChatTemplates.from_fields(Fields(self.metadata.source, tokenizer_config(self.metadata)))
        return Tokenizer.checked(tokenizer_from_gguf(self.metadata), config, chat, source=self.metadata.source)


def open_gguf(file: Path) -> GGUFModel:
    """Read the header of the GGUF ``file`` (the first of its shards, where there are several).

    Raises:
        InvalidModel: the file is damaged.
        Unsupported: a version, type, architecture or rope scaling that is not implemented.
    """
    header = read_gguf(file)
    metadata = Fields(str(file), header.metadata)
    stored = {name: tensor for name, tensor in header.tensors.items() if name not in _ROPE_TENSORS}
    divisors = {name: _divisors(header.tensors[name]) for name in _ROPE_TENSORS if name in header.tensors}
    rope = RopeFactors(*(divisors.get(name) for name in _ROPE_TENSORS))
    names = set(stored)
    embedding = stored.get("token_embd.weight")
    config = config_of(
        metadata,
        Stored(
            vocab_size=embedding.shape[0] if embedding is not None else 0,
            tied="output.weight" not in names,
            attention_bias="blk.0.attn_q.bias" in names,
            mlp_bias="blk.0.ffn_up.bias" in names,
            rope=rope,
        ),
    )
    # llama.cpp turns neighbouring rows in this architecture and halves in the others.
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    pairs = RotatedPairs(*heads) if metadata.text("general.architecture") == "llama" else None
    return GGUFModel(metadata, config, GGUFWeights(file, stored.values(), pairs))


def convert_gguf(file: Path, folder: Path, progress: ProgressCallback) -> None:
    """Write the model of the GGUF ``file`` into the existing ``folder``, in float32; reports bytes done.

    Raises:
        InvalidModel: the file is damaged, or its tensors are not those its metadata describes.
        Unsupported: an architecture, rope scaling or tokenizer that is not implemented.
        OSError: writing failed.
    """
    model = open_gguf(file)
    check_weights(file, model.model_config(), model.weights)
    write_json(folder / CONFIG_FILE, model.config)
    write_json(folder / GENERATION_CONFIG_FILE, special_ids(model.metadata))
    tokenizer_from_gguf(model.metadata).save(str(folder / TOKENIZER_FILE))
    write_json(folder / TOKENIZER_CONFIG_FILE, tokenizer_config(model.metadata))
    shapes = {name: model.weights.shape(name) for name in model.weights.names}
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * _FLOAT32_BYTES
    weights, done = {}, 0
    for name, shape in shapes.items():
        progress(done, total, "convert")
        weights[name] = model.weights.tensor(name, shape)
        done += weights[name].nbytes
    progress(total, total, "convert")
    try:
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"writing {folder / WEIGHTS_FILE}: {error}") from error
    # The library makes the file readable by its owner alone; it should be as readable as the files beside it.
    (folder / WEIGHTS_FILE).chmod((folder / CONFIG_FILE).stat().st_mode)


def tokenizer_config(metadata: Fields) -> dict[str, Any]:
    """``tokenizer_config.json``: what transformers needs beside ``tokenizer.json``, and the chat templates."""
    given = metadata.raw("tokenizer.ggml.tokens")
    tokens: list[Any] = given if isinstance(given, list) else []
    special = {name: _token(tokens, metadata.raw(f"tokenizer.ggml.{key}_token_id")) for name, key in _SPECIAL_TOKENS}
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return base | {name: token for name, token in special.items() if token is not None} | _templates(metadata)


_SPECIAL_TOKENS: Final = (
    ("bos_token", "bos"),
    ("eos_token", "eos"),
    ("unk_token", "unknown"),
    ("pad_token", "padding"),
)


def _token(tokens: list[Any], token_id: object) -> str | None:
    """The text of a token, None where the id means none."""
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        return None
    token = tokens[token_id]
    return token if isinstance(token, str) else None


def _templates(metadata: Fields) -> dict[str, Any]:
    default = metadata.text("tokenizer.chat_template", default="")
    names = metadata.raw("tokenizer.chat_templates")
    if not isinstance(names, list) or not names:
        return {"chat_template": default} if default else {}
    named = {str(name): metadata.text(f"tokenizer.chat_template.{name}") for name in names}
    every = ({"default": default} if default else {}) | named
    return {"chat_template": [{"name": name, "template": template} for name, template in every.items()]}


def _divisors(tensor: GGUFTensor) -> list[float]:
    if len(tensor.shape) != 1 or tensor.shape[0] > _MAX_ROPE_FACTORS or tensor.kind.name != "F32":
        raise InvalidModel(
            f"{tensor.file}: tensor {tensor.name} is {tensor.kind.name} {list(tensor.shape)}; expected a float32 list of "
            "half the size of a head"
        )
    values = dequantised(tensor)
    if not (np.isfinite(values) & (values > 0)).all():
        raise InvalidModel(
            f"{tensor.file}: tensor {tensor.name} has values that are not positive numbers; fetch it again"
        )
    divisors: list[float] = values.tolist()
    return divisors
