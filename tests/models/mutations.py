"""Ways of damaging model files: bytes changed at random, and values changed where the format has them."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forebay.runtime.models import gguf_file

Mutation = Callable[[bytes, random.Random], bytes]
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    31,
    32,
    63,
    127,
    255,
    256,
    1000,
    2**16,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
ODD_VALUES: tuple[Any, ...] = (
    *NUMBERS, -1, -(2**31), -(2**63), 10**30, 0.5, 1e-300, 1e300, float("nan"), float("inf"), None, True, False, "", "x",
    "../model.safetensors", "/etc/passwd", "..\\x.safetensors", "a\0.safetensors", "model.safetensors", "\ud800", "é" * 9,
    "x" * 5000, [], {}, [[]], [0], [-1], [2**63, 2**63], ["x"], {"a": {"b": None}}, "F32", "BF16", "I8", "F64", "yarn", "linear",
    "llama3", "longrope", "dynamic", "silu", "gelu", "llama", "mistral", "qwen2", "qwen3", "{{ messages }}", "{% for %}",
)  # fmt: skip


def damaged(content: bytes, draw: random.Random, region: int | None = None) -> bytes:
    """One to three random changes, half of them in the first ``region`` bytes: a bit or byte flipped, a piece cut, moved."""
    result = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        limit = min(region, len(result)) if region is not None and draw.random() < 0.5 else len(result)
        if not limit:
            break
        at, other = draw.randrange(limit), draw.randrange(limit)
        length = draw.choice((1, 4, 8, draw.randint(1, 400)))
        match draw.choice(("bit", "byte", "digit", "cut", "drop", "double", "splice", "zero", "swell")):
            case "bit":
                result[at] ^= 1 << draw.randrange(8)
            case "byte":
                result[at] = draw.randrange(256)
            case "digit":
                result[at] = draw.choice(b'0123456789-"{}[],:')
            case "cut":
                del result[at:]
            case "drop":
                del result[at : at + length]
            case "double":
                result[at:at] = result[at : at + length]
            case "splice":
                result[at : at + length] = result[other : other + length]
            case "zero":
                result[at : at + length] = bytes(length)
            case "swell":
                result[at:at] = draw.randbytes(length)
    return bytes(result)


def changed_json(content: bytes, draw: random.Random) -> bytes:
    """JSON with one to three values replaced, removed, renamed, repeated or nested."""
    value = json.loads(content)
    for _ in range(draw.randint(1, 3)):
        holder, key = _somewhere(value, draw)
        if holder is None:
            continue
        match draw.choice(("replace", "replace", "replace", "remove", "rename", "copy", "scale")):
            case "replace":
                holder[key] = draw.choice(ODD_VALUES)
            case "remove":
                del holder[key]
            case "rename" if isinstance(holder, dict):
                holder[draw.choice(("x", "", f"{key}x", "__metadata__", "rope_scaling"))] = holder.pop(key)
            case "copy":
                other, place = _somewhere(value, draw)
                if other is not None and not _holds(holder[key], other):
                    other[place] = holder[key]
            case "scale" if isinstance(holder[key], int):
                holder[key] = holder[key] * draw.choice((-1, 2, 2**32)) + draw.choice((-1, 0, 1))
            case _:
                holder[key] = [holder[key]]
    text = json.dumps(value)
    match draw.randrange(20):
        case 0:
            text = text.replace(":", ":" + "[" * draw.choice((10, 1000, 100_000)), 1)
        case 1:
            text = text.replace("{", '{"a":' * draw.choice((10, 1000, 100_000)), 1)
        case 2:
            text = text.replace(":", ":" + "9" * draw.choice((20, 400, 100_000)), 1)
        case 3:
            text = text[:-1] + "," + text[1:]
    return text.encode("utf-8", "surrogatepass")


def nudged_json(content: bytes, draw: random.Random) -> bytes:
    """JSON with one value changed to another of its kind, which more often than not is still a model."""
    value = json.loads(content)
    holder, key = draw.choice(list(_leaves(value)) or [({"": None}, "")])
    match holder[key]:
        case bool(old):
            holder[key] = not old
        case int(old):
            holder[key] = draw.choice((old - 1, old + 1, old * 2, old // 2, 0, -old))
        case float(old):
            holder[key] = old * draw.choice((-1.0, 0.0, 0.5, 2.0, 1e10))
        case str(old):
            holder[key] = draw.choice((f"{old}x", old[:-1], old[1:], old.upper(), old * 2, ""))
        case _:
            holder[key] = draw.choice(ODD_VALUES)
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _leaves(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every object or list inside ``value`` with each key of it that holds a plain value."""
    for key in value if isinstance(value, dict) else range(len(value)):
        if isinstance(value[key], (dict, list)):
            yield from _leaves(value[key])
        else:
            yield value, key


def _somewhere(value: Any, draw: random.Random) -> tuple[Any, Any]:
    """An object or list inside ``value`` and a key of it; (None, None) where there is none."""
    holder, key = None, None
    while isinstance(value, (dict, list)) and value:
        holder, key = value, draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        value = holder[key]
        if draw.random() < 0.2:
            break
    return holder, key


def _holds(value: Any, part: Any) -> bool:
    """Whether ``part`` is ``value`` or inside it: putting ``value`` there would close a circle."""
    if value is part:
        return True
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_holds(each, part) for each in parts)


def changed_safetensors(content: bytes, draw: random.Random) -> bytes:
    """A safetensors file whose header values or header length are changed."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    if draw.random() < 0.8:
        header = changed_json(header, draw)
    claimed = len(header)
    if draw.random() < 0.2:
        claimed = draw.choice((*NUMBERS, claimed - 1, claimed + 1, len(content), len(content) - 8, len(content) - 7))
    if draw.random() < 0.2:
        data = draw.choice((b"", data[:-1], data + b"\0", data * 2))
    return struct.pack("<Q", claimed % 2**64) + header + data


class GGUFNumbers:
    """Changes numbers of one GGUF file where its header has them: counts, lengths, types, values, dimensions, offsets."""

    def __init__(self, file: Path) -> None:
        places: list[tuple[int, str]] = []

        class Recording(gguf_file._Cursor):
            def number(self, code: str, what: str) -> Any:
                places.append((self.at, code))
                return super().number(code, what)

            def take(self, count: int, what: str) -> bytes:
                if what.startswith("tensor ") and count % 8 == 0:  # the dimensions
                    places.extend((self.at + 8 * i, "Q") for i in range(count // 8))
                return super().take(count, what)

        with file.open("rb") as stream:
            gguf_file._parse(Recording(file, stream, file.stat().st_size))
        # The lengths of thousands of tokens and merges are all alike: a few of them do.
        self.places = places[:200] + places[-400:]

    def __call__(self, content: bytes, draw: random.Random) -> bytes:
        """``content`` with one to three of the numbers replaced."""
        result = bytearray(content)
        for _ in range(draw.randint(1, 3)):
            at, code = draw.choice(self.places)
            size = struct.calcsize(f"<{code}")
            old = int.from_bytes(result[at : at + size], "little")
            value = draw.choice((*NUMBERS, old - 1, old + 1, old * 2, len(content), draw.getrandbits(8 * size)))
            result[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
        return bytes(result)
