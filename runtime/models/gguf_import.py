"""A GGUF file to a plain model folder: float32 safetensors, ``config.json``, ``generation_config.json``, ``tokenizer.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file

from forebay.specs.errors import InvalidModel, Unsupported

from .config import CONFIG_FILE, GENERATION_CONFIG_FILE, ModelConfig
from .files import write_json
from .gguf_tokenizer import tokenizer_from_gguf
from .json_fields import Fields, show
from .llama_tensors import expected_tensors
from .progress import ProgressCallback
from .safetensors_folder import WEIGHTS_FILE
from .tokenizer import TOKENIZER_FILE

TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
_MAX: Final = 2**31 - 1
_FLOAT32_BYTES: Final = 4


def convert_gguf(file: Path, folder: Path, progress: ProgressCallback) -> None:
    """Write the model of the GGUF ``file`` into the existing ``folder``; reports float32 bytes done.

    Raises:
        InvalidModel: the file is damaged, or its tensors are not those its metadata describes.
        Unsupported: an architecture, rope scaling or tokenizer that is not implemented.
        OSError: writing failed.
    """
    reader = _open(file)
    metadata = Fields(file.name, {key: _contents(reader, key) for key in reader.fields})
    stored = {tensor.name: tensor for tensor in reader.tensors}

    write_json(folder / CONFIG_FILE, _config(metadata, tied="output.weight" not in stored))
    write_json(folder / GENERATION_CONFIG_FILE, _special_ids(metadata))
    config = ModelConfig.from_folder(folder)
    tokenizer_from_gguf(metadata).save(str(folder / TOKENIZER_FILE))
    write_json(folder / TOKENIZER_CONFIG_FILE, _tokenizer_config(metadata))

    weights = _dequantised(file, stored, config, progress)
    try:
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"writing {folder / WEIGHTS_FILE}: {error}") from error
    # The library makes the file readable by its owner alone; it should be as readable as the files beside it.
    (folder / WEIGHTS_FILE).chmod((folder / CONFIG_FILE).stat().st_mode)


def _open(file: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(file)
    except (ValueError, LookupError, OverflowError) as error:
        raise InvalidModel(f"{file}: not a readable GGUF file ({error}); fetch it again") from error


def _contents(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return field.contents() if field is not None else None


def _config(metadata: Fields, *, tied: bool) -> dict[str, Any]:
    """``config.json`` in transformers' terms."""
    architecture = metadata.text("general.architecture")
    if architecture != "llama":
        raise Unsupported(f"{metadata.source}: architecture {show(architecture)}; supported: 'llama'")
    scaling = metadata.text("llama.rope.scaling.type", default="none")
    if scaling != "none":
        raise Unsupported(f"{metadata.source}: rope scaling {show(scaling)}; supported: 'none'")
    hidden_size = metadata.integer("llama.embedding_length", maximum=_MAX)
    num_heads = metadata.integer("llama.attention.head_count", maximum=_MAX)
    head_dim = metadata.integer("llama.attention.key_length", maximum=_MAX, default=max(1, hidden_size // num_heads))
    rotated = metadata.integer("llama.rope.dimension_count", maximum=_MAX, default=head_dim)
    if rotated != head_dim:
        raise Unsupported(
            f"{metadata.source}: rotary embedding over {rotated} of {head_dim} dimensions; supported: all"
        )
    theta = _shortest(metadata.number("llama.rope.freq_base", above=1.0, below=1e15, default=10_000.0))
    eps = metadata.number("llama.attention.layer_norm_rms_epsilon", above=0.0, below=1.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "torch_dtype": "float32",
        "vocab_size": len(metadata.raw("tokenizer.ggml.tokens") or ()),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("llama.feed_forward_length", maximum=_MAX),
        "num_hidden_layers": metadata.integer("llama.block_count", maximum=_MAX),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("llama.attention.head_count_kv", maximum=_MAX, default=num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.integer("llama.context_length", maximum=_MAX),
        "rms_norm_eps": _shortest(eps),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
    } | _special_ids(metadata)


def _shortest(value: float) -> float:
    """The shortest decimal of a value stored as float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _special_ids(metadata: Fields) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {key: metadata.raw(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}
    return {key: value for key, value in ids.items() if value is not None}


def _tokenizer_config(metadata: Fields) -> dict[str, Any]:
    """What transformers needs beside ``tokenizer.json``, and the chat template."""
    tokens = metadata.raw("tokenizer.ggml.tokens") or []
    special = {key.removesuffix("_id"): tokens[i] for key, i in _special_ids(metadata).items() if 0 <= i < len(tokens)}
    template = metadata.text("tokenizer.chat_template", default="")
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return base | special | ({"chat_template": template} if template else {})


def _dequantised(
    file: Path, stored: dict[str, gguf.ReaderTensor], config: ModelConfig, progress: ProgressCallback
) -> dict[str, npt.NDArray[np.float32]]:
    """Every expected tensor in float32, under its safetensors name."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    shapes = expected_tensors(config)
    sources = {name: names.get_name(name, try_suffixes=(".weight",)) or name for name in shapes}
    missing = [name for name in sources.values() if name not in stored]
    unused = sorted(stored.keys() - set(sources.values()))
    if missing or unused:
        raise InvalidModel(
            f"{file}: {len(missing)} tensors are missing (first: {missing[:1]}) and {len(unused)} have no place in the "
            f"model (first: {unused[:1]}); expected the {len(shapes)} tensors of its metadata"
        )
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * _FLOAT32_BYTES
    weights, done = {}, 0
    for name, shape in shapes.items():
        progress(done, total, "convert")
        weights[name] = _tensor(file, stored[sources[name]], name, shape, config)
        done += weights[name].nbytes
    progress(total, total, "convert")
    return weights


def _tensor(
    file: Path, source: gguf.ReaderTensor, name: str, shape: tuple[int, ...], config: ModelConfig
) -> npt.NDArray[np.float32]:
    try:
        values = np.asarray(gguf.dequantize(source.data, source.tensor_type), dtype=np.float32)
    except NotImplementedError as error:
        raise Unsupported(
            f"{file}: tensor {source.name} is quantised as {source.tensor_type.name}, unknown to gguf"
        ) from error
    if values.shape != shape:
        raise InvalidModel(f"{file}: tensor {source.name} has shape {list(values.shape)}; expected {list(shape)}")
    if name.endswith("self_attn.q_proj.weight"):
        values = _split_halves(values, config.num_heads)
    if name.endswith("self_attn.k_proj.weight"):
        values = _split_halves(values, config.num_kv_heads)
    return np.ascontiguousarray(values)


def _split_halves(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder each head's rows [D, in] from pairs (0,1),(2,3),… that rotate together, as GGUF has them, to halves (i, i + D/2)."""
    head_dim = rows.shape[0] // heads
    return rows.reshape(heads, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
