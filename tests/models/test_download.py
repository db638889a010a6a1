"""Downloading over HTTP: cuts, resumption, servers that do not play along."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.runtime.models.download import NotServed, download
from forebay.runtime.models.progress import Phase, no_progress
from forebay.specs import ModelUnavailable
from tests.models.http_server import Index

pytestmark = pytest.mark.usefixtures("no_pauses")


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "file.part"


def test_a_whole_file_arrives_with_progress(index: Index, part: Path) -> None:
    seen: list[tuple[int, int | None, Phase]] = []
    download(index.url, part, lambda *report: seen.append(report))
    size = len(index.content)
    assert part.read_bytes() == index.content
    assert seen[0] == (0, size, "download")
    assert seen[-1] == (size, size, "download")


def test_a_part_is_continued(index: Index, part: Path) -> None:
    part.write_bytes(index.content[:1000])
    download(index.url, part, no_progress)
    assert index.asked == ["bytes=1000-"]
    assert part.read_bytes() == index.content


def test_a_broken_connection_is_taken_up_again_where_it_broke(index: Index, part: Path) -> None:
    index.cut_after = 65_536
    download(index.url, part, no_progress)
    assert index.asked == ["", *(f"bytes={index.cut_after * i}-" for i in range(1, len(index.asked)))]
    assert len(index.asked) == 5
    assert part.read_bytes() == index.content


def test_what_was_received_is_kept_when_it_breaks_for_good(index: Index, part: Path) -> None:
    index.cut_after = 65_536

    def cut_at_once(done: int, total: int | None, phase: Phase) -> None:
        if done:
            index.cut_after = 0

    with pytest.raises(
        ModelUnavailable, match="65536 bytes are kept: run the same command again to continue"
    ) as raised:
        download(index.url, part, cut_at_once)
    assert not isinstance(raised.value, NotServed)
    assert part.read_bytes() == index.content[:65_536]
    assert len(index.asked) == 1 + 3
    index.cut_after = None
    download(index.url, part, no_progress)
    assert index.asked[-1] == "bytes=65536-"
    assert part.read_bytes() == index.content


def test_a_server_without_ranges_is_read_from_the_start(index: Index, part: Path) -> None:
    index.ranges = False
    part.write_bytes(bytes(2 * len(index.content)))
    download(index.url, part, no_progress)
    assert part.read_bytes() == index.content


def test_a_part_that_is_whole_is_left_alone(index: Index, part: Path) -> None:
    part.write_bytes(index.content)
    download(index.url, part, no_progress)
    assert part.read_bytes() == index.content
    assert len(index.asked) == 1


def test_a_part_longer_than_the_file_is_started_anew(index: Index, part: Path) -> None:
    part.write_bytes(index.content + b"more")
    download(index.url, part, no_progress)
    assert part.read_bytes() == index.content


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_refusal_is_not_repeated(index: Index, part: Path, status: int) -> None:
    index.status = status
    with pytest.raises(NotServed, match=f"download of .* failed: {status} .*; check the network"):
        download(index.url, part, no_progress)
    assert len(index.asked) == 1
    assert not part.exists()


def test_a_server_that_cannot_be_reached_is_not_served(part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(NotServed) as raised:
        download("http://user:secret@127.0.0.1:1/file.whl", part, no_progress)
    assert "secret" not in str(raised.value)


def test_a_range_that_was_not_asked_for_is_not_believed(index: Index, part: Path) -> None:
    part.write_bytes(index.content[:1000])
    index.range_offset = 8
    with pytest.raises(NotServed, match=r"asked for bytes from 1000, answered with Content-Range 'bytes 1008-"):
        download(index.url, part, no_progress)
    assert part.read_bytes() == index.content[:1000]
