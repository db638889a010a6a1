"""SafetensorsFolder: values and dtypes, shards, and every kind of damage."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from forebay.runtime.models import SafetensorsFolder, expected_tensors, open_model_folder
from forebay.specs.errors import InvalidInput, InvalidModel
from tests.models import tiny

EMBEDDING = "model.embed_tokens.weight"
Header = dict[str, Any]


def read_all(folder: Path, dtype: str = "float32") -> dict[str, npt.NDArray[Any]]:
    """Open the folder and read every expected tensor."""
    model = open_model_folder(folder)
    return {name: model.weights.tensor(name, shape, dtype) for name, shape in expected_tensors(model.config).items()}


def all_bfloat16() -> npt.NDArray[np.uint16]:
    return np.arange(2**16, dtype=np.uint16)


def awkward_float32() -> npt.NDArray[np.float32]:
    """Bit patterns around every rounding decision: for many upper halves, the lower halves next to a tie, and random ones."""
    upper = np.arange(0, 2**16, 7, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)[None, :]
    random = np.random.default_rng(5).integers(0, 2**32, 5000, dtype=np.uint32)
    return np.concatenate([(upper | lower).ravel(), random]).view(np.float32)


def test_float32_is_a_read_only_view_of_the_file(tiny_folder: Path) -> None:
    written = tiny.weights()
    read = read_all(tiny_folder)
    for name, values in written.items():
        assert read[name].dtype == np.float32
        assert read[name].flags.c_contiguous
        assert not read[name].flags.writeable
        assert not read[name].flags.owndata
        np.testing.assert_array_equal(read[name], values)


def test_bfloat16_widens_exactly_and_keeps_its_bits(tmp_path: Path) -> None:
    bits = all_bfloat16()
    save_torch_file({"x": torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)}, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    wide = folder.tensor("x", (2**16,))
    np.testing.assert_array_equal(wide.view(np.uint32), bits.astype(np.uint32) << 16)
    same = folder.tensor("x", (2**16,), "bfloat16")
    np.testing.assert_array_equal(same, bits)
    assert not same.flags.owndata


def test_float32_rounds_to_bfloat16_as_torch_does(tmp_path: Path) -> None:
    values = awkward_float32()
    save_file({"x": values}, tmp_path / "model.safetensors")
    bits = SafetensorsFolder(tmp_path).tensor("x", values.shape, "bfloat16")
    reference = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(values)
    np.testing.assert_array_equal(bits[~nan], reference[~nan])
    assert np.isnan((bits[nan].astype(np.uint32) << 16).view(np.float32)).all()


def test_float16_widens_exactly_and_rounds_to_bfloat16(tmp_path: Path) -> None:
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)]
    save_file({"x": values}, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    np.testing.assert_array_equal(folder.tensor("x", values.shape), values.astype(np.float32))
    reference = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(folder.tensor("x", values.shape, "bfloat16"), reference)


def test_unaligned_data_comes_aligned(tiny_folder: Path) -> None:
    file = tiny_folder / "model.safetensors"
    header, data = split(file)
    text = json.dumps(header).encode()
    join(file, text + b" " * (5 - len(text) % 4), data)
    read = read_all(tiny_folder)
    for name, values in tiny.weights().items():
        assert read[name].flags.aligned
        np.testing.assert_array_equal(read[name], values)


def test_shards_hold_the_same_model(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "model", shards=3)
    read = read_all(folder)
    for name, values in tiny.weights().items():
        np.testing.assert_array_equal(read[name], values)
    assert SafetensorsFolder(folder).nbytes == sum(values.nbytes for values in tiny.weights().values())


def test_another_dtype_is_not_asked_for(tiny_folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"float16.*expected one of float32, bfloat16"):
        SafetensorsFolder(tiny_folder).tensor(EMBEDDING, (1,), "float16")


# Damage to the tensors of a well-formed file.


def test_all_missing_tensors_are_named_in_one_error(tmp_path: Path) -> None:
    tensors = {name: values for name, values in tiny.weights().items() if "layers.1." not in name}
    folder = tiny.write_folder(tmp_path / "model", tensors)
    with pytest.raises(
        InvalidModel, match=r"9 of 20 expected tensors are missing: model.layers.1.input_layernorm.*and 4 more"
    ):
        open_model_folder(folder)
    with pytest.raises(InvalidModel, match=r"tensor 'model.layers.1.mlp.up_proj.weight' is missing"):
        SafetensorsFolder(folder).tensor("model.layers.1.mlp.up_proj.weight", (96, 64))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            EMBEDDING,
            np.zeros((64, len(tiny.TOKENS)), np.float32),
            r"embed_tokens.weight' has shape \[64, 267\].*\[267, 64\]",
        ),
        (
            "model.norm.weight",
            np.zeros((64, 1), np.float32),
            r"model.norm.weight' has shape \[64, 1\]; .* expects \[64\]",
        ),
        (
            "model.norm.weight",
            np.zeros(64, np.float64),
            "model.norm.weight' is stored as F64; expected one of F32, F16, BF16",
        ),
        ("model.norm.weight", np.zeros(64, np.int8), "model.norm.weight' is stored as I8"),
    ],
)
def test_a_wrong_shape_or_dtype_is_refused(tmp_path: Path, name: str, value: npt.NDArray[Any], message: str) -> None:
    folder = tiny.write_folder(tmp_path / "model", tiny.weights() | {name: value})
    with pytest.raises(InvalidModel, match=message):
        open_model_folder(folder)


def test_a_tensor_the_model_has_no_place_for_is_refused(tmp_path: Path) -> None:
    bias = {"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}
    folder = tiny.write_folder(tmp_path / "model", tiny.weights() | bias)
    with pytest.raises(
        InvalidModel, match=r"1 stored tensors have no place .* first is 'model.layers.0.self_attn.q_proj.bias'"
    ):
        open_model_folder(folder)


def test_redundant_tensors_are_passed_over(tmp_path: Path) -> None:
    extra = {
        "lm_head.weight": np.ones(3, np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    folder = tiny.write_folder(tmp_path / "model", tiny.weights() | extra)
    assert set(extra) < set(open_model_folder(folder).weights.names)


# Damage to the file itself. A mutation gets the header and the data and returns the bytes of the file.


def split(file: Path) -> tuple[Header, bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header: Header = json.loads(content[8 : 8 + length])
    return header, content[8 + length :]


def join(file: Path, header: bytes, data: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def entry(**changes: Any) -> Callable[[Header, bytes], tuple[bytes, bytes]]:
    """Change the header entry of the embedding."""
    return lambda header, data: (json.dumps(header | {EMBEDDING: header[EMBEDDING] | changes}).encode(), data)


def moved(begin: int, end: int) -> Callable[[Header, bytes], tuple[bytes, bytes]]:
    """Move the embedding's offsets."""

    def mutate(header: Header, data: bytes) -> tuple[bytes, bytes]:
        first, last = header[EMBEDDING]["data_offsets"]
        return entry(data_offsets=[first + begin, last + end])(header, data)

    return mutate


def as_is(header: Header) -> bytes:
    return json.dumps(header).encode()


MUTATIONS: Mapping[str, Callable[[Header, bytes], tuple[bytes, bytes]]] = {
    "data cut by one byte": lambda h, d: (as_is(h), d[:-1]),
    "data cut to half": lambda h, d: (as_is(h), d[: len(d) // 2]),
    "no data": lambda h, d: (as_is(h), b""),
    "data too long": lambda h, d: (as_is(h), d + b"\0" * 64),
    "offsets before the data": moved(-(2**40), 0),
    "offsets overlap the next tensor": moved(4, 4),
    "offsets beyond the file": moved(2**40, 2**40),
    "offsets of the wrong length": moved(0, -4),
    "offsets the wrong way round": lambda h, d: entry(data_offsets=h[EMBEDDING]["data_offsets"][::-1])(h, d),
    "offsets of another tensor": lambda h, d: entry(data_offsets=h["model.norm.weight"]["data_offsets"])(h, d),
    "offsets beyond 64 bits": entry(data_offsets=[0, 2**70]),
    "offsets negative": entry(data_offsets=[-8, 0]),
    "offsets a string": entry(data_offsets="all"),
    "offsets missing": entry(data_offsets=None),
    "huge shape": entry(shape=[2**40, 2**20]),
    "shape that overflows to the right size": entry(shape=[2**63, 2, len(tiny.TOKENS), 64]),
    "negative shape": entry(shape=[-267, -64]),
    "shape of fractions": entry(shape=[267.0, 64.0]),
    "unknown dtype": entry(dtype="F31"),
    "dtype of another width": entry(dtype="F16"),
    "dtype a number": entry(dtype=7),
    "entry a list": lambda h, d: (json.dumps(h | {EMBEDDING: [1, 2]}).encode(), d),
    "header a list": lambda h, d: (b"[]", d),
    "header a number": lambda h, d: (b"1234", d),
    "header empty": lambda h, d: (b"", d),
    "header not JSON": lambda h, d: (as_is(h)[:-1], d),
    "header not UTF-8": lambda h, d: (as_is(h).replace(b"model.norm", b"model.nor\xff"), d),
    "header nested deeply": lambda h, d: (b'{"a":' * 50_000, d),
    "header without tensors": lambda h, d: (b"{}", b""),
    "metadata not text": lambda h, d: (json.dumps(h | {"__metadata__": {"a": 1}}).encode(), d),
    "a tensor twice": lambda h, d: (
        as_is(h)[:-1] + b', "model.norm.weight": ' + json.dumps(h["model.norm.weight"]).encode() + b"}",
        d,
    ),
    "a gap between tensors": lambda h, d: (
        json.dumps({k: v for k, v in h.items() if "layers.0.mlp" not in k}).encode(),
        d,
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_damaged_file_is_refused(tiny_folder: Path, mutation: str) -> None:
    file = tiny_folder / "model.safetensors"
    join(file, *MUTATIONS[mutation](*split(file)))
    with pytest.raises(InvalidModel) as raised:
        open_model_folder(tiny_folder)
    message = str(raised.value)
    assert str(tiny_folder) in message
    assert "again" in message
    assert len(message) < 700


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100])
def test_a_file_cut_short_is_refused(tiny_folder: Path, length: int) -> None:
    file = tiny_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(InvalidModel, match="truncated or corrupt safetensors file"):
        open_model_folder(tiny_folder)


@pytest.mark.parametrize("claimed", [2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_header_length_beyond_the_file_is_refused(tiny_folder: Path, claimed: int) -> None:
    file = tiny_folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", claimed) + file.read_bytes()[8:])
    with pytest.raises(InvalidModel, match=f"the header alone claims {claimed + 8}"):
        open_model_folder(tiny_folder)


def test_a_huge_header_is_refused_unread(tiny_folder: Path) -> None:
    file = tiny_folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(struct.pack("<Q", 2**30))
        stream.truncate(2**31)
    with pytest.raises(InvalidModel, match="header of 1073741824 bytes; expected at most"):
        open_model_folder(tiny_folder)


def test_a_file_that_shrinks_after_it_was_checked_is_refused(tiny_folder: Path) -> None:
    weights = SafetensorsFolder(tiny_folder)
    file = tiny_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(InvalidModel, match=r"tensor 'model.norm.weight' cannot be read"):
        weights.tensor("model.norm.weight", (64,))


def test_a_folder_without_weights_says_what_it_has(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").rename(tiny_folder / "pytorch_model.bin")
    with pytest.raises(InvalidModel, match=r"neither model.safetensors nor .*pytorch_model.bin: convert"):
        open_model_folder(tiny_folder)
    with pytest.raises(InvalidModel, match="no such folder"):
        open_model_folder(tiny_folder / "nowhere")
    with pytest.raises(InvalidModel, match="no such folder"):
        SafetensorsFolder(tiny_folder / "nowhere")


def test_a_folder_of_gguf_files_says_what_to_give(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").rename(tiny_folder / "model.gguf")
    with pytest.raises(InvalidModel, match=r"it has model.gguf: give the GGUF file itself"):
        open_model_folder(tiny_folder)


def test_weights_that_are_a_folder_are_refused(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").unlink()
    (tiny_folder / "model.safetensors").mkdir()
    with pytest.raises(InvalidModel, match="cannot be read"):
        open_model_folder(tiny_folder)


# Damage to the index of a sharded model.

ESCAPES = (
    "../model.safetensors",
    "/etc/model.safetensors",
    "sub/model.safetensors",
    "..\\model.safetensors",
    "C:model.safetensors",
    "a\0.safetensors",
    ".hidden.safetensors",
    "passwords.txt",
    "",
    7,
    None,
    ["a.safetensors"],
)


@pytest.mark.parametrize("shard", ESCAPES)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, shard: object) -> None:
    folder = tiny.write_folder(tmp_path / "model", shards=2)
    save_file(tiny.weights(), tmp_path / "model.safetensors")
    edit_index(folder, {EMBEDDING: shard})
    with pytest.raises(
        InvalidModel, match=r"index.json: tensor 'model.embed_tokens.weight' is said to be in .*plain name"
    ):
        open_model_folder(folder)


def edit_index(folder: Path, changes: Mapping[str, object]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] |= changes
    file.write_text(json.dumps(index))


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "model", shards=2)
    edit_index(folder, {"model.extra.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(InvalidModel, match=r"1 tensors are not in the shard it names: model.extra.weight"):
        open_model_folder(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidModel, match=r"model-00002-of-00002.safetensors: no such file"):
        open_model_folder(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "model", shards=2)
    second = folder / "model-00002-of-00002.safetensors"
    save_file({**load_file(second), EMBEDDING: tiny.weights()[EMBEDDING]}, second)
    with pytest.raises(InvalidModel, match=rf"1 tensors are in model-00001-of-00002.safetensors too: {EMBEDDING}"):
        open_model_folder(folder)


def test_a_tensor_the_index_does_not_name_is_not_overlooked(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "model", shards=2)
    second = folder / "model-00002-of-00002.safetensors"
    save_file({**load_file(second), "model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}, second)
    with pytest.raises(InvalidModel, match=r"1 stored tensors have no place .*q_proj.bias"):
        open_model_folder(folder)


def test_shards_may_differ_in_dtype_and_be_links(tmp_path: Path) -> None:
    """The cache of a hub keeps files elsewhere and links to them."""
    folder = tiny.write_folder(tmp_path / "model", shards=3)
    for i, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16), start=1):
        shard = folder / f"model-0000{i}-of-00003.safetensors"
        save_torch_file({name: torch.from_numpy(v).to(dtype) for name, v in load_file(shard).items()}, shard)
        shard.rename(tmp_path / shard.name)
        shard.symlink_to(tmp_path / shard.name)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, values in read_all(folder).items():
        dtype = (torch.float32, torch.float16, torch.bfloat16)[int(index[name][10]) - 1]
        np.testing.assert_array_equal(values, torch.from_numpy(tiny.weights()[name]).to(dtype).float().numpy())


@pytest.mark.parametrize("weight_map", [None, [], {}, "all", 3])
def test_an_index_without_a_map_is_refused(tmp_path: Path, weight_map: object) -> None:
    folder = tiny.write_folder(tmp_path / "model", shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidModel, match=r"weight_map is .*; expected an object of tensor name to shard file"):
        open_model_folder(folder)
