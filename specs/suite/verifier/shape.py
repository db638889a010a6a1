"""The form of a record: strict JSON, every key there, none that is unknown, every value of its kind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Final, NoReturn, get_args

from forebay.specs import Capabilities
from forebay.specs.descriptor import ModeKind
from forebay.specs.driver import DELEGABLE
from forebay.specs.dtypes import FLOAT_DTYPES
from forebay.specs.geometry import LAYOUTS

FORMAT: Final = 1
KINDS: Final = ("pass", "fail", "refused", "waived", "not-run")
_DEEPEST: Final = 32
_DIGITS: Final = 20

Check = Callable[[Any, str], Iterator[str]]
"""``(value, where)``: what is wrong with the value, said of the place it is at."""


class NotARecord(Exception):
    """A file is no record; ``faults`` says why, one text each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def read_record(data: bytes) -> dict[str, Any]:
    """The record in a file's bytes, of the right form.

    Raises:
        NotARecord: not UTF-8, not strict JSON, or of another form.
    """
    try:
        record = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_no_number,
            parse_float=_float,
            parse_int=_int,
        )
    except UnicodeDecodeError as error:
        raise NotARecord([f"not UTF-8 text: {error}"]) from error
    except json.JSONDecodeError as error:
        raise NotARecord([f"not JSON: {error}" if data.strip() else "not JSON: an empty file"]) from error
    except RecursionError:
        raise NotARecord([f"nested more than {_DEEPEST} levels deep"]) from None
    if _depth(record) > _DEEPEST:
        raise NotARecord([f"nested more than {_DEEPEST} levels deep"])
    faults = list(_RECORD(record, "record"))
    if faults:
        raise NotARecord(faults)
    whole: dict[str, Any] = record
    return whole


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        raise NotARecord([f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r} in a JSON object"])
    return made


def _no_number(text: str) -> NoReturn:
    raise NotARecord([f"{text} is no JSON number"])


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _int(text: str) -> int:
    return int(text) if len(text) <= _DIGITS else _no_number(f"an integer of {len(text)} digits")


def _depth(value: Any) -> int:
    level, deepest = [value], 0
    while level:
        deepest += 1
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return deepest


# -- what a value may be -------------------------------------------------------------------------------------------------


def _is(kind: str, holds: Callable[[Any], bool]) -> Check:
    def check(value: Any, where: str) -> Iterator[str]:
        if not holds(value):
            shown = json.dumps(value)
            yield f"{where}: {shown if len(shown) <= 80 else f'{shown[:80]} …'}, expected {kind}"

    return check


def _one_of(*choices: str) -> Check:
    return _is(f"one of {', '.join(choices)}", lambda value: isinstance(value, str) and value in choices)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


TEXT: Final = _is("a text", lambda value: isinstance(value, str))
SAYING: Final = _is("a text that says something", lambda value: isinstance(value, str) and bool(value.strip()))
FLAG: Final = _is("true or false", lambda value: isinstance(value, bool))
COUNT: Final = _is("a count", lambda value: _whole_number(value) and value >= 0)
NUMBER: Final = _is("a number that is not negative", _number)
OBJECT: Final = _is("an object", lambda value: isinstance(value, dict))
PAIR: Final = _is(
    "an error and its limit",
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(_number, value)),
)


def _maybe(check: Check) -> Check:
    return lambda value, where: iter(()) if value is None else check(value, where)


def _list_of(check: Check) -> Check:
    def checked(value: Any, where: str) -> Iterator[str]:
        if not isinstance(value, list):
            yield f"{where}: a {type(value).__name__}, expected a list"
            return
        for number, entry in enumerate(value, 1):
            yield from check(entry, f"{where} {number}")

    return checked


def _some(check: Check) -> Check:
    """A list that is not empty and names nothing twice."""

    def checked(value: Any, where: str) -> Iterator[str]:
        faults = list(_list_of(check)(value, where))
        if not faults and (not value or len(set(value)) != len(value)):
            faults = [f"{where}: {json.dumps(value)}, expected some, each once"]
        yield from faults

    return checked


def _map_of(check: Check) -> Check:
    def checked(value: Any, where: str) -> Iterator[str]:
        yield from OBJECT(value, where)
        for key, entry in value.items() if isinstance(value, dict) else ():
            yield from check(entry, f"{where}: {key}")

    return checked


def _fields(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    known = {**required, **(optional or {})}

    def checked(value: Any, where: str) -> Iterator[str]:
        yield from OBJECT(value, where)
        if not isinstance(value, dict):
            return
        for key in required:
            if key not in value:
                yield f"{where}: no {key!r}"
        for key, entry in value.items():
            if key in known:
                yield from known[key](entry, f"{where}: {key}")
            else:
                yield f"{where}: unknown key {key!r}"

    return checked


_TEXTS: Final = _list_of(SAYING)
_BY_TYPE: Final[Mapping[str, Check]] = {
    "bool": FLAG,
    "tuple[str, ...]": _TEXTS,
    "int | None": _maybe(COUNT),
    "tuple[int, ...] | None": _maybe(_list_of(COUNT)),
}
_SIZES: Final = _maybe(_some(_is("a size", lambda value: _whole_number(value) and value > 0)))
_BY_NAME: Final[Mapping[str, Check]] = {
    "layouts": _some(_one_of(*LAYOUTS)),
    "kv_dtypes": _some(_one_of(*FLOAT_DTYPES)),
    "head_dims": _SIZES,
    "block_sizes": _SIZES,
}
_BACKEND: Final = _fields(
    {
        "name": SAYING,
        "mode": TEXT,
        "distribution": TEXT,
        "version": TEXT,
        "kind": _one_of(*get_args(ModeKind)),
        "info": OBJECT,
        "capabilities": _fields(
            {field.name: _BY_NAME.get(field.name, _BY_TYPE[str(field.type)]) for field in fields(Capabilities)}
        ),
        "core_gaps": _TEXTS,
    }
)
_COUNTED: Final = (
    "run",
    "capture",
    "replay",
    "recapture",
    "declined",
    "uploads",
    "upload_bytes",
    "downloads",
    "syncs",
    "dropped",
    "invalid",
)
OPERATIONS: Final = (*DELEGABLE, "gather")
_COUNTS: Final = _fields({}, dict.fromkeys(OPERATIONS, COUNT))
_BY_OPERATION: Final = {"launches": _COUNTS, "delegated": _COUNTS}
_READ: Final = _fields({**_BY_OPERATION, **dict.fromkeys(_COUNTED, COUNT), "info": OBJECT})
_UNREADABLE: Final = _fields({**_BY_OPERATION, "unreadable": SAYING})


def _counters(value: Any, where: str) -> Iterator[str]:
    """None of a backend that was not opened or whose process died; of a lost device those the host keeps."""
    if value != {}:
        yield from (_UNREADABLE if isinstance(value, dict) and "unreadable" in value else _READ)(value, where)


_RESULT: Final = _fields(
    {
        "test": SAYING,
        "clauses": _TEXTS,
        "refuses": _TEXTS,
        "cases": _TEXTS,
        "outcome": _one_of(*KINDS),
        "seconds": NUMBER,
        "message": TEXT,
        "failure": _maybe(_fields({"input": TEXT, "expected": TEXT, "got": TEXT})),
        "refusal": _maybe(_fields({"capability": SAYING, "value": TEXT, "message": TEXT, "raised_in": SAYING})),
        "errors": _map_of(PAIR),
    }
)
_WAIVER: Final = _fields(
    {
        **dict.fromkeys(("test", "clause", "device", "reason", "expiry"), SAYING),
        "state": _one_of("used", "stale", "elsewhere", "idle"),
    }
)
_RECORD: Final = _fields(
    {
        "format": _is(
            f"{FORMAT}, the format this verifier reads", lambda value: value == FORMAT and _whole_number(value)
        ),
        "spec_version": SAYING,
        "suite_hash": SAYING,
        "requested": SAYING,
        "profile": _one_of("smoke", "full"),
        "complete": FLAG,
        "selection": _TEXTS,
        "backend": _maybe(_BACKEND),
        "versions": _fields(dict.fromkeys(("python", "platform", "forebay", "numpy", "pytest", "hypothesis"), SAYING)),
        "seeds": _fields({"hypothesis": SAYING, "hypothesis_max_examples": COUNT, "numpy": SAYING}),
        "started": SAYING,
        "ended": _maybe(SAYING),
        "stopped": TEXT,
        "running": TEXT,
        "tolerances": _map_of(_fields({"limit": NUMBER, "largest": NUMBER, "test": SAYING})),
        "counters": _counters,
        "delegated": _COUNTS,
        "waivers": _list_of(_WAIVER),
        "results": _list_of(_RESULT),
        "summary": _fields(dict.fromkeys((*KINDS, "total"), COUNT)),
        "problems": _TEXTS,
        "verdict": _one_of("conformant", "conformant with waivers", "passed", "passed with waivers", "failed"),
        "digest": SAYING,
    }
)
