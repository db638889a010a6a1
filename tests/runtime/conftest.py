"""Fixtures of the runtime tests: one backend, one tiny model and the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch

from forebay.runtime import Engine, Model, load_model, open_backend
from forebay.runtime.models import fetch
from forebay.runtime.settings import user_cache_dir
from forebay.specs import Backend
from tests.runtime.harness import PARAMS, PROMPTS, make_engine, write_tiny_folder
from tests.runtime.plain import Plain
from tests.runtime.scene import Scene, scene_engine


@pytest.fixture(autouse=True)
def surroundings(plain_surroundings: None) -> None:
    """Every test of this folder has them plain."""


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


@pytest.fixture(scope="package")
def expected(tiny_model: Model, backend: Backend) -> list[tuple[int, ...]]:
    """Tokens of each prompt alone, in the eager arm."""
    with make_engine(tiny_model, backend, arm="eager", slots=1, max_len=64) as engine:
        return [engine.generate([p], s)[0].token_ids for p, s in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(scope="package")
def scene_tokens(tiny_model: Model, backend: Backend) -> dict[str, tuple[int, ...]]:
    """Tokens of each request of the scene, alone on an engine of its own, in the eager arm."""
    with scene_engine(tiny_model, backend, "eager") as engine:
        return {
            name: engine.generate([getattr(Scene, name)[0]], getattr(Scene, name)[1])[0].token_ids for name in "ABCDEZ"
        }


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


@pytest.fixture
def served(tiny_model: Model, backend: Backend) -> Iterator[Engine]:
    """An engine for many callers: 3 slots, 2 requests wait at most. It has to be empty in the end."""
    with make_engine(tiny_model, backend, slots=3, block_size=4, max_len=512, max_waiting=2) as made:
        yield made
        assert not made.has_work
        memory = made.report()["memory"]
        assert (memory["blocks_allocated"], memory["blocks_in_flight"]) == (0, 0)
