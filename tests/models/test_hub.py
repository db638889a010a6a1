"""Hub ids, with huggingface_hub itself against a hub of our own: what is fetched, what is kept, and every way it fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from forebay.runtime import load_model
from forebay.runtime.models import ModelUnavailable, open_model, resolve_model
from forebay.runtime.models.hub import fetch_from_hub, is_hub_id
from forebay.runtime.models.progress import Phase
from forebay.specs.errors import InvalidModel
from tests.models import tiny
from tests.models.hub_server import COMMIT, Hub, serve

ALWAYS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has the tiny model, and files that a model folder does not need."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tiny.write_folder(tmp_path / "served")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for name in (
        "pytorch_model.bin",
        "model.gguf",
        "modeling.py",
        "README.md",
        "training_args.bin",
        "adapter.safetensors",
    ):
        (folder / name).write_bytes(b"not wanted")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"not wanted")
    with serve(folder) as server:
        yield server


def test_a_model_is_fetched_once_and_loads(tmp_path: Path, hub: Hub) -> None:
    seen: list[tuple[int, int | None, Phase]] = []
    cache = tmp_path / "cache"
    folder = resolve_model("org/tiny", cache, hub_endpoint=hub.endpoint, progress=lambda *report: seen.append(report))
    assert set(hub.fetched) == ALWAYS | {"model.safetensors"} == {path.name for path in folder.iterdir()}
    assert folder.is_relative_to(cache)
    model = open_model(folder)
    for name, values in tiny.weights().items():
        np.testing.assert_array_equal(model.weights.tensor(name, values.shape), values)
    assert model.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]) == "hello"
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert seen[0] == (0, None, "locate")
    assert seen[-1] == (size, size, "download")
    hub.fetched.clear()
    assert resolve_model("org/tiny", cache, hub_endpoint=hub.endpoint) == folder
    assert resolve_model(f"org/tiny@{COMMIT}", cache, hub_endpoint=hub.endpoint) == folder
    assert hub.fetched == []


def test_load_model_takes_an_id(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = load_model("org/tiny", cache_dir=tmp_path / "cache", hub_endpoint=hub.endpoint)
    assert (model.name, model.config.vocab_size) == ("org/tiny", len(tiny.TOKENS))


def test_a_sharded_model_is_fetched_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serve(tiny.write_folder(tmp_path / "served", shards=3)) as hub:
        folder = fetch_from_hub("org/tiny", cache_dir=tmp_path / "cache", endpoint=hub.endpoint)
    assert len(list(folder.glob("model-*.safetensors"))) == 3
    open_model(folder)


def test_a_folder_of_that_name_wins(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.write_folder(tmp_path / "org" / "tiny")
    assert resolve_model("org/tiny", tmp_path / "cache", hub_endpoint=hub.endpoint) == Path("org/tiny")
    assert hub.fetched == []


def test_what_is_in_the_cache_is_taken_when_the_hub_is_gone(tmp_path: Path, hub: Hub) -> None:
    cache = tmp_path / "cache"
    folder = fetch_from_hub("org/tiny", cache_dir=cache, endpoint=hub.endpoint)
    assert fetch_from_hub("org/tiny", cache_dir=cache, endpoint="http://127.0.0.1:1") == folder
    hub.refused = (503, "")
    assert fetch_from_hub("org/tiny", cache_dir=cache, endpoint=hub.endpoint) == folder


def test_a_cut_fetch_is_not_taken_for_a_model(tmp_path: Path, hub: Hub) -> None:
    cache = tmp_path / "cache"
    hub.cut = "model.safetensors"
    with pytest.raises(ModelUnavailable, match=r"'org/tiny' could not be fetched from the hub at .*; try again"):
        fetch_from_hub("org/tiny", cache_dir=cache, endpoint=hub.endpoint)
    with pytest.raises(ModelUnavailable, match=r"does not hold it whole"):
        fetch_from_hub("org/tiny", cache_dir=cache, endpoint="http://127.0.0.1:1")
    hub.cut = ""
    open_model(fetch_from_hub("org/tiny", cache_dir=cache, endpoint=hub.endpoint))


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (
            404,
            "RepoNotFound",
            r"'org/tiny' is neither a folder here nor a known model, and the hub at \S+ does not have it",
        ),
        (403, "GatedRepo", r"'org/tiny' is gated: ask for access .* then log in with 'hf auth login'"),
        (404, "RevisionNotFound", r"the hub at \S+ has the model of 'org/tiny' without that revision"),
        (
            503,
            "",
            r"neither a folder .*could not be reached or failed, and .*hub does not hold it whole \(HfHubHTTPError",
        ),
    ],
)
def test_a_refusal_of_the_hub_is_one_clear_line(tmp_path: Path, hub: Hub, status: int, code: str, message: str) -> None:
    hub.refused = (status, code)
    with pytest.raises(ModelUnavailable, match=message) as raised:
        fetch_from_hub("org/tiny", cache_dir=tmp_path / "cache", endpoint=hub.endpoint)
    assert "\n" not in str(raised.value)


def test_a_hub_that_cannot_be_reached_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(
        ModelUnavailable, match=r"at http://127.0.0.1:1 could not be reached .*check the network, or"
    ) as raised:
        resolve_model("org/tiny", tmp_path / "cache", hub_endpoint="http://127.0.0.1:1")
    assert "\n" not in str(raised.value)


def test_without_the_library_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelUnavailable, match=r"huggingface_hub must be installed: pip install 'forebay\[hf\]'"):
        resolve_model("org/tiny", tmp_path / "cache")


@pytest.mark.parametrize("name", ["a/b", "org/name-1.5B", "org/name@main", "org/name@refs/pr/1", f"a/b@{COMMIT}"])
def test_ids_are_known_by_their_form(name: str) -> None:
    assert is_hub_id(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a",
        "a/b/c",
        "/a/b",
        "./a",
        "../a",
        "~/a",
        "a/..",
        "a/",
        "/a",
        "a/b@",
        "a b/c",
        "a/b\n",
        "a\\b",
        "ä/b",
        "x" * 99 + "/b",
    ],
)
def test_paths_and_other_names_are_no_ids(tmp_path: Path, name: str) -> None:
    assert not is_hub_id(name)
    with pytest.raises(InvalidModel, match="is no hub id; expected org/name"):
        fetch_from_hub(name, cache_dir=tmp_path)
