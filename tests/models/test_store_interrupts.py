"""Fetches that are cut, killed, out of space, or several at the same time: a whole model or none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from forebay.runtime.models import (
    ModelUnavailable,
    fetch,
)
from forebay.runtime.models.progress import Phase
from forebay.runtime.models.registry import KnownModel
from tests.models.caches import FINISHED, Known, contents, state
from tests.models.http_server import Index

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
