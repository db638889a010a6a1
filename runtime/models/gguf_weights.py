"""The weights of GGUF files, dequantised tensor by tensor as they are asked for; nothing is converted on disk."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from forebay.specs.dtypes import bfloat16_bits, check_dtype
from forebay.specs.errors import InvalidModel, Unsupported

from .gguf_file import GGUFTensor
from .json_fields import show
from .llama_tensors import EMBEDDING, FINAL_NORM, OUTPUT
from .weights import COPY_AGAIN, Weights

_MODEL_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": OUTPUT}
)
_LAYER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
"""GGUF's name of a part of ``blk.N`` and its name in a safetensors folder."""


@dataclass(frozen=True, slots=True)
class RotatedPairs:
    """GGUF files of the llama architecture keep the rows of queries and keys in pairs that rotate together."""

    num_heads: int
    num_kv_heads: int

    def heads(self, name: str) -> int | None:
        """Over how many heads the rows of the tensor ``name`` are reordered, None where they are not."""
        if ".self_attn.q_proj." in name:
            return self.num_heads
        return self.num_kv_heads if ".self_attn.k_proj." in name else None


class GGUFWeights(Weights):
    """The tensors of one GGUF file or its shards, under the names and in the row order of a safetensors folder."""

    def __init__(self, file: Path, tensors: Iterable[GGUFTensor], pairs: RotatedPairs | None) -> None:
        """``pairs``: how rows are to be reordered; None where they are in order.

        Raises:
            Unsupported: a tensor has a type that the gguf package cannot dequantise.
            InvalidModel: rows that do not divide into heads.
        """
        super().__init__(file)
        self._pairs = pairs
        self._tensors = {safetensors_name(tensor.name): tensor for tensor in tensors}
        self._stamps = {tensor.file: _stamp(tensor.file) for tensor in self._tensors.values()}
        unreadable = {kind for kind in {tensor.kind for tensor in self._tensors.values()} if not can_dequantise(kind)}
        for name, tensor in self._tensors.items():
            if tensor.kind in unreadable:
                known = ", ".join(kind.name for kind in GGML_QUANT_SIZES if can_dequantise(kind))
                raise Unsupported(
                    f"{tensor.file}: tensor {show(tensor.name)} is {tensor.kind.name}; supported: {known}"
                )
            heads = pairs.heads(name) if pairs else None
            if heads and tensor.shape[0] % (2 * heads):
                raise InvalidModel(
                    f"{tensor.file}: tensor {show(tensor.name)} has {tensor.shape[0]} rows; expected {heads} heads of an "
                    "even number of rows"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all stored tensors; GGUF's own where a safetensors folder has none."""
        return tuple(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors together, as they are stored."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the stored tensor ``name``; raises :class:`InvalidModel` where there is none."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise InvalidModel(f"{self.source}: tensor {show(name)} is missing; {COPY_AGAIN}")
        return tensor.shape

    def check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that ``name`` is stored with ``shape``."""
        stored = self.shape(name)
        if stored != tuple(shape):
            raise InvalidModel(
                f"{self.source}: tensor {show(name)} has shape {list(stored)}; the metadata expects {list(shape)}; "
                f"{COPY_AGAIN}"
            )

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> npt.NDArray[Any]:
        """As :meth:`Weights.tensor`."""
        check_dtype(dtype, ("float32", "bfloat16"), "weight dtype")
        self.check_tensor(name, shape)
        stored = self._tensors[name]
        if _stamp(stored.file) != self._stamps[stored.file]:
            raise InvalidModel(f"{stored.file}: has changed since the model was opened; load the model again")
        content = _map(stored)
        heads = self._pairs.heads(name) if self._pairs else None
        if stored.kind is GGMLQuantizationType.BF16 and dtype == "bfloat16":
            return _in_order(content.view("<u2").reshape(stored.shape), heads)
        values = _in_order(_dequantised(content, stored), heads)
        return values if dtype == "float32" else bfloat16_bits(values)


def safetensors_name(name: str) -> str:
    """What the GGUF tensor ``name`` is called in a safetensors folder; itself where it has no place there."""
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    parts = re.fullmatch(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)", name, re.ASCII)
    if parts is None or parts[2] not in _LAYER_NAMES:
        return name
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"


def can_dequantise(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package turns ``kind`` into float32; asked of the package, with one block of zeros."""
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def dequantised(stored: GGUFTensor) -> npt.NDArray[np.float32]:
    """The values of ``stored`` in float32, in its own shape and row order."""
    return _dequantised(_map(stored), stored)


def _dequantised(content: npt.NDArray[np.uint8], stored: GGUFTensor) -> npt.NDArray[np.float32]:
    block, block_bytes = GGML_QUANT_SIZES[stored.kind]
    rows = content.reshape(*stored.shape[:-1], stored.shape[-1] // block * block_bytes)
    # Scales are any bits a file has: infinite and NaN ones are values like others.
    with np.errstate(all="ignore"):
        values: npt.NDArray[np.float32] = gguf.dequantize(rows, stored.kind)
    return np.ascontiguousarray(values.reshape(stored.shape), dtype=np.float32)


def _map(stored: GGUFTensor) -> npt.NDArray[np.uint8]:
    try:
        mapped = np.memmap(stored.file, dtype=np.uint8, mode="r", offset=stored.offset, shape=(stored.nbytes,))
    except (OSError, ValueError) as error:
        raise InvalidModel(
            f"{stored.file}: tensor {show(stored.name)} cannot be read ({error}); {COPY_AGAIN}"
        ) from error
    content = mapped.view(np.ndarray)
    # The file chooses its alignment; kernels and foreign libraries want that of the element.
    return content if stored.offset % np.dtype(np.float32).itemsize == 0 else content.copy()


def _in_order(rows: npt.NDArray[Any], heads: int | None) -> npt.NDArray[Any]:
    """Reorder each head's rows from pairs (0,1),(2,3),… that rotate together, as GGUF has them, to halves (i, i + D/2)."""
    if heads is None:
        return rows
    half = rows.shape[0] // heads // 2
    ordered = rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(ordered).reshape(rows.shape)


def _stamp(file: Path) -> tuple[int, int]:
    """What changes when ``file`` is written to or replaced."""
    try:
        status = file.stat()
    except OSError as error:
        raise InvalidModel(f"{file}: cannot be read ({error.strerror or error}); {COPY_AGAIN}") from error
    return status.st_size, status.st_mtime_ns
