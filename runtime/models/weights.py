"""What every kind of weight file offers a model: tensors by name, checked against the shapes a configuration expects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

from forebay.specs.errors import InvalidModel

COPY_AGAIN: Final = "copy or fetch the model again"
_MAX_NAMED: Final = 5


class Weights(ABC):
    """The stored tensors of one model under the names of its safetensors form. Holds no open file."""

    def __init__(self, source: Path) -> None:
        """``source``: the folder or file that errors name."""
        self.source = source

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of all stored tensors."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all stored tensors together, as they are stored."""

    @abstractmethod
    def tensor(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> npt.NDArray[Any]:
        """The tensor ``name``, which must have ``shape``, as a C-contiguous array of ``dtype`` ``"float32"`` or ``"bfloat16"``.

        bfloat16 comes as uint16 bit patterns, rounded to nearest even where the stored values are wider. Where the
        stored values are those asked for the array is a read-only view of the mapped file, else a fresh array.

        Raises:
            InvalidModel: the tensor is missing, has another shape or a dtype that cannot be read, or its file has changed.
            InvalidInput: ``dtype`` is another one.
        """

    @abstractmethod
    def check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that ``name`` is stored, with ``shape`` and in a form that can be read; raises :class:`InvalidModel`."""

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Check that every ``expected`` tensor is stored, with its shape and in a form that can be read.

        Raises :class:`InvalidModel` that names the first few that are missing and how many there are, else the first
        that is wrong.
        """
        stored = set(self.names)
        missing = [name for name in expected if name not in stored]
        if missing:
            raise InvalidModel(
                f"{self.source}: {len(missing)} of {len(expected)} expected tensors are missing: "
                f"{first_few(missing)}; the weights do not belong to this configuration or are incomplete: {COPY_AGAIN}"
            )
        for name, shape in expected.items():
            self.check_tensor(name, shape)

    def unexpected(self, expected: Iterable[str]) -> tuple[str, ...]:
        """The names of stored tensors that are not among ``expected``."""
        known = set(expected)
        return tuple(name for name in self.names if name not in known)


def first_few(names: list[str]) -> str:
    """The first five of ``names``, and how many more there are."""
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
