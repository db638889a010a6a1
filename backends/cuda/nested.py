"""Arguments and results of torch's operations: tensors and numbers in lists and tuples, at any depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor


def mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """``x`` with ``change`` made to what its lists and tuples hold, at any depth."""
    if isinstance(x, list | tuple):
        return type(x)([mapped(change, part) for part in x])
    return change(x)


def leaves(parts: Iterable[Any]) -> Iterator[Any]:
    """What lists and tuples among ``parts`` hold, at any depth, and the other parts."""
    for x in parts:
        if isinstance(x, list | tuple):
            yield from leaves(x)
        else:
            yield x


def kinds(parts: Iterable[Any]) -> tuple[Any, ...]:
    """All that decides on the sizes of an operation's results: sizes, strides and dtypes of tensors, and the other operands."""
    return tuple(
        (x.shape, x.stride(), x.dtype)
        if isinstance(x, Tensor)
        else (type(x), kinds(x))
        if isinstance(x, list | tuple)
        else (type(x), x)
        for x in parts
    )
