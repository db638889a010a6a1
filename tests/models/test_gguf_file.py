"""The GGUF header: what the gguf package reads too, shards, and everything a file may lie about."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType

from forebay.runtime.models.gguf_file import read_gguf
from forebay.specs.errors import InvalidModel, Unsupported
from tests.models import tiny


def string(text: str | bytes) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content)) + content


def entry(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(key: str, kind: int, count: int, content: bytes) -> bytes:
    return entry(key, GGUFValueType.ARRAY, struct.pack("<IQ", kind, count) + content)


def tensor(
    name: str = "t", dims: tuple[int, ...] = (4, 2), kind: int = 0, offset: int = 0, num_dims: int | None = None
) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def file_of(
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A file of these parts, which may say of itself that it has others."""
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    header = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join(entries) + b"".join(tensors)
    return header + b"\0" * (-len(header) % alignment) + data


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write_file(content: bytes) -> Path:
        (tmp_path / "x.gguf").write_bytes(content)
        return tmp_path / "x.gguf"

    return write_file


def test_the_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    extra = {
        "x.flag": True,
        "x.text": "ä",
        "x.numbers": [1, 2, 3],
        "x.floats": [0.5],
        "x.big": 7,
        "general.alignment": 64,
    }
    kinds = {"blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q8_0}
    file = tiny.write_gguf(tmp_path / "x.gguf", tiny.gguf_tensors(tiny.weights()), metadata=extra, kinds=kinds)
    header, reader = read_gguf(file), gguf.GGUFReader(file)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert {key: _plain(value) for key, value in header.metadata.items()} == fields
    assert list(header.tensors) == [t.name for t in reader.tensors]
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        assert (ours.kind, ours.offset, ours.nbytes) == (theirs.tensor_type, theirs.data_offset, theirs.n_bytes)
        assert list(ours.shape) == theirs.shape.tolist()[::-1]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


DAMAGE: Mapping[str, tuple[bytes, str]] = {
    "no magic": (b"GGML" + b"\0" * 40, "does not begin with 'GGUF'"),
    "tensor count of 2^63": (file_of(counts=(2**63, 0)), f"{2**63} tensors; expected at most"),
    "metadata count of 2^63": (file_of(counts=(0, 2**63)), f"{2**63} metadata entries; expected at most"),
    "more tensors than there are": (file_of(counts=(60_000, 0)), "tensor .* takes 4 bytes at byte 32"),
    "key length of 2^63": (file_of((struct.pack("<Q", 2**63),)), f"a metadata key has {2**63} bytes"),
    "text length of 2^64": (file_of((entry("a", 8, struct.pack("<Q", 2**64 - 1)),)), f"'a' has {2**64 - 1} bytes"),
    "text beyond the file": (file_of((entry("a", 8, struct.pack("<Q", 10**6)),)), "'a' takes 1000000 bytes"),
    "key not UTF-8": (file_of((string(b"\xff") + struct.pack("<IB", 0, 1),)), "a metadata key is not UTF-8"),
    "text not UTF-8": (file_of((entry("a", 8, string(b"\xff")),)), "'a' is not UTF-8"),
    "key twice": (
        file_of((entry("a", 0, b"\1"), entry("a", 0, b"\1"))),
        "the metadata key 'a' is given more than once",
    ),
    "unknown type": (file_of((entry("a", 13, b"\1"),)), "'a' has the unknown type 13"),
    "flag of 2": (file_of((entry("a", 7, b"\2"),)), "the flag 'a' is 2; expected 0 or 1"),
    "numbers of 2^63": (file_of((array("a", 0, 2**63, b""),)), f"the array 'a' takes {2**63} bytes"),
    "numbers of 2^61 times 8 bytes": (file_of((array("a", 10, 2**61, b""),)), f"takes {2**64} bytes"),
    "texts of 2^63": (file_of((array("a", 8, 2**63, b""),)), f"{2**63} strings in arrays"),
    "texts beyond the file": (file_of((array("a", 8, 10**6, b""),)), "the array 'a' takes 8000000 bytes"),
    "unknown item type": (file_of((array("a", 99, 1, b"\1"),)), "'a' has the unknown type 99"),
    "alignment of zero": (
        file_of((entry("general.alignment", 4, struct.pack("<I", 0)),)),
        "alignment is 0; expected a power",
    ),
    "alignment of three": (
        file_of((entry("general.alignment", 4, struct.pack("<I", 3)),)),
        "alignment is 3; expected a power",
    ),
    "alignment a text": (file_of((entry("general.alignment", 8, string("32")),)), "alignment is '32'"),
    "alignment NaN": (file_of((entry("general.alignment", 6, struct.pack("<f", np.nan)),)), "alignment is nan"),
    "no dimensions": (file_of((), (tensor(dims=()),)), "'t' has 0 dimensions; expected 1 to 4"),
    "dimensions of 2^32": (file_of((), (tensor(num_dims=2**32 - 1),)), f"'t' has {2**32 - 1} dimensions"),
    "a dimension of zero": (file_of((), (tensor(dims=(4, 0)),)), r"'t' of F32 has shape \[0, 4\]"),
    "dimensions that overflow": (file_of((), (tensor(dims=(2**32, 2**32)),), b"\0" * 64), "is said to lie at bytes"),
    "dimensions that overflow to one": (
        file_of((), (tensor(dims=(2**63, 2, 1)),), b"\0" * 64),
        "is said to lie at bytes",
    ),
    "half a block": (file_of((), (tensor(dims=(33, 2), kind=8),), b"\0" * 99), "expected rows of whole blocks of 32"),
    "offset beyond the file": (file_of((), (tensor(offset=2**40),), b"\0" * 64), "is said to lie at bytes"),
    "offset that wraps": (file_of((), (tensor(offset=2**64 - 32),), b"\0" * 64), "is said to lie at bytes"),
    "offset not aligned": (file_of((), (tensor(offset=4),), b"\0" * 64), "aligned to 32"),
    "data cut by a byte": (file_of((), (tensor(),), b"\0" * 31), "is said to lie at bytes"),
    "tensors that overlap": (
        file_of((), (tensor("a"), tensor("b", (8, 2)), tensor("c", offset=32)), b"\0" * 99),
        "after the tensor",
    ),
    "a tensor twice": (file_of((), (tensor(), tensor(offset=32)), b"\0" * 99), "2 tensors have 1 different names"),
    "tensor name not UTF-8": (file_of((), (string(b"\xff") + b"\0" * 40,)), "a tensor name is not UTF-8"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_header_is_refused(write: Callable[[bytes], Path], damage: str) -> None:
    content, message = DAMAGE[damage]
    with pytest.raises(InvalidModel, match=rf"x.gguf: not a readable GGUF file \(.*{message}.*again"):
        read_gguf(write(content))


def test_every_cut_of_a_small_file_is_refused(write: Callable[[bytes], Path]) -> None:
    content = file_of((entry("a", 8, string("b")), array("n", 4, 2, b"\0" * 8)), (tensor(),), b"\0" * 32)
    assert list(read_gguf(write(content)).tensors) == ["t"]
    for length in range(len(content)):
        with pytest.raises(InvalidModel, match="not a readable GGUF file"):
            read_gguf(write(content[:length]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (file_of(version=1), "GGUF version 1; supported: little-endian 2 and 3"),
        (file_of(version=3 << 24), r"GGUF version 50331648 \(a big-endian file\)"),
        (
            file_of((array("a", 9, 1, b"\0" * 12),)),
            "'a' is an array of arrays; supported: arrays of numbers or strings",
        ),
        (file_of((), (tensor(kind=999),), b"\0" * 64), "tensor 't' has the type 999, unknown to the gguf package"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    write: Callable[[bytes], Path], content: bytes, message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        read_gguf(write(content))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"x\.gguf: no such file"):
        read_gguf(tmp_path / "x.gguf")
    with pytest.raises(InvalidModel, match="cannot be read"):
        read_gguf(tmp_path)


def shard(number: int, count: int, names: tuple[str, ...], total: int | None = None) -> bytes:
    entries = [entry("split.no", 2, struct.pack("<H", number)), entry("split.count", 2, struct.pack("<H", count))]
    if total is not None:
        entries.append(entry("split.tensors.count", 5, struct.pack("<i", total)))
    tensors = tuple(tensor(name, offset=32 * i) for i, name in enumerate(names))
    return file_of(tuple(entries), tensors, bytes([number]) * 32 * len(names))


def write_shards(folder: Path, *contents: bytes, count: int | None = None) -> Path:
    files = [folder / f"m-{i:05}-of-{count or len(contents):05}.gguf" for i in range(1, len(contents) + 1)]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    return files[0]


def test_shards_are_one_file(tmp_path: Path) -> None:
    first = write_shards(tmp_path, shard(0, 3, ("a", "b"), 4), shard(1, 3, ("c",)), shard(2, 3, ("d",)))
    header = read_gguf(first)
    assert {name: t.file.name for name, t in header.tensors.items()} == {
        "a": "m-00001-of-00003.gguf",
        "b": "m-00001-of-00003.gguf",
        "c": "m-00002-of-00003.gguf",
        "d": "m-00003-of-00003.gguf",
    }
    with pytest.raises(InvalidModel, match=r"part 1 of 3, counted from 0; give the first shard .*-00001-of-00003.gguf"):
        read_gguf(first.with_name("m-00002-of-00003.gguf"))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (shard(0, 2, ("c",)), "says it is part 0 of 2, counted from 0; expected part 1 of 2"),
        (shard(1, 9, ("c",)), "says it is part 1 of 9"),
        (file_of(), "says it is part None of None"),
        (shard(1, 2, ("a",)), "tensor 'a' is in another shard too"),
        (shard(1, 2, ("c", "d")), "its shards have 3 tensors; expected 2"),
        (shard(1, 2, ("c",))[:-1], "is said to lie at bytes"),
    ],
)
def test_shards_that_do_not_belong_together_are_refused(tmp_path: Path, second: bytes, message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        read_gguf(write_shards(tmp_path, shard(0, 2, ("a",), 2), second))


@pytest.mark.parametrize("count", [2, 1000, 65_535])
def test_missing_shards_are_refused(tmp_path: Path, count: int) -> None:
    file = write_shards(tmp_path, shard(0, count, ("a",)), count=count)
    with pytest.raises(InvalidModel, match=r"no such file|split.count is 65535; expected 1 to 1024"):
        read_gguf(file)


def test_a_shard_under_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "renamed.gguf").write_bytes(shard(0, 2, ("a",)))
    with pytest.raises(InvalidModel, match="give the first shard under its own name"):
        read_gguf(tmp_path / "renamed.gguf")
