"""Reading JSON that others wrote: typed look-ups whose refusals name the file, the key, the value and what was expected."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from forebay.specs.errors import InvalidModel

from .json_size import check_json_size

_MAX_JSON_BYTES = 32 * 2**20
_MAX_SHOWN = 60


def read_json_object(file: Path) -> dict[str, Any]:
    """Parse ``file`` as one JSON object.

    Raises :class:`InvalidModel` where the file is missing, unreadable, larger than 32 MiB, not UTF-8 or not one JSON
    object.
    """
    try:
        size = file.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise InvalidModel(f"{file}: {size} bytes; expected a JSON file of at most {_MAX_JSON_BYTES} bytes")
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InvalidModel(f"{file}: no such file; a model folder needs it, copy or fetch the folder again") from error
    except UnicodeDecodeError as error:
        raise InvalidModel(f"{file}: not UTF-8 text ({error.reason} at byte {error.start}); expected JSON") from error
    except OSError as error:
        raise InvalidModel(f"{file}: cannot be read ({error.strerror or error})") from error
    return parse_json_object(text, source=str(file))


def parse_json_object(text: str | bytes, *, source: str) -> dict[str, Any]:
    """Parse ``text`` as one JSON object; repeated keys, NaN and Infinity are refused. ``source`` names it in errors."""
    check_json_size(text, source=source)
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{source}: not valid JSON ({error}); copy or fetch the file again") from error
    if not isinstance(value, dict):
        raise InvalidModel(f"{source}: holds a JSON {type(value).__name__}; expected an object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = min(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the key {show(repeated)} is given more than once")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def show(value: object) -> str:
    """``value`` as an error message shows it: its repr, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Fields:
    """One JSON object (or GGUF metadata) and where it came from. A null counts as absent, as writers use it that way.

    Every look-up returns a value of the promised type or raises :class:`InvalidModel`; ``default=None`` means required.
    """

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self._values = values

    def has(self, key: str) -> bool:
        """Whether ``key`` is present and not null."""
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether ``key`` is present and null, which some writers use to switch off what is on by default."""
        return key in self._values and self._values[key] is None

    def raw(self, key: str) -> Any:
        """The value of ``key`` as it was parsed, ``None`` where it is absent."""
        return self._values.get(key)

    def invalid(self, key: str, expected: str) -> InvalidModel:
        """The error that ``key`` does not hold what was ``expected``."""
        given = "missing" if key not in self._values else show(self._values[key])
        return InvalidModel(f"{self.source}: {key} is {given}; expected {expected}")

    def integer(self, key: str, *, minimum: int = 1, maximum: int, default: int | None = None) -> int:
        """An integer of ``minimum`` to ``maximum``."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.invalid(key, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, *, above: float, below: float, default: float | None = None) -> float:
        """A finite number strictly between ``above`` and ``below``."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not _is_number(value) or not above < value < below:
            raise self.invalid(key, f"a number above {above:g} and below {below:g}")
        return float(value)

    def number_from(self, key: str, *, minimum: float, maximum: float, default: float | None = None) -> float:
        """A finite number from ``minimum`` to ``maximum``, both included."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not _is_number(value) or not minimum <= value <= maximum:
            raise self.invalid(key, f"a number from {minimum:g} to {maximum:g}")
        return float(value)

    def numbers(self, key: str, *, length: int, above: float, below: float) -> tuple[float, ...]:
        """A list of ``length`` finite numbers strictly between ``above`` and ``below``."""
        values = self._values.get(key)
        if not isinstance(values, list) or not all(_is_number(value) and above < value < below for value in values):
            raise self.invalid(key, f"a list of numbers above {above:g} and below {below:g}")
        if len(values) != length:
            raise InvalidModel(f"{self.source}: {key} has {len(values)} numbers; expected {length}")
        return tuple(float(value) for value in values)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.invalid(key, "true or false")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        """A string."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.invalid(key, "a string")
        return value

    def token_ids(self, key: str, *, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them, each below ``vocab_size``; ``()`` where the key is absent."""
        value = self._values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids):
            raise self.invalid(key, f"a token id, or a list of them, from 0 to {vocab_size - 1}")
        return tuple(dict.fromkeys(ids))

    def section(self, key: str) -> Fields:
        """The object under ``key``, an empty one where it is absent."""
        value = self._values.get(key)
        if value is None:
            return Fields(f"{self.source}: {key}", {})
        if not isinstance(value, dict):
            raise self.invalid(key, "an object")
        return Fields(f"{self.source}: {key}", value)
