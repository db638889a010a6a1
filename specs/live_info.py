"""What an opened device says about itself, looked up anew each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class LiveInfo(Mapping[str, Any]):
    """What the device says about itself, asked anew at every look."""

    def __init__(self, describe: Callable[[], dict[str, Any]]) -> None:
        self._describe = describe

    def __getitem__(self, key: str) -> Any:
        return self._describe()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._describe())

    def __len__(self) -> int:
        return len(self._describe())
