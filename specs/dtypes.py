"""Names of element types, and what stands for them in host memory.

A dtype is always *named* (``"float32"``); nothing infers one from a byte count (clause S3). numpy has no bfloat16: a host array of
it is either float32 values (``to_device(x, dtype="bfloat16")`` rounds to nearest even) or uint16 bit patterns (foreign memory,
staging), and which of the two is meant is said by the call, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .errors import InvalidInput

HostArray = npt.NDArray[Any]
"""A numpy array, known to the host."""

Array = Any
"""A device array: the backend's own type (torch.Tensor, jax.Array, …)."""

FLOAT_DTYPES: Final = ("float32", "bfloat16", "float16")
DTYPES: Final = (*FLOAT_DTYPES, "int32", "bool")
ITEMSIZE: Final[Mapping[str, int]] = MappingProxyType(
    {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "bool": 1}
)

BITS_DTYPE: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(
    {
        "float32": np.dtype(np.float32),
        "bfloat16": np.dtype(np.uint16),
        "float16": np.dtype(np.float16),
        "int32": np.dtype(np.int32),
        "bool": np.dtype(np.bool_),
    }
)
"""The numpy dtype whose bytes are those of the named dtype (bfloat16 as uint16 bit patterns)."""


def check_dtype(name: str, allowed: tuple[str, ...] = DTYPES, what: str = "dtype") -> str:
    """Return ``name`` if it is one of ``allowed``; raise InvalidInput naming them otherwise."""
    if not isinstance(name, str) or name not in allowed:
        raise InvalidInput(f"{what}: got {name!r}, expected one of {', '.join(allowed)}")
    return name


def is_host(x: object) -> bool:
    """True for values the host knows without asking the device: numpy arrays and scalars, Python numbers and sequences."""
    return isinstance(x, np.ndarray | np.generic | int | float | bool | list | tuple)


def bfloat16_bits(x: HostArray) -> HostArray:
    """float32 values to bfloat16 bit patterns (uint16), rounded to nearest even; NaN becomes a quiet NaN of the same sign."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)


def bfloat16_values(bits: HostArray) -> HostArray:
    """bfloat16 bit patterns (uint16) to float32 values, exactly."""
    return (np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def host_bits(x: object, dtype: str | None, what: str = "array") -> tuple[HostArray, str]:
    """A host value as a C-contiguous array of the bytes the device will hold (``BITS_DTYPE``), and the name of its dtype.

    int64 becomes int32, and float64 becomes float32, only where every value survives. Naming a float ``dtype`` for float values
    means the rounding (to nearest even). uint16 with ``dtype="bfloat16"`` are bit patterns.

    Raises:
        InvalidInput: a value would change by narrowing, or the element type is not known.
    """
    source = _native(x, what)
    target = _natural_dtype(source, what) if dtype is None else check_dtype(dtype, what=f"{what} dtype")
    if target == "bfloat16" and source.dtype == np.uint16:
        return np.ascontiguousarray(source), target
    if source.dtype.kind not in "fiub" or (target in ("int32", "bool") and source.dtype.kind == "f"):
        raise InvalidInput(f"{what}: {source.dtype} cannot become {target}; convert it on the host first")
    carrier = np.dtype(np.float32) if target == "bfloat16" else BITS_DTYPE[target]
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.ascontiguousarray(source, dtype=carrier).reshape(source.shape)
        if target == "bfloat16" and source.dtype == np.float64:
            values = _odd_ties(source, values)
        bits = bfloat16_bits(values) if target == "bfloat16" else values
        means_rounding = dtype is not None and target in FLOAT_DTYPES and source.dtype.kind == "f"
        # Compared in the source's own type: numpy would round both sides alike.
        back = host_from_bits(bits, target).astype(source.dtype)
    if not means_rounding and not np.array_equal(back, source, equal_nan=source.dtype.kind == "f"):
        raise InvalidInput(
            f"{what}: {source.dtype} values do not fit {target} (range {source.min()} to {source.max()}); nothing was copied"
        )
    return bits, target


def _native(x: object, what: str) -> HostArray:
    """``x`` as a numpy array in the machine's byte order."""
    try:
        source = np.asarray(x)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidInput(f"{what}: {type(x).__name__} is no array of numbers: {error}") from error
    return source.astype(source.dtype.newbyteorder("=")) if not source.dtype.isnative else source


def _odd_ties(source: HostArray, values: HostArray) -> HostArray:
    """float32 ``values`` of float64 ``source`` moved off bfloat16's ties towards the source, so that rounding twice rounds once."""
    bits = values.view(np.uint32).copy()
    tie = (bits & np.uint32(0xFFFF)) == np.uint32(0x8000)
    magnitude, kept = np.abs(source), np.abs(values.astype(np.float64))
    bits[tie & (magnitude > kept)] += np.uint32(1)
    bits[tie & (magnitude < kept)] -= np.uint32(1)
    return bits.view(np.float32)


def host_from_bits(bits: HostArray, dtype: str) -> HostArray:
    """What a user of the host sees of device bytes: bfloat16 as float32 values, everything else as it is."""
    return bfloat16_values(bits) if dtype == "bfloat16" else bits


def _natural_dtype(x: HostArray, what: str) -> str:
    match x.dtype.kind:
        case "b":
            return "bool"
        case "i":
            return "int32"
        case "f" if x.dtype == np.float16:
            return "float16"
        case "f":
            return "float32"
    raise InvalidInput(f"{what}: numpy {x.dtype} has no device dtype; expected float32, float16, int32, int64 or bool")
