"""GGUF tensors: every type, every family, against the gguf package and transformers' own reader of GGUF files."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from forebay.runtime.models.gguf_file import GGUFTensor, read_gguf
from forebay.runtime.models.gguf_import import open_gguf
from forebay.runtime.models.gguf_weights import GGUFWeights, RotatedPairs, can_dequantise, safetensors_name
from forebay.specs.dtypes import bfloat16_bits
from forebay.specs.errors import InvalidInput, InvalidModel, Unsupported
from tests.models import gguf_families, tiny

READABLE = [kind for kind in GGML_QUANT_SIZES if can_dequantise(kind)]
Q = "model.layers.0.self_attn.q_proj.weight"


def blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Random bytes as rows of blocks of ``kind``."""
    block, size = GGML_QUANT_SIZES[kind]
    return np.random.default_rng(int(kind)).integers(0, 256, (rows, columns // block * size), np.uint8)


def opened(tmp_path: Path, kind: GGMLQuantizationType, rows: int = 8, columns: int = 512) -> tuple[GGUFWeights, bytes]:
    content = blocks(kind, rows, columns)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", content, raw_shape=None, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = read_gguf(tmp_path / "x.gguf").tensors.values()
    return GGUFWeights(tmp_path / "x.gguf", tensors, None), content.tobytes()


def test_the_package_dequantises_the_usual_types() -> None:
    names = {kind.name for kind in READABLE}
    assert {"F32", "F16", "BF16", "Q4_0", "Q8_0", "Q2_K", "Q6_K", "IQ1_S", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4"} <= names
    assert not can_dequantise(GGMLQuantizationType.Q8_K)


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_every_type_gives_what_the_package_gives(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    weights, content = opened(tmp_path, kind)
    read = weights.tensor(Q, (8, 512))
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(np.frombuffer(content, np.uint8).reshape(8, -1), kind)
    assert read.dtype == np.float32
    assert read.flags.c_contiguous
    np.testing.assert_array_equal(read, expected)
    halves = weights.tensor(Q, (8, 512), "bfloat16")
    np.testing.assert_array_equal(_values(halves), _values(bfloat16_bits(expected)))
    if int(kind) in GGML_BLOCK:
        theirs = dequantize(torch.frombuffer(bytearray(content), dtype=torch.uint8), int(kind)).numpy().reshape(8, 512)
        finite = np.isfinite(theirs) & np.isfinite(read)
        assert finite.mean() > 0.5
        np.testing.assert_allclose(read[finite], theirs[finite], rtol=2e-3, atol=1e-6)


def _values(
    bits: np.ndarray[tuple[int, ...], np.dtype[np.uint16]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """As numbers, since any bits of NaN are NaN."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("kind", [k for k in GGML_QUANT_SIZES if k not in READABLE], ids=lambda kind: kind.name)
def test_a_type_the_package_does_not_dequantise_is_refused(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    with pytest.raises(Unsupported, match=rf"tensor 'blk.0.attn_q.weight' is {kind.name}; supported: F32, F16, Q4_0"):
        opened(tmp_path, kind)


def test_float32_and_bfloat16_in_order_are_views_of_the_file(tmp_path: Path) -> None:
    for kind, dtype in ((GGMLQuantizationType.F32, "float32"), (GGMLQuantizationType.BF16, "bfloat16")):
        read = opened(tmp_path, kind)[0].tensor(Q, (8, 512), dtype)
        assert not read.flags.owndata
        assert not read.flags.writeable


FAMILIES = [
    ("llama", "llama", {}),
    ("llama", "llama", {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen2", "qwen2", {}),
    ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    ("qwen3", "qwen3", {"head_dim": 32}),
]


@pytest.mark.parametrize(("family", "architecture", "changes"), FAMILIES)
def test_tensors_are_those_of_the_model_and_of_transformers_reader(
    tmp_path: Path, family: str, architecture: str, changes: dict[str, object]
) -> None:
    made = gguf_families.random_model(family, **changes)
    gguf_families.write(tmp_path / "x.gguf", made, architecture)
    weights = open_gguf(tmp_path / "x.gguf").weights
    original = {k: v for k, v in made.state_dict().items() if k in weights.names or not made.config.tie_word_embeddings}
    assert set(weights.names) == set(original)
    theirs = load_gguf_checkpoint(tmp_path / "x.gguf", return_tensors=True, model_to_load=made)["tensors"]
    assert len(theirs) >= len(original)
    for name, parameter in original.items():
        values = weights.tensor(name, tuple(parameter.shape))
        np.testing.assert_array_equal(values, parameter.numpy())
        np.testing.assert_array_equal(values, theirs[name].numpy())


def test_quantised_rows_are_reordered_as_they_were(tmp_path: Path) -> None:
    made = gguf_families.random_model("llama")
    q8 = GGMLQuantizationType.Q8_0
    kinds = {"blk.0.attn_q.weight": q8, "blk.0.attn_k.weight": q8}
    gguf_families.write(tmp_path / "x.gguf", made, "llama", kinds=kinds)
    weights = open_gguf(tmp_path / "x.gguf").weights
    for name in (Q, Q.replace("q_proj", "k_proj")):
        values = made.state_dict()[name].numpy()
        error = np.abs(weights.tensor(name, values.shape) - values).max()
        assert 0 < error <= 0.5 / 127 * 0.51 + 1e-3 * 0.5


def test_names_follow_the_package() -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 12)
    for part in (
        "self_attn.q_proj",
        "self_attn.k_norm",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ):
        name = f"model.layers.11.{part}"
        assert safetensors_name(f"{names.get_name(name)}.weight") == f"{name}.weight"
    for other in (
        "blk.01.attn_q.weight",
        "blk.0.attn_rot_embd.weight",
        "blk.0.attn_q.scale",
        "x",
        "blk.٣.attn_q.weight",
    ):
        assert safetensors_name(other) == other


def test_what_is_asked_for_wrongly_is_refused(tmp_path: Path) -> None:
    weights, _ = opened(tmp_path, GGMLQuantizationType.F32)
    with pytest.raises(InvalidModel, match="tensor 'other' is missing"):
        weights.tensor("other", (8, 512))
    with pytest.raises(InvalidModel, match=r"has shape \[8, 512\]; the metadata expects \[512, 8\]"):
        weights.tensor(Q, (512, 8))
    with pytest.raises(InvalidInput, match=r"float16.*expected one of float32, bfloat16"):
        weights.tensor(Q, (8, 512), "float16")


def test_rows_that_are_no_heads_are_refused(tmp_path: Path) -> None:
    stored = GGUFTensor(tmp_path, "blk.0.attn_q.weight", GGMLQuantizationType.F32, (10, 4), 0, 160)
    with pytest.raises(InvalidModel, match="10 rows; expected 4 heads of an even number of rows"):
        GGUFWeights(tmp_path, [stored], RotatedPairs(4, 2))


def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    weights, _ = opened(tmp_path, GGMLQuantizationType.F32)
    file = tmp_path / "x.gguf"
    os.utime(file, ns=(1, 1))
    with pytest.raises(InvalidModel, match="has changed since the model was opened; load the model again"):
        weights.tensor(Q, (8, 512))
    file.unlink()
    with pytest.raises(InvalidModel, match="cannot be read"):
        weights.tensor(Q, (8, 512))


def test_every_byte_of_a_tensor_counts(tmp_path: Path) -> None:
    file = tiny.write_gguf(tmp_path / "x.gguf", tiny.gguf_tensors(tiny.weights()))
    assert open_gguf(file).weights.nbytes == sum(values.nbytes for values in tiny.weights().values())
