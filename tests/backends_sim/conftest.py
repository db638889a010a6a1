"""The simulated device, opened for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.runtime import Model, Settings, load_model, open_backend
from forebay.specs import Backend
from tests.backends_sim.opened import open_sim
from tests.runtime.harness import PARAMS, PROMPTS, make_engine, write_tiny_folder


@pytest.fixture(scope="session")
def backend() -> Iterator[Backend]:
    """One device for the tests that leave it as they found it."""
    with open_sim() as made:
        yield made


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The tiny model of the runtime's tests, in float32."""
    return load_model(write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model"), dtype="float32")


@pytest.fixture(scope="session")
def expected(model: Model) -> list[tuple[int, ...]]:
    """Tokens of the runtime tests' prompts, each alone, by a plain run on the cpu backend."""
    with (
        open_backend("cpu", settings=Settings(), threads=1) as cpu,
        make_engine(model, cpu, arm="eager", slots=1, max_len=64) as engine,
    ):
        return [engine.generate([p], s)[0].token_ids for p, s in zip(PROMPTS, PARAMS, strict=True)]
