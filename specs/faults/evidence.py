"""What a failed assertion of the suite is about: the names in the part of its comparison whose two sides differ."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.specs.suite.failure import leaves

SUITE: Final = Path(__file__).resolve().parent.parent / "suite"


@dataclass(frozen=True)
class Compared:
    """Both sides of the last comparison that did not hold, as the values they had."""

    left: object
    right: object


def fell_by(error: BaseException, compared: Compared | None) -> list[str]:
    """The name of the error by which a test fell, then what its assertion is about (:func:`about`)."""
    return [type(leaves(error)[0]).__name__, *about(error, compared)]


def about(error: BaseException, compared: Compared | None) -> list[str]:
    """Variables, attributes and the words of keys that the suite's failed assertion names where it does not hold, in order.

    ``(c.uploads, c.run) == before`` is about ``uploads`` if only the first of the two differs, and a comparison of two mappings is
    about the keys that differ. Empty where ``error`` is no assertion of the suite's.
    """
    leaf = leaves(error)[0]
    if not isinstance(leaf, AssertionError) or leaf.__traceback__ is None:
        return []
    for entry in reversed(list(pytest.ExceptionInfo.from_exception(leaf).traceback)):
        if Path(entry.path).resolve().parent == SUITE:
            return names_in(str(entry.statement), compared)
    return []


def names_in(statement: str, compared: Compared | None) -> list[str]:
    """The same of one statement that did not hold, given as its source."""
    try:
        parsed = ast.parse(textwrap.dedent(statement)).body[0]
    except (SyntaxError, IndexError):  # the first line of a block: no assertion
        return []
    return sorted(set(_of_statement(parsed, compared)))


def _of_statement(statement: ast.AST, compared: Compared | None) -> Iterator[str]:
    match statement:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])) if compared is not None:
            yield from _differing(left, compared.left, compared.right)
            yield from _differing(right, compared.right, compared.left)
        case ast.Assert(test=test):
            yield from _names(test)
        case ast.Expr(value=ast.Call() as call):  # numpy's assertions, and helpers that assert
            for part in (*call.args, *(keyword.value for keyword in call.keywords)):
                yield from _names(part)


def _differing(node: ast.expr, mine: object, other: object) -> Iterator[str]:
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
        yield from _keys(mine, other)
    elif isinstance(mine, tuple | list) and isinstance(other, tuple | list) and len(mine) == len(other):
        written = isinstance(node, ast.Tuple | ast.List) and len(node.elts) == len(mine)
        elements = node.elts if written and isinstance(node, ast.Tuple | ast.List) else [node] * len(mine)
        for element, x, y in zip(elements, mine, other, strict=True):
            if _unlike(x, y):
                yield from _differing(element, x, y)
    else:
        yield from _names(node)


def _keys(mine: Mapping[Any, Any], other: Mapping[Any, Any]) -> Iterator[str]:
    for key in {**mine, **other}:
        x, y = mine.get(key), other.get(key)
        if _unlike(x, y):
            yield from re.findall(r"\w+", str(key))
            if isinstance(x, Mapping) and isinstance(y, Mapping):
                yield from _keys(x, y)


def _unlike(x: Any, y: Any) -> bool:
    try:
        return bool(x != y)
    except ValueError:  # arrays: which of their elements differ says nothing about names
        return True


def _names(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        match each:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                yield name
