"""Fixtures of the runtime tests: one backend, one tiny model, the real model and its reference tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from forebay.runtime import Engine, Model, load_model, open_backend
from forebay.runtime.models import fetch
from forebay.runtime.settings import user_cache_dir
from forebay.specs import Backend
from tests.runtime.harness import PARAMS, PROMPTS, make_engine, write_tiny_folder
from tests.runtime.plain import Plain

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_fp32.json"


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings from the machine the tests run on."""
    for name in list(os.environ):
        if name.startswith("FOREBAY_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="package")
def backend() -> Iterator[Backend]:
    """The embedded default, opened once; with one thread, so that a busy machine slows the tests down no more than it must.

    torch and numba keep their numbers of threads for the whole process, so both are given back for the tests that follow.
    """
    threads = torch.get_num_threads(), numba.get_num_threads()
    with open_backend("cpu", threads=1) as opened:
        yield opened
    torch.set_num_threads(threads[0])
    numba.set_num_threads(threads[1])


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder."""
    return write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> Model:
    """The tiny model in float32."""
    return load_model(tiny_folder, dtype="float32")


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """SmolLM2-135M in float32, fetched into the user's model cache when it is not there."""
    return load_model(fetch("smollm2-135m", cache_dir=user_cache_dir()), dtype="float32")


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    """The reference prompts with their ids and greedy continuations."""
    items: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["items"]
    return items


@pytest.fixture(scope="package")
def expected(tiny_model: Model, backend: Backend) -> list[tuple[int, ...]]:
    """Tokens of each prompt alone, in the eager arm."""
    with make_engine(tiny_model, backend, arm="eager", slots=1, max_len=64) as engine:
        return [engine.generate([p], s)[0].token_ids for p, s in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(scope="package")
def plain(tiny_model: Model, backend: Backend) -> Iterator[Plain]:
    """What any request gives alone."""
    made = Plain(tiny_model, backend)
    yield made
    made.close()


@pytest.fixture
def engine(tiny_model: Model, backend: Backend) -> Iterator[Engine]:
    """A small engine: 5 blocks of 4 tokens, sequences of at most 40."""
    with make_engine(tiny_model, backend, slots=2, block_size=4, num_blocks=6, max_len=40) as made:
        yield made
