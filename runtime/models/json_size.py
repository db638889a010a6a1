"""How many values a JSON text may have: parsers make some 60 bytes of each, which may be two in the text."""

from __future__ import annotations

from typing import Final

from forebay.specs.errors import InvalidModel

MAX_VALUES: Final = 2**19
"""Of a configuration, an index or a header: 40 MB once it is parsed. The index of 90,000 tensors has 180,000."""

_MARKS: Final = (",", ":", "[", "{")


def check_json_size(text: str | bytes, *, source: str, allowed: int = MAX_VALUES) -> None:
    """Refuse a text with more than ``allowed`` marks of JSON's structure before a parser sees it.

    Marks inside strings count too: a bound and no count. Raises :class:`InvalidModel` that names ``source``.
    """
    found = sum(text.count(mark) if isinstance(text, str) else text.count(mark.encode()) for mark in _MARKS)
    if found > allowed:
        raise InvalidModel(
            f"{source}: {found} JSON values or so; expected at most {allowed}; copy or fetch the file again"
        )
