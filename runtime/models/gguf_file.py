"""The header of GGUF files: metadata and where each tensor lies, believed only as far as the file's size bears it out.

Read here and not with ``gguf.GGUFReader``, which makes one array for every element of the header, takes text and data that
are cut short as if they were whole, and lets offsets wrap. What the numbers mean is left to the package: types, block
sizes, dequantisation. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from forebay.specs.errors import InvalidModel, Unsupported

from .json_fields import show
from .weights import COPY_AGAIN

GGUF_SUFFIX: Final = ".gguf"
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_ALIGNMENT: Final = 32

# Beyond any published model (the largest vocabularies have about 800,000 tokens and merges together, 10 to 20 MB of header).
_MAX_HEADER_BYTES: Final = 64 * 2**20
_MAX_STRINGS: Final = 2**20
_MAX_ENTRIES: Final = 2**16
_MAX_KEY_BYTES: Final = 2**16
_MAX_SHARDS: Final = 1024
_MAX_DIMS: Final = 4

_SCALARS: Final[Mapping[GGUFValueType, str]] = MappingProxyType(
    {
        GGUFValueType.UINT8: "B",
        GGUFValueType.INT8: "b",
        GGUFValueType.UINT16: "H",
        GGUFValueType.INT16: "h",
        GGUFValueType.UINT32: "I",
        GGUFValueType.INT32: "i",
        GGUFValueType.FLOAT32: "f",
        GGUFValueType.UINT64: "Q",
        GGUFValueType.INT64: "q",
        GGUFValueType.FLOAT64: "d",
    }
)
"""How ``struct`` and numpy call each type of number."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies: ``nbytes`` bytes of type ``kind`` at ``offset`` of ``file``; ``shape`` is row-major."""

    file: Path
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """One GGUF file, or all shards of one: the first one's metadata, and the tensors of all.

    Numbers, flags and strings of the metadata are Python's; an array of strings is a list, one of numbers a numpy array.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def read_gguf(file: Path) -> GGUFHeader:
    """The header of ``file``, and of the shards beside it where it is the first of several. No tensor data is read.

    Raises:
        InvalidModel: a file is missing, cut short, damaged or inconsistent, or shards do not belong together.
        Unsupported: a version or type that is not known here.
    """
    first = _read_one(file)
    count = first.metadata.get("split.count", 0)
    if count in (0, 1):
        return first
    shards = {path: _read_one(path) for path in _shard_files(file, first.metadata)[1:]}
    tensors = dict(first.tensors)
    for index, (path, shard) in enumerate(shards.items(), start=1):
        given = (shard.metadata.get("split.no"), shard.metadata.get("split.count"))
        if given != (index, count):
            raise InvalidModel(
                f"{path}: says it is part {show(given[0])} of {show(given[1])}, counted from 0; expected part {index} of "
                f"{count}; the shards do not belong together: {COPY_AGAIN}"
            )
        repeated = tensors.keys() & shard.tensors.keys()
        if repeated:
            raise InvalidModel(f"{path}: tensor {show(min(repeated))} is in another shard too; {COPY_AGAIN}")
        tensors |= shard.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise InvalidModel(f"{file}: its shards have {len(tensors)} tensors; expected {show(total)}; {COPY_AGAIN}")
    return GGUFHeader(first.metadata, MappingProxyType(tensors))


def _shard_files(file: Path, metadata: Mapping[str, Any]) -> list[Path]:
    number, count = metadata.get("split.no"), metadata.get("split.count")
    if not isinstance(count, int) or not 0 < count <= _MAX_SHARDS:
        raise InvalidModel(f"{file}: split.count is {show(count)}; expected 1 to {_MAX_SHARDS}")
    name = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", file.name)
    if number != 0 or name is None or (int(name[2]), int(name[3])) != (1, count):
        raise InvalidModel(
            f"{file}: part {show(number)} of {count}, counted from 0; give the first shard under its own name, "
            f"...-00001-of-{count:05}{GGUF_SUFFIX}"
        )
    return [file.with_name(f"{name[1]}-{i:05}-of-{count:05}{GGUF_SUFFIX}") for i in range(1, count + 1)]


def _read_one(file: Path) -> GGUFHeader:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            return _parse(_Cursor(file, stream, size))
    except FileNotFoundError as error:
        raise InvalidModel(f"{file}: no such file; {COPY_AGAIN}") from error
    except OSError as error:
        raise InvalidModel(f"{file}: cannot be read ({error.strerror or error})") from error


class _Cursor:
    """Reads one header from its start. Every length is compared with what is left of the file before bytes are read."""

    def __init__(self, file: Path, stream: IO[bytes], size: int) -> None:
        self.file = file
        self.size = size
        self.at = 0
        self.strings = 0
        self._stream = stream
        self._limit = min(size, _MAX_HEADER_BYTES)

    def damaged(self, what: str) -> InvalidModel:
        """The error that the file is no readable GGUF file because of ``what``."""
        return InvalidModel(f"{self.file}: not a readable GGUF file ({what}); {COPY_AGAIN}")

    def require(self, count: int, each: int, what: str) -> None:
        """Refuse ``count`` items of at least ``each`` bytes that the rest of the file cannot hold."""
        if count * each > self._limit - self.at:
            raise self.damaged(
                f"{what} takes {count * each} bytes at byte {self.at}, and a header may go to byte {self._limit} here"
            )

    def take(self, count: int, what: str) -> bytes:
        """The next ``count`` bytes."""
        self.require(count, 1, what)
        content = self._stream.read(count)
        if len(content) != count:
            raise self.damaged(f"{what} at byte {self.at} ends after {len(content)} of {count} bytes")
        self.at += count
        return content

    def number(self, code: str, what: str) -> Any:
        """One little-endian number of ``struct`` type ``code``."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def text(self, what: str, limit: int = _MAX_HEADER_BYTES) -> str:
        """A string: its length in 8 bytes, then UTF-8 bytes."""
        length = self.number("Q", f"the length of {what}")
        if length > limit:
            raise self.damaged(f"{what} has {length} bytes; expected at most {limit}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not UTF-8") from error


def _parse(cursor: _Cursor) -> GGUFHeader:
    if cursor.take(len(_MAGIC), "the magic number") != _MAGIC:
        raise cursor.damaged("it does not begin with 'GGUF'")
    version = cursor.number("I", "the version")
    if version not in _VERSIONS:
        swapped = " (a big-endian file)" if version & 0xFFFF == 0 else ""
        raise Unsupported(f"{cursor.file}: GGUF version {version}{swapped}; supported: little-endian 2 and 3")
    tensor_count, entry_count = cursor.number("Q", "the tensor count"), cursor.number("Q", "the metadata count")
    for count, what in ((tensor_count, "tensors"), (entry_count, "metadata entries")):
        if count > _MAX_ENTRIES:
            raise cursor.damaged(f"{count} {what}; expected at most {_MAX_ENTRIES}")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.text("a metadata key", _MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.damaged(f"the metadata key {show(key)} is given more than once")
        metadata[key] = _value(cursor, key)
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    return GGUFHeader(MappingProxyType(metadata), MappingProxyType(_place(cursor, entries, metadata)))


def _value(cursor: _Cursor, key: str) -> Any:
    kind = _value_type(cursor, key)
    if kind is not GGUFValueType.ARRAY:
        return _single(cursor, kind, key)
    item, count = _value_type(cursor, key), cursor.number("Q", f"the length of {show(key)}")
    what = f"the array {show(key)}"
    if item is GGUFValueType.ARRAY:
        raise Unsupported(f"{cursor.file}: {show(key)} is an array of arrays; supported: arrays of numbers or strings")
    if item is GGUFValueType.STRING:
        cursor.strings += count
        if cursor.strings > _MAX_STRINGS:
            raise cursor.damaged(f"{cursor.strings} strings in arrays; expected at most {_MAX_STRINGS}")
        cursor.require(count, 8, what)
        return [cursor.text(what) for _ in range(count)]
    dtype = np.dtype(f"<{_SCALARS.get(item, '?')}" if item in _SCALARS else np.bool_)
    cursor.require(count, dtype.itemsize, what)
    return np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)


def _value_type(cursor: _Cursor, key: str) -> GGUFValueType:
    number = cursor.number("I", f"the type of {show(key)}")
    try:
        return GGUFValueType(number)
    except ValueError as error:
        raise cursor.damaged(f"{show(key)} has the unknown type {number}") from error


def _single(cursor: _Cursor, kind: GGUFValueType, key: str) -> str | bool | int | float:
    what = show(key)
    if kind is GGUFValueType.STRING:
        return cursor.text(what)
    if kind is GGUFValueType.BOOL:
        flag = cursor.number("B", what)
        if flag > 1:
            raise cursor.damaged(f"the flag {what} is {flag}; expected 0 or 1")
        return bool(flag)
    value: int | float = cursor.number(_SCALARS[kind], what)
    return value


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as the header describes it; ``offset`` counts from the start of the data."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def _tensor_entry(cursor: _Cursor) -> _Entry:
    name = cursor.text("a tensor name", _MAX_KEY_BYTES)
    what = f"tensor {show(name)}"
    num_dims = cursor.number("I", what)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.damaged(f"{what} has {num_dims} dimensions; expected 1 to {_MAX_DIMS}")
    dims: tuple[int, ...] = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims, what))
    number, offset = cursor.number("I", what), cursor.number("Q", what)
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise Unsupported(f"{cursor.file}: {what} has the type {number}, unknown to the gguf package") from error
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in dims or dims[0] % block:
        raise cursor.damaged(
            f"{what} of {kind.name} has shape {list(dims[::-1])}; expected rows of whole blocks of {block}"
        )
    return _Entry(name, kind, dims[::-1], offset, math.prod(dims) // block * block_bytes)


def _place(cursor: _Cursor, entries: list[_Entry], metadata: Mapping[str, Any]) -> dict[str, GGUFTensor]:
    """The tensors with their offsets in the file, which lie inside it, aligned and apart."""
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {show(alignment)}; expected a power of two")
    start = -(-cursor.at // alignment) * alignment
    end, tensors = start, {}
    for entry in sorted(entries, key=lambda entry: entry.offset):
        begin = start + entry.offset
        if entry.offset % alignment or begin < end or begin + entry.nbytes > cursor.size:
            raise cursor.damaged(
                f"tensor {show(entry.name)} is said to lie at bytes {begin} to {begin + entry.nbytes} of {cursor.size}, "
                f"aligned to {alignment}, after the tensor that ends at {end}"
            )
        end = begin + entry.nbytes
        tensors[entry.name] = GGUFTensor(cursor.file, entry.name, entry.kind, entry.shape, begin, entry.nbytes)
    if len(tensors) != len(entries):
        raise cursor.damaged(f"{len(entries)} tensors have {len(tensors)} different names")
    return {entry.name: tensors[entry.name] for entry in entries}
