"""Seeded random damage to every file of a model folder: it loads, or it is refused by name, cheaply."""

from __future__ import annotations

import random
import resource
import struct
import tracemalloc
from pathlib import Path

import pytest

from forebay.runtime.models import expected_tensors, open_model_folder
from forebay.specs.errors import InvalidModel, Unsupported

MUTATIONS = 400
_MEGABYTE = 2**20


def damaged(content: bytes, draw: random.Random, region: int) -> bytes:
    """One to three random changes, half of them in the first ``region`` bytes: a bit or byte flipped, a piece cut, doubled."""
    result = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        limit = min(region, len(result)) if draw.random() < 0.5 else len(result)
        if not limit:
            break
        at = draw.randrange(limit)
        match draw.choice(["bit", "byte", "digit", "cut", "drop", "double"]):
            case "bit":
                result[at] ^= 1 << draw.randrange(8)
            case "byte":
                result[at] = draw.randrange(256)
            case "digit":
                result[at] = draw.choice(b'0123456789-"{}[],:')
            case "cut":
                del result[at:]
            case "drop":
                del result[at : at + draw.randint(1, 40)]
            case "double":
                result[at:at] = result[at : at + draw.randint(1, 40)]
    return bytes(result)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("model.safetensors", (InvalidModel,)),
        ("tokenizer.json", (InvalidModel,)),
        ("config.json", (InvalidModel, Unsupported)),
        ("generation_config.json", (InvalidModel,)),
    ],
)
def test_random_damage_loads_or_is_refused(tiny_folder: Path, name: str, allowed: tuple[type[Exception], ...]) -> None:
    file = tiny_folder / name
    content = file.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0] if name == "model.safetensors" else len(content)
    draw = random.Random(name)  # noqa: S311  (repeatable damage, not cryptography)
    loads(tiny_folder)
    outcomes = {True: 0, False: 0}
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        for _ in range(MUTATIONS):
            file.write_bytes(damaged(content, draw, header))
            tracemalloc.reset_peak()
            try:
                loads(tiny_folder)
                outcomes[True] += 1
            except allowed as error:
                outcomes[False] += 1
                assert str(tiny_folder) in str(error)
            assert tracemalloc.get_traced_memory()[1] < 4 * _MEGABYTE
    finally:
        tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 64 * 1024
    # Both must occur, or the damage proves nothing.
    assert outcomes[False] > MUTATIONS // 10
    assert outcomes[True] > 0


def loads(folder: Path) -> None:
    """Open the folder and use every part of it."""
    model = open_model_folder(folder)
    for name, shape in expected_tensors(model.config).items():
        for dtype in ("float32", "bfloat16"):
            model.weights.tensor(name, shape, dtype)
    model.tokenizer.decode(model.tokenizer.encode("hello world 42"))
