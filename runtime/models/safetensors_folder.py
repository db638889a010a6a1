"""A folder of safetensors weights as numpy arrays: one ``model.safetensors``, or the shards its index names.

Nothing is believed before it is checked, and no tensor is read before all of them are known to be there with the right
shape. The format: 8 bytes little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}``, then the
data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from forebay.specs.dtypes import bfloat16_bits, bfloat16_values, check_dtype
from forebay.specs.errors import InvalidModel

from .json_fields import parse_json_object, read_json_object, show
from .json_size import check_json_size
from .weights import COPY_AGAIN, Weights, first_few

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 32 * 2**20

_STORED: Final[Mapping[str, np.dtype[Any]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
"""Element types that can be read, and the numpy dtype of their bytes."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: ``nbytes`` bytes at ``offset`` of ``file``, row-major."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFolder(Weights):
    """The weights of one model folder. Holds no open file; arrays it hands out map the file where no conversion is needed."""

    def __init__(self, folder: Path) -> None:
        """Read and check every header of ``folder``; the data is not touched.

        Raises :class:`InvalidModel` where there are no weights, a header is damaged, or the index and the shards
        disagree.
        """
        super().__init__(folder)
        self._tensors = _read_folder(folder)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all stored tensors."""
        return tuple(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors together."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> npt.NDArray[Any]:
        """As :meth:`Weights.tensor`."""
        check_dtype(dtype, ("float32", "bfloat16"), "weight dtype")
        stored = self._checked(name, shape)
        values = _map(stored, name)
        if dtype == "float32":
            return bfloat16_values(values) if stored.dtype == "BF16" else values.astype(np.float32, copy=False)
        return values if stored.dtype == "BF16" else bfloat16_bits(values.astype(np.float32, copy=False))

    def check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that ``name`` is stored, with ``shape`` and in a dtype that can be read."""
        self._checked(name, shape)

    def _checked(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise InvalidModel(f"{self.source}: tensor {show(name)} is missing; {COPY_AGAIN}")
        if stored.shape != tuple(shape):
            raise InvalidModel(
                f"{stored.file}: tensor {show(name)} has shape {list(stored.shape)}; the configuration expects "
                f"{list(shape)}; the weights belong to another configuration: {COPY_AGAIN}"
            )
        if stored.dtype not in _STORED:
            raise InvalidModel(
                f"{stored.file}: tensor {show(name)} is stored as {stored.dtype}; expected one of "
                f"{', '.join(_STORED)}; convert the weights"
            )
        return stored


def _map(stored: StoredTensor, name: str) -> npt.NDArray[Any]:
    try:
        mapped = np.memmap(stored.file, dtype=np.uint8, mode="r", offset=stored.offset, shape=(stored.nbytes,))
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{stored.file}: tensor {show(name)} cannot be read ({error}); {COPY_AGAIN}") from error
    values = mapped.view(np.ndarray).view(_STORED[stored.dtype]).reshape(stored.shape)
    # The format asks for aligned data without demanding it; kernels and foreign libraries do demand it.
    return values if values.flags.aligned else values.copy()


def _read_folder(folder: Path) -> dict[str, StoredTensor]:
    if not folder.is_dir():
        raise InvalidModel(f"{folder}: no such folder; expected a model folder with {WEIGHTS_FILE}")
    if (folder / WEIGHTS_FILE).exists():
        return read_header(folder / WEIGHTS_FILE)
    if (folder / INDEX_FILE).exists():
        return _read_shards(folder)
    others = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".gguf", ".safetensors"})
    advice = "give the GGUF file itself" if others and others[0].endswith(".gguf") else "convert or rename the weights"
    hint = f" (it has {first_few(others)}: {advice})" if others else ""
    raise InvalidModel(f"{folder}: has neither {WEIGHTS_FILE} nor {INDEX_FILE}{hint}; expected a model folder")


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    index_file = folder / INDEX_FILE
    weight_map = read_json_object(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidModel(
            f"{index_file}: weight_map is {show(weight_map)}; expected an object of tensor name to shard file"
        )
    for name, shard in weight_map.items():
        if not _is_plain_file_name(shard):
            raise InvalidModel(
                f"{index_file}: tensor {show(name)} is said to be in {show(shard)}; "
                "expected the plain name of a .safetensors file in the same folder"
            )
    headers = {shard: read_header(folder / shard) for shard in sorted(set(weight_map.values()))}
    lost = [name for name, shard in weight_map.items() if name not in headers[shard]]
    if lost:
        raise InvalidModel(
            f"{index_file}: {len(lost)} tensors are not in the shard it names: {first_few(lost)}; "
            f"index and shards do not belong together: {COPY_AGAIN}"
        )
    tensors: dict[str, StoredTensor] = {}
    for shard, header in headers.items():
        repeated = sorted(tensors.keys() & header.keys())
        if repeated:
            raise InvalidModel(
                f"{folder / shard}: {len(repeated)} tensors are in {tensors[repeated[0]].file.name} too: "
                f"{first_few(repeated)}; expected each in one shard: {COPY_AGAIN}"
            )
        tensors |= header
    return tensors


def _is_plain_file_name(name: object) -> bool:
    """Whether ``name`` can only mean a file directly in the folder, on every operating system."""
    return isinstance(name, str) and name.endswith(".safetensors") and not set(name) & set("/\\:\0") and name[0] != "."


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors ``file``. The safetensors library checks the header: offsets, gaps, overlaps, sizes.

    Raises :class:`InvalidModel` where the file is missing, unreadable, truncated or corrupt. Reads the header only.
    """
    try:
        header, data_start, size = _read_header_bytes(file)
        check_json_size(header, source=f"{file}: header")
        with safe_open(file, framework="numpy"):
            pass
    except FileNotFoundError as error:
        raise InvalidModel(f"{file}: no such file; {COPY_AGAIN}") from error
    except OSError as error:
        raise InvalidModel(f"{file}: cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        raise InvalidModel(f"{file}: truncated or corrupt safetensors file ({error}); {COPY_AGAIN}") from error
    entries = parse_json_object(header, source=f"{file}: header")
    entries.pop("__metadata__", None)
    return {name: _stored_tensor(file, name, entry, data_start, size) for name, entry in entries.items()}


def _read_header_bytes(file: Path) -> tuple[bytes, int, int]:
    """The JSON header, the offset at which data starts, and the file's size; bounded before anything is allocated."""
    with file.open("rb") as stream:
        size = file.stat().st_size
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        available = size - _LENGTH_BYTES
        if available < 0 or length > available:
            raise InvalidModel(
                f"{file}: truncated or corrupt safetensors file: {size} bytes, of which the header alone claims "
                f"{length + _LENGTH_BYTES}; {COPY_AGAIN}"
            )
        if length > _MAX_HEADER_BYTES:
            raise InvalidModel(f"{file}: header of {length} bytes; expected at most {_MAX_HEADER_BYTES}; {COPY_AGAIN}")
        return stream.read(length), _LENGTH_BYTES + length, size


def _stored_tensor(file: Path, name: str, entry: Mapping[str, Any], data_start: int, size: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    stored = StoredTensor(file, entry["dtype"], tuple(entry["shape"]), data_start + begin, end - begin)
    element = _STORED.get(stored.dtype)
    whole = element is None or stored.nbytes == math.prod(stored.shape) * element.itemsize
    # The library has checked this; checking what will be mapped once more costs nothing and leaves no trust in how it parses.
    if not whole or begin < 0 or end < begin or data_start + end > size:
        raise InvalidModel(
            f"{file}: tensor {show(name)} of {stored.dtype} {list(stored.shape)} is said to lie at bytes {begin} to "
            f"{end} of {size - data_start}; {COPY_AGAIN}"
        )
    return stored
