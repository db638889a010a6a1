"""Damaged model files, some hundreds of mutations at random and the ones made to take memory: refused by name, and cheaply."""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from forebay.runtime.models import open_model
from forebay.specs.errors import InvalidModel
from tests.models import tiny
from tests.models.fuzz_model_files import ALLOWANCE, limited
from tests.models.test_gguf_file import array, file_of, string, tensor

MUTATIONS = 390


def test_mutations_load_or_are_refused() -> None:
    """In a process of its own, which a crash may end."""
    command = [sys.executable, "-m", "tests.models.fuzz_model_files", "--count", str(MUTATIONS), "--seed", "7"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert done.stdout, f"{done.returncode}: {done.stderr[-2000:]}"
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert report["mutations"] == MUTATIONS
    # Both must occur for every kind of file, or the damage proves nothing.
    for target, outcomes in report["by_target"].items():
        assert outcomes.get("accepted"), target
        assert outcomes.get("InvalidModel"), target


def test_the_limit_on_memory_is_one() -> None:
    # More than the process has mapped: what it has freed before is reused without asking for address space.
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    with limited(ALLOWANCE):
        np.ones(ALLOWANCE // 2, np.uint8)
        with pytest.raises(MemoryError):
            np.empty(mapped + 2 * ALLOWANCE, np.uint8)


def json_file(name: str, content: Callable[[dict[str, object]], str]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        model = tiny.write_folder(folder / "model", shards=2 if "index" in name else 0)
        file = model / name
        given = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(content(given))
        return model

    return write


def with_list(items: str) -> Callable[[dict[str, object]], str]:
    return lambda given: f'{json.dumps(given)[:-1]}{"," if given else ""}"bomb":[{items}0]}}'


def safetensors(header: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        model = tiny.write_folder(folder / "model")
        (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        return model

    return write


def gguf_file(entries: tuple[bytes, ...], tensors: tuple[bytes, ...] = (), data: bytes = b"") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        file = folder / "bomb.gguf"
        file.write_bytes(file_of(entries, tensors, data))
        return file

    return write


EMPTY = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
BOMBS: Mapping[str, Callable[[Path], Path]] = {
    "empty lists": json_file("config.json", with_list("[]," * 5_000_000)),
    "empty objects": json_file("config.json", with_list("{}," * 5_000_000)),
    "numbers": json_file("config.json", with_list("1," * 9_000_000)),
    "short texts": json_file("generation_config.json", with_list('"ab",' * 5_000_000)),
    "one key again and again": json_file("config.json", lambda _: "{" + '"a":1,' * 200_000 + '"a":1}'),
    "an index of lists": json_file("model.safetensors.index.json", with_list("[]," * 5_000_000)),
    "a tokenizer of lists": json_file("tokenizer.json", with_list("[]," * 5_000_000)),
    "a tokenizer whose model is a list": json_file("tokenizer.json", lambda _: f'{{"model":[{"[]," * 5_000_000}0]}}'),
    "a template without end": json_file("tokenizer_config.json", lambda _: json.dumps({"chat_template": "x" * 2**24})),
    "a header of empty tensors": safetensors(b"{" + b"".join(EMPTY % i for i in range(300_000))[:-1] + b"}"),
    "a header of lists": safetensors(b'{"a":[' + b"[]," * 5_000_000 + b"0]}"),
    "a GGUF of short texts": gguf_file((array("a", 8, 2**20 + 1, string("ab") * (2**20 + 1)),)),
    "a GGUF of many short texts": gguf_file((array("a", 8, 2**20, string("ab") * 2**20),)),
    "a GGUF of keys": gguf_file(tuple(string(f"{i:x}") + struct.pack("<IB", 0, 1) for i in range(2**16))),
    "a GGUF of tensors": gguf_file((), tuple(tensor(f"{i:x}", (1,), 0, 32 * i) for i in range(2**16)), b"\0" * 2**21),
    "a GGUF of numbers": gguf_file((array("a", 0, 60 * 2**20, b"\1" * (60 * 2**20)),)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_file_made_to_take_memory_or_time_is_refused(tmp_path: Path, bomb: str) -> None:
    path = BOMBS[bomb](tmp_path)
    files = path.iterdir() if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    open_model(tiny.write_folder(tmp_path / "first"))  # what is loaded once is loaded
    start = time.monotonic()
    with limited(ALLOWANCE + size), pytest.raises(InvalidModel, match=str(path)):
        open_model(path)
    assert time.monotonic() - start < 10
